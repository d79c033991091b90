"""Where the segments of a packed row begin."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Int

from hla_jax._types import Mask, SegmentIds


def segment_starts(
    segment_ids: SegmentIds,
    mask: Mask | None = None,
    before: tuple[Int[jax.Array, "*B"], Bool[jax.Array, "*B"]] | None = None,
) -> Bool[jax.Array, "*B S"]:
    """Returns which tokens begin a segment other than the row's first.

    Those are the unmasked tokens whose id differs from that of the last unmasked token before them:
    an id that comes back later names a new segment, and ids of masked tokens do not matter.
    `before` is such a token's id before all of these, and whether there was one.

    Example:
      >>> import jax.numpy as jnp
      >>> print(segment_starts(jnp.array([7, 7, 2, 2, 7])))
      [False False  True False  True]
    """
    segment_ids = jnp.asarray(segment_ids)
    real = jnp.ones(segment_ids.shape, bool) if mask is None else jnp.asarray(mask)
    here = jnp.arange(segment_ids.shape[-1], dtype=jnp.int32)
    latest = lax.cummax(jnp.where(real, here, -1), axis=real.ndim - 1)
    place = jnp.concatenate([jnp.full_like(latest[..., :1], -1), latest[..., :-1]], axis=-1)
    previous = jnp.take_along_axis(segment_ids, jnp.maximum(place, 0), axis=-1, mode="clip")
    exists = place >= 0
    if before is not None:
        id_, existed = (x[..., None] for x in before)
        previous = jnp.where(exists, previous, id_)
        exists |= existed
    return real & exists & (segment_ids != previous)


def segment_numbers(segment_ids: SegmentIds, mask: Mask | None = None) -> Int[jax.Array, "*B S"]:
    """Numbers a row's segments 0, 1, 2, ...; masked tokens carry the number of what precedes them.

    Example:
      >>> import jax.numpy as jnp
      >>> print(segment_numbers(jnp.array([7, 7, 2, 2, 7])))
      [0 0 1 1 2]
    """
    return jnp.cumsum(segment_starts(segment_ids, mask), axis=-1, dtype=jnp.int32)
