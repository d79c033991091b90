"""The image model: steps are the parallel pass, completions keep what is known, and it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import rms_error
from scipy.stats import chisquare

from hla_jax import attention, nn
from hla_jax.models import logistics
from hla_jax.models.image import START, ImageModel, ImageState
from hla_jax.models.transformer import MIXERS

SHAPE = (4, 2, 2)
N = 16
KEY = jax.random.key(0)


def make(mixer="linear", shape=SHAPE, **more):
    sizes = dict(num_layers=1, num_heads=2, features=8, mlp_features=16, num_logistics=3)
    return ImageModel(shape, mixer=mixer, rngs=nnx.Rngs(0), **sizes | more)


def random_images(batch_size, shape=SHAPE, seed=0):
    return np.random.default_rng(seed).integers(256, size=(batch_size, *shape), dtype=np.uint8)


def tokens_of(images):
    """The sequence that the model reads to predict the images."""
    values = images.reshape(len(images), -1).astype(np.int32)
    return np.concatenate([np.full((len(values), 1), START), values[:, :-1]], axis=1)


@nnx.jit
def whole(model, tokens):
    return model(tokens)[0]


@nnx.jit
def stepped(model, tokens):
    """Two tokens at once, and then one a step."""

    def step(state, token):
        parameters, state = model(token[:, None], state)
        return state, parameters[:, 0]

    first, state = model(tokens[:, :2])
    _, rest = jax.lax.scan(step, state, tokens[:, 2:].T)
    return jnp.concatenate([first, rest.swapaxes(0, 1)], axis=1)


def certain(mixer):
    """A model whose one component is so narrow that it draws what it expects."""
    model = make(mixer, num_logistics=1)
    model.head.kernel[...] *= jnp.array([0.0, 10.0, 0.0])
    model.head.bias[...] = jnp.array([0.0, 0.0, -20.0])
    return model


bits = nnx.jit(ImageModel.bits_per_dim)


@pytest.mark.parametrize("mixer", ["linear", "hla2", "softmax", "performer"])
def test_steps_are_the_parallel_pass(mixer):
    model, images = make(mixer), random_images(2)
    model.head.kernel[...] *= 10  # lest the biases hide a difference
    want = whole(model, tokens_of(images))
    assert want.shape == (2, N, 9)
    assert rms_error(stepped(model, tokens_of(images)), want) < 1e-5
    # Causality: what a later pixel holds reaches no earlier mixture, and does reach a later one.
    other = images.copy()
    other[:, 2:] = 255 - other[:, 2:]
    changed = whole(model, tokens_of(other))
    assert rms_error(changed[:, :9], want[:, :9]) < 1e-6
    assert rms_error(changed[:, 9:], want[:, 9:]) > 1e-2


@pytest.mark.parametrize("mixer", ["hla2", "softmax"])
def test_a_completion_keeps_the_upper_rows_and_draws_the_rest_from_them(mixer):
    model, images = certain(mixer), random_images(2)
    got = np.asarray(model.complete(images, 2, KEY))
    want = images.reshape(2, N).copy()
    for n in range(N // 2, N):
        mean = whole(model, tokens_of(want))[:, n, 1]
        want[:, n] = np.clip(np.ceil(127.5 * mean) + 127, 0, 255)
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, want.reshape(images.shape))
    assert len(np.unique(got[:, 2:])) > 4


def test_bits_are_those_of_the_values_one_by_one():
    model, images = make(), random_images(3)
    log_p = logistics.log_prob(whole(model, tokens_of(images)), images.reshape(3, N))
    want = -np.log2(np.exp(np.asarray(log_p, np.float64))).mean(1)
    assert rms_error(bits(model, images), want) < 1e-5


def test_a_new_model_expects_any_value():
    """Which would cost 8 bits, were it not for the tails of the logistics."""
    assert 8 < bits(make(), random_images(3)).mean() < 8.6


def test_an_image_of_one_value_is_drawn_with_its_probabilities():
    model = make(shape=(1, 1, 1))
    images = np.asarray(model.sample(KEY, 5000))
    assert images.shape == (5000, 1, 1, 1)
    every = np.arange(256, dtype=np.uint8).reshape(256, 1, 1, 1)
    p = np.exp2(-np.asarray(bits(model, every), np.float64))
    counts, want = (
        a.reshape(32, 8).sum(1) for a in (np.bincount(images.ravel(), minlength=256), p)
    )
    assert chisquare(counts, 5000 * want / want.sum()).pvalue > 0.01


def test_it_learns_whether_an_image_is_dark():
    """Dark or bright, and noise of 17 values: at best 4.3 bits, and 5.1 for one that sees nothing.

    And every parameter has a part in it.
    """
    graph, params = nnx.split(make(shape=(2, 3, 1), features=16))
    optimiser = optax.adam(1e-2)

    def step(carry, key):
        params, state = carry
        colour_key, noise_key = jax.random.split(key)
        colours = jax.random.choice(colour_key, jnp.array([64, 192]), (16, 1, 1, 1))
        noise = jax.random.randint(noise_key, (16, 2, 3, 1), -8, 9)

        def loss(params):
            images = (colours + noise).astype(jnp.uint8)
            return nnx.merge(graph, params).bits_per_dim(images).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        change, state = optimiser.update(gradient, state, params)
        return (optax.apply_updates(params, change), state), (value, gradient)

    @jax.jit
    def train(params):
        keys = jax.random.split(KEY, 150)
        _, (losses, gradients) = jax.lax.scan(step, (params, optimiser.init(params)), keys)
        return losses, jax.tree.map(lambda g: jnp.abs(g).max(), gradients)

    losses, largest = train(params)
    assert losses[-20:].mean() < 4.9
    for path, gradient in jax.tree.leaves_with_path(largest):
        assert 0 < gradient < np.inf, jax.tree_util.keystr(path)


OPTIONS = {
    "sparse": dict(pattern=attention.patterns.sliding_window(4)),
    "sliding_window": dict(window=4),
    "longformer": dict(window=4),
}


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_has_room_for_one_image_and_no_more(mixer):
    model = nnx.eval_shape(lambda: make(mixer, **OPTIONS.get(mixer, {})))
    assert getattr(model.blocks[0].mixer, "max_length", None) in (None, N)


def test_a_bfloat16_model_has_float32_mixtures():
    model = make("softmax", dtype=jnp.bfloat16)
    parameters, state = jax.eval_shape(model, tokens_of(random_images(2)))
    assert parameters.dtype == jnp.float32
    assert state.blocks[0].memory.k.dtype == jnp.bfloat16
    images = jax.eval_shape(lambda key: model.sample(key, 2), KEY)
    assert (images.shape, images.dtype) == ((2, *SHAPE), jnp.uint8)


def test_a_completion_is_the_same_in_64_bit_mode():
    model, images = certain("softmax"), random_images(2)
    want = np.asarray(model.complete(images, 2, KEY))
    with jax.enable_x64(True):
        np.testing.assert_array_equal(model.complete(images, 2, KEY), want)
        assert jax.eval_shape(model.bits_per_dim, images).dtype == jnp.float32


def test_nothing_is_left_to_draw_where_all_rows_are_known():
    images = random_images(2)
    np.testing.assert_array_equal(make().complete(images, SHAPE[0], KEY), images)


def test_a_value_after_the_last_is_nan():
    model = make()
    step = nnx.jit(lambda model, state: model(jnp.full((2, 1), 7), state)[0])
    state = jax.eval_shape(model, jnp.full((2, 1), START))[1]
    state = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), state)
    assert np.isfinite(step(model, state._replace(position=jnp.int32(N - 1)))).all()
    assert np.isnan(step(model, state._replace(position=jnp.int32(N)))).all()


@pytest.mark.parametrize("token", [-1, START + 1])
def test_a_token_that_does_not_exist_is_an_error_and_in_jit_a_nan(token):
    model, tokens = make(), np.array([[START, 7, token]])
    with pytest.raises(ValueError, match=rf"tokens must be in 0\.\.256, got {token}"):
        model(tokens)
    assert np.isnan(whole(model, tokens)[:, 2]).all()
    assert np.isfinite(whole(model, np.abs(tokens) % 257)).all()


def test_wrong_arguments_are_named(no_type_checks):
    def not_causal(**options):
        return nn.SoftmaxAttention(causal=False, **options)

    model, images = make(), random_images(2)
    for message, call in {
        "mixer must be one of": lambda: make("hla4"),
        "mixer must make layers with causal=True": lambda: make(not_causal),
        "max_length must be at least 16, .* got 15": lambda: make("softmax", max_length=15),
        r"shape must be \(height, width, channels\), .* got \(4, 4\)": lambda: make(shape=(4, 4)),
        "num_logistics must be .*at least 1": lambda: make(num_logistics=0),
        "images must be uint8, got float32": lambda: model.bits_per_dim(images / np.float32(255)),
        r"images must be \[B, 4, 2, 2\], got \(4, 2, 2\)": lambda: model.bits_per_dim(images[0]),
        r"rows must be an integer in 0\.\.4, got 5": lambda: model.complete(images, 5, KEY),
        "key must be one PRNG key": lambda: model.complete(images, 2, 0),
        "batch_size must be an integer at least 1": lambda: model.sample(KEY, 0),
        r"tokens must be \[B, T\], T <= 16, got \(2, 17\)": lambda: model(jnp.zeros((2, 17), int)),
        r"tokens must be in 0\.\.256, got 4294967296": lambda: model(np.full((2, 3), 2**32)),
        "tokens must be integer, got float32": lambda: model(jnp.zeros((2, 3))),
        "state must be None or an ImageState, got a tuple": lambda: model(
            jnp.zeros((2, 1), int), (1, 2)
        ),
        "state must have 1 blocks, got 0": lambda: model(
            jnp.zeros((2, 1), int), ImageState(jnp.int32(0), ())
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
