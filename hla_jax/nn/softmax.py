"""Softmax attention as a layer; its state is a preallocated KV cache."""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Float

from hla_jax._segments import segment_numbers
from hla_jax.attention.softmax import attend, softmax_attention
from hla_jax.nn.mixer import Mixer, MixerOptions, Tokens


class KVCache(NamedTuple):
    """The keys and values of each row's current segment: the token at position p is in slot p.

    Attributes:
      k: [B, M, K, D], M the layer's max_length.
      v: [B, M, K, E].
    """

    k: Float[jax.Array, "B M K D"]
    v: Float[jax.Array, "B M K E"]


class SoftmaxAttention(Mixer):
    """Causal softmax attention with a KV cache: the layer that the others are compared with.

    The cache holds `max_length` positions. A token past them is an error where its position is
    known while Python runs (outside jit, or by its static length); inside jit its output is NaN, so
    that it cannot go unnoticed, and no other token is touched.

    Source: Attention Is All You Need (Vaswani et al. 2017, arXiv 1706.03762), section 3.2.2.

    Args:
      num_heads: see `Mixer`.
      in_features: see `Mixer`.
      max_length: M, how many unmasked tokens a segment may have.
      rngs: see `Mixer`.
      **options: num_kv_heads, head_dim, value_head_dim, qk_norm, output_norm, rotary, rotary_base,
        dtype and param_dtype, see `Mixer`; output_norm is off by default.

    Raises:
      ValueError: an option does not fit, or (from calls) a position is past max_length.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = SoftmaxAttention(num_heads=2, in_features=8, max_length=4, rngs=nnx.Rngs(0))
      >>> y, state = layer(jnp.ones((1, 3, 8)))
      >>> y, state = layer(jnp.ones((1, 1, 8)), state)
      >>> print(y.shape, state.memory.k.shape, state.position)
      (1, 1, 8) (1, 4, 2, 4) [4]
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        max_length: int = 2048,
        rngs: nnx.Rngs,
        **options: Unpack[MixerOptions],
    ):
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        super().__init__(
            num_heads, in_features, rngs=rngs, **MixerOptions(output_norm=False) | options
        )
        self.max_length = max_length

    @property
    def uses_positions(self) -> bool:
        """Always: the cache needs them."""
        return True

    def _mix(
        self,
        x: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        memory: KVCache | None,
        tokens: Tokens,
    ) -> tuple[jax.Array, KVCache]:
        mask, segment_ids, positions = tokens
        self._check_length(tokens)
        old = self._init_memory(len(x), k.dtype) if memory is None else self._checked(memory)
        number = None if segment_ids is None else segment_numbers(segment_ids, mask)
        cache = self._write(old, k, v, tokens, number)

        if memory is None:
            o = jnp.asarray(softmax_attention(q, k, v, mask=mask, segment_ids=segment_ids))
        elif number is None:
            visible = jnp.arange(self.max_length) <= positions[..., None]
            o = attend(q, cache.k, cache.v, visible)
        else:  # what an earlier segment needs is not in the new cache
            T = x.shape[1]
            stored = jnp.arange(self.max_length) < positions[:, :1, None]
            own = jnp.tri(T, dtype=bool) & (number[:, :, None] == number[:, None, :])
            if mask is not None:
                own &= mask[:, None, :]
            visible = jnp.concatenate([stored & (number == 0)[..., None], own], axis=-1)
            o = attend(
                q,
                jnp.concatenate([old.k, k.astype(old.k.dtype)], axis=1),
                jnp.concatenate([old.v, v.astype(old.v.dtype)], axis=1),
                visible,
            )
        o = o.astype(v.dtype)
        if memory is not None or x.shape[1] > self.max_length:
            past = positions >= self.max_length
            o = jnp.where((past if mask is None else past & mask)[..., None, None], jnp.nan, o)
        return o, cache

    def _init_memory(self, batch_size: int, dtype: DTypeLike | None = None) -> KVCache:
        dtype = dtype or self.dtype or self.param_dtype
        rows = (batch_size, self.max_length, self.num_kv_heads)
        return KVCache(
            jnp.zeros((*rows, self.head_dim), dtype), jnp.zeros((*rows, self.value_head_dim), dtype)
        )

    def _checked(self, memory: KVCache) -> KVCache:
        slots, K = self.max_length, self.num_kv_heads
        wanted = [(slots, K, self.head_dim), (slots, K, self.value_head_dim)]
        if not isinstance(memory, KVCache) or [jnp.shape(a)[1:] for a in memory] != wanted:
            raise ValueError(
                "state must be None or a MixerState of this layer, its memory a KVCache of "
                f"{wanted[0]} and {wanted[1]} a row, got {jax.tree.map(jnp.shape, memory)}"
            )
        return memory

    def _write(
        self,
        cache: KVCache,
        k: jax.Array,
        v: jax.Array,
        tokens: Tokens,
        number: jax.Array | None,
    ) -> KVCache:
        """Puts the last segment's tokens into the slots of their positions."""
        keep = tokens.positions < self.max_length
        if tokens.mask is not None:
            keep &= tokens.mask
        if number is not None:
            keep &= number == number[:, -1:]
        slots = jnp.where(keep, tokens.positions, self.max_length)  # past the end: dropped
        rows = jnp.arange(len(k))[:, None]
        return KVCache(
            *(
                old.at[rows, slots].set(new.astype(old.dtype), mode="drop")
                for old, new in zip(cache, (k, v), strict=True)
            )
        )

    def _check_length(self, tokens: Tokens) -> None:
        mask, segment_ids, positions = tokens
        if not isinstance(positions, jax.core.Tracer) and not isinstance(mask, jax.core.Tracer):
            real = positions if mask is None else jnp.where(mask, positions, -1)
            length = int(real.max(initial=-1)) + 1
        else:
            length = positions.shape[1] if mask is None and segment_ids is None else 0
        if length > self.max_length:
            raise ValueError(
                f"the KV cache holds max_length={self.max_length} positions; got a token at "
                f"position {length - 1}"
            )
