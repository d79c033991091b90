"""The formulas of one chunk of causal linear attention: outputs, next state, and all cotangents.

One state head, c tokens, g query heads that share the state. `v` comes with an optional column of
row weights `w` (all ones for a normaliser) that is summed alongside without being appended:

    A = (Q K^T) . D                          weights inside the chunk
    O = A V + b . (Q P)      z = A w + b . (Q m)
    P' = rho P + (e . K)^T V    m' = rho m + (e . K)^T w

D holds the decay between two tokens of the chunk, b from the chunk's start to each token, e from
each token to its end, rho over the whole chunk. FLOPs forward: 2 c (g c (D + E) + (g + 1) D E).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hla_jax import _decay
from hla_jax.kernels._layout import Operands, Results

Scalar = Float[Array, ""]


class Decay(NamedTuple):
    """The decay of one chunk as products."""

    D: Float[Array, "c c"]
    b: Float[Array, " c"]
    e: Float[Array, " c"]
    rho: Scalar


def decay(
    log_decay: Float[Array, " c"] | None, c: int, *, power: int, strict: bool, dtype: jnp.dtype
) -> Decay:
    """Returns the decay terms of a chunk, each log decay multiplied by `power`."""
    causal = jnp.tril(jnp.ones((c, c), dtype), -1 if strict else 0)
    if log_decay is None or c == 0:  # XLA folds the products with 1 away
        return Decay(causal, jnp.ones(c, dtype), jnp.ones(c, dtype), jnp.ones((), dtype))
    log_w = power * _decay.pairwise(log_decay)
    b = jnp.exp(power * _decay.floor(log_decay[0]) + log_w[:, 0])
    return Decay(jnp.exp(log_w) * causal, b, jnp.exp(log_w[-1]), b[-1])


def forward(x: Operands, *, power, strict, precision) -> Results:
    """Returns outputs and next state of one chunk of one state head."""
    q, k, v, w, log_decay, P, m = x
    terms = decay(log_decay, len(q), power=power, strict=strict, dtype=P.dtype)
    if log_decay is None:
        power = 0
    o, z = output(q, k, v, w, terms, P, m, power=power, precision=precision)
    into = into_state(k, v, w, terms, precision=precision)
    return Results(o, z, *advance(terms.rho, (P, m), into))


def backward(x: Operands, ct: Results, *, power, strict, precision) -> Operands:
    """Returns the cotangents of `forward`'s operands."""
    q, k, v, w, log_decay, P, m = x
    terms = decay(log_decay, len(q), power=power, strict=strict, dtype=P.dtype)
    if log_decay is None:
        power = 0
    d = cotangents(q, k, v, w, terms, P, m, *ct, power=power, precision=precision)
    into = into_cotangent(q, ct.o, ct.z, terms, precision=precision)
    return Operands(*d, *advance(terms.rho, (ct.P, ct.m), into))


def advance(rho, state, into):
    """Returns rho state + into, for the state and for its mass."""
    return jax.tree.map(lambda s, x: rho * s + x, state, into)


def into_state(k, v, w, terms: Decay, *, precision):
    """Returns what the chunk adds to the state: (e . K)^T V [D, E] and (e . K)^T w [D]."""
    return _sums(k * terms.e[:, None], v, w, precision)


def into_cotangent(q, do, dz, terms: Decay, *, precision):
    """Returns what the chunk adds to the state's cotangent: (b . Q)^T dO and (b . Q)^T dz."""
    rows = len(q) * q.shape[1]  # each query head of each token is a row
    q = (q * terms.b[:, None, None]).reshape(rows, -1)
    return _sums(q, do.reshape(rows, -1), None if dz is None else dz.reshape(rows), precision)


def _sums(keys, values, weights, precision):
    P = jnp.einsum("sd,se->de", keys, values, precision=precision)
    return P, None if weights is None else jnp.einsum("sd,s->d", keys, weights, precision=precision)


def output(q, k, v, w, terms: Decay, P, m, *, power, precision):
    """Returns O [c, g, E] and z [c, g] (None without w); power 0: no decay."""
    A = _decayed(jnp.einsum("tgd,sd->tgs", q, k, precision=precision), terms, power)
    q = q * terms.b[:, None, None]
    o = jnp.einsum("tgs,se->tge", A, v, precision=precision)
    o += jnp.einsum("tgd,de->tge", q, P, precision=precision)
    if w is None:
        return o, None
    z = jnp.einsum("tgs,s->tg", A, w, precision=precision)
    return o, z + jnp.einsum("tgd,d->tg", q, m, precision=precision)


def cotangents(q, k, v, w, terms: Decay, P, m, do, dz, L, mu, *, power, precision):
    """Returns dq, dk, dv, dw and d log_decay of one chunk (power 0: no decay, and None for it).

    P and m are the state at the chunk's start, L and mu the cotangents of the state at its end.
    """

    def dot(spec, *x):
        return jnp.einsum(spec, *x, precision=precision)

    A = _decayed(dot("tgd,sd->tgs", q, k), terms, power)
    X = dot("tge,se->tgs", do, v)
    start = dot("tge,de->tgd", do, P)
    end = dot("se,de->sd", v, L)
    k_end = k * terms.e[:, None]
    dv = dot("tgs,tge->se", A, do) + dot("sd,de->se", k_end, L)
    dw = None
    if w is not None:
        X += dz[..., None] * w[None, None]
        start += dz[..., None] * m[None, None]
        end += w[:, None] * mu[None]
        dw = dot("tgs,tg->s", A, dz) + dot("sd,d->s", k_end, mu)
    H = _decayed(X, terms, power)
    start *= terms.b[:, None, None]
    end *= terms.e[:, None]
    dq = dot("tgs,sd->tgd", H, k) + start
    dk = dot("tgs,tgd->sd", H, q) + end
    if not power:
        return dq, dk, dv, dw, None

    inside = _product("tgs,tgs->ts", A, X)  # what flows from s to t
    entering = _product("tgd,tgd->t", q, start)
    leaving = _product("sd,sd->s", k, end)
    through = _product("de,de->", L, P)
    if w is not None:
        through += _product("d,d->", mu, m)
    crossing = _crossing(inside, entering, leaving, terms.rho * through)
    return dq, dk, dv, dw, power * crossing


def _crossing(inside, entering, leaving, through):
    """Sums, for each token, every path that its decay multiplies; returns [c].

    Nothing is subtracted, so nothing cancels, and each path through a reset is exactly 0.
    """
    c = len(leaving)
    since = jnp.triu(jnp.ones((c, c), inside.dtype))  # [t, u]: u >= t
    before = 1 - since  # [t, s]: s < t
    pairs = _product("ts,ts->t", _product("tu,us->ts", since, inside), before)
    ends = _product("tu,u->t", since, entering) + _product("ts,s->t", before, leaving)
    return pairs + ends + through


def _decayed(A, terms: Decay, power: int):
    """Returns A * D for A [c, g, c]."""
    return _product("tgs,ts->tgs", A, terms.D) if power else A * terms.D[:, None]


def _product(spec, *operands):
    """An einsum at full precision, whatever `precision` says of the large products.

    Also in place of `jnp.sum(a * b)`, and of products whose derivative is one: XLA's CPU backend
    makes scalar loops of these, and jaxlib 0.10.2 crashes where the sum runs over a middle axis.
    """
    return jnp.einsum(spec, *operands, precision=lax.Precision.HIGHEST)
