"""The chunk formulas on two-dimensional tiles, as the bodies of Pallas kernels compute them.

The same algebra as in `_chunk`, in the operations that kernel compilers lower: one chunk of C
tokens of one state; the g query heads that share the state lie under each other as R = g C rows.
Per-token numbers come as rows [1, C] and columns [R, 1].

FLOPs per chunk, forward: 2 R (C (D + E) + D E) + 2 C D E; all cotangents: about 2.5 times that.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# exp of anything below is 0 in float32: such a decay is a reset.
RESET = -103.98


class Decay(NamedTuple):
    """The decay of one chunk as products: within it, from its start, to its end, over all of it."""

    D: Float[Array, "R C"]
    b: Float[Array, "R 1"]
    e: Float[Array, "C 1"]
    rho: Float[Array, "1 1"]


def decay_rows(log_decay: Float[Array, "B T K"], C: int) -> Float[Array, "B K n 3 C"]:
    """Returns prefix sums of log_decay within chunks: hi, lo and the count of resets.

    A difference of two prefix sums loses what their common part rounds away. Here hi sums multiples
    of 2^-8, which is exact, and lo sums what is left, which is small: hi_t - hi_s + (lo_t - lo_s)
    is as exact as a sum over s < u <= t alone, and so is three times it, for C up to 128.
    """
    T = log_decay.shape[1]
    x = jnp.moveaxis(log_decay.astype(jnp.float32), 1, 2)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -T % C)))
    reset = x < RESET
    x = jnp.where(reset, 0, x)
    hi = jnp.round(x * 256) / 256
    parts = jnp.stack([hi, x - hi, reset.astype(jnp.float32)], 2)
    return jnp.cumsum(parts.reshape(*x.shape[:2], 3, -1, C), -1).swapaxes(2, 3)


def decay(rows, columns, R: int, C: int, *, power: int = 1, strict: bool = False) -> Decay:
    """Returns the decay terms from (hi, lo, resets) as rows [1, C] and as columns [R, 1].

    Both None: no decay. Each exponent is masked before exp, so none is positive.
    """

    def exp(x, mask):
        return jnp.where(mask, jnp.exp(jnp.where(mask, power * x, 0.0)), 0.0)

    t, s = token_indices(R, C)
    causal = t > s if strict else t >= s
    if rows is None:
        one = jnp.ones((1, 1), jnp.float32)
        return Decay(causal.astype(jnp.float32), one, one, one)
    (hi, lo, resets), (hi_t, lo_t, resets_t) = rows, columns
    D = exp(hi_t - hi + (lo_t - lo), causal & (resets_t == resets))
    b = exp(hi_t + lo_t, resets_t == 0)
    last = lax.broadcasted_iota(jnp.int32, (1, C), 1) == C - 1
    hi_c, lo_c, resets_c = (_over_columns(jnp.where(last, x, 0.0)) for x in rows)
    # A chunk's tokens are the first C rows of R.
    hi_s, lo_s, resets_s = (lax.slice_in_dim(x, 0, C, axis=0) for x in columns)
    e = exp(hi_c - hi_s + (lo_c - lo_s), resets_s == resets_c)
    return Decay(D, b, e, exp(hi_c + lo_c, resets_c == 0))


def token_indices(R: int, C: int):
    """Returns the token of each row (R = g C) and of each column, as [R, C]."""
    rows, columns = (lax.broadcasted_iota(jnp.int32, (R, C), axis) for axis in (0, 1))
    return lax.rem(rows, lax.full_like(rows, C)) if R > C else rows, columns


def column(row: Float[Array, "1 C"], R: int) -> Float[Array, "R 1"]:
    """Returns a row as a column, for each query head: compilers do not transpose vectors."""
    t, s = token_indices(R, row.shape[1])
    return jnp.sum(jnp.where(t == s, row, 0.0), 1, keepdims=True)


def row(column: Float[Array, "C 1"]) -> Float[Array, "1 C"]:
    """Returns a column as a row."""
    C = column.shape[0]
    t, s = token_indices(C, C)
    return jnp.sum(jnp.where(t == s, column, 0.0), 0, keepdims=True)


class Dots(NamedTuple):
    """Products of tiles, a^T and b^T without a transpose, accumulated in float32."""

    nn: Callable
    nt: Callable
    tn: Callable


def knows(precision: lax.PrecisionLike) -> bool:
    """Tells whether it is one of `jax.lax.Precision`: kernels know no pairs and no algorithms."""
    try:
        return precision is None or isinstance(lax.Precision(precision), lax.Precision)
    except (TypeError, ValueError):
        return False


def product_type(x, precision: lax.PrecisionLike) -> tuple[jnp.dtype, lax.PrecisionLike]:
    """Returns what the operands of products are rounded to, and the products' own precision.

    bfloat16 tokens are multiplied as such, and what meets them is rounded to the same; a precision
    asked for by name means float32.
    """
    narrow = any(a.dtype == jnp.bfloat16 for a in (x.q, x.k, x.v))
    if precision is None or lax.Precision(precision) == lax.Precision.DEFAULT:
        return jnp.dtype(jnp.bfloat16 if narrow else jnp.float32), None
    return jnp.dtype(jnp.float32), lax.Precision.HIGHEST


def dots(dtype: jnp.dtype, precision: lax.PrecisionLike) -> Dots:
    """Returns the products whose operands are rounded to `dtype`."""

    def dot(a, b, *, axes):
        return lax.dot_general(
            a.astype(dtype),
            b.astype(dtype),
            ((axes[:1], axes[1:]), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    return Dots(*(partial(dot, axes=axes) for axes in ((1, 0), (1, 1), (0, 0))))


def output(A, q, v, w, t: Decay, P, m, dot: Dots):
    """Returns O [R, E] and z [R, 1] (None without w [1, C] and m [1, D]) for A = Q K^T . D."""
    o = dot.nn(A, v) + t.b * dot.nn(q, P)
    if w is None:
        return o, None
    return o, _over_columns(A * w) + t.b * _over_columns(q * m)


def next_state(k, v, w, t: Decay, P, m, dot: Dots):
    """Returns P' = rho P + (e . K)^T V [D, E] and m' [1, D] (None without w [C, 1])."""
    k = k * t.e
    P = t.rho * P + dot.tn(k, v)
    return P, None if w is None else t.rho * m + _over_rows(k * w)


def previous_cotangent(q, do, dz, t: Decay, L, mu, dot: Dots):
    """Returns the cotangent of the state at the chunk's start from that at its end."""
    q = q * t.b
    L = t.rho * L + dot.tn(q, do)
    return L, None if dz is None else t.rho * mu + _over_rows(q * dz)


class Cotangents(NamedTuple):
    """Of one chunk: dq [R, D], dk [C, D], dv [C, E], and as rows [1, C] dw and d log_decay."""

    q: Array
    k: Array
    v: Array
    w: Array | None
    log_decay: Array | None


def cotangents(q, k, v, w, t: Decay, P, m, do, dz, L, mu, dot: Dots, *, decays: bool) -> Cotangents:
    """Returns the cotangents of a chunk's tokens.

    P and m are the state at its start, L and mu the cotangents of the state at its end. w is a row
    [1, C] and dz a column [R, 1], or both None. d log_decay is for a power of 1.
    """
    A, X = dot.nt(q, k) * t.D, dot.nt(do, v)
    start, end = dot.nt(do, P), dot.nt(v, L)
    dv, dw = dot.tn(A, do) + t.e * dot.nn(k, L), None
    if w is not None:
        w_column = column(w, k.shape[0])
        X, start, end = X + dz * w, start + dz * m, end + w_column * mu
        dw = _over_rows(A * dz) + row(t.e * _over_columns(k * mu))
    start, end, H = t.b * start, t.e * end, X * t.D
    dq, dk = dot.nn(H, k) + start, dot.tn(H, q) + end
    if not decays:
        return Cotangents(dq, dk, dv, dw, None)
    through = jnp.sum(_over_columns(L * P), 0, keepdims=True)
    if w is not None:
        through += _over_columns(mu * m)
    entering, leaving = _over_columns(q * start), _over_columns(k * end)
    return Cotangents(dq, dk, dv, dw, _flow(A * X, entering, leaving, t.rho * through, dot))


def _flow(inside, entering, leaving, through, dot: Dots):
    """Sums, for each token u of the chunk, every path from s < u to t >= u: a row [1, C].

    Nothing is subtracted, so nothing cancels, and each path through a reset is exactly 0.
    """
    R, C = inside.shape
    s, u = token_indices(C, C)
    before = s < u
    from_before = dot.nn(inside, before.astype(jnp.float32))  # [t, u]: from all s < u
    t, u = token_indices(R, C)
    reaching = jnp.where(t >= u, from_before + entering, 0.0)
    return _over_rows(reaching) + _over_rows(jnp.where(before, leaving, 0.0)) + through


def _over_columns(x):
    return jnp.sum(x, 1, keepdims=True)


def _over_rows(x):
    return jnp.sum(x, 0, keepdims=True)
