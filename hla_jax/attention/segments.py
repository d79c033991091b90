"""Which segment of its row each token of a packed batch belongs to."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Int

from hla_jax._types import Mask, SegmentIds


def segment_numbers(segment_ids: SegmentIds, mask: Mask | None = None) -> Int[jax.Array, "*B S"]:
    """Numbers a row's segments 0, 1, 2, ... in the order in which they come.

    A segment starts at an unmasked token whose id differs from that of the last unmasked token, so
    an id that comes back later names a new segment, and ids of masked tokens do not matter.

    Args:
        segment_ids: integers, [*B, S].
        mask: True at real tokens, [*B, S]; None means everywhere.

    Returns:
        The numbers, int32 [*B, S]; masked tokens carry that of the last unmasked token before them.

    Example:
        >>> import jax.numpy as jnp
        >>> print(segment_numbers(jnp.array([7, 7, 2, 2, 7])))
        [0 0 1 1 2]
    """
    segment_ids = jnp.asarray(segment_ids)
    real = jnp.ones(segment_ids.shape, bool) if mask is None else jnp.asarray(mask)
    here = jnp.arange(segment_ids.shape[-1], dtype=jnp.int32)
    latest = lax.cummax(jnp.where(real, here, -1), axis=real.ndim - 1)
    before = jnp.roll(latest, 1, axis=-1).at[..., :1].set(-1)
    previous = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=-1, mode="clip")
    starts = real & (before >= 0) & (segment_ids != previous)
    return jnp.cumsum(starts, axis=-1, dtype=jnp.int32)
