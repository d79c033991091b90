"""What all token-mixing layers share: the call, the state, positions."""

import inspect
import typing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from hla_jax._check import (
    FLOATING,
    array,
    check_flag,
    checked_dtype,
    checked_or_none,
    is_float,
    type_name,
)
from hla_jax._export import exported
from hla_jax._layout import Layout, check_layout, divide_parameter
from hla_jax._segments import segment_starts
from hla_jax._types import Array, Mask, SegmentIds


@exported
class MixerState(NamedTuple):
    """What a layer remembers of the tokens it has seen.

    Attributes:
      memory: the operator's state, or the KV cache: arrays with leading axis B.
      position: [B], int32, the next token's position: how many unmasked tokens its row's segment
        has so far. None in a layer that does not use positions.
    """

    memory: Any
    position: Int[Array, " B"] | None


class Tokens(NamedTuple):
    """What a call knows about its tokens besides their features."""

    mask: Bool[jax.Array, "B T"] | None
    segment_ids: Int[jax.Array, "B T"] | None
    positions: Int[jax.Array, "B T"]


class Mixer(nnx.Module):
    """The protocol of the layers: `y, state = layer(x, state=None, mask=None, segment_ids=None)`.

    A token whose mask is False changes no other output and no state, does not advance the
    positions, and gets output 0, whatever it contains. Each segment is computed as if it were
    alone: positions count the unmasked tokens since the segment's start. A given state continues
    the row's first segment, and the returned one is the last segment's. A layer that is not causal
    has no state: it takes None and returns `MixerState(None, None)`.

    A subclass calls `__init__` here, and has a method `_mix(x, memory, tokens)`, which returns the
    mixed features [B, T, F] and the next memory. The memory before any token is None or zeros.
    `MultiHead` is the one with the usual projections.

    Args:
      in_features: F, features of input and output.
      causal: whether a token sees those before it and itself alone.
      dtype: of the computation; None means the promotion of inputs and parameters.
      param_dtype: of the parameters.
      layout: how parameters and tokens are divided over devices.
    """

    def __init__(
        self,
        in_features: int,
        *,
        causal: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        layout: Layout | None = None,
    ):
        check_flag("causal", causal)
        if layout is not None:
            check_layout(layout, in_features)
        self.in_features, self.causal = in_features, causal
        self.dtype = None if dtype is None else checked_dtype("dtype", dtype)
        self.param_dtype, self.layout = checked_dtype("param_dtype", param_dtype), layout

    def __call__(
        self,
        x: Float[Array, "B T F"],
        state: MixerState | None = None,
        mask: Mask | None = None,
        segment_ids: SegmentIds | None = None,
    ) -> tuple[Float[jax.Array, "B T F"], MixerState]:
        """Mixes the tokens; T = 1 with a state is a decoding step.

        Args:
          x: [B, T, F].
          state: what this layer returned for the tokens before; None is the beginning.
          mask: [B, T], False at padding.
          segment_ids: [B, T], integers: a segment starts where the id of an unmasked token differs
            from that of the last unmasked token.

        Returns:
          The mixed features [B, T, F], and the state after the last token.

        Raises:
          ValueError: an argument has a wrong shape or dtype, or state is not this layer's; the
            message names it.
        """
        x = array("x", x)
        self._check(x, state)
        mask = checked_or_none("mask", mask, x.shape[:2], jnp.bool_)
        segment_ids = checked_or_none("segment_ids", segment_ids, x.shape[:2], jnp.integer)
        if mask is not None:
            x = jnp.where(mask[..., None], x, 0)  # so that nothing it holds meets a gradient
        memory, start = (None, None) if state is None else state
        start = jnp.zeros(x.shape[:1], jnp.int32) if start is None else start
        positions, position = count_positions(x.shape[:2], start, mask, segment_ids)
        y, memory = self._mix(x, memory, Tokens(mask, segment_ids, positions))
        if mask is not None:
            y = jnp.where(mask[..., None], y, 0)
        counts = self.causal and self.uses_positions
        return y, MixerState(memory if self.causal else None, position if counts else None)

    def init_state(self, batch_size: int) -> MixerState:
        """The state before any token, for `batch_size` rows."""
        if not self.causal:
            raise ValueError("a layer with causal=False has no state, but init_state was called")
        position = jnp.zeros((batch_size,), jnp.int32) if self.uses_positions else None
        return MixerState(self._init_memory(batch_size), position)

    @property
    def uses_positions(self) -> bool:
        """Whether the state counts tokens."""
        return True

    def _mix(self, x: jax.Array, memory: Any, tokens: Tokens) -> tuple[jax.Array, Any]:
        # A subclass mixes the tokens here: features [B, T, F], and what to remember of them.
        raise NotImplementedError

    def _init_memory(self, batch_size: int) -> Any:
        # Zeros, of the shapes that no tokens leave behind.
        x = jax.ShapeDtypeStruct((batch_size, 0, self.in_features), self.dtype or self.param_dtype)
        left = jax.eval_shape(lambda x: self(x)[1].memory, x)
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), left)

    def _linear(
        self,
        features_in: int | tuple[int, ...],
        features_out: int | tuple[int, ...],
        rngs: nnx.Rngs,
        *names: str | None,
    ) -> nnx.LinearGeneral:
        # The names are of the fields of a layout, one for each axis of the kernel.
        axes = len(features_in) if isinstance(features_in, tuple) else 1
        linear = nnx.LinearGeneral(
            features_in,
            features_out,
            axis=tuple(range(-axes, 0)),
            use_bias=False,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            rngs=rngs,
        )
        linear.kernel = divide_parameter(linear.kernel, self.layout, *names)
        return linear

    def _norm(self, features: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
        return nnx.RMSNorm(features, dtype=self.dtype, param_dtype=self.param_dtype, rngs=rngs)

    def _check(self, x: jax.Array, state: MixerState | None) -> None:
        F = self.in_features
        if x.ndim != 3 or x.shape[-1] != F or not is_float(x.dtype):
            raise ValueError(f"x must be {FLOATING}, [B, T, F] with F={F}, got {x.dtype} {x.shape}")
        if state is None:
            return
        if not self.causal:
            raise ValueError(f"state must be None where causal=False, got {type_name(state)}")
        if not isinstance(state, MixerState):
            raise ValueError(f"state must be None or a MixerState, got {type_name(state)}")
        if (state.position is not None) != self.uses_positions:
            wanted, got = ("a position", "none") if self.uses_positions else ("no position", "one")
            raise ValueError(f"state must be None or a MixerState with {wanted}, got {got}")
        rows = {jnp.shape(a)[:1] for a in jax.tree.leaves(state)}
        if rows - {x.shape[:1]}:
            shapes = jax.tree.map(jnp.shape, state)
            raise ValueError(f"state must have x's {len(x)} rows, got shapes {shapes}")


def refuse_unknown(layer: Mixer, unknown: dict[str, Any]) -> None:
    """Raises TypeError, as Python does, if there are options that a layer does not take."""
    if unknown:
        kind = type(layer).__name__
        raise TypeError(
            f"{kind} got unexpected options {', '.join(unknown)}; it takes "
            f"{', '.join(_options_of(type(layer)))}. In a model of several kinds of layers, give "
            "an option of one kind with its class: "
            f"functools.partial(hla_jax.nn.ThatLayer, {next(iter(unknown))}=...)"
        )


def _options_of(kind: Any) -> list[str]:
    """The names of all keyword arguments, those behind `**options: Unpack[...]` too."""
    names = []
    for parameter in inspect.signature(kind.__init__).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_KEYWORD:
            for options in typing.get_args(parameter.annotation):
                names += options.__annotations__
    return names


def random_key(rngs: nnx.Rngs) -> nnx.Variable[jax.Array]:
    """Draws a key that a layer keeps with its parameters, as plain numbers that can be saved."""
    return nnx.Variable(jax.random.bits(rngs.params(), (2,), jnp.uint32))


def wrapped_key(kept: nnx.Variable[jax.Array]) -> jax.Array:
    """The key of what was kept; always of this kind, so that a saved layer stays what it was."""
    return jax.random.wrap_key_data(kept[...], impl="threefry2x32")


def count_positions(
    shape: tuple[int, ...],
    start: Int[Array, " B"],
    mask: Mask | None = None,
    segment_ids: SegmentIds | None = None,
) -> tuple[Int[jax.Array, "B T"], Int[jax.Array, " B"]]:
    """Counts the unmasked tokens of each token's segment before it.

    Args:
      shape: (B, T).
      start: [B], how many the row's first segment has already.
      mask: [B, T], False at padding.
      segment_ids: [B, T], integers.

    Returns:
      The positions, int32 [B, T], of no meaning where masked; and that of the token after the last,
      int32 [B].

    Example:
      >>> import jax.numpy as jnp
      >>> ids = jnp.array([[0, 0, 1, 1]])
      >>> print(*count_positions((1, 4), jnp.array([5]), None, ids))
      [[5 6 0 1]] [2]
    """
    if shape[1] == 0:
        return jnp.zeros(shape, jnp.int32), jnp.asarray(start)
    real = jnp.ones(shape, bool) if mask is None else mask
    one = real.astype(jnp.int32)
    before = jnp.cumsum(one, axis=1) - one
    # `before` at the start of each token's segment, which for the first one may lie before the row.
    offset = -start[:, None]
    if segment_ids is not None:
        starts = segment_starts(segment_ids, real)
        offset = jax.lax.cummax(jnp.where(starts, before, offset), axis=1)
    positions = before - offset
    return positions, positions[:, -1] + one[:, -1]
