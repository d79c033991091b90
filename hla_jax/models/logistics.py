"""A mixture of logistics over the integers 0..255, for the value of one channel of one pixel.

The values 0..255 lie evenly on [-1, 1], w = 1/127.5 apart, and each owns what is nearest to it, the
first and the last a whole tail. A component with mean m and scale s gives value v, which lies at
x = v w - 1,

    P(v) = sigmoid(b) - sigmoid(a),  a = (x - w/2 - m) / s,  b = (x + w/2 - m) / s,

with a = -inf for v = 0 and b = inf for v = 255. The same without a difference of numbers that may
be equal in floating point is

    log P(v) = log sigmoid(b) + log sigmoid(-a) + log(1 - exp(-w/s)),

of which 0 keeps the first term alone, and 255 the second.

Source: PixelCNN++ (Salimans et al. 2017, arXiv 1701.05517), section 2.1; with ten components, the
output of the image models in Transformers are RNNs (Katharopoulos et al. 2020, arXiv 2006.16236),
section 4.2.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Integer, UInt8

from hla_jax._check import checked
from hla_jax._types import Array, result_type

# Log-scales beyond these are taken as these, so that exp and its products stay finite.
LARGEST_LOG_SCALE = 30.0


def log_prob(
    parameters: Float[Array, "*B three_M"], values: Integer[Array, "*B"]
) -> Float[jax.Array, "*B"]:
    """Log-probabilities of values; exp of them sums to 1 over 0..255.

    They and their gradients are finite for narrow and wide components and for far means. PixelCNN++
    takes log-scales below -7 as -7; here they are free, and a narrow component that misses has a
    gradient as steep as 1/s: clip gradients in training. Time and memory are O(M) a value.

    Args:
      parameters: [*B, 3 M], for M components: the logits of their weights, then their means, then
        the logs of their scales (taken as within -30..30), on the scale where 0..255 is [-1, 1].
      values: [*B], integers of any dtype; outside 0..255 the probability is 0.

    Returns:
      Log-probabilities [*B], float32, or float64 if the parameters are.

    Raises:
      ValueError: an argument has a wrong shape or dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> narrow = jnp.array([0.0, 0.0, -9.0])  # its mean is half-way from 127 to 128
      >>> p = jnp.exp(log_prob(jnp.tile(narrow, (4, 1)), jnp.arange(126, 130)))
      >>> print(jnp.round(p, 3))
      [0.  0.5 0.5 0. ]
    """
    logits, means, log_scales = _components(parameters)
    values = checked("values", values, logits.shape[:-1], jnp.integer)
    # In steps of one value from the middle of the scale, the edges are integers, and exact: two
    # neighbours share one, and so the sum is 1 however narrow a component is.
    edge = values[..., None].astype(means.dtype) - 128
    centre = 127.5 * means
    step = jnp.exp(-log_scales) / 127.5
    below = jax.nn.log_sigmoid((edge + 1 - centre) * step)
    above = jax.nn.log_sigmoid((centre - edge) * step)
    inside = jnp.log(-jnp.expm1(-step))
    first, last = edge == -128, edge == 127
    each = jnp.where(last, 0, below) + jnp.where(first, 0, above)
    each += jnp.where(first | last, 0, inside)
    total = jax.nn.logsumexp(jax.nn.log_softmax(logits) + each, axis=-1)
    return jnp.where(((edge >= -128) & (edge <= 127))[..., 0], total, -jnp.inf)


def sample(parameters: Float[Array, "*B three_M"], key: jax.Array) -> UInt8[jax.Array, "*B"]:
    """Draws a value from each mixture.

    Args:
      parameters: [*B, 3 M], as in `log_prob`.
      key: of the random choices.

    Returns:
      The values [*B], uint8.

    Raises:
      ValueError: parameters has a wrong shape or dtype.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> print(sample(jnp.array([[0.0, -1.0, -9.0], [0.0, 0.2, -9.0]]), jax.random.key(0)))
      [  0 153]
    """
    logits, means, log_scales = _components(parameters)
    choice_key, noise_key = jax.random.split(key)
    choice = jax.random.categorical(choice_key, logits)[..., None]
    mean, log_scale = (jnp.take_along_axis(a, choice, axis=-1)[..., 0] for a in (means, log_scales))
    noise = jax.random.logistic(noise_key, mean.shape, mean.dtype)
    x = mean + jnp.exp(log_scale) * noise
    # v owns v - 128 to v - 127; rounding 127.5 (x + 1) would lose the digits of an x near 0.
    return jnp.clip(jnp.ceil(127.5 * x) + 127, 0, 255).astype(jnp.uint8)


def _components(parameters: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits, means and log-scales, [*B, M] each, in float32 at least."""
    parameters = checked("parameters", parameters, None, jnp.floating)
    if parameters.ndim == 0 or parameters.shape[-1] % 3 or parameters.shape[-1] == 0:
        raise ValueError(f"parameters must be [*B, 3 M] with M >= 1, got {parameters.shape}")
    parameters = parameters.astype(result_type(parameters.dtype, jnp.float32))
    logits, means, log_scales = jnp.split(parameters, 3, axis=-1)
    return logits, means, jnp.clip(log_scales, -LARGEST_LOG_SCALE, LARGEST_LOG_SCALE)
