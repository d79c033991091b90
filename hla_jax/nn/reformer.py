"""LSH attention as a layer."""

from typing import NamedTuple, Unpack

import jax
from flax import nnx
from jaxtyping import Float, Int

from hla_jax._export import exported
from hla_jax.attention import lsh_attention, lsh_buckets, lsh_decode
from hla_jax.nn.cache import View
from hla_jax.nn.mixer import Tokens, random_key, wrapped_key
from hla_jax.nn.softmax import Cached, CachedOptions


@exported
class LSHCache(NamedTuple):
    """What is kept of each token of a row's current segment.

    Attributes:
      qk: [B, M, H, D], queries, which are keys as well.
      v: [B, M, K, E].
      buckets: [B, M, H, R], int32, the buckets they fell into.
    """

    qk: Float[jax.Array, "B M H D"]
    v: Float[jax.Array, "B M K E"]
    buckets: Int[jax.Array, "B M H R"]


class Reformer(Cached):
    """LSH attention: a token looks at tokens whose queries point its way.

    One projection makes queries and keys. The hashes are drawn once, when the layer is made.
    Continuing a state, a token's bucket is compared with those of all that the cache holds.

    Source: Reformer (Kitaev et al. 2020, arXiv 2001.04451), section 2.

    Args:
      num_heads: see `MultiHead`.
      in_features: see `MultiHead`.
      num_buckets: as in `hla_jax.attention.lsh_attention`, and so are the next two.
      num_rounds: how many hashes there are.
      chunk_size: how far a token looks along its bucket.
      rngs: see `MultiHead`; the hashes are drawn from its "params" stream.
      **options: as in `SoftmaxAttention`; num_kv_heads counts the heads of values.

    Raises:
      ValueError: an option does not fit, or (from calls) a position is past max_length.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = Reformer(2, 8, num_buckets=4, max_length=64, rngs=nnx.Rngs(0))
      >>> y, state = jax.eval_shape(layer, jnp.ones((1, 16, 8)))
      >>> print(y.shape, state.memory.buckets.shape)
      (1, 16, 8) (1, 64, 2, 1)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_buckets: int = 32,
        num_rounds: int = 1,
        chunk_size: int = 64,
        rngs: nnx.Rngs,
        **options: Unpack[CachedOptions],
    ):
        super().__init__(num_heads, in_features, rngs=rngs, **options)
        del self.key, self.key_norm  # a query is the key
        self.num_buckets, self.num_rounds, self.chunk_size = num_buckets, num_rounds, chunk_size
        self.hash_key = random_key(rngs)
        self._init_memory(1)  # so that a wrong number is refused here, not in a call

    def _project(
        self, x: jax.Array, positions: Int[jax.Array, "B T"]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        qk = self._positioned(self.query(x), self.query_norm, positions)
        return qk, qk, self.value(x)

    def _entries(self, x: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens) -> LSHCache:
        return LSHCache(k, v, self._buckets(k))

    def _buckets(self, qk: jax.Array) -> Int[jax.Array, "B T H R"]:
        return lsh_buckets(qk, wrapped_key(self.hash_key), self.num_buckets, self.num_rounds)

    def _whole(self, x: jax.Array, q: jax.Array, entries: LSHCache, tokens: Tokens) -> jax.Array:
        return lsh_attention(
            q,
            entries.v,
            key=wrapped_key(self.hash_key),
            num_buckets=self.num_buckets,
            num_rounds=self.num_rounds,
            chunk_size=self.chunk_size,
            causal=self.causal,
            mask=tokens.mask,
            segment_ids=tokens.segment_ids,
        )

    def _continued(self, x: jax.Array, q: jax.Array, view: View, tokens: Tokens) -> jax.Array:
        buckets = self._buckets(q)
        qk, v, cached = view.entries
        return lsh_decode(q, buckets, qk, v, cached, view.visible, chunk_size=self.chunk_size)
