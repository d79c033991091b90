"""Rotary positions."""

from decimal import Decimal, localcontext
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Integer, UInt32

from hla_jax._check import checked, known_number
from hla_jax._types import Array, result_type

TWO_PI = Decimal("6.283185307179586476925286766559005768394338798750211641949889184615632812572")


def rotary(
    x: Float[Array, "*B T H D"], positions: Integer[Array, "*B T"], *, base: float = 10_000.0
) -> Float[jax.Array, "*B T H D"]:
    """Rotates channels i and i + D // 2 by the angle position * base^(-i / (D // 2)).

    The product of a query and a key rotated so depends on the difference of their positions only,
    to the rounding of the dtype, for any positions up to 2^32. Each affinity of a higher-order
    operator is such a product, so this holds for all operators here.

    Source: RoFormer (Su et al. 2021, arXiv 2104.09864), section 3.2.

    Args:
      x: [*B, T, H, D], queries or keys. If D is odd, the last channel is left as it is.
      positions: [*B, T], integers, the tokens' positions, or [T] for all rows.
      base: the larger, the slower the last channels turn; a number known while tracing.

    Returns:
      [*B, T, H, D], in x's dtype; computed in float32 at least.

    Raises:
      ValueError: x or positions has a wrong shape or dtype, or base is below 1e-30.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([1.0, 0.0]).reshape(1, 1, 2)
      >>> print(rotary(x, jnp.array([1])).ravel().round(3))
      [0.54  0.841]
    """
    x = checked("x", x, None, jnp.floating)
    if x.ndim < 3:
        raise ValueError(f"x must be [*B, T, H, D], got {x.shape}")
    positions = checked("positions", positions, None, jnp.integer)
    _check_positions(positions.shape, x.shape[:-2])
    base = known_number("base", base)
    if not 1e-30 <= base < float("inf"):  # less would need more digits of pi
        raise ValueError(f"base must be a finite number of at least 1e-30, got {base}")
    half, dtype = x.shape[-1] // 2, result_type(x, jnp.float32)
    angles = 2 * np.pi * _turns(positions, half, base, dtype)[..., None, :]  # [*B, T, 1, D // 2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = (x[..., i : i + half].astype(dtype) for i in (0, half))
    rotated = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
    return jnp.concatenate([rotated, x[..., 2 * half :]], axis=-1)


def _check_positions(given: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    # Rows may share positions, but one for all tokens is a mistake.
    fits = len(given) <= len(tokens) and given[-1:] == tokens[-1:]
    if not fits or any(n not in (1, m) for n, m in zip(given[::-1], tokens[::-1], strict=False)):
        raise ValueError(f"positions must be [*B, T] = {tokens} or [T], got {given}")


def _turns(
    positions: Integer[jax.Array, "*B T"], half: int, base: float, dtype: jnp.dtype
) -> Float[jax.Array, "*B T half"]:
    """Returns position * frequency in turns, less whole turns: in [-1/2, 1/2].

    A float product would round the angle at its own size, and far positions would share angles.
    This one is exact: of integers, the frequency being a fraction of a turn in fixed point, and
    what overflows are whole turns. It is long multiplication, in digits of 16 bits.
    """
    if positions.dtype.itemsize < 4:
        positions = positions.astype(jnp.int32)
    size = positions.dtype.itemsize
    distance = jnp.abs(positions)[..., None].astype(f"uint{8 * size}")
    digits = 6 if dtype == jnp.float64 else 4
    frequencies = _frequencies(half, base, digits).reshape(digits, *(1,) * positions.ndim, half)
    product: list[jax.Array] = [jnp.zeros((1,) * distance.ndim, jnp.uint32)] * digits
    for j in range(size // 2):
        digit = (distance >> 16 * j).astype(jnp.uint32) & 0xFFFF
        carry = jnp.zeros_like(product[0])
        for i in range(digits - j):
            total = digit * frequencies[i] + product[i + j] + carry  # at most 2^32 - 1
            product[i + j], carry = total & 0xFFFF, total >> 16
    high, low = (product[i] << 16 | product[i - 1] for i in (-1, -3))
    # As a signed number, the upper half of the turn is negative.
    turns = lax.bitcast_convert_type(high, jnp.int32).astype(dtype) * 2.0**-32
    turns = turns + low.astype(dtype) * 2.0**-64
    return jnp.where(positions[..., None] < 0, -turns, turns)


@lru_cache
def _frequencies(half: int, base: float, digits: int) -> UInt32[np.ndarray, "digits half"]:
    """Returns frequencies in turns, less whole ones, in digits of 16 bits, the lowest first."""
    with localcontext(prec=80):
        turns = [Decimal(base) ** (Decimal(-i) / half) / TWO_PI for i in range(half)]
        fixed = [round(t % 1 * 2 ** (16 * digits)) for t in turns]
    return np.array([[f >> 16 * d & 0xFFFF for f in fixed] for d in range(digits)], np.uint32)
