"""FlashAttention: exact softmax attention whose memory grows with T, not with T^2."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int

from hla_jax._check import checked_int
from hla_jax._sharding import left_to_the_compiler, vary_like
from hla_jax._types import Keys, Mask, Outputs, Queries, SegmentIds, Values, result_type
from hla_jax.attention._inputs import Inputs, logit_scale, prepare

# Measured on a CPU: larger tiles leave its cache, smaller ones are slow products.
BLOCK_SIZE = 256


def flash_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    causal: bool = True,
    mask: Mask | None = None,
    segment_ids: SegmentIds | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    block_size: int = BLOCK_SIZE,
) -> tuple[Outputs, Float[jax.Array, "*B T H"]]:
    """Exact softmax attention without the T x S matrix, and the log-sum-exp of the logits.

        lse_t = log sum_s exp(scale q_t . k_s)
        o_t = sum_s exp(scale q_t . k_s - lse_t) v_s

    Queries and keys are cut into blocks. Each block of queries, by itself, goes over the blocks of
    keys with the maximum, the sum and the weighted values of what it has seen, rescaled as the
    maximum grows; where causal, blocks of keys in the future are never visited. The backward pass
    computes the weights again from lse.

    Time is O(T S (D + E)) per query head, half of it where causal. Memory, forward and backward, is
    O(T (D + E)) per query head, O(S (D + E)) per kv head and one tile of block_size^2 per query
    head. lse serves to merge attention over several sets of keys: it has a gradient like o.

    Products are of the inputs' dtype, their sums and the softmax in float32, or float64 if an input
    is. In float32 a TPU or GPU multiplies with less by default: see `jax.default_matmul_precision`.

    A query with no key to look at gives 0, and -inf for its lse. Whatever a masked key contains,
    NaN included, reaches no output and no gradient; nor does a masked query where causal.

    Source: FlashAttention-2 (Dao 2023, arXiv 2307.08691), section 3.1, algorithms 1 and 2;
    FlashAttention (Dao et al. 2022, arXiv 2205.14135).

    Args:
      q: [*B, T, H, D].
      k: [*B, S, K, D]; K divides H, and query head h uses kv head h // (H // K).
      v: [*B, S, K, E].
      causal: whether token t sees s <= t alone; needs T == S.
      mask: [*B, S], False at padding: masked keys are not seen. Where causal, tokens are queries
        too, and masked ones give 0.
      segment_ids: [*B, T], integers, for T == S: each token sees its own segment alone. A segment
        starts where the id differs from that of the last unmasked token.
      scale: multiplies every product q . k, a number known while tracing; None is D^(-1/2).
      implementation: None or "xla" is what is described above. "cudnn" (through
        `jax.nn.dot_product_attention`) and "tokamax" (`tokamax.dot_product_attention`, its fused
        kernels alone) compute the outputs by a kernel of that library, under its rules for shapes
        and dtypes, without mask and segment_ids. Neither gives a float32 lse that has a gradient,
        so that comes from "xla", in a second pass which `jax.jit` drops where lse is not used.
      block_size: the most queries, and keys, in a block; for "xla".

    Returns:
      Outputs [*B, T, H, E] in v's dtype, and lse [*B, T, H] in float32, or float64 if an input is.

    Raises:
      ValueError: an argument has a wrong shape, dtype or value, or the named implementation cannot
        serve the request here; the message says which and why.

    Example:
      >>> import jax.numpy as jnp
      >>> q = k = jnp.zeros((3, 1, 4))
      >>> v = jnp.array([2.0, 4.0, 9.0]).reshape(3, 1, 1)
      >>> out, lse = flash_attention(q, k, v)
      >>> print(out.ravel())
      [2. 3. 5.]
      >>> print(jnp.exp(lse).ravel())
      [1. 2. 3.]
    """
    inputs = prepare(q, k, v, causal=causal, mask=mask, segment_ids=segment_ids)
    scale = _known(logit_scale(scale, inputs.q.shape[-1]))
    block_size = checked_int("block_size", block_size)
    check_implementation(implementation)
    out = None
    if implementation in _LIBRARIES:
        if mask is not None or segment_ids is not None:
            raise ValueError(
                f'mask and segment_ids must be None for implementation="{implementation}"'
            )
        out = _by_library(implementation, inputs, causal, scale)
    in_blocks, lse = _sharded(inputs, causal=causal, scale=scale, block_size=block_size)
    return in_blocks if out is None else out, lse


def check_implementation(name: Any) -> None:
    """Raises unless it is one that `flash_attention` knows."""
    if name not in (None, "xla", *_LIBRARIES):
        raise ValueError(f'implementation must be None, "xla", "cudnn" or "tokamax", got {name!r}')


def _specs(q: jax.Array) -> tuple[PartitionSpec, PartitionSpec]:
    """How outputs and lse lie on explicit mesh axes: as q does."""
    spec = jax.typeof(q).sharding.spec[:-1]
    return PartitionSpec(*spec, None), PartitionSpec(*spec)


# So that a call outside of jit compiles once, see `hla_jax._compiled`.
@partial(jax.jit, static_argnames=("causal", "scale", "block_size"))
def _sharded(inputs: Inputs, **options: Any) -> tuple[jax.Array, jax.Array]:
    run = partial(_in_blocks, **options)
    return left_to_the_compiler(run, inputs, lambda: _specs(inputs.q))


def _in_blocks(
    inputs: Inputs, causal: bool, scale: float, block_size: int
) -> tuple[jax.Array, jax.Array]:
    """Returns outputs and lse: cuts tokens into blocks of equal size, for one kv head at a time."""
    q, k, v, *_ = inputs
    *batch, T, H, _ = q.shape
    S, K, E = v.shape[-3:]
    if 0 in (*batch, T, S, H, E):
        lse = jnp.full_like(q, -jnp.inf, result_type(q, k, v, jnp.float32), shape=(*batch, T, H))
        return jnp.zeros_like(q, v.dtype, (*batch, T, H, E)), lse

    def of_row(q, k, v, query_labels, key_labels):
        q = q.reshape(T, K, H // K, -1)
        blocks = partial(_blocks, block_size=block_size)
        heads = jax.vmap(partial(_attend, causal, scale), (2, 2, 2, None, None), out_axes=2)
        out, lse = heads(
            blocks(q),
            blocks(k),
            blocks(v),
            blocks(query_labels, fill=-2),
            blocks(key_labels, fill=-1),
        )
        return out.reshape(-1, H, E)[:T], lse.reshape(-1, H)[:T]

    for _ in batch:
        of_row = jax.vmap(of_row)
    return of_row(*vary_like(inputs, inputs))


def _blocks(x: jax.Array, block_size: int, fill: int = 0) -> jax.Array:
    """Cuts [T, ...] into [blocks, tokens in each, ...], as equal as can be, and fills the last."""
    n = -(-len(x) // block_size)
    size = -(-len(x) // n)
    x = jnp.pad(x, [(0, n * size - len(x))] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
    return x.reshape(n, size, *x.shape[1:])


# From here on there is one kv head and the G query heads that share it. A block of queries i is
# q[i] [t, G, D], one of keys j is k[j] [s, D]; where causal, both are of one size.


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    causal: bool,
    scale: float,
    q: Float[jax.Array, "n t G D"],
    k: Float[jax.Array, "m s D"],
    v: Float[jax.Array, "m s E"],
    query_labels: Int[jax.Array, "n t"],
    key_labels: Int[jax.Array, "m s"],
) -> tuple[Float[jax.Array, "n t G E"], Float[jax.Array, "n t G"]]:
    dtype = result_type(q, k, v, jnp.float32)

    def of_queries(block):
        i, q_i, labels_i = block

        def step(j, carry):
            top, total, acc = carry
            seen = _seen(causal, i, j, labels_i, key_labels[j])
            logits = _logits(scale, q_i, k[j], seen, dtype)
            new_top = jnp.maximum(top, logits.max(-1))
            # Where nothing has been seen yet, -inf - -inf would be NaN.
            finite = jnp.where(new_top == -jnp.inf, 0, new_top)
            p = jnp.exp(logits - finite[..., None])
            fade = jnp.exp(top - finite)
            total = fade * total + p.sum(-1)
            acc = fade[..., None] * acc + _product("tgs,se->tge", p.astype(v.dtype), v[j], dtype)
            return new_top, total, acc

        nothing = jnp.zeros_like(q_i, dtype, q_i.shape[:-1])
        acc = jnp.zeros_like(q_i, dtype, (*q_i.shape[:-1], v.shape[-1]))
        visited = i + 1 if causal else len(k)
        top, total, acc = lax.fori_loop(0, visited, step, (nothing - jnp.inf, nothing, acc))
        out = acc / jnp.where(total == 0, 1, total)[..., None]
        return out.astype(v.dtype), top + jnp.log(total)

    return lax.map(of_queries, (jnp.arange(len(q)), q, query_labels))


def _attend_forward(causal, scale, *tokens):
    out, lse = _attend(causal, scale, *tokens)
    return (out, lse), (*tokens, out, lse)


def _attend_backward(causal, scale, residuals, cotangents):
    q, k, v, query_labels, key_labels, out, lse = residuals
    d_out, d_lse = cotangents
    dtype = lse.dtype
    # The softmax's derivative is ds = p (dp - delta). A query without keys has none, not NaN.
    delta = (d_out.astype(dtype) * out.astype(dtype)).sum(-1) - d_lse
    delta, lse = (jnp.where(lse == -jnp.inf, 0, x) for x in (delta, lse))

    def of_keys(dq, block):
        j, k_j, v_j, labels_j = block

        def step(i, carry):
            dq, dk_j, dv_j = carry
            q_i, d_out_i = q[i], d_out[i]
            seen = _seen(causal, i, j, query_labels[i], labels_j)
            p = jnp.exp(_logits(scale, q_i, k_j, seen, dtype) - lse[i][..., None])
            dp = _product("tge,se->tgs", d_out_i, v_j, dtype)
            ds = scale * p * (dp - delta[i][..., None])
            dv_j += _product("tgs,tge->se", p.astype(v.dtype), d_out_i, dtype)
            dk_j += _product("tgs,tgd->sd", ds.astype(q.dtype), q_i, dtype)
            dq = dq.at[i].add(_product("tgs,sd->tgd", ds.astype(k.dtype), k_j, dtype))
            return dq, dk_j, dv_j

        zeros = jnp.zeros_like(k_j, dtype), jnp.zeros_like(v_j, dtype)
        first = j if causal else 0
        dq, dk_j, dv_j = lax.fori_loop(first, len(q), step, (dq, *zeros))
        return dq, (dk_j.astype(k.dtype), dv_j.astype(v.dtype))

    dq, (dk, dv) = lax.scan(
        of_keys, jnp.zeros_like(q, dtype), (jnp.arange(len(k)), k, v, key_labels)
    )
    return dq.astype(q.dtype), dk, dv, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _seen(causal: bool, i, j, query_labels, key_labels) -> Bool[jax.Array, "t s"]:
    """Which keys of block j each query of block i sees."""
    seen = query_labels[:, None] == key_labels[None]
    if causal:
        size = len(query_labels)
        seen &= (i - j) * size + jnp.arange(size)[:, None] >= jnp.arange(size)[None]
    return seen


def _logits(scale: float, q, k, seen, dtype) -> Float[jax.Array, "t G s"]:
    logits = scale * _product("tgd,sd->tgs", q, k, dtype)
    return jnp.where(seen[:, None], logits, -jnp.inf)


def _product(subscripts: str, a, b, dtype) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=dtype)


# The libraries refuse what they cannot serve with NotImplementedError, while tracing.


def _by_library(name: str, inputs: Inputs, causal: bool, scale: float) -> jax.Array:
    try:
        out = _LIBRARIES[name](*inputs[:3], is_causal=causal, scale=scale)
    except (ImportError, NotImplementedError, ExceptionGroup) as error:
        errors = error.exceptions if isinstance(error, ExceptionGroup) else [error]
        reasons = dict.fromkeys(map(str, errors))
        raise ValueError(
            f'implementation="{name}" cannot serve this request here '
            f'({"; ".join(reasons)}), "xla" computes the same'
        ) from error
    return out.astype(inputs.v.dtype)


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, **options) -> jax.Array:
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"it is for GPUs, the backend is {jax.default_backend()}")
    D, E = q.shape[-1], v.shape[-1]
    # jax.nn wants one batch axis and D = E, cuDNN a multiple of 8. Zero columns change nothing.
    width = -(-max(D, E) // 8) * 8

    def padded(x: jax.Array) -> jax.Array:
        x = x.reshape(-1, *x.shape[-3:])
        return jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])])

    out = jax.nn.dot_product_attention(*map(padded, (q, k, v)), implementation="cudnn", **options)
    return out[..., :E].reshape(*q.shape[:-1], E)


def _tokamax(q: jax.Array, k: jax.Array, v: jax.Array, **options) -> jax.Array:
    tokamax = importlib.import_module("tokamax")
    return tokamax.dot_product_attention(q, k, v, implementation=_FUSED, **options)


# Tokamax's kernels, the first that will serve; left to itself it may choose dense attention.
_FUSED = ("mosaic", "triton")

_LIBRARIES: dict[str, Callable[..., jax.Array]] = {"cudnn": _cudnn, "tokamax": _tokamax}


def _known(scale: Any) -> float:
    if isinstance(scale, jax.core.Tracer):
        raise ValueError(f"scale must be known while tracing, got {scale!r}")
    return float(scale)
