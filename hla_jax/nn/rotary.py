"""Rotary positions."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from hla_jax._types import Array


def rotary(
    x: Float[Array, "*B T H D"], positions: Int[Array, "*B T"], *, base: float = 10_000.0
) -> Float[jax.Array, "*B T H D"]:
    """Rotates channels i and i + D // 2 by the angle position * base^(-i / (D // 2)).

    The product of a query and a key rotated so depends on their positions' difference alone. Each
    affinity of a higher-order operator is such a product, so this holds for all operators here.

    Source: RoFormer (Su et al. 2021, arXiv 2104.09864), section 3.2.

    Args:
      x: [*B, T, H, D], queries or keys. If D is odd, the last channel is left as it is.
      positions: [*B, T], integers, the tokens' positions.
      base: the larger, the slower the last channels turn.

    Returns:
      [*B, T, H, D], in x's dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([1.0, 0.0]).reshape(1, 1, 2)
      >>> print(rotary(x, jnp.array([1])).ravel())
      [0.5403023  0.84147096]
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / max(half, 1))
    angles = positions[..., None, None].astype(jnp.float32) * frequencies  # [*B, T, 1, D // 2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
    return jnp.concatenate([rotated, rest], axis=-1)
