"""Feature maps: values, gradients, and what bfloat16 leaves of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import rms_error

from hla_jax import feature_maps as fm

# Each map as NumPy writes it in float64.
DEFINITIONS = {
    fm.elu_plus_one: lambda x: np.where(x >= 0, x + 1, np.exp(np.minimum(x, 0))),
    fm.relu: lambda x: np.maximum(x, 0),
    fm.squared_relu: lambda x: np.maximum(x, 0) ** 2,
    fm.exp: np.exp,
    fm.softmax: lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True),
    fm.identity: lambda x: x,
    fm.taylor: lambda x: np.concatenate(
        [np.ones_like(x[..., :1]), x]
        + [x[..., i : i + 1] * x / np.sqrt(2) for i in range(x.shape[-1])],
        axis=-1,
    ),
}
maps = pytest.mark.parametrize("feature_map", DEFINITIONS, ids=lambda f: f.__name__)


def inputs(*shape: int) -> np.ndarray:
    return 2 * np.random.default_rng(0).normal(size=shape)


def test_every_public_map_is_tested() -> None:
    assert {f.__name__ for f in DEFINITIONS} | {"FavorPlus", "favor_plus"} == set(fm.__all__)


@maps
def test_equals_its_definition(feature_map) -> None:
    x = inputs(2, 3, 5)
    assert rms_error(feature_map(x.astype(np.float32)), DEFINITIONS[feature_map](x)) < 1e-6


@maps
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64])
def test_keeps_the_dtype(feature_map, dtype, x64) -> None:
    assert feature_map(jnp.ones((2, 3), dtype)).dtype == dtype


@maps
def test_takes_no_tokens(feature_map) -> None:
    x = np.zeros((0, 2, 3), np.float32)
    assert feature_map(x).shape == DEFINITIONS[feature_map](x).shape


@maps
def test_gradient_equals_finite_differences(feature_map, x64) -> None:
    x, step = inputs(5), 1e-6
    shift = step * np.eye(5)
    define = DEFINITIONS[feature_map]
    differences = (define(x + shift) - define(x - shift)) / (2 * step)
    assert rms_error(jax.jacobian(feature_map)(x).T, differences) < 1e-8


@maps
@pytest.mark.parametrize("x", [-1e30, -200.0, -0.0, 0.0, 50.0])
def test_gradient_is_finite_far_out(feature_map, x) -> None:
    gradient = jax.grad(lambda x: feature_map(x)[0])(jnp.array([x, 0.0]))
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("x", [-4.0, -6.0, -8.0, -20.0])
def test_elu_plus_one_keeps_its_tail_in_bfloat16(x) -> None:
    assert rms_error(fm.elu_plus_one(jnp.array([x], jnp.bfloat16)), np.exp([x])) < 2**-8


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_elu_plus_one_and_its_slope_are_one_at_zero(dtype) -> None:
    value, slope = jax.value_and_grad(lambda x: fm.elu_plus_one(x[None])[0])(jnp.zeros((), dtype))
    assert (value, slope) == (1, 1)


def test_elu_plus_one_slope_keeps_its_tail_in_bfloat16() -> None:
    slope = jax.grad(lambda x: fm.elu_plus_one(x)[0])(jnp.array([-8.0], jnp.bfloat16))
    assert rms_error(slope, np.exp([-8.0])) < 2**-8


def test_taylor_inner_product_is_the_series() -> None:
    x, y = 0.5 * inputs(2, 7, 4)
    z = x @ y.T
    features_x, features_y = (fm.taylor(a.astype(np.float32)) for a in (x, y))
    assert features_x.shape == (7, 1 + 4 + 4**2)
    assert rms_error(features_x @ features_y.T, 1 + z + z**2 / 2) < 1e-6


def test_a_row_of_softmax_features_sums_to_one_however_large() -> None:
    assert rms_error(fm.softmax(1e4 * inputs(6, 3).astype(np.float32)).sum(-1), np.ones(6)) < 1e-6
