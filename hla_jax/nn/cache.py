"""A preallocated cache of what each row's current segment has shown so far.

The token at position p of its segment is in slot p, or in slot p % M of a rolling cache of M slots,
which so holds the last M tokens. What is kept of a token is any pytree: keys and values, latents.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from hla_jax._segments import segment_numbers
from hla_jax._sharding import left_to_the_compiler, specs_of
from hla_jax.nn.mixer import Tokens


class View(NamedTuple):
    """What tokens that continue a sequence may look at.

    Attributes:
      entries: what is kept of each token, a pytree of leaves [B, S, ...], in order of position
        unless the cache rolls.
      positions: [B, S], theirs, within their segments.
      visible: [B, T, S], which entries each token sees: those of its segment, unmasked, not later.
    """

    entries: Any
    positions: Int[jax.Array, "B S"]
    visible: Bool[jax.Array, "B T S"]


def mix_with_cache(
    cache: Any,
    new: Any,
    tokens: Tokens,
    *,
    slots: int,
    rolling: bool = False,
    whole: Callable[[], jax.Array],
    continued: Callable[[View], jax.Array],
) -> tuple[jax.Array, Any]:
    """Mixes the tokens and appends them to the cache.

    Args:
      cache: leaves [B, M, ...]; None is the beginning.
      new: what to keep of the tokens, leaves [B, T, ...].
      tokens: their mask, segments and positions.
      slots: M.
      rolling: whether the oldest tokens give way to the newest. If not, a token past the last slot
        is an error where its position is known while Python runs; else it is dropped and its
        output is NaN.
      whole: mixes the tokens of a sequence that begins with them.
      continued: mixes tokens that may look at earlier ones.

    Returns:
      What `whole` or `continued` returned, [B, T, ...], and the cache with the last segment's
      tokens in it.

    Raises:
      ValueError: the cache is another layer's, or too short.
    """
    fresh, T = cache is None, tokens.positions.shape[1]
    wanted = jax.tree.map(lambda a: (len(a), slots, *a.shape[2:]), new)
    if fresh:
        cache = left_to_the_compiler(partial(_empty, slots=slots), new, lambda: specs_of(new))
    elif (got := jax.tree.map(jnp.shape, cache)) != wanted or type(got) is not type(wanted):
        raise ValueError(
            "state must be None or a MixerState of this layer, its memory of shapes "
            f"{wanted}, got {got}"
        )
    if T == 0:
        return whole(), cache
    if not rolling:
        _check_length(tokens, slots)
    new = jax.tree.map(lambda old, a: a.astype(old.dtype), cache, new)
    number = jnp.zeros_like(tokens.positions)
    if tokens.segment_ids is not None:
        number = segment_numbers(tokens.segment_ids, tokens.mask)
    real = jnp.ones(number.shape, bool) if tokens.mask is None else tokens.mask
    after = _written(cache, new, tokens.positions, real & (number == number[:, -1:]), rolling)
    if fresh:
        o = whole()
    elif T == 1:
        held = _positions_held(tokens.positions[:, 0], slots)
        o = continued(View(after, held, (real & (held >= 0))[:, None]))
    else:
        o = continued(_side_by_side(cache, new, tokens.positions, real, number))
    if not rolling and not (fresh and slots >= T):
        past = real & (tokens.positions >= slots)
        o = jnp.where(jnp.expand_dims(past, range(2, o.ndim)), jnp.nan, o)
    return o, after


def _empty(new: Any, slots: int) -> Any:
    return jax.tree.map(lambda a: jnp.zeros((len(a), slots, *a.shape[2:]), a.dtype), new)


def _written(
    cache: Any,
    new: Any,
    positions: Int[jax.Array, "B T"],
    keep: Bool[jax.Array, "B T"],
    rolling: bool,
) -> Any:
    slots = jax.tree.leaves(cache)[0].shape[1]
    if rolling:  # of tokens that would share a slot, the last one alone
        newest = jnp.max(jnp.where(keep, positions, -1), axis=1, keepdims=True)
        keep &= positions > newest - slots
    slot = jnp.where(keep, positions % slots if rolling else positions, slots)

    def put(trees: tuple[Any, Any, jax.Array]) -> Any:
        cache, new, slot = trees

        # Mapped over rows, for indices of rows would gather a divided batch. What has no slot, or
        # one past the end, is dropped.
        @jax.vmap
        def put_row(old: jax.Array, slot: jax.Array, a: jax.Array) -> jax.Array:
            return old.at[slot].set(a, mode="drop")

        return jax.tree.map(lambda old, a: put_row(old, slot, a), cache, new)

    return left_to_the_compiler(put, (cache, new, slot), lambda: specs_of(cache))


def _side_by_side(
    cache: Any,
    new: Any,
    positions: Int[jax.Array, "B T"],
    real: Bool[jax.Array, "B T"],
    number: Int[jax.Array, "B T"],
) -> View:
    """The old cache, which the first segment alone continues, and then the new tokens."""
    held = _positions_held(positions[:, 0] - 1, jax.tree.leaves(cache)[0].shape[1])
    old = (held >= 0)[:, None] & (number == 0)[..., None]
    own = (number[:, :, None] == number[:, None, :]) & real[:, None]
    own &= jnp.tri(own.shape[-1], dtype=bool)[None]
    entries = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), cache, new)
    held = jnp.concatenate([held, positions], axis=1)
    return View(entries, held, jnp.concatenate([old, own], axis=-1))


def _positions_held(last: Int[jax.Array, " B"], slots: int) -> Int[jax.Array, "B M"]:
    """The position held in each slot once `last` is in; negative if it is empty."""
    return last[:, None] - (last[:, None] - jnp.arange(slots, dtype=last.dtype)[None]) % slots


def _check_length(tokens: Tokens, slots: int) -> None:
    mask, segment_ids, positions = tokens
    if not isinstance(positions, jax.core.Tracer) and not isinstance(mask, jax.core.Tracer):
        real = positions if mask is None else jnp.where(mask, positions, -1)
        length = int(real.max(initial=-1)) + 1
    else:
        length = positions.shape[1] if mask is None and segment_ids is None else 0
    if length > slots:
        raise ValueError(
            f"the cache holds max_length={slots} positions; got a token at position {length - 1}"
        )
