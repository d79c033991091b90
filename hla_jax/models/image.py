"""An image model: pixels are predicted one after another, from those before."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Integer, UInt8

from hla_jax import _compiled
from hla_jax._check import check_sizes, checked, checked_int, checked_key
from hla_jax._export import exported
from hla_jax._types import Array, result_type
from hla_jax.models import logistics
from hla_jax.models._values import check_range
from hla_jax.models.blocks import (
    CACHED,
    MIXERS,
    Block,
    Mixers,
    State,
    length_limit,
    make_mixers,
    run_blocks,
)

# The token before the first pixel; the others are the values 0..255.
START = 256


@exported
class ImageState(NamedTuple):
    """What the model remembers of the tokens it has read.

    Attributes:
      position: int32, how many there were.
      blocks: a `hla_jax.nn.MixerState` for each block.
    """

    position: Int[jax.Array, ""]
    blocks: State


class ImageModel(nnx.Module):
    """An autoregressive model of images, whose state may have a constant size.

    An image is a sequence of values in raster order, the channels of a pixel one after another:
    N = height x width x channels tokens. Each is predicted from those before it, as a mixture of
    logistics (`hla_jax.models.logistics`). A token's embedding is the sum of one of the value
    before it and one of its place in the image, both learned.

    Source: Transformers are RNNs (Katharopoulos et al. 2020, arXiv 2006.16236), section 4.2, where
    MNIST is modelled with 8 layers, CIFAR-10 with 16, both with 8 heads and 256 features; the
    mixture of logistics, PixelCNN++ (Salimans et al. 2017, arXiv 1701.05517), section 2.1.

    Args:
      shape: (height, width, channels) of the images.
      num_layers: how many blocks.
      num_heads: H, query heads of each.
      features: F, width of the residual stream.
      mixer: the token-mixing layer, or one for each block, as in `hla_jax.models.TransformerLM`. A
        named one for all, with a KV cache, has max_length=N by default.
      num_logistics: M, components of the mixture.
      mlp_features: width inside the MLP (default 4 F).
      dtype: of the computation; None means the parameters'. The mixture's parameters are float32
        in any case, or float64.
      param_dtype: of the parameters.
      rngs: the source of the initial parameters.
      **mixer_options: go to the token-mixing layers.

    Raises:
      ValueError: a size is not positive, mixer is another name or makes a layer that is not causal,
        or a KV cache is too short for an image.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> model = ImageModel((4, 4, 1), num_layers=1, num_heads=2, features=8, rngs=nnx.Rngs(0))
      >>> images = model.sample(jax.random.key(0), 2)
      >>> again = model.complete(images, 2, jax.random.key(1))
      >>> print(images.shape, images.dtype, model.bits_per_dim(images).shape)
      (2, 4, 4, 1) uint8 (2,)
      >>> print((again == images)[:, :2].all())
      True
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        num_layers: int,
        num_heads: int,
        features: int,
        mixer: Mixers = "linear",
        num_logistics: int = 10,
        mlp_features: int | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        **mixer_options: Any,
    ):
        if len(shape) != 3 or min(shape) < 1:
            raise ValueError(f"shape must be (height, width, channels), each >= 1, got {shape}")
        check_sizes(num_logistics=num_logistics)
        self.shape = tuple(shape)
        N = self.num_tokens
        if isinstance(mixer, str) and mixer in CACHED:
            mixer_options.setdefault("max_length", N)
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.embed = nnx.Embed(START + 1, features, **kinds)
        self.positions = nnx.Embed(N, features, **kinds)
        mixer_options |= dict(num_heads=num_heads, in_features=features, **kinds)
        mixers = make_mixers(mixer, MIXERS, num_layers, causal=True, **mixer_options)
        mlp_features = mlp_features or 4 * features
        self.blocks = nnx.List([Block(features, mlp_features, m, **kinds) for m in mixers])
        if (limit := length_limit(self.blocks)) is not None and limit < N:
            raise ValueError(f"max_length must be at least {N}, an image, got {limit}")
        self.norm = nnx.RMSNorm(features, **kinds)
        self.head = nnx.Linear(
            features,
            3 * num_logistics,
            # A new model expects any value of any pixel, nearly; small weights tell tokens apart.
            kernel_init=nnx.initializers.variance_scaling(0.01, "fan_in", "normal"),
            bias_init=_spread,
            # In bfloat16 the means of neighbouring values would be one number.
            dtype=result_type(dtype or param_dtype, jnp.float32),
            param_dtype=param_dtype,
            rngs=rngs,
        )

    @property
    def num_tokens(self) -> int:
        """N, how many values an image has."""
        height, width, channels = self.shape
        return height * width * channels

    def __call__(
        self, tokens: Integer[Array, "B T"], state: ImageState | None = None
    ) -> tuple[Float[jax.Array, "B T three_M"], ImageState]:
        """The mixture of the value after each token, and the state after the last token.

        Args:
          tokens: [B, T], integers: `START` (256), then the image's values in raster order. Others
            than 0..256 are an error where they are known; inside jit, they make parameters NaN.
          state: what the model returned for the tokens before; None is the beginning.

        Returns:
          Parameters [B, T, 3 M] for `hla_jax.models.logistics`, of float32 or float64 (NaN for what
          follows a whole image), and the state.

        Raises:
          ValueError: an argument has a wrong shape, dtype or value, or T is more than N.
        """
        given, tokens = tokens, checked("tokens", tokens, None, jnp.integer)
        if tokens.ndim != 2 or tokens.shape[1] > self.num_tokens:
            raise ValueError(f"tokens must be [B, T], T <= {self.num_tokens}, got {tokens.shape}")
        check_range("tokens", given, 0, START)
        if state is not None and not isinstance(state, ImageState):
            raise ValueError(f"state must be None or an ImageState, got a {type(state).__name__}")
        if state is not None and len(state.blocks) != len(self.blocks):
            raise ValueError(f"state must have {len(self.blocks)} blocks, got {len(state.blocks)}")
        position, before = (jnp.int32(0), None) if state is None else state
        T = tokens.shape[1]
        tokens = tokens.astype(result_type(tokens.dtype, jnp.int32))
        exists = (tokens >= 0) & (tokens <= START)
        x = jnp.where(exists[..., None], self.embed(tokens), jnp.nan)
        x += self.positions(position + jnp.arange(T, dtype=jnp.int32))[None]
        x, after = run_blocks(self.blocks, x, before)
        return self.head(self.norm(x)), ImageState(position + T, after)

    def bits_per_dim(
        self, images: UInt8[Array, "B height width channels"]
    ) -> Float[jax.Array, " B"]:
        """-(1/N) sum_n log2 P(value n | the values before it), of each image: the loss to train on.

        Args:
          images: [B, height, width, channels], uint8.

        Returns:
          Bits [B], float32 or float64. 8 is what knowing nothing costs.

        Raises:
          ValueError: images has a wrong shape or dtype.
        """
        values = self._values(images)
        parameters, _ = self(_after_start(values[:, :-1]))
        return -logistics.log_prob(parameters, values).mean(axis=1) / math.log(2)

    def sample(
        self, key: jax.Array, batch_size: int
    ) -> UInt8[jax.Array, "batch_size height width channels"]:
        """Draws images: N steps in one compiled scan.

        A step costs the same wherever it is where the mixer's state has a constant size, and also
        with a KV cache, whose N slots are all read.

        Args:
          key: of the random choices.
          batch_size: how many images.

        Returns:
          Images [batch_size, height, width, channels], uint8.

        Raises:
          ValueError: key is not one, or batch_size not a positive integer.
        """
        batch_size = checked_int("batch_size", batch_size, 1)
        return self.complete(jnp.zeros((batch_size, *self.shape), jnp.uint8), 0, key)

    def complete(
        self, images: UInt8[Array, "B height width channels"], rows: int, key: jax.Array
    ) -> UInt8[jax.Array, "B height width channels"]:
        """Keeps the upper rows of images, and draws the others given them.

        One parallel pass reads what is kept; then there is one step for each value, in one compiled
        scan. Another number of rows or images is compiled anew.

        Args:
          images: [B, height, width, channels], uint8; what they hold below is ignored.
          rows: how many to keep, in 0..height.
          key: of the random choices.

        Returns:
          Images [B, height, width, channels], uint8.

        Raises:
          ValueError: an argument has a wrong shape, dtype or value.
        """
        values = self._values(images)
        height, width, channels = self.shape
        rows, key = checked_int("rows", rows, 0, height), checked_key("key", key)
        if rows == height:
            return jnp.asarray(images)
        graph, variables = nnx.split(self)
        known = values[:, : rows * width * channels]
        drawn = _compiled.call(_complete, variables, known, key, graph=graph)
        return drawn.reshape(images.shape)

    def _values(self, images: Any) -> jax.Array:
        # The images as sequences, uint8 [B, N].
        images = checked("images", images, None, jnp.uint8)
        if images.ndim != 4 or images.shape[1:] != self.shape:
            height, width, channels = self.shape
            raise ValueError(
                f"images must be [B, {height}, {width}, {channels}], got {images.shape}"
            )
        return images.reshape(len(images), self.num_tokens)


def _after_start(values: UInt8[jax.Array, "B T"]) -> Int[jax.Array, "B T+1"]:
    return jnp.pad(values.astype(jnp.int32), ((0, 0), (1, 0)), constant_values=START)


def _spread(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> Float[jax.Array, " P"]:
    """Parameters of equal components side by side, which share the values out among them."""
    M = shape[0] // 3
    means = (2 * jnp.arange(M) + 1) / M - 1
    return jnp.concatenate([jnp.zeros(M), means, jnp.full(M, -math.log(M))]).astype(dtype)


@partial(jax.jit, static_argnames="graph")
def _complete(
    variables: Any,
    known: UInt8[jax.Array, "B n"],
    key: jax.Array,
    *,
    graph: nnx.GraphDef[ImageModel],
) -> UInt8[jax.Array, "B N"]:
    model = nnx.merge(graph, variables)
    tokens = _after_start(known)
    _, state = model(tokens[:, :-1])

    def step(
        carry: tuple[ImageState, jax.Array], key: jax.Array
    ) -> tuple[tuple[ImageState, jax.Array], jax.Array]:
        state, token = carry
        parameters, state = model(token[:, None], state)
        value = logistics.sample(parameters[:, 0], key)
        return (state, value.astype(token.dtype)), value

    keys = jax.random.split(key, model.num_tokens - known.shape[1])
    _, drawn = jax.lax.scan(step, (state, tokens[:, -1]), keys)
    return jnp.concatenate([known, drawn.T], axis=1)
