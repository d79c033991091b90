"""The layers whose state does not grow: linear attention and its higher orders."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Float

from hla_jax import feature_maps, ops
from hla_jax._check import real
from hla_jax._layout import divide_parameter
from hla_jax._types import FeatureMaps, Number, result_type
from hla_jax.nn._options import Options
from hla_jax.nn.mixer import Tokens
from hla_jax.nn.multihead import MultiHead, MultiHeadOptions
from hla_jax.parallel import sharded

Decay = Literal["learned"] | float | Sequence[float] | None


class RecurrentOptions(MultiHeadOptions, total=False):
    """The options of every layer in this file, see `Recurrent`."""

    decay: Decay
    causal: bool
    implementation: str | None
    chunk_size: int | None
    precision: jax.lax.PrecisionLike


class Recurrent(MultiHead):
    """A layer around an operator with a state: the shared part of the layers below.

    A subclass names its `operator`, as a static method, and passes the operator's own options on as
    `operator_options`. Every affinity is multiplied by D^(-1/2), the operator's `scale`. The decay
    is learned by default, for without one the states grow with the number of tokens.

    The operator is called as those of `hla_jax` are, for a single token too:

        out, state = operator(q, k, v, *, log_decay=None, mask=None, segment_ids=None,
            initial_state=None, scale, precision, chunk_size, implementation, **operator_options)

    with q [B, T, H, D], k [B, T, K, D], v [B, T, K, E], log_decay [K] or [B, T, K], mask and
    segment_ids [B, T], and out [B, T, H, E]; a state is a pytree of arrays with leading axis B.

    Args:
      num_heads: see `MultiHead`.
      in_features: see `MultiHead`.
      operator_options: what this layer passes to its operator, over the options above: any pytrees.
        An array among them is saved with the parameters but not trained; in an `nnx.Param` it is.
      decay: how much of the state each token leaves, in (0, 1]. "learned": exp(-softplus(w . x +
        b)), per token and kv head; at first the heads forget over 2 to 512 tokens. A number, or
        one per kv head: that much. None: all of it.
      causal: False, which only linear attention knows and without decay, lets all tokens of a
        segment see each other.
      implementation: the operator's, for more than one token.
      chunk_size: the operator's.
      precision: the operator's.
      rngs: see `MultiHead`.
      **options: num_kv_heads, head_dim, value_head_dim, qk_norm, output_norm, rotary, rotary_base,
        dtype, param_dtype and layout, see `MultiHead`.

    Raises:
      ValueError: an option does not fit.
    """

    operator: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        operator_options: dict[str, Any] | None = None,
        decay: Decay = "learned",
        causal: bool = True,
        implementation: str | None = None,
        chunk_size: int | None = None,
        precision: jax.lax.PrecisionLike = None,
        rngs: nnx.Rngs,
        **options: Unpack[MultiHeadOptions],
    ):
        super().__init__(num_heads, in_features, causal=causal, rngs=rngs, **options)
        self._check_layout()
        shared = dict(scale=self.head_dim**-0.5, precision=precision, chunk_size=chunk_size)
        if not causal:
            shared["causal"] = False
        self.kept_options = Options(**shared | (operator_options or {}))
        self.implementation = implementation
        if not causal and "causal" not in inspect.signature(type(self).operator).parameters:
            raise ValueError(f"causal must be True: {type(self).__name__} has no other form")
        if not causal and decay is not None:
            raise ValueError(f"decay must be None where causal=False, got {decay!r}")
        if isinstance(decay, str) and decay != "learned":
            raise ValueError(f"decay must be 'learned', numbers in (0, 1] or None, got {decay!r}")
        self.decay = _decay_logits(self, rngs) if isinstance(decay, str) else None
        self.log_decay = None if isinstance(decay, str) else _logs(decay, self.num_kv_heads)
        # So that wrong options are refused here, not in a call.
        self._init_memory(1)

    def _mix_heads(
        self, x: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, memory: Any, tokens: Tokens
    ) -> tuple[jax.Array, Any]:
        log_decay = None if self.log_decay is None else jnp.asarray(self.log_decay, jnp.float32)
        if self.decay is not None:
            log_decay = -jax.nn.softplus(self.decay(x))
        operator = type(self).operator
        if self.layout is not None and x.shape[1] > 0:
            mesh, batch, heads, sequence, _ = self.layout
            sequence = None if x.shape[1] == 1 else sequence
            operator = sharded(operator, mesh, batch=batch, heads=heads, sequence=sequence)
        return operator(
            q,
            k,
            v,
            log_decay=log_decay,
            mask=tokens.mask,
            segment_ids=tokens.segment_ids,
            initial_state=memory,
            implementation=self.implementation if x.shape[1] != 1 else None,
            **self.operator_options,
        )

    @property
    def operator_options(self) -> dict[str, Any]:
        """The keyword arguments of the operator that do not depend on the tokens."""
        return self.kept_options()

    def _check_layout(self) -> None:
        layout, K = self.layout, self.num_kv_heads
        if layout is None or layout.heads is None or K % layout.mesh.shape[layout.heads] == 0:
            return
        raise ValueError(
            f"num_kv_heads must be a multiple of the {layout.mesh.shape[layout.heads]} devices of "
            f"mesh axis {layout.heads!r}, got {K}"
        )


def _logs(decay: float | Sequence[float] | None, num_kv_heads: int) -> tuple[float, ...] | None:
    if decay is None:
        return None
    if isinstance(decay, jax.core.Tracer):
        raise ValueError(f"decay must be known while tracing, got {decay}")
    real("decay", decay)
    kept = np.asarray(decay, np.float64)
    if kept.shape not in ((), (num_kv_heads,)) or not ((kept > 0) & (kept <= 1)).all():
        raise ValueError(f"decay must be in (0, 1], one number or {num_kv_heads}, got {decay}")
    return tuple(np.broadcast_to(np.log(kept), (num_kv_heads,)).tolist())


def _decay_logits(layer: MultiHead, rngs: nnx.Rngs) -> nnx.Linear:
    """The projection z with decay exp(-softplus(z)), in float32 at least: decays near 1 need it."""

    def spread(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> Float[jax.Array, " K"]:
        rate = jnp.geomspace(1 / 2, 1 / 512, shape[0], dtype=dtype)
        return jnp.log(jnp.expm1(rate))

    linear = nnx.Linear(
        layer.in_features,
        layer.num_kv_heads,
        bias_init=spread,
        dtype=result_type(layer.dtype or layer.param_dtype, jnp.float32),
        param_dtype=layer.param_dtype,
        rngs=rngs,
    )
    linear.kernel = divide_parameter(linear.kernel, layer.layout, "parameters", "heads")
    return linear


class LinearAttention(Recurrent):
    """Linear attention as a layer: sums (phi(q_t) . phi(k_s)) v_s over s <= t; normalised.

    Source: Transformers are RNNs (Katharopoulos et al. 2020, arXiv 2006.16236), section 3.

    Args:
      num_heads: see `MultiHead`.
      in_features: see `MultiHead`.
      feature_map: phi, by default `hla_jax.feature_maps.elu_plus_one`, else what
        `hla_jax.linear_attention` takes; applied after rotary positions.
      normalize: whether to divide by the sum of the affinities.
      rngs: see `MultiHead`.
      **options: decay, causal, implementation, chunk_size and precision, see `Recurrent`;
        num_kv_heads, head_dim, value_head_dim, qk_norm, output_norm, rotary, rotary_base, dtype,
        param_dtype and layout, see `MultiHead`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = LinearAttention(num_heads=2, in_features=8, rngs=nnx.Rngs(0))
      >>> y, state = layer(jnp.ones((1, 5, 8)))
      >>> print(y.shape, state.memory.kv.shape, state.position)
      (1, 5, 8) (1, 2, 4, 4) [5]
    """

    operator = staticmethod(ops.linear_attention)

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        feature_map: FeatureMaps = feature_maps.elu_plus_one,
        normalize: bool = True,
        rngs: nnx.Rngs,
        **options: Unpack[RecurrentOptions],
    ):
        chosen = dict(feature_map=feature_map, normalize=normalize)
        super().__init__(num_heads, in_features, operator_options=chosen, rngs=rngs, **options)


class HLA2(Recurrent):
    """Second-order attention: sums (q_t . k_i)(k_i . q_j) v_j over i <= j <= t.

    Source: Higher-order Linear Attention (arXiv 2510.27258), section 3.

    Args:
      num_heads: see `MultiHead`.
      in_features: see `MultiHead`.
      masked: False lets i run past j, up to t.
      ridge: adds this many times (q_t . q_j) v_j.
      feature_map: see `hla_jax.hla2`.
      normalize: see `hla_jax.hla2`; wants a positive feature map.
      rngs: see `MultiHead`.
      **options: decay, implementation, chunk_size and precision, see `Recurrent`; num_kv_heads,
        head_dim, value_head_dim, qk_norm, output_norm, rotary, rotary_base, dtype, param_dtype and
        layout, see `MultiHead`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = HLA2(num_heads=2, in_features=8, rngs=nnx.Rngs(0))
      >>> y, state = layer(jnp.ones((1, 5, 8)))
      >>> y, state = layer(jnp.ones((1, 1, 8)), state)
      >>> print(y.shape, state.memory.kk.shape, state.memory.f.shape, state.position)
      (1, 1, 8) (1, 2, 4, 4) (1, 2, 4, 4) [6]
    """

    operator = staticmethod(ops.hla2)

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        masked: bool = True,
        ridge: Number | nnx.Variable[jax.Array] = 0.0,
        feature_map: FeatureMaps = None,
        normalize: bool = False,
        rngs: nnx.Rngs,
        **options: Unpack[RecurrentOptions],
    ):
        chosen = dict(masked=masked, ridge=ridge, feature_map=feature_map, normalize=normalize)
        super().__init__(num_heads, in_features, operator_options=chosen, rngs=rngs, **options)


class AHLA(Recurrent):
    """Asymmetric second-order attention: sums (q_t . k_i)(q_i . k_j) v_j over j <= i <= t.

    Source: Higher-order Linear Attention (arXiv 2510.27258), section 6.

    Args:
      num_heads: see `MultiHead`.
      in_features: see `MultiHead`.
      feature_map: see `hla_jax.ahla`.
      normalize: see `hla_jax.ahla`; wants a positive feature map.
      rngs: see `MultiHead`.
      **options: decay, implementation, chunk_size and precision, see `Recurrent`; num_kv_heads,
        head_dim, value_head_dim, qk_norm, output_norm, rotary, rotary_base, dtype, param_dtype and
        layout, see `MultiHead`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = AHLA(num_heads=2, in_features=8, num_kv_heads=1, rngs=nnx.Rngs(0))
      >>> y, state = layer(jnp.ones((1, 5, 8)))
      >>> print(y.shape, state.memory.kv.shape, state.memory.e.shape)
      (1, 5, 8) (1, 1, 4, 4) (1, 2, 4, 4)
    """

    operator = staticmethod(ops.ahla)

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        feature_map: FeatureMaps = None,
        normalize: bool = False,
        rngs: nnx.Rngs,
        **options: Unpack[RecurrentOptions],
    ):
        chosen = dict(feature_map=feature_map, normalize=normalize)
        super().__init__(num_heads, in_features, operator_options=chosen, rngs=rngs, **options)


class HLA3(Recurrent):
    """Third-order attention: sums (q_t . k_i)(k_i . q_u)(q_u . k_j) v_j over i, j <= u <= t.

    Source: Higher-order Linear Attention (arXiv 2510.27258), section 7; docs/errata.md tells why
    "masked" differs from "published".

    Args:
      num_heads: see `MultiHead`.
      in_features: see `MultiHead`.
      variant: "masked", "unmasked" or "published", see `hla_jax.hla3`.
      feature_map: see `hla_jax.hla3`.
      normalize: see `hla_jax.hla3`; wants a positive feature map.
      rngs: see `MultiHead`.
      **options: decay, implementation, chunk_size and precision, see `Recurrent`; num_kv_heads,
        head_dim, value_head_dim, qk_norm, output_norm, rotary, rotary_base, dtype, param_dtype and
        layout, see `MultiHead`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = HLA3(num_heads=2, in_features=8, rngs=nnx.Rngs(0))
      >>> y, state = layer(jnp.ones((1, 5, 8)))
      >>> print(y.shape, state.memory.f.shape)
      (1, 5, 8) (1, 2, 4, 4)
    """

    operator = staticmethod(ops.hla3)

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        variant: Literal["masked", "unmasked", "published"] = "masked",
        feature_map: FeatureMaps = None,
        normalize: bool = False,
        rngs: nnx.Rngs,
        **options: Unpack[RecurrentOptions],
    ):
        chosen = dict(variant=variant, feature_map=feature_map, normalize=normalize)
        super().__init__(num_heads, in_features, operator_options=chosen, rngs=rngs, **options)
