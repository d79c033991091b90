"""The primitive token by token, and with dense weights; differentiated by JAX."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hla_jax import _decay
from hla_jax.kernels import _chunk
from hla_jax.kernels._layout import Operands, Results, cast, per_head


def serial(x: Operands, *, power, strict, precision) -> Results:
    """The recurrence, one token at a time: `lax.scan`, or for a single token the step itself.

    Written on whole arrays, since the state is most of what a step moves: a state that is reshaped
    in each step is copied in each step.
    """
    squares = x.v is x.k  # the second moment of one array
    x = cast(x, x.P.dtype)
    N, H = x.P.shape[-3], x.q.shape[-2]
    dot = partial(jnp.einsum, precision=precision)

    def per_state(a, axis):
        return jnp.repeat(a, N // a.shape[axis], axis)

    def step(state, token):
        P, m = state
        q, k, v, w, log_decay = token
        q = q.reshape(*q.shape[:-2], N, H // N, q.shape[-1])
        k, v = per_state(k, -2), per_state(v, -2)
        if (
            squares
        ):  # XLA's CPU backend does not vectorise the product of a scanned slice with itself
            v = jnp.take(v, jnp.arange(v.shape[-1]), axis=-1)
        if log_decay is not None:
            a = per_state(jnp.exp(power * _decay.floor(log_decay)), -1)[..., None]
            P, m = a[..., None] * P, None if m is None else a * m
        before = P, m
        P = P + k[..., None] * v[..., None, :]
        m = None if m is None else m + k * per_state(w, -1)[..., None]
        seen = before if strict else (P, m)
        o = dot("...ngd,...nde->...nge", q, seen[0])
        z = None if m is None else dot("...ngd,...nd->...ng", q, seen[1])
        o = o.reshape(*o.shape[:-3], H, o.shape[-1])
        return (P, m), (o, z if z is None else z.reshape(*z.shape[:-2], H))

    axis = x.token_axis
    if x.q.shape[axis] == 1:
        token = jax.tree.map(lambda a: jnp.squeeze(a, axis), x[:5])
        state, out = step((x.P, x.m), token)
        return Results._make((*jax.tree.map(lambda a: jnp.expand_dims(a, axis), out), *state))
    tokens = jax.tree.map(lambda a: jnp.moveaxis(a, axis, 0), x[:5])
    state, outs = lax.scan(step, (x.P, x.m), tokens)
    return Results._make((*jax.tree.map(lambda a: jnp.moveaxis(a, 0, axis), outs), *state))


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
    """Returns D * (Q K^T), the dense weights of the primitive, of every query head."""
    w = jnp.tril(affinities(q, k, precision=precision), -1 if strict else 0)
    if log_decay is None:
        return w
    pairwise = jnp.vectorize(_decay.pairwise, signature="(t)->(t,t)")
    log_decay = repeat_heads(log_decay[..., None], q.shape[-2] // log_decay.shape[-1])[..., 0]
    return w * jnp.exp(power * pairwise(jnp.moveaxis(log_decay, -1, -2)))


def repeat_heads(a: Float[Array, "*B K W"], times: int) -> Float[Array, "*B H W"]:
    """Returns each head `times` times in a row: `jnp.repeat`, which explicit meshes do not know."""
    *rows, K, width = a.shape
    a = jnp.broadcast_to(a[..., None, :], (*rows, K, times, width))
    return a.reshape(*rows, K * times, width)
