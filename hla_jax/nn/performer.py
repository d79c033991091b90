"""Linear attention over FAVOR+ features as a layer."""

from dataclasses import dataclass
from typing import Literal, Unpack

import jax
from flax import nnx
from jaxtyping import Float

from hla_jax import ops
from hla_jax.feature_maps import FavorPlus, favor_plus
from hla_jax.nn._options import Options
from hla_jax.nn.multihead import checked_head_dim
from hla_jax.nn.recurrent import Recurrent, RecurrentOptions


class Performer(Recurrent):
    """Linear attention whose affinities estimate those of softmax attention (FAVOR+).

    Queries and keys are divided by D^(1/4) before the feature map, so that the estimate is of
    exp(q . k / sqrt(D)). One projection serves all tokens until `redraw` is called.

    Source: Rethinking Attention with Performers (Choromanski et al. 2021, arXiv 2009.14794),
    section 2.

    Args:
      num_heads: see `MultiHead`.
      in_features: see `MultiHead`.
      num_features: how many random features.
      kind: of features, as in `hla_jax.feature_maps.favor_plus`.
      rngs: see `MultiHead`; the projection is drawn from its "params" stream.
      **options: decay, None by default, causal, implementation, chunk_size and precision, see
        `Recurrent`; num_kv_heads, head_dim, value_head_dim, qk_norm, output_norm, rotary,
        rotary_base, dtype, param_dtype and layout, see `MultiHead`.

    Raises:
      ValueError: an option does not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = Performer(num_heads=2, in_features=8, num_features=32, rngs=nnx.Rngs(0))
      >>> y, state = layer(jnp.ones((1, 5, 8)))
      >>> print(y.shape, state.memory.kv.shape)
      (1, 5, 8) (1, 2, 32, 4)
    """

    operator = staticmethod(ops.linear_attention)

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_features: int = 64,
        kind: Literal["positive", "hyperbolic", "relu"] = "positive",
        rngs: nnx.Rngs,
        **options: Unpack[RecurrentOptions],
    ):
        width = checked_head_dim(num_heads, in_features, options.get("head_dim"))
        features = favor_plus(rngs.params(), width, num_features, kind)
        options.setdefault("decay", None)
        super().__init__(
            num_heads,
            in_features,
            operator_options=dict(feature_map=_Scaled(features), scale=1.0),
            rngs=rngs,
            **options,
        )

    def redraw(self, key: jax.Array) -> None:
        """Draws another projection; a state of the old one is then of no use."""
        options = self.operator_options
        redrawn = _Scaled(options["feature_map"].features.redraw(key))
        nnx.update(self.kept_options, nnx.state(Options(**options | dict(feature_map=redrawn))))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Scaled:
    """The features of x / D^(1/4)."""

    features: FavorPlus

    def __call__(self, x: Float[jax.Array, "*B D"]) -> Float[jax.Array, "*B N"]:
        return self.features(x * x.shape[-1] ** -0.25)
