"""What token-mixing layers share: projections, heads, norms, positions, the call protocol."""

from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from hla_jax._check import array, checked_or_none
from hla_jax._segments import segment_starts
from hla_jax._types import Array, Mask, SegmentIds
from hla_jax.nn.rotary import rotary


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


class MixerOptions(TypedDict, total=False):
    """The options of every layer, see `Mixer`."""

    num_kv_heads: int | None
    head_dim: int | None
    value_head_dim: int | None
    qk_norm: bool
    output_norm: bool
    rotary: bool
    rotary_base: float
    dtype: DTypeLike | None
    param_dtype: DTypeLike


class Mixer(nnx.Module):
    """The shared part of the layers; a subclass says how heads are mixed and what its memory is.

    A subclass has two methods: `_mix(x, q, k, v, memory, tokens)`, which returns the mixed heads
    [B, T, H, E] and the next memory, and `_init_memory(batch_size)`, the memory before any token.

    A token whose mask is False changes no other output and no state, does not advance the
    positions, and gets output 0, whatever it contains. Each segment is computed as if it were
    alone: positions count the unmasked tokens since the segment's start. A given state continues
    the row's first segment, and the returned one is the last segment's.

    Args:
      num_heads: H, query heads.
      in_features: F, features of input and output.
      num_kv_heads: K, a divisor of H (default H).
      head_dim: D, width of queries and keys (default F // H, if H divides F).
      value_head_dim: E, width of values (default D).
      qk_norm: whether each query and key is normalised to a root mean square of 1 (times a
        learned gain per channel), before rotary positions and feature maps. With the factor
        D^(-1/2) of the affinities, these are then of order 1.
      output_norm: whether each head's output is normalised so. Sums of products of affinities grow
        with the number of tokens; this takes their scale away.
      rotary: whether queries and keys are rotated by their positions (`rotary`).
      rotary_base: its base.
      dtype: of the computation; None means the promotion of inputs and parameters.
      param_dtype: of the parameters.
      rngs: the source of the initial parameters.

    Raises:
      ValueError: a size is not positive, num_kv_heads does not divide num_heads, or num_heads not
        in_features where head_dim is None.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        qk_norm: bool = True,
        output_norm: bool = True,
        rotary: bool = True,
        rotary_base: float = 10_000.0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        **unknown: Any,
    ):
        if unknown:  # said here, where the layer's own name is known
            raise TypeError(f"{type(self).__name__} got unexpected options {', '.join(unknown)}")
        sizes: dict[str, int | None] = dict(
            num_heads=num_heads,
            in_features=in_features,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
        )
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        H, K = num_heads, num_heads if num_kv_heads is None else num_kv_heads
        if H % K:
            raise ValueError(f"num_kv_heads must divide num_heads={H}, got {K}")
        if head_dim is None and in_features % H:
            raise ValueError(
                f"num_heads={H} must divide in_features={in_features} where head_dim is None; "
                "the first two arguments are num_heads, in_features"
            )
        D = in_features // H if head_dim is None else head_dim
        E = D if value_head_dim is None else value_head_dim
        self.num_heads, self.num_kv_heads, self.head_dim, self.value_head_dim = H, K, D, E
        self.in_features = in_features
        self.rotary, self.rotary_base = rotary, rotary_base
        self.dtype, self.param_dtype = dtype, param_dtype

        def linear(features_in: int, features_out: int) -> nnx.Linear:
            return nnx.Linear(
                features_in,
                features_out,
                use_bias=False,
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )

        def norm(features: int, wanted: bool) -> nnx.RMSNorm | None:
            if not wanted:
                return None
            return nnx.RMSNorm(features, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

        self.query = linear(in_features, H * D)
        self.key = linear(in_features, K * D)
        self.value = linear(in_features, K * E)
        self.out = linear(H * E, in_features)
        self.query_norm, self.key_norm = norm(D, qk_norm), norm(D, qk_norm)
        self.output_norm = norm(E, output_norm)

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
        q, k, v = self._project(x, positions)
        o, memory = self._mix(x, q, k, v, memory, Tokens(mask, segment_ids, positions))
        if self.output_norm is not None:
            o = self.output_norm(o)
        y = self.out(o.reshape(*x.shape[:2], self.num_heads * self.value_head_dim))
        if mask is not None:
            y = jnp.where(mask[..., None], y, 0)
        return y, MixerState(memory, position if self.uses_positions else None)

    def init_state(self, batch_size: int) -> MixerState:
        """The state before any token, for `batch_size` rows."""
        position = jnp.zeros((batch_size,), jnp.int32) if self.uses_positions else None
        return MixerState(self._init_memory(batch_size), position)

    @property
    def uses_positions(self) -> bool:
        """Whether the state counts tokens."""
        return self.rotary

    def _mix(
        self, x: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, memory: Any, tokens: Tokens
    ) -> tuple[jax.Array, Any]:
        # A subclass mixes the tokens here: heads [B, T, H, E], and what to remember of them.
        raise NotImplementedError

    def _init_memory(self, batch_size: int) -> Any:
        # A subclass returns here what it remembers before the first token.
        raise NotImplementedError

    def _project(
        self, x: jax.Array, positions: Int[jax.Array, "B T"]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        q = self.query(x).reshape(*x.shape[:2], self.num_heads, self.head_dim)
        k = self.key(x).reshape(*x.shape[:2], self.num_kv_heads, self.head_dim)
        v = self.value(x).reshape(*x.shape[:2], self.num_kv_heads, self.value_head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rotary:
            q, k = (rotary(a, positions, base=self.rotary_base) for a in (q, k))
        return q, k, v

    def _check(self, x: jax.Array, state: MixerState | None) -> None:
        F = self.in_features
        if x.ndim != 3 or x.shape[-1] != F or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"x must be floating, [B, T, F] with F={F}, got {x.dtype} {x.shape}")
        if state is None:
            return
        if not isinstance(state, MixerState):
            raise ValueError(f"state must be None or a MixerState, got {type(state).__name__}")
        if (state.position is not None) != self.uses_positions:
            wanted, got = ("a position", "none") if self.uses_positions else ("no position", "one")
            raise ValueError(f"state must be None or a MixerState with {wanted}, got {got}")
        rows = {jnp.shape(a)[:1] for a in jax.tree.leaves(state)}
        if rows - {x.shape[:1]}:
            shapes = jax.tree.map(jnp.shape, state)
            raise ValueError(f"state must have x's {len(x)} rows, got shapes {shapes}")


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
    before = jnp.cumsum(real, axis=1, dtype=jnp.int32) - real
    # `before` at the start of each token's segment, which for the first one may lie before the row.
    offset = -start[:, None]
    if segment_ids is not None:
        starts = segment_starts(segment_ids, real)
        offset = jax.lax.cummax(jnp.where(starts, before, offset), axis=1)
    positions = before - offset
    return positions, positions[:, -1] + real[:, -1]
