"""Layers whose tokens look at the few keys that a pattern names."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float

from hla_jax._check import check_sizes, type_name
from hla_jax._export import exported
from hla_jax._sharding import left_to_the_compiler, specs_of
from hla_jax.attention import patterns, sparse_attention
from hla_jax.attention.patterns import Pattern, checked_positions
from hla_jax.attention.softmax import attend
from hla_jax.nn.cache import View
from hla_jax.nn.mixer import Tokens, random_key, wrapped_key
from hla_jax.nn.multihead import MultiHeadOptions
from hla_jax.nn.padding import padding_moved_to_the_end
from hla_jax.nn.softmax import Cached, CachedOptions, KVCache


class Sparse(Cached):
    """The shared part of the layers with a pattern.

    A whole sequence costs what the pattern's blocks cost. Continuing a state, a token is compared
    with all that the cache holds, and the pattern chooses among them.

    The pattern speaks of a token's position among the unmasked tokens of its row. Where it depends
    on more than the distance of two tokens, a second segment in a row would look different from
    the same tokens alone: such a layer takes no segment_ids.

    Args:
      num_heads: see `MultiHead`.
      in_features: see `MultiHead`.
      pattern: one of `hla_jax.attention.patterns`, or a union of them.
      rngs: see `MultiHead`.
      **options: as in `Cached`.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        pattern: Pattern,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        if not isinstance(pattern, Pattern):
            raise ValueError(
                f"pattern must be one of hla_jax.attention.patterns, got {type_name(pattern)}"
            )
        super().__init__(num_heads, in_features, rngs=rngs, **options)
        self.pattern = pattern

    def _pattern(self) -> Pattern:
        return self.pattern

    def _whole(self, x: jax.Array, q: jax.Array, entries: Any, tokens: Tokens) -> jax.Array:
        pattern = self._checked_pattern(tokens)
        (mask, ids, _), (q, k, v), back = padding_moved_to_the_end(tokens, q, *entries)
        out = sparse_attention(q, k, v, pattern, causal=self.causal, mask=mask, segment_ids=ids)
        return back(out)

    def _continued(self, x: jax.Array, q: jax.Array, view: View, tokens: Tokens) -> jax.Array:
        k, v = view.entries
        return attend(q, k, v, self._seen(view, tokens))

    def _seen(self, view: View, tokens: Tokens) -> Bool[jax.Array, "B heads T S"]:
        t, s = tokens.positions[None, :, :, None], view.positions[None, :, None, :]
        seen = self._checked_pattern(tokens).sees(t, s, self.slots, causal=True)
        return jnp.moveaxis(seen, 0, 1) & view.visible[:, None]

    def _checked_pattern(self, tokens: Tokens) -> Pattern:
        pattern = self._pattern()
        if tokens.segment_ids is not None and not pattern.relative:
            raise ValueError(
                "segment_ids must be None for a pattern of absolute positions (global tokens, "
                "fixed or random blocks), which a packed segment would see from another place; "
                "got an array"
            )
        return pattern


class SparseAttention(Sparse):
    """Softmax attention over the keys of a pattern, as `Sparse` has it.

    Source: Sparse Transformers (Child et al. 2019, arXiv 1904.10509), section 4, whose patterns are
    `hla_jax.attention.patterns.strided` and `fixed`.

    Args:
      num_heads: see `MultiHead`.
      in_features: see `MultiHead`.
      pattern: one of `hla_jax.attention.patterns`, or a union of them.
      rngs: see `MultiHead`.
      **options: as in `SoftmaxAttention`.

    Raises:
      ValueError: an option does not fit, or (from calls) a position is past max_length, or
        segment_ids came with a pattern of absolute positions.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from hla_jax.attention.patterns import strided
      >>> layer = SparseAttention(2, 8, pattern=strided(4), max_length=64, rngs=nnx.Rngs(0))
      >>> y, state = jax.eval_shape(layer, jnp.ones((1, 16, 8)))
      >>> print(y.shape, state.memory.k.shape)
      (1, 16, 8) (1, 64, 2, 4)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        pattern: Pattern,
        rngs: nnx.Rngs,
        **options: Unpack[CachedOptions],
    ):
        super().__init__(num_heads, in_features, pattern=pattern, rngs=rngs, **options)


class SlidingWindowAttention(Sparse):
    """Softmax attention over the last tokens, with a rolling cache of them.

    Source: Longformer (Beltagy et al. 2020, arXiv 2004.05150), section 3.1.

    Args:
      num_heads: see `MultiHead`.
      in_features: see `MultiHead`.
      window: a token sees the last `window` tokens, itself included; where not causal, those nearer
        than `window` on both sides. The cache holds that many tokens, however many there were.
      rngs: see `MultiHead`.
      **options: as in `SoftmaxAttention`, without max_length.

    Raises:
      ValueError: an option does not fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = SlidingWindowAttention(num_heads=2, in_features=8, window=4, rngs=nnx.Rngs(0))
      >>> y, state = jax.eval_shape(layer, jnp.ones((1, 9, 8)))
      >>> print(y.shape, state.memory.k.shape)
      (1, 9, 8) (1, 4, 2, 4)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        window: int,
        causal: bool = True,
        rngs: nnx.Rngs,
        **options: Unpack[MultiHeadOptions],
    ):
        super().__init__(
            num_heads,
            in_features,
            pattern=patterns.sliding_window(window),
            max_length=window,
            rolling=True,
            causal=causal,
            rngs=rngs,
            **options,
        )
        self.window = window


class BigBird(Sparse):
    """Softmax attention over a window, global tokens and random blocks.

    Each head has blocks of its own, drawn once when the layer is made.

    Source: Big Bird (Zaheer et al. 2020, arXiv 2007.14062), section 2.

    Args:
      num_heads: see `MultiHead`.
      in_features: see `MultiHead`.
      window: as in `hla_jax.attention.patterns.big_bird`, and so are the next three.
      num_random: how many random blocks of keys a block of queries sees.
      global_positions: positions of the global tokens among the unmasked ones of a row.
      block_size: of the random blocks.
      rngs: see `MultiHead`; the blocks are drawn from its "params" stream.
      **options: as in `SoftmaxAttention`.

    Raises:
      ValueError: an option does not fit, or (from calls) a position is past max_length, or
        segment_ids came.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = BigBird(2, 8, window=4, num_random=1, block_size=4, rngs=nnx.Rngs(0))
      >>> y, state = jax.eval_shape(layer, jnp.ones((1, 16, 8)))
      >>> print(y.shape)
      (1, 16, 8)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        window: int = 64,
        num_random: int = 2,
        global_positions: Sequence[int] = (0,),
        block_size: int = 32,
        rngs: nnx.Rngs,
        **options: Unpack[CachedOptions],
    ):
        key = random_key(rngs)
        positions = checked_positions("global_positions", global_positions)
        without = patterns.longformer(window, positions)
        check_sizes(num_random=num_random, block_size=block_size)
        super().__init__(num_heads, in_features, pattern=without, rngs=rngs, **options)
        self.num_random, self.block_size = num_random, block_size
        self.blocks_key = None if self.causal else key
        self.blocks = self._draw(key) if self.causal else None

    def _draw(self, key: nnx.Variable[jax.Array]) -> nnx.Variable[jax.Array]:
        # Where causal, the blocks do not depend on a row's length, and can be drawn here.
        total = -(-self.slots // self.block_size)
        draw = wrapped_key(key), total, self.num_random, self.num_heads
        return nnx.Variable(patterns.draw_blocks(*draw, causal=True))

    def _pattern(self) -> Pattern:
        if self.blocks is not None:
            return self.pattern | patterns.drawn_blocks(self.blocks[...], self.block_size)
        assert self.blocks_key is not None  # one of them is there
        return self.pattern | patterns.random_blocks(
            wrapped_key(self.blocks_key),
            num_blocks=self.num_random,
            block_size=self.block_size,
            num_heads=self.num_heads,
        )


@exported
class LongformerCache(NamedTuple):
    """What each row's current segment has shown so far.

    Attributes:
      local: the keys and values that are looked at along the window and at the global tokens.
      all: those that the global tokens look at.
    """

    local: KVCache
    all: KVCache


class Longformer(Sparse):
    """Sliding-window attention with global tokens, which have projections of their own.

    Each token looks at its window and at the global tokens. A global token looks at all tokens,
    through queries, keys and values that are made for this by a second set of projections.

    Source: Longformer (Beltagy et al. 2020, arXiv 2004.05150), section 3.1.

    Args:
      num_heads: see `MultiHead`.
      in_features: see `MultiHead`.
      window: as in `hla_jax.attention.patterns.sliding_window`.
      dilation: as in `hla_jax.attention.patterns.dilated_window`.
      global_positions: positions of the global tokens among the unmasked ones of a row.
      rngs: see `MultiHead`.
      **options: as in `SoftmaxAttention`.

    Raises:
      ValueError: an option does not fit, or (from calls) a position is past max_length, or
        segment_ids came with global tokens.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = Longformer(2, 8, window=4, global_positions=[0], max_length=64, rngs=nnx.Rngs(0))
      >>> y, state = jax.eval_shape(layer, jnp.ones((1, 16, 8)))
      >>> print(y.shape, state.memory.all.k.shape)
      (1, 16, 8) (1, 64, 2, 4)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        window: int,
        dilation: int = 1,
        global_positions: Sequence[int] = (0,),
        rngs: nnx.Rngs,
        **options: Unpack[CachedOptions],
    ):
        positions = checked_positions("global_positions", global_positions)
        # What global tokens look at is not the pattern's: they have queries of their own.
        pattern = patterns.dilated_window(window, dilation) | patterns.global_keys(positions)
        super().__init__(num_heads, in_features, pattern=pattern, rngs=rngs, **options)
        self.global_positions = positions
        H, K, D, E = self.num_heads, self.num_kv_heads, self.head_dim, self.value_head_dim
        self.global_query = self._to_heads((H, D), rngs)
        self.global_key = self._to_heads((K, D), rngs)
        self.global_value = self._to_heads((K, E), rngs)

    def _entries(self, x: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens) -> LongformerCache:
        keys = self._positioned(self.global_key(x), self.key_norm, tokens.positions)
        return LongformerCache(KVCache(k, v), KVCache(keys, self.global_value(x)))

    def _whole(
        self, x: jax.Array, q: jax.Array, entries: LongformerCache, tokens: Tokens
    ) -> jax.Array:
        o = super()._whole(x, q, entries.local, tokens)
        few = np.array([p for p in self.global_positions if p < x.shape[1]], int)
        if few.size == 0:
            return o
        heads = o, self._global_queries(x, tokens), *entries.all
        (mask, _, _), (o, q, k, v), back = padding_moved_to_the_end(tokens, *heads)
        real = jnp.ones(x.shape[:2], bool) if mask is None else mask
        earlier = np.arange(x.shape[1]) <= few[:, None]
        seen = real[:, None] & (earlier[None] if self.causal else True)

        def with_global_rows(rows: tuple[jax.Array, ...]) -> jax.Array:
            o, q, k, v, seen = rows
            seen = jnp.broadcast_to(seen, (len(o), len(few), o.shape[1]))
            return o.at[:, few].set(attend(q[:, few], k, v, seen))

        rows = o, q, k, v, seen
        return back(left_to_the_compiler(with_global_rows, rows, lambda: specs_of(o)))

    def _continued(self, x: jax.Array, q: jax.Array, view: View, tokens: Tokens) -> jax.Array:
        local, (k, v) = view.entries
        o = super()._continued(x, q, view._replace(entries=local), tokens)
        o_global = attend(self._global_queries(x, tokens), k, v, view.visible)
        is_global = jnp.isin(tokens.positions, np.array(self.global_positions, int))
        return jnp.where(is_global[..., None, None], o_global, o)

    def _global_queries(self, x: jax.Array, tokens: Tokens) -> Float[jax.Array, "B T H D"]:
        return self._positioned(self.global_query(x), self.query_norm, tokens.positions)
