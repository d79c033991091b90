"""Sums of log decays over pairs of tokens, without overflow, cancellation or NaN."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# exp of this is exactly 0 in float64 and float32, and sums of it stay far from overflow: a reset
# (log decay -inf) becomes an ordinary number that no 0 * inf can turn into NaN.
FLOOR = -1e4


def floor(log_decay: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """Replaces everything whose exponential is 0 anyway, -inf included, by a finite number."""
    return jnp.maximum(log_decay, FLOOR)


def pairwise(log_decay: Float[Array, " c"]) -> Float[Array, "c c"]:
    """Returns log w(t, s) = sum of log_decay over s < u <= t, and -inf for s > t.

    Every entry sums numbers of one sign, so strong and weak decays mix without cancellation: a
    difference of two prefix sums would lose about a digit and a half. As one product of a 0-1
    matrix it costs 2 c^3 FLOPs, needs full precision on accelerators, and is faster than a masked
    cumsum.
    """
    c = log_decay.shape[0]
    lower = jnp.tril(jnp.ones((c, c), log_decay.dtype))
    after = 1 - lower.T  # [u, s]: u > s
    terms = floor(log_decay)[:, None] * after
    sums = jnp.matmul(lower, terms, precision=lax.Precision.HIGHEST)
    return jnp.where(lower > 0, sums, -jnp.inf)
