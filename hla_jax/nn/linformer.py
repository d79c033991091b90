"""Linformer attention as a layer: keys and values are projected to a fixed number."""

from typing import Any, Literal, Unpack

import jax
from flax import nnx

from hla_jax._check import check_sizes
from hla_jax.attention import linformer_attention, linformer_projection
from hla_jax.nn.mixer import Tokens
from hla_jax.nn.multihead import MultiHead, MultiHeadOptions
from hla_jax.nn.padding import padding_moved_to_the_end


class Linformer(MultiHead):
    """Softmax attention over n mixtures of all keys; never causal.

    A projection is made for positions: a token counts by its place among the unmasked ones of its
    row, and segment_ids are not taken.

    Source: Linformer (Wang et al. 2020, arXiv 2006.04768), section 4.

    Args:
      num_heads: see `MultiHead`.
      in_features: see `MultiHead`.
      num_projected: n, how many mixtures there are.
      max_length: N, the longest row.
      projection: "learned" from a random start, or "fixed" there.
      shared: whether values are mixed as keys are.
      causal: only False.
      rngs: see `MultiHead`.
      **options: num_kv_heads, head_dim, value_head_dim, qk_norm, output_norm, rotary, rotary_base,
        dtype, param_dtype and layout, see `MultiHead`; output_norm is off by default.

    Raises:
      ValueError: an option does not fit, or (from calls) the row is longer than max_length, or
        segment_ids came.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = Linformer(2, 8, num_projected=4, max_length=64, rngs=nnx.Rngs(0))
      >>> y, _ = layer(jnp.ones((1, 16, 8)))
      >>> print(y.shape)
      (1, 16, 8)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_projected: int,
        max_length: int = 2048,
        projection: Literal["learned", "fixed"] = "learned",
        shared: bool = True,
        causal: bool = False,
        rngs: nnx.Rngs,
        **options: Unpack[MultiHeadOptions],
    ):
        if causal:
            raise ValueError(
                "causal must be False for Linformer, got True: each key that it looks at is a "
                "mixture of all tokens, later ones too"
            )
        check_sizes(num_projected=num_projected, max_length=max_length)
        if projection not in ("learned", "fixed"):
            raise ValueError(f"projection must be 'learned' or 'fixed', got {projection!r}")
        options.setdefault("output_norm", False)
        super().__init__(num_heads, in_features, causal=False, rngs=rngs, **options)
        self.max_length = max_length
        kind = nnx.Param if projection == "learned" else nnx.Variable

        def make() -> nnx.Variable:
            key = rngs.params()
            return kind(linformer_projection(key, num_projected, max_length, self.param_dtype))

        self.key_projection = make()
        self.value_projection = None if shared else make()

    def _mix_heads(
        self, x: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, memory: Any, tokens: Tokens
    ) -> tuple[jax.Array, None]:
        if tokens.segment_ids is not None:
            raise ValueError("segment_ids must be None: Linformer mixes all tokens of a row")
        if x.shape[1] > self.max_length:
            raise ValueError(
                f"x must have at most max_length={self.max_length} tokens a row, got {x.shape[1]}"
            )
        e = self.key_projection[...]
        f = e if self.value_projection is None else self.value_projection[...]

        (mask, _, _), (q, k, v), back = padding_moved_to_the_end(tokens, q, k, v)
        return back(linformer_attention(q, k, v, e, f, mask=mask)), None
