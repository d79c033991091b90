"""Speech: features of a recording, and a model that reads labels from them, trained with CTC."""

import os
import wave
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Float32, Float64, Int, Integer

from hla_jax import _compiled, nn
from hla_jax._check import check_sizes, checked
from hla_jax._types import Array, result_type
from hla_jax.models._values import checked_lengths
from hla_jax.models.blocks import Block, Mixers, make_mixers
from hla_jax.nn.mixer import Tokens

# What silence is taken for, so that its logarithm is finite.
_FLOOR = 1e-10


def read_wav(path: str | os.PathLike[str]) -> tuple[Float32[np.ndarray, " N"], int]:
    """Reads a WAV file of integer samples (PCM) with 8, 16, 24 or 32 bits.

    Args:
      path: the file.

    Returns:
      The samples [N], float32 in [-1, 1], the mean of the channels, and how many there are in a
      second.

    Raises:
      ValueError: the file is not such a WAV file, or is cut off.

    Example:
      >>> import tempfile, wave
      >>> import numpy as np
      >>> path = tempfile.mkdtemp() + "/two.wav"
      >>> with wave.open(path, "wb") as file:
      ...     file.setparams((1, 2, 8000, 0, "NONE", None))
      ...     file.writeframes(np.array([16384, -8192], "<i2").tobytes())
      >>> print(read_wav(path))
      (array([ 0.5 , -0.25], dtype=float32), 8000)
    """
    path = os.fspath(path)
    try:
        with wave.open(path, "rb") as file:
            channels, width, rate, count, *_ = file.getparams()
            data = file.readframes(count)
    except (wave.Error, EOFError) as error:
        raise ValueError(f"path must be a WAV file of integers, got {path}: {error}") from error
    if width > 4 or len(data) != count * channels * width:
        raise ValueError(
            f"path must be a whole WAV file of at most 32 bits, got {path} of {8 * width} bits and "
            f"{len(data)} of {count * channels * width} bytes"
        )
    # Each sample becomes the high bytes of a little-endian integer of 32 bits.
    integers = np.zeros((count * channels, 4), np.uint8)
    integers[:, 4 - width :] = np.frombuffer(data, np.uint8).reshape(-1, width)
    if width == 1:  # the one width that is stored without a sign
        integers[:, 3] ^= 0x80
    samples = integers.view("<i4").reshape(count, channels) / 2.0**31
    return samples.mean(1).astype(np.float32), rate


def log_mel(
    samples: Float[Array, "*B N"],
    sample_rate: int,
    *,
    num_filters: int = 40,
    window: float = 0.025,
    hop: float = 0.010,
) -> Float[jax.Array, "*B T num_filters"]:
    """Logarithms of the energy in bands that are equally wide on the mel scale.

        x_ti = log max(sum_f w_fi |FFT(hann * samples of frame t)_f|^2, 1e-10)
        w_fi = max(0, 1 - |mel(f) - i step| / step),  mel(f) = 2595 log10(1 + f / 700)

    i = 1..n; step divides the mels from 0 to half the sample rate into n + 1. Frame t begins at
    sample t * hop, and frames that would pass the end are left out: T = 1 + (N - window) // hop,
    in samples. The FFT has the next power of two of points, the rest of them 0.

    Under jit each N compiles anew: a batch is best padded with zeros, and its frames counted.

    Source: The HTK Book (Young et al. 2006), section 5.4, for the scale and the triangles on it.

    Args:
      samples: [*B, N].
      sample_rate: samples in a second.
      num_filters: n, how many bands there are.
      window: length of a frame in seconds.
      hop: from the start of a frame to that of the next, in seconds.

    Returns:
      [*B, T, n], float32, or float64 if samples are.

    Raises:
      ValueError: samples has a wrong dtype, window or hop is shorter than a sample, or a band is so
        narrow that it has no frequency of the FFT.

    Example:
      >>> import jax.numpy as jnp
      >>> second = jnp.sin(2 * jnp.pi * 1000 * jnp.arange(8000) / 8000)
      >>> x = log_mel(second, 8000)
      >>> print(x.shape, x[50].argmax())
      (98, 40) 18
    """
    samples = checked("samples", samples, None, jnp.floating)
    if samples.ndim == 0:
        raise ValueError("samples must be [*B, N], got a number")
    size, step = round(window * sample_rate), round(hop * sample_rate)
    if size < 1 or step < 1:
        raise ValueError(
            "window and hop must be at least one sample, "
            f"got {window} s and {hop} s of {sample_rate} samples in a second"
        )
    points = 1 << (size - 1).bit_length()
    filters = _mel_filters(num_filters, points, sample_rate)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)
    starts = np.arange(0, samples.shape[-1] - size + 1, step)
    dtype = result_type(samples.dtype, jnp.float32)
    frames = samples[..., starts[:, None] + np.arange(size)].astype(dtype)
    frames *= jnp.asarray(hann, dtype).reshape((1,) * samples.ndim + (size,))
    energy = jnp.square(jnp.abs(jnp.fft.rfft(frames, points)))
    bands = jnp.matmul(energy, jnp.asarray(filters, dtype), precision=jax.lax.Precision.HIGHEST)
    return jnp.log(jnp.maximum(bands, _FLOOR))


class BiLSTM(nn.Mixer):
    """A layer of two LSTMs that read the tokens forwards and backwards; never causal.

    Each has F / 2 cells, and their outputs stand side by side. Cells keep float32 at least.
    segment_ids are not taken.

    Source: Long Short-Term Memory (Hochreiter and Schmidhuber 1997, Neural Computation 9), with the
    forget gates of flax's cell.

    Args:
      in_features: F, even, features of input and output.
      dtype: see `hla_jax.nn.Mixer`.
      param_dtype: see `hla_jax.nn.Mixer`.
      rngs: the source of the initial parameters.

    Raises:
      ValueError: in_features is odd, or (from calls) segment_ids came.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = BiLSTM(8, rngs=nnx.Rngs(0))
      >>> y, _ = layer(jnp.ones((1, 5, 8)))
      >>> print(y.shape)
      (1, 5, 8)
    """

    def __init__(
        self,
        in_features: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if in_features % 2:
            raise ValueError(f"in_features must be even for two LSTMs, got {in_features}")
        super().__init__(in_features, causal=False, dtype=dtype, param_dtype=param_dtype)
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        kinds["recurrent_kernel_init"] = _orthogonal
        self.forwards = nnx.OptimizedLSTMCell(in_features, in_features // 2, **kinds)
        self.backwards = nnx.OptimizedLSTMCell(in_features, in_features // 2, **kinds)

    def _mix(self, x: jax.Array, memory: None, tokens: Tokens) -> tuple[jax.Array, None]:
        if tokens.segment_ids is not None:
            raise ValueError("segment_ids must be None: a BiLSTM reads all tokens of a row")
        if x.shape[1] == 0:  # a scan over nothing is an error where jit is disabled
            return x, None
        real = jnp.ones(x.shape[:2], bool) if tokens.mask is None else tokens.mask
        dtype = jnp.dtype(self.dtype or result_type(x, self.param_dtype))
        zeros = jnp.zeros((len(x), self.in_features // 2), result_type(dtype, jnp.float32))
        y = []
        for cell, reverse in [(self.forwards, False), (self.backwards, True)]:
            graph, weights = nnx.split(cell)
            options = dict(graph=graph, reverse=reverse)
            y.append(_compiled.call(_read, weights, x, real, zeros, **options))
        return jnp.concatenate(y, axis=-1).astype(dtype), None


# How to make the layers that let each frame see those after it, too.
MIXERS: dict[str, Callable[..., nn.Mixer]] = {
    "linear": partial(nn.LinearAttention, decay=None, causal=False),
    "softmax": partial(nn.SoftmaxAttention, causal=False),
    "flash": partial(nn.FlashAttention, causal=False),
    "mla": partial(nn.MLA, causal=False),
    "sliding_window": partial(nn.SlidingWindowAttention, causal=False),
    "sparse": partial(nn.SparseAttention, causal=False),
    "longformer": partial(nn.Longformer, causal=False),
    "big_bird": partial(nn.BigBird, causal=False),
    "performer": partial(nn.Performer, causal=False),
    "reformer": partial(nn.Reformer, causal=False),
    "linformer": nn.Linformer,
    "bilstm": BiLSTM,
}


class CTCEncoder(nnx.Module):
    """Log-probabilities of labels and a blank for each frame of speech, for `ctc_loss`.

    Features are subsampled in time by convolutions, projected to F, and go through the blocks of
    `TransformerLM` around a token-mixing layer that is not causal, or through layers of a BiLSTM
    without blocks. What padded frames hold has no influence.

    Source: Transformers are RNNs (Katharopoulos et al. 2020, arXiv 2006.16236), section 4.3: 40
    filters, no subsampling, 9 layers with 6 heads; or 3 layers of a BiLSTM with 320 cells in each
    direction (features=640), there without the projection before and the norm after.

    Args:
      num_labels: how many labels there are besides the blank; V = num_labels + 1.
      num_layers: how many blocks, or layers of a BiLSTM.
      features: F, width of the stream.
      mixer: the token-mixing layer: "linear", "softmax", "flash", "mla", "sliding_window",
        "sparse", "longformer", "big_bird", "performer", "reformer", "linformer", "bilstm", or
        anything that makes one when called with in_features, dtype, param_dtype, rngs and
        `mixer_options`. Or one of these for each layer.
      in_features: of each frame.
      subsampling: 1, 2 or 4: one frame of the output for that many of the input. Each factor of 2
        is a convolution over 3 frames with stride 2, and a ReLU.
      dtype: of the computation; None means the parameters'.
      param_dtype: of the parameters.
      rngs: the source of the initial parameters.
      **mixer_options: go to the token-mixing layers: num_heads, which all need but a BiLSTM, and,
        for example, rotary or num_rounds.

    Raises:
      ValueError: a size is not positive, subsampling or mixer is another, or the layer is causal.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> model = CTCEncoder(
      ...     5, num_layers=1, features=16, num_heads=2, subsampling=2, rngs=nnx.Rngs(0)
      ... )
      >>> log_probs, lengths = model(jnp.zeros((2, 9, 40)), jnp.array([9, 4]))
      >>> print(log_probs.shape, lengths)
      (2, 5, 6) [5 2]
    """

    def __init__(
        self,
        num_labels: int,
        *,
        num_layers: int,
        features: int,
        mixer: Mixers = "linear",
        in_features: int = 40,
        subsampling: int = 1,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        **mixer_options: Any,
    ):
        check_sizes(num_labels=num_labels, features=features, in_features=in_features)
        if subsampling not in (1, 2, 4):
            raise ValueError(f"subsampling must be 1, 2 or 4, got {subsampling}")
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.in_features = in_features
        # "SAME" padding would depend on T, and so on how far a row is padded.
        halving: dict[str, Any] = dict(kernel_size=3, strides=2, padding=((1, 1),), **kinds)
        *widths, width = [in_features, features, features][: 1 + (1, 2, 4).index(subsampling)]
        self.convolutions = nnx.List([nnx.Conv(width, features, **halving) for width in widths])
        self.project = nnx.Linear(width, features, **kinds)
        mixer_options |= dict(in_features=features, **kinds)
        mixers = make_mixers(mixer, MIXERS, num_layers, causal=False, **mixer_options)
        self.layers = nnx.List(
            [
                m if isinstance(m, BiLSTM) else Block(features, 4 * features, m, **kinds)
                for m in mixers
            ]
        )
        self.norm = nnx.RMSNorm(features, **kinds)
        self.head = nnx.Linear(features, num_labels + 1, **kinds)

    def __call__(
        self, features: Float[Array, "B T in_features"], lengths: Integer[Array, " B"]
    ) -> tuple[Float[jax.Array, "B frames V"], Int[jax.Array, " B"]]:
        """The log-probabilities of each frame's symbol.

        Args:
          features: [B, T, in_features], as from `log_mel`.
          lengths: [B], integers in 0..T: how many frames of each row count, the first ones. Inside
            jit, where they are not known, others are not an error.

        Returns:
          [B, ceil(T / subsampling), V], in float32, or float64 if the computation is, the blank
          first, of no meaning past a row's length; and the lengths, ceil(lengths / subsampling).

        Raises:
          ValueError: an argument has a wrong shape, dtype or value; the message names it.
        """
        x = checked("features", features, None, jnp.floating)
        if x.ndim != 3 or x.shape[-1] != self.in_features:
            raise ValueError(f"features must be [B, T, {self.in_features}], got {x.shape}")
        lengths = checked_lengths("lengths", lengths, *x.shape[:2])
        lengths = lengths.astype(result_type(lengths.dtype, jnp.int32))
        x = jnp.where(_mask(x, lengths)[..., None], x, 0)
        for convolution in self.convolutions:
            lengths = (lengths + 1) // 2
            x = jax.nn.relu(convolution(x))
            x = jnp.where(_mask(x, lengths)[..., None], x, 0)
        x = self.project(x)
        mask = _mask(x, lengths)
        for layer in self.layers:
            x, _ = layer(x, mask=mask)
        logits = self.head(self.norm(x))
        dtype = result_type(logits.dtype, jnp.float32)
        return jax.nn.log_softmax(logits.astype(dtype)), lengths


def _mel_filters(
    num_filters: int, points: int, sample_rate: int
) -> Float64[np.ndarray, "bins num_filters"]:
    """The weight of each frequency of an FFT in each band."""
    check_sizes(num_filters=num_filters)
    hertz = np.arange(points // 2 + 1) * sample_rate / points
    mel = 2595 * np.log10(1 + hertz / 700)
    step = mel[-1] / (num_filters + 1)
    centres = step * np.arange(1, num_filters + 1)
    filters = np.maximum(0, 1 - np.abs(mel[:, None] - centres) / step)
    if not filters.any(0).all():
        raise ValueError(
            "num_filters must be so small that each band has a frequency of the FFT, "
            f"got {num_filters} for {points} points at {sample_rate} samples in a second"
        )
    return filters


def _orthogonal(
    key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike, **options: Any
) -> Float[jax.Array, "F cells"]:
    """Flax's orthogonal matrices, in 16 bits too, in which they cannot be computed."""
    wide = nnx.initializers.orthogonal()(key, shape, result_type(dtype, jnp.float32), **options)
    return wide.astype(dtype)


@partial(jax.jit, static_argnames=("graph", "reverse"))
def _read(
    weights: Any,
    x: Float[jax.Array, "B T F"],
    real: Bool[jax.Array, "B T"],
    start: Float[jax.Array, "B cells"],
    *,
    graph: nnx.GraphDef[nnx.OptimizedLSTMCell],
    reverse: bool,
) -> Float[jax.Array, "B T cells"]:
    """The outputs of an LSTM that steps over what is not real."""
    cell = nnx.merge(graph, weights)
    Carry = tuple[jax.Array, jax.Array]

    def step(carry: Carry, token: tuple[jax.Array, jax.Array]) -> tuple[Carry, jax.Array]:
        x, real = token
        new, y = cell(carry, x)
        return jax.tree.map(partial(jnp.where, real[:, None]), new, carry), y

    tokens = x.swapaxes(0, 1), real.swapaxes(0, 1)
    # Whatever the user has set, for the cell promotes what is not in its carry's dtype.
    with jax.numpy_dtype_promotion("standard"):
        _, y = jax.lax.scan(step, (start, start), tokens, reverse=reverse)
    return y.swapaxes(0, 1)


def _mask(x: Float[jax.Array, "B T _"], lengths: Integer[jax.Array, " B"]) -> jax.Array:
    return jnp.arange(x.shape[1], dtype=lengths.dtype)[None] < lengths[:, None]
