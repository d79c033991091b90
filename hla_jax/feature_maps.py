"""Feature maps: what is done to queries and keys before their inner products are taken.

Each is a plain function on the last axis, [..., D] -> [..., N], and any callable of that kind can
stand in its place. The output has the input's dtype. Affinities of positive features
(`elu_plus_one`, `exp`, `softmax`) can be normalised by their sum, and so can those of `taylor`,
since 1 + z + z^2/2 > 0. With `relu` and `squared_relu` the sum can be 0, with `identity` of either
sign. `favor_plus` draws random features, whose affinities estimate those of softmax.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from hla_jax._check import check_sizes, checked_key
from hla_jax._types import Array, result_type

__all__ = [
    "FavorPlus",
    "elu_plus_one",
    "exp",
    "favor_plus",
    "identity",
    "relu",
    "softmax",
    "squared_relu",
    "taylor",
]


def elu_plus_one(x: Float[Array, "*B D"]) -> Float[jax.Array, "*B D"]:
    """Returns x + 1 where x >= 0 and exp(x) elsewhere: elu(x) + 1 without its rounding.

    Written as `elu(x) + 1`, the tail is a small number rounded at the size of 1: in bfloat16 it is
    far off at x = -6 and 0 at x = -8, and a normaliser made of such features vanishes. Here each
    branch is computed by itself.

    Source: Transformers are RNNs (Katharopoulos et al. 2020, arXiv 2006.16236), section 3.2.1,
    equation 7.

    Args:
      x: [..., D], queries or keys.

    Returns:
      [..., D], positive, in x's dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> print(elu_plus_one(jnp.array([-8.0, 0.0, 2.0], jnp.bfloat16)))
      [0.000335693 1 3]
    """
    x = jnp.asarray(x)
    # The exponent is masked too: an exp that overflows makes NaN gradients even where not taken.
    return jnp.where(x >= 0, x + 1, jnp.exp(jnp.where(x >= 0, 0, x)))


def relu(x: Float[Array, "*B D"]) -> Float[jax.Array, "*B D"]:
    """Returns max(x, 0).

    Source: cosFormer (Qin et al. 2022, arXiv 2202.08791), section 3.

    Args:
      x: [..., D], queries or keys.

    Returns:
      [..., D], not negative, in x's dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> print(relu(jnp.array([-1.0, 2.0])))
      [0. 2.]
    """
    return jax.nn.relu(x)


def squared_relu(x: Float[Array, "*B D"]) -> Float[jax.Array, "*B D"]:
    """Returns max(x, 0)^2, whose gradient is continuous at 0.

    Source: Primer (So et al. 2021, arXiv 2109.08668).

    Args:
      x: [..., D], queries or keys.

    Returns:
      [..., D], not negative, in x's dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> print(squared_relu(jnp.array([-1.0, 3.0])))
      [0. 9.]
    """
    return jnp.square(jax.nn.relu(x))


def exp(x: Float[Array, "*B D"]) -> Float[jax.Array, "*B D"]:
    """Returns e^x, each feature by itself; nothing is subtracted, so large inputs overflow.

    Args:
      x: [..., D], queries or keys.

    Returns:
      [..., D], positive, in x's dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> print(exp(jnp.array([0.0])))
      [1.]
    """
    return jnp.exp(x)


def softmax(x: Float[Array, "*B D"]) -> Float[jax.Array, "*B D"]:
    """Returns exp(x) / sum(exp(x)) over the feature axis: each token's features are a distribution.

    Source: Efficient Attention (Shen et al. 2018, arXiv 1812.01243), section 3.2. There keys are
    normalised over tokens, which is not causal; here over features.

    Args:
      x: [..., D], queries or keys.

    Returns:
      [..., D], positive and of sum 1, in x's dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> print(softmax(jnp.array([5.0, 5.0])))
      [0.5 0.5]
    """
    return jax.nn.softmax(x, axis=-1)


def identity(x: Float[Array, "*B D"]) -> Float[jax.Array, "*B D"]:
    """Returns x: affinities are plain inner products, of either sign.

    Args:
      x: [..., D], queries or keys.

    Returns:
      [..., D], in x's dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> print(identity(jnp.array([-1.0, 2.0])))
      [-1.  2.]
    """
    return jnp.asarray(x)


def taylor(x: Float[Array, "*B D"]) -> Float[jax.Array, "*B N"]:
    """Returns features whose inner product is the second-order Taylor series of exp.

    taylor(x) . taylor(y) = 1 + x . y + (x . y)^2 / 2, which is at least 1/2. Nothing is scaled: for
    the affinity exp(q . k / sqrt(D)) of softmax attention, divide q and k by D^(1/4) each.

    Source: Simple linear attention language models balance the recall-throughput tradeoff (Arora
    et al. 2024, arXiv 2402.18668), section 3.

    Args:
      x: [..., D], queries or keys.

    Returns:
      [..., 1 + D + D^2] in x's dtype: 1, then x, then x_i x_j / sqrt(2), j the faster.

    Example:
      >>> import jax.numpy as jnp
      >>> x, y = jnp.array([1.0, 2.0]), jnp.array([3.0, -1.0])
      >>> taylor(x).shape
      (7,)
      >>> bool(jnp.allclose(taylor(x) @ taylor(y), 1 + x @ y + (x @ y) ** 2 / 2))
      True
    """
    x = jnp.asarray(x)
    *batch, d = x.shape
    pairs = x[..., :, None] * x[..., None, :] / math.sqrt(2)
    ones = jnp.ones((*batch, 1), x.dtype)
    return jnp.concatenate([ones, x, pairs.reshape(*batch, d * d)], axis=-1)


FavorKind: TypeAlias = Literal["positive", "hyperbolic", "relu"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)  # compared by identity, since arrays have no hash
class FavorPlus:
    """What `favor_plus` draws: a feature map, and a pytree whose one leaf is the projection.

    It may be closed over, or be an argument of jit, vmap or grad. One object serves a sequence, its
    decoding steps and every evaluation: nothing is drawn again unless `redraw` is called.

    Attributes:
      projection: [m, D], one random vector w a row.
      kind: "positive", "hyperbolic" or "relu", see `favor_plus`.
    """

    projection: Any  # an array; JAX, mapping over trees, puts other things in its place
    kind: FavorKind = field(default="positive", metadata=dict(static=True))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[jax.Array, "*B N"]:
        """Returns the features of x, [..., N] in x's dtype; computed in float32 at least.

        Args:
          x: [..., D], queries or keys.

        Raises:
          ValueError: x does not have the projection's width.
        """
        x = jnp.asarray(x)
        width = self.projection.shape[-1]
        if x.shape[-1:] != (width,):
            raise ValueError(f"x must be [..., {width}], got shape {x.shape}")
        dtype = result_type(x.dtype, jnp.float32)
        wide = x.astype(dtype)
        # Errors of the product end up in an exponent: the default of a TPU would be too coarse.
        wx = jnp.matmul(wide, self.projection.astype(dtype).T, precision=lax.Precision.HIGHEST)
        if self.kind == "relu":
            features = jax.nn.relu(wx)
        else:
            if self.kind == "hyperbolic":
                wx = jnp.concatenate([wx, -wx], axis=-1)
            # One exponent: exp(w . x) by itself overflows where the product is small.
            features = jnp.exp(wx - jnp.sum(wide * wide, axis=-1, keepdims=True) / 2)
        return (features / math.sqrt(wx.shape[-1])).astype(x.dtype)

    def redraw(self, key: jax.Array) -> "FavorPlus":
        """Returns a map of the same kind and size with a projection drawn under `key`."""
        num_features, width = self.projection.shape
        return favor_plus(key, width, num_features, self.kind)


def favor_plus(
    key: jax.Array, width: int, num_features: int, kind: FavorKind = "positive"
) -> FavorPlus:
    """Draws FAVOR+: random features whose inner products are, on average, a kernel.

    With m rows w of a random projection, the features phi(x), and E[phi(x) . phi(y)]:

        "positive"     exp(w . x - |x|^2 / 2) / sqrt(m)                        exp(x . y)
        "hyperbolic"   exp(w . x - |x|^2 / 2), exp(-w . x - |x|^2 / 2),
                       both / sqrt(2 m)                                        exp(x . y)
        "relu"         max(w . x, 0) / sqrt(m)        |x| |y| (sin a + (pi - a) cos a) / (2 pi),
                                                      a being the angle between x and y

    Each w is Gaussian, so the estimates have no bias; D of them at a time are orthogonal, which
    makes their variance less than that of independent ones. It falls as 1/m. "hyperbolic" has twice
    the features, and (1 - exp(-|x + y|^2)) / 2 of the variance of "positive" with the same
    independent w. "relu" is one of the generalised kernels; nothing is added to its features, so
    the sum of its affinities can be 0.

    Nothing is scaled: for the affinity exp(q . k / sqrt(D)) of softmax attention, divide q and k by
    D^(1/4) each. To scale in a layer, pass a `functools.partial` of a function and this map: the
    layer then keeps the projection as its own, which a lambda would hide from it.

    Nothing is subtracted from the exponents either: a maximum over tokens, the usual guard, would
    let later tokens change earlier outputs. The exponents are at most |w|^2 / 2, about D / 2 (more
    than float32 has room for from D = 170 on, for an x that is near a w), and a feature that
    underflows is 0, with a gradient of 0. Where vectors are long, most draws give
    affinities of the size of exp(-(|x|^2 + |y|^2) / 2), and rare ones the rest: keep |x|^2 below
    25, where that size is above the `eps` of `linear_attention`. Queries and keys of mean square 1,
    as qk_norm makes them, have |x|^2 = sqrt(D) after the division by D^(1/4).

    Time O(m D) and memory O(m) per token; the draw, O(m D^2) once.

    Source: Rethinking Attention with Performers (Choromanski et al. 2021, arXiv 2009.14794),
    section 2.2 ("relu"), section 2.3 with lemma 1 ("positive", "hyperbolic"), section 2.4
    (orthogonal blocks), lemma 2 (variances).

    Args:
      key: a JAX random key. The same key gives the same map.
      width: D, of the queries and keys.
      num_features: m >= 1, the random vectors; the last block of D is cut where D does not divide
        it.
      kind: "positive", "hyperbolic" or "relu".

    Returns:
      A `FavorPlus`, [..., D] -> [..., m], or [..., 2 m] where hyperbolic.

    Raises:
      ValueError: width or num_features is not an int >= 1, or there is no such kind.

    Example:
      >>> import jax, hla_jax as hla
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 10, 1, 4))  # [T, H, D]
      >>> exact = hla.attention.softmax_attention(q, k, v)
      >>> favor = hla.feature_maps.favor_plus(jax.random.key(1), width=4, num_features=1024)
      >>> out, _ = hla.linear_attention(q, k, v, feature_map=lambda x: favor(x / 4 ** (1 / 4)))
      >>> print(f"{abs(out - exact).mean():.1g}")
      0.03
    """
    key = checked_key("key", key)
    check_sizes(width=width, num_features=num_features)
    if kind not in get_args(FavorKind):
        raise ValueError(f"kind must be one of {get_args(FavorKind)}, got {kind!r}")
    directions, norms = jax.random.split(key)
    blocks = jax.random.orthogonal(
        directions, width, (math.ceil(num_features / width),), jnp.float32
    )
    # The norms of Gaussian vectors, independent of the directions, make each row Gaussian again.
    gaussian = jax.random.normal(norms, (num_features, width), jnp.float32)
    norm = jnp.linalg.norm(gaussian, axis=-1, keepdims=True)
    return FavorPlus(norm * blocks.reshape(-1, width)[:num_features], kind)
