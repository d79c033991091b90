"""The features of speech against their definition; the encoder sees no padding, and learns."""

import wave
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import rms_error

from hla_jax import nn
from hla_jax.attention import patterns
from hla_jax.models.ctc import ctc_loss, error_rate, greedy_decode
from hla_jax.models.speech import MIXERS, BiLSTM, CTCEncoder, log_mel, read_wav


def write_wav(path, integers, width, channels=1, rate=8000):
    unsigned = np.asarray(integers, np.int64) + (128 if width == 1 else 0)
    data = b"".join((int(i) % 256**width).to_bytes(width, "little") for i in unsigned.ravel())
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", None))
        file.writeframes(data)
    return path


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_samples_of_every_width_come_back(tmp_path, width):
    largest = 2 ** (8 * width - 1)
    integers = [0, 1, -1, largest - 1, -largest, largest // 3]
    samples, rate = read_wav(write_wav(tmp_path / "a.wav", integers, width, rate=11025))
    assert rate == 11025
    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, np.array(integers) / largest, rtol=1e-6)


def test_channels_are_averaged_and_an_empty_recording_is_one(tmp_path):
    stereo, _ = read_wav(write_wav(tmp_path / "a.wav", [[64, 0], [-64, 32]], 1, channels=2))
    assert stereo.tolist() == [0.25, -0.125]
    assert read_wav(write_wav(tmp_path / "b.wav", [], 2))[0].shape == (0,)


def test_what_is_not_a_whole_wav_file_of_integers_is_refused(tmp_path):
    path = write_wav(tmp_path / "a.wav", range(100), 2)
    whole = path.read_bytes()
    for data, message in {
        b"": "WAV file of integers",
        b"RIFX" + whole[4:]: "WAV file of integers",
        whole[:20] + b"\3\0" + whole[22:]: "WAV file of integers, got .* 3",  # floats
        whole[:-10]: "whole WAV file .* 190 of 200 bytes",
    }.items():
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            read_wav(path)


def naive_log_mel(samples, rate, num_filters):
    def mel(hertz):
        return 2595 * np.log10(1 + hertz / 700)

    size, step = int(0.025 * rate), int(0.010 * rate)
    points = 2 ** int(np.ceil(np.log2(size)))
    time, width = np.arange(size), mel(rate / 2) / (num_filters + 1)
    rows = []
    for start in range(0, len(samples) - size + 1, step):
        frame = samples[start : start + size] * np.sin(np.pi * time / size) ** 2
        bands = np.zeros(num_filters)
        for f in range(points // 2 + 1):
            energy = abs(np.sum(frame * np.exp(-2j * np.pi * f * time / points))) ** 2
            for i in range(num_filters):
                distance = abs(mel(f * rate / points) - (i + 1) * width) / width
                bands[i] += max(0, 1 - distance) * energy
        rows.append(np.log(np.maximum(bands, 1e-10)))
    return np.array(rows)


@pytest.mark.parametrize(("rate", "num_filters", "N"), [(8000, 40, 447), (4000, 7, 100)])
def test_log_mel_is_its_definition(rate, num_filters, N):
    samples = 0.1 * np.random.default_rng(0).standard_normal((2, N)).astype(np.float32)
    got = log_mel(samples, rate, num_filters=num_filters)
    want = np.stack([naive_log_mel(row.astype(np.float64), rate, num_filters) for row in samples])
    assert got.dtype == jnp.float32
    assert rms_error(got, want) < 1e-5


def test_a_tone_is_loudest_in_the_filter_that_is_centred_there():
    step = 2595 * np.log10(1 + 4000 / 700) / 41
    for i in (5, 20, 35):
        hertz = 700 * (10 ** ((i + 1) * step / 2595) - 1)
        x = log_mel(np.sin(2 * np.pi * hertz * np.arange(800) / 8000), 8000)
        assert (x.argmax(-1) == i).all()


def test_silence_is_finite_and_too_short_a_recording_has_no_frames():
    value, gradient = jax.value_and_grad(lambda x: log_mel(x, 8000).mean())(np.zeros(400))
    np.testing.assert_allclose(value, np.log(1e-10), rtol=1e-6)
    assert np.isfinite(gradient).all()
    assert log_mel(np.zeros((3, 199)), 8000).shape == (3, 0, 40)


OPTIONS = {
    "linear": dict(),
    "softmax": dict(),
    "reformer": dict(num_buckets=2, chunk_size=4),
    "longformer": dict(window=2),
    "sparse": dict(pattern=patterns.strided(2)),
    "sliding_window": dict(window=2),
    "linformer": dict(num_projected=3, max_length=16),
    "mla": dict(rotary_dim=4),
}


def make(mixer, **more):
    options = dict(num_labels=3, num_layers=1, features=8, in_features=5, rngs=nnx.Rngs(0))
    if mixer != "bilstm":
        options |= dict(num_heads=2) | OPTIONS.get(mixer, {})
    return CTCEncoder(mixer=mixer, **options | more)


X = np.random.default_rng(0).standard_normal((3, 9, 5)).astype(np.float32)
LENGTHS = np.array([9, 6, 0])


@pytest.mark.parametrize(
    ("mixer", "subsampling"), [("linear", 1), ("softmax", 4), ("linformer", 1), ("bilstm", 2)]
)
def test_rows_of_a_batch_and_their_gradients_are_those_of_a_row_alone(mixer, subsampling):
    graph, params = nnx.split(make(mixer, subsampling=subsampling))

    @jax.jit
    def run(params, x, lengths):
        def loss(params, x):
            log_probs, n = nnx.merge(graph, params)(x, lengths)
            real = jnp.arange(log_probs.shape[1]) < n[:, None]
            return jnp.where(real, log_probs[..., 1], 0).sum(), (log_probs, n)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)

    padded = np.where(np.arange(9)[:, None] < LENGTHS[:, None, None], X, np.nan)
    (_, (log_probs, lengths)), (for_params, for_x) = run(params, padded, LENGTHS)
    assert lengths.tolist() == [-(-n // subsampling) for n in LENGTHS]
    assert jax.tree.all(jax.tree.map(lambda a: np.isfinite(a).all(), for_params))
    assert not np.asarray(for_x)[1:, 6:].any()
    (_, (want, _)), (_, want_for_x) = run(params, X[1:2, :6], LENGTHS[1:2])
    assert rms_error(log_probs[1, : lengths[1]], want[0]) < 1e-5
    assert rms_error(for_x[1, :6], want_for_x[0]) < 1e-5


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_every_mixer_fits_and_log_probabilities_are_float32(mixer):
    def run(x, lengths, **options):
        return make(mixer, **options)(x, lengths)[0]

    for options in (dict(dtype=jnp.bfloat16), dict(param_dtype=jnp.bfloat16)):
        log_probs = jax.eval_shape(partial(run, **options), X, LENGTHS)
        assert log_probs.shape == (3, 9, 4)
        assert log_probs.dtype == jnp.float32


def naive_lstm(cell, x, mask):
    def sigmoid(z):
        return 1 / (1 + np.exp(-z))

    weights = (cell.dense_i.kernel, cell.dense_h.kernel, cell.dense_h.bias)
    w, u, b = (np.asarray(a[...], np.float64) for a in weights)
    h, c, out = np.zeros(len(u)), np.zeros(len(u)), np.zeros((len(x), len(u)))
    for t in np.flatnonzero(mask):
        i, f, g, o = np.split(x[t] @ w + h @ u + b, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        out[t] = h = sigmoid(o) * np.tanh(c)
    return out


def test_a_bilstm_is_two_lstms_that_step_over_padding():
    rng = np.random.default_rng(0)
    layer, x = BiLSTM(6, rngs=nnx.Rngs(0)), rng.standard_normal((1, 7, 6))
    for cell in (layer.forwards, layer.backwards):
        cell.dense_h.bias[...] = jnp.asarray(rng.standard_normal(12))
    mask = np.array([[0, 1, 1, 0, 1, 1, 0]], bool)
    got, state = jax.jit(layer)(x.astype(np.float32), mask=mask)
    there = naive_lstm(layer.forwards, x[0], mask[0])
    back = naive_lstm(layer.backwards, x[0, ::-1], mask[0, ::-1])[::-1]
    assert rms_error(got[0], np.concatenate([there, back], axis=-1)) < 1e-5
    assert state == nn.MixerState(None, None)


def test_no_frames_and_64_bits_are_served(x64):
    model = make("bilstm", subsampling=4)
    assert jax.eval_shape(model, X.astype(np.float64), LENGTHS)[0].dtype == jnp.float64
    with jax.disable_jit():
        log_probs, lengths = model(X[:1, :0], np.array([0]))
    assert log_probs.shape == (1, 0, 4)
    assert lengths.tolist() == [0]


def test_lengths_may_be_of_8_bits():
    _, lengths = make("bilstm", subsampling=2)(np.zeros((1, 255, 5)), np.array([255], np.uint8))
    assert lengths.tolist() == [128]


def test_an_encoder_learns_to_read_labels_that_nobody_aligned():
    """Each label is a sound of 2 to 5 frames, unlike the one before; 8 rows of 4 labels."""
    rng = np.random.default_rng(0)
    sounds, labels = rng.standard_normal((4, 5)), rng.integers(1, 3, (8, 4)).cumsum(1) % 3 + 1
    frames = [np.repeat(sounds[row], rng.integers(2, 6, 4), axis=0) for row in labels]
    lengths, four = np.array([len(row) for row in frames]), np.full(8, 4)
    x = np.stack([np.pad(row, ((0, 20 - len(row)), (0, 0))) for row in frames]).astype(np.float32)
    graph, params = nnx.split(make("linear", features=16))
    optimiser = optax.adam(1e-2)

    def step(carry, _):
        params, state = carry

        def loss(params):
            log_probs, n = nnx.merge(graph, params)(x, lengths)
            losses, feasible = ctc_loss(log_probs, n, labels, four)
            return losses.sum() / feasible.sum()

        value, gradient = jax.value_and_grad(loss)(params)
        change, state = optimiser.update(gradient, state, params)
        return (optax.apply_updates(params, change), state), value

    train = jax.jit(lambda carry: jax.lax.scan(step, carry, length=100))
    (params, _), losses = train((params, optimiser.init(params)))
    decoded = greedy_decode(*jax.jit(nnx.merge(graph, params))(x, lengths))
    assert losses[0] > 5
    assert error_rate(decoded, labels.tolist()) == 0


def test_wrong_arguments_are_named(no_type_checks):
    for message, options in {
        "mixer must be one of .*'linformer'.* got 'hla2'": dict(mixer="hla2"),
        "mixer must make layers with causal=False": dict(mixer=nn.HLA2),
        "subsampling must be 1, 2 or 4, got 3": dict(mixer="linear", subsampling=3),
        "in_features must be even for two LSTMs, got 7": dict(mixer="bilstm", features=7),
        "num_labels must be": dict(mixer="linear", num_labels=0),
    }.items():
        with pytest.raises(ValueError, match=message):
            make(**options)
    model = make("bilstm")
    for message, arguments in {
        r"features must be \[B, T, 5\], got \(3, 9, 4\)": (X[..., 1:], LENGTHS),
        "features must be floating": (X.astype(int), LENGTHS),
        "lengths must be integer of shape": (X, LENGTHS[1:]),
        r"lengths must be in 0\.\.9, got 10": (X, LENGTHS + 1),
        r"lengths must be in 0\.\.9, got -1": (X, LENGTHS - 1),
    }.items():
        with pytest.raises(ValueError, match=message):
            model(*arguments)
    with pytest.raises(ValueError, match="segment_ids must be None"):
        BiLSTM(6, rngs=nnx.Rngs(0))(jnp.ones((1, 2, 6)), segment_ids=jnp.zeros((1, 2), int))
    for message, samples, options in [
        ("samples must be floating", np.zeros(400, int), {}),
        ("samples must be .* got a number", np.float32(1), {}),
        ("window and hop must be at least one sample", np.zeros(400), dict(hop=1e-5)),
        ("num_filters must be so small", np.zeros(400), dict(num_filters=200)),
    ]:
        with pytest.raises(ValueError, match=message):
            log_mel(samples, 8000, **options)
