"""The primitive token by token, and with dense weights; differentiated by JAX.

Each is a function of one state head, q [T, g, D], mapped over the rest.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hla_jax import _decay
from hla_jax.kernels import _chunk
from hla_jax.kernels._layout import Operands, Results, cast, per_head


def serial(x: Operands, *, power, strict, precision) -> Results:
    """The recurrence, one token at a time, by `lax.scan`: P = a P + k v^T, o = q P."""

    def step(state, token):
        P, m = state
        q, k, v, w, a = token
        a = jnp.exp(power * _decay.floor(a)) if a is not None else 1
        before, m_before = a * P, None if m is None else a * m
        P = before + k[:, None] * v
        o = jnp.einsum("gd,de->ge", q, before if strict else P, precision=precision)
        if m is None:
            return (P, None), (o, None)
        m = m_before + k * w
        z = jnp.einsum("gd,d->g", q, m_before if strict else m, precision=precision)
        return (P, m), (o, z)

    @per_head
    def run(x: Operands) -> Results:
        tokens = (x.q, x.k, x.v, x.w, x.log_decay)
        if len(x.q) == 1:  # a decoding step
            state, out = step((x.P, x.m), jax.tree.map(lambda a: a[0], tokens))
            return Results(*jax.tree.map(lambda a: a[None], out), *state)
        (P, m), (o, z) = lax.scan(step, (x.P, x.m), tokens)
        return Results(o, z, P, m)

    return run(cast(x, x.P.dtype))


def quadratic(x: Operands, *, power, strict, precision) -> Results:
    """Dense weights: the chunk formulas with the whole sequence as one chunk."""
    chunk = partial(_chunk.forward, power=power, strict=strict, precision=precision)
    return per_head(chunk)(cast(x, x.P.dtype))


def affinities(
    q: Float[Array, "*B T H D"], k: Float[Array, "*B S K D"], *, precision: lax.PrecisionLike = None
) -> Float[Array, "*B H T S"]:
    """Returns Q K^T of every query head."""
    *batch, T, H, D = q.shape
    S, K = k.shape[-3:-1]
    q = q.reshape(*batch, T, K, H // K, D)
    return jnp.einsum("...tkgd,...skd->...kgts", q, k, precision=precision).reshape(*batch, H, T, S)


def weights(
    q: Float[Array, "*B T H D"],
    k: Float[Array, "*B T Hk D"],
    log_decay: Float[Array, "*B T K"] | None,
    *,
    power: int = 1,
    strict: bool = False,
    precision: lax.PrecisionLike = None,
) -> Float[Array, "*B H T T"]:
    """Returns D . (Q K^T), the dense weights of the primitive, of every query head."""
    w = jnp.tril(affinities(q, k, precision=precision), -1 if strict else 0)
    if log_decay is None:
        return w
    pairwise = jnp.vectorize(_decay.pairwise, signature="(t)->(t,t)")
    decay = jnp.exp(power * pairwise(jnp.moveaxis(log_decay, -1, -2)))
    return w * jnp.repeat(decay, q.shape[-2] // log_decay.shape[-1], axis=-3)
