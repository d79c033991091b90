"""Softmax attention as layers; their state is a preallocated KV cache."""

from typing import Any, NamedTuple, Unpack

import jax
from flax import nnx
from jaxtyping import Float

from hla_jax._check import check_sizes
from hla_jax._export import exported
from hla_jax.attention import flash_attention, softmax_attention
from hla_jax.attention.flash import check_implementation
from hla_jax.attention.softmax import attend
from hla_jax.nn.cache import View, mix_with_cache
from hla_jax.nn.mixer import Tokens
from hla_jax.nn.multihead import MultiHead, MultiHeadOptions


@exported
class KVCache(NamedTuple):
    """The keys and values of each row's current segment.

    Attributes:
      k: [B, M, K, D], M the layer's max_length, or the window of a cache that rolls.
      v: [B, M, K, E].
    """

    k: Float[jax.Array, "B M K D"]
    v: Float[jax.Array, "B M K E"]


class CachedOptions(MultiHeadOptions, total=False):
    """The options of every layer with a cache, see `Cached`."""

    max_length: int
    causal: bool


class Cached(MultiHead):
    """A layer around attention that remembers its tokens: the shared part of those with a cache.

    The cache holds `max_length` positions. A token past them is an error where its position is
    known while Python runs (outside jit, or by its static length); inside jit its output is NaN, so
    that it cannot go unnoticed, and no other token is touched.

    A subclass has a method for a sequence from its start, one for tokens that continue what is in
    the cache, and, unless keys and values are all that it keeps, one for what to keep.

    Args:
      num_heads: see `MultiHead`.
      in_features: see `MultiHead`.
      max_length: M, how many unmasked tokens a segment may have; 2048 by default.
      rolling: whether the cache holds the last M tokens instead, of any number.
      causal: see `Mixer`.
      rngs: see `MultiHead`.
      **options: num_kv_heads, head_dim, value_head_dim, qk_norm, output_norm, rotary, rotary_base,
        dtype, param_dtype and layout, see `MultiHead`; output_norm is off by default.

    Raises:
      ValueError: an option does not fit, or (from calls) a position is past max_length.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        max_length: int = 2048,
        rolling: bool = False,
        causal: bool = True,
        rngs: nnx.Rngs,
        **options: Unpack[MultiHeadOptions],
    ):
        check_sizes(max_length=max_length)
        options.setdefault("output_norm", False)
        super().__init__(num_heads, in_features, causal=causal, rngs=rngs, **options)
        self.slots, self.rolling = max_length, rolling

    @property
    def max_length(self) -> int | None:
        """How many tokens a segment may have, if the cache limits it."""
        return None if self.rolling else self.slots

    @property
    def uses_positions(self) -> bool:
        """Always: the cache needs them."""
        return True

    def _mix_heads(
        self, x: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, memory: Any, tokens: Tokens
    ) -> tuple[jax.Array, Any]:
        entries = self._entries(x, k, v, tokens)
        if not self.causal:
            return self._whole(x, q, entries, tokens), None
        return mix_with_cache(
            memory,
            entries,
            tokens,
            slots=self.slots,
            rolling=self.rolling,
            whole=lambda: self._whole(x, q, entries, tokens),
            continued=lambda view: self._continued(x, q, view, tokens).astype(v.dtype),
        )

    def _entries(self, x: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens) -> Any:
        """Returns what the cache keeps of tokens: a pytree of leaves [B, T, ...]."""
        return KVCache(k, v)

    def _whole(self, x: jax.Array, q: jax.Array, entries: Any, tokens: Tokens) -> jax.Array:
        """Returns the heads [B, T, H, E] of a sequence that begins with these tokens."""
        raise NotImplementedError

    def _continued(self, x: jax.Array, q: jax.Array, view: View, tokens: Tokens) -> jax.Array:
        """Returns the heads [B, T, H, E] of tokens that continue what is in the cache."""
        k, v = view.entries
        return attend(q, k, v, view.visible)


class SoftmaxAttention(Cached):
    """Softmax attention with a KV cache: the layer that the others are compared with.

    Source: Attention Is All You Need (Vaswani et al. 2017, arXiv 1706.03762), section 3.2.2. As an
    RNN: Transformers are RNNs (Katharopoulos et al. 2020, arXiv 2006.16236), appendix.

    Args:
      num_heads: see `MultiHead`.
      in_features: see `MultiHead`.
      rngs: see `MultiHead`.
      **options: max_length and causal, see `Cached`; num_kv_heads, head_dim, value_head_dim,
        qk_norm, output_norm, rotary, rotary_base, dtype, param_dtype and layout, see `MultiHead`.

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
        rngs: nnx.Rngs,
        **options: Unpack[CachedOptions],
    ):
        super().__init__(num_heads, in_features, rngs=rngs, **options)

    def _whole(self, x: jax.Array, q: jax.Array, entries: Any, tokens: Tokens) -> jax.Array:
        k, v = entries
        mask, ids, _ = tokens
        return softmax_attention(q, k, v, causal=self.causal, mask=mask, segment_ids=ids)


class FlashAttention(Cached):
    """The function of `SoftmaxAttention`, in memory that grows with T, not T^2.

    What continues a state is computed as there.

    Source: FlashAttention-2 (Dao 2023, arXiv 2307.08691), section 3.

    Args:
      num_heads: see `MultiHead`.
      in_features: see `MultiHead`.
      implementation: as in `hla_jax.attention.flash_attention`.
      rngs: see `MultiHead`.
      **options: as in `SoftmaxAttention`.

    Raises:
      ValueError: an option does not fit, or (from calls) a position is past max_length.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = FlashAttention(num_heads=2, in_features=8, max_length=4, rngs=nnx.Rngs(0))
      >>> y, state = layer(jnp.ones((1, 3, 8)))
      >>> print(y.shape, state.memory.k.shape)
      (1, 3, 8) (1, 4, 2, 4)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        implementation: str | None = None,
        rngs: nnx.Rngs,
        **options: Unpack[CachedOptions],
    ):
        check_implementation(implementation)
        super().__init__(num_heads, in_features, rngs=rngs, **options)
        self.implementation = implementation

    def _whole(self, x: jax.Array, q: jax.Array, entries: Any, tokens: Tokens) -> jax.Array:
        k, v = entries
        out, _ = flash_attention(
            q,
            k,
            v,
            causal=self.causal,
            mask=tokens.mask,
            segment_ids=tokens.segment_ids,
            implementation=self.implementation,
        )
        return out
