"""Feature maps: what is done to queries and keys before their inner products are taken.

Each is a plain function on the last axis, [..., D] -> [..., N], and any callable of that kind can
stand in its place. The output has the input's dtype. Affinities of positive features
(`elu_plus_one`, `exp`, `softmax`) can be normalised by their sum, and so can those of `taylor`,
since 1 + z + z^2/2 > 0. With `relu` and `squared_relu` the sum can be 0, with `identity` of either
sign.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Float

from hla_jax._types import Array

__all__ = ["elu_plus_one", "exp", "identity", "relu", "softmax", "squared_relu", "taylor"]


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
