"""What else computes raw causal linear attention, o_t = sum_{s <= t} (q_t . k_s) v_s, on a CPU."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

Operator = Callable[..., Any]


def jax_tokens(q, k, v):
    """Token by token: `lax.scan` with the state as its carry, arrays [B, T, H, D]."""

    def step(state, token):
        q, k, v = token
        state += jnp.einsum("bhd,bhe->bhde", k, v)
        return state, jnp.einsum("bhd,bhde->bhe", q, state)

    B, _, H, D = q.shape
    state = jnp.zeros((B, H, D, v.shape[-1]))
    _, o = lax.scan(step, state, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v)))
    return jnp.moveaxis(o, 0, 1)


def jax_chunks(q, k, v, size=128):
    """Chunk by chunk: `lax.scan` over dense chunks, arrays [B, T, H, D]."""
    causal = jnp.tril(jnp.ones((size, size)))

    def step(state, chunk):
        q, k, v = chunk
        weights = jnp.einsum("bthd,bshd->bhts", q, k) * causal
        o = jnp.einsum("bhts,bshe->bthe", weights, v) + jnp.einsum("bthd,bhde->bthe", q, state)
        return state + jnp.einsum("bshd,bshe->bhde", k, v), o

    def split(x):
        return jnp.moveaxis(x.reshape(B, T // size, size, H, -1), 1, 0)

    B, T, H, D = q.shape
    state = jnp.zeros((B, H, D, v.shape[-1]))
    _, o = lax.scan(step, state, (split(q), split(k), split(v)))
    return jnp.moveaxis(o, 0, 1).reshape(v.shape)


IN_JAX: dict[str, Operator] = {
    "jax, `lax.scan` over tokens": jax_tokens,
    "jax, `lax.scan` over chunks of 128": jax_chunks,
}


def torch_chunks(q, k, v, size=128):
    """All chunks at once in PyTorch, tensors [B, H, T, D]."""
    q, k, v = (x.unflatten(2, (-1, size)) for x in (q, k, v))
    weights = (q @ k.transpose(-1, -2)).tril()
    sums = k.transpose(-1, -2) @ v
    return (weights @ v + q @ (sums.cumsum(2) - sums)).flatten(2, 3)


def in_torch(native: str | None) -> dict[str, Operator]:
    """Returns those on tensors [B, H, T, D] that can be imported."""
    if importlib.util.find_spec("torch") is None:
        return {}
    found: dict[str, Operator] = {"PyTorch, chunks of 128": torch_chunks}
    if importlib.util.find_spec("fast_transformers") is not None:
        module = importlib.import_module("fast_transformers.causal_product")
        found["fast-transformers, as pip builds it"] = module.CausalDotProduct.apply
    if native is not None:
        # Under another name: extension modules are cached by theirs, and the first build has it.
        sys.path.append(str(Path(native, "fast_transformers")))
        module = importlib.import_module("causal_product")
        found["fast-transformers, built for this CPU"] = module.CausalDotProduct.apply
    return found


def torch_cases(
    operator: Operator, arrays: Sequence[Any], threads: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns calls of forward and of forward and backward, on arrays q, k, v, do [B, T, H, D]."""
    import torch

    torch.set_num_threads(threads)
    q, k, v, do = (torch.tensor(np.asarray(x).swapaxes(1, 2).copy()) for x in arrays)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def forward():
        with torch.no_grad():
            return operator(q, k, v)

    def forward_backward():
        o = operator(*leaves)
        return o, torch.autograd.grad(o, leaves, do)

    return forward, forward_backward
