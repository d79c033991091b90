"""Multi-head latent attention: a cache of one small vector a token, for all heads."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Float

from hla_jax._check import check_sizes, known_number
from hla_jax._export import exported
from hla_jax._layout import Layout
from hla_jax.attention import softmax_attention
from hla_jax.attention.softmax import attend
from hla_jax.nn.cache import View, mix_with_cache
from hla_jax.nn.mixer import Mixer, Tokens, refuse_unknown
from hla_jax.nn.multihead import checked_head_dim
from hla_jax.nn.rotary import rotary


@exported
class LatentCache(NamedTuple):
    """What is kept of each token of a row's current segment, for all heads together.

    Attributes:
      latent: [B, M, R], what keys and values are made of.
      rotated: [B, M, P], the part of the key that carries its position.
    """

    latent: Float[jax.Array, "B M R"]
    rotated: Float[jax.Array, "B M P"]


class MLA(Mixer):
    """Multi-head latent attention (MLA): softmax attention with keys and values of low rank.

    With c_s = norm(W_c x_s) of R numbers and r_s = rotary(W_r x_s) of P numbers, head h has keys
    [U_h c_s; r_s] and values V_h c_s. The state keeps c and r alone, R + P numbers a token: a query
    [a_h; b_h] meets the key in (U_h^T a_h) . c_s + b_h . r_s, and V_h is applied to the weighted
    sum of latents. So decoding is attention with one kv head, of width R + P, shared by all heads.

    Source: DeepSeek-V2 (DeepSeek-AI 2024, arXiv 2405.04434), section 2.1.

    Args:
      num_heads: H.
      in_features: F, features of input and output.
      kv_rank: R.
      query_rank: width that queries are squeezed through as well; None projects them directly.
      head_dim: D, width of queries and keys without position (default F // H, if H divides F).
      rotary_dim: P, width of their part with position.
      value_head_dim: E (default D).
      max_length: M, as in `SoftmaxAttention`.
      rotary_base: see `rotary`.
      causal: see `Mixer`.
      dtype: see `Mixer`.
      param_dtype: see `Mixer`.
      layout: see `MultiHead`.
      rngs: the source of the initial parameters.

    Raises:
      ValueError: an option does not fit, or (from calls) a position is past max_length.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = MLA(num_heads=4, in_features=32, kv_rank=8, rotary_dim=4, rngs=nnx.Rngs(0))
      >>> y, state = layer(jnp.ones((1, 3, 32)))
      >>> print(y.shape, state.memory.latent.shape, state.memory.rotated.shape)
      (1, 3, 32) (1, 2048, 8) (1, 2048, 4)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        kv_rank: int = 64,
        query_rank: int | None = None,
        head_dim: int | None = None,
        rotary_dim: int = 16,
        value_head_dim: int | None = None,
        max_length: int = 2048,
        rotary_base: float = 10_000.0,
        causal: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        layout: Layout | None = None,
        rngs: nnx.Rngs,
        **unknown: Any,
    ):
        refuse_unknown(self, unknown)
        D = checked_head_dim(num_heads, in_features, head_dim)
        F, H, R, P = in_features, num_heads, kv_rank, rotary_dim
        E = D if value_head_dim is None else value_head_dim
        check_sizes(kv_rank=R, rotary_dim=P, value_head_dim=E, max_length=max_length)
        if query_rank is not None:
            check_sizes(query_rank=query_rank)
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, layout=layout)
        super().__init__(in_features, causal=causal, **kinds)
        self.head_dim, self.kv_rank, self.rotary_dim = D, R, P
        self.max_length, self.rotary_base = max_length, known_number("rotary_base", rotary_base)
        down, up = ("parameters", None), ("parameters", "heads", None)
        self.query_down = None if query_rank is None else self._linear(F, query_rank, rngs, *down)
        self.query_norm = None if query_rank is None else self._norm(query_rank, rngs)
        self.query_up = self._linear(query_rank or F, (H, D + P), rngs, *up)
        self.kv_down = self._linear(F, R, rngs, *down)
        self.kv_norm = self._norm(R, rngs)
        self.key_rotary = self._linear(F, P, rngs, *down)
        self.key_up = self._linear(R, (H, D), rngs, *up)
        self.value_up = self._linear(R, (H, E), rngs, *up)
        self.out = self._linear((H, E), F, rngs, "heads", None, "parameters")

    def _mix(
        self, x: jax.Array, memory: LatentCache | None, tokens: Tokens
    ) -> tuple[jax.Array, LatentCache | None]:
        D, scale = self.head_dim, (self.head_dim + self.rotary_dim) ** -0.5
        squeezed = x
        if self.query_down is not None and self.query_norm is not None:
            squeezed = self.query_norm(self.query_down(x))
        q = self.query_up(squeezed)
        q = jnp.concatenate([q[..., :D], self._rotary(q[..., D:], tokens)], axis=-1)
        latent = self.kv_norm(self.kv_down(x))
        rotated = self._rotary(self.key_rotary(x)[:, :, None], tokens)

        def whole() -> jax.Array:
            k = self.key_up(latent)
            shared = jnp.broadcast_to(rotated, (*k.shape[:-1], self.rotary_dim))
            return softmax_attention(
                q,
                jnp.concatenate([k, shared], axis=-1),
                self.value_up(latent),
                causal=self.causal,
                mask=tokens.mask,
                segment_ids=tokens.segment_ids,
                scale=scale,
            )

        def continued(view: View) -> jax.Array:
            latents, turned = view.entries
            # U_h^T a_h, the same product with the key's matrix turned around.
            through = jnp.einsum("bthd,rhd->bthr", q[..., :D], self.key_up.kernel.astype(q.dtype))
            keys = jnp.concatenate([latents, turned], axis=-1)[:, :, None]
            o = attend(
                jnp.concatenate([through, q[..., D:]], axis=-1),
                keys,
                latents[:, :, None],
                view.visible,
                scale=scale,
            )
            return jnp.einsum("bthr,rhe->bthe", o, self.value_up.kernel.astype(o.dtype))

        if not self.causal:
            return self.out(whole()), None
        o, memory = mix_with_cache(
            memory,
            LatentCache(latent, rotated[:, :, 0]),
            tokens,
            slots=self.max_length,
            whole=whole,
            continued=continued,
        )
        return self.out(o.astype(q.dtype)), memory

    def _rotary(
        self, x: Float[jax.Array, "B T heads P"], tokens: Tokens
    ) -> Float[jax.Array, "B T heads P"]:
        return rotary(x, tokens.positions, base=self.rotary_base)
