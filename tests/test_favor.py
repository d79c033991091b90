"""FAVOR+: unbiased, its variance that of the paper, and causal to the last bit."""

import functools
import math

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
from helpers import attention_inputs, rms_error

import hla_jax as hla
from hla_jax.feature_maps import FavorPlus, favor_plus
from hla_jax.testing import check_causal

D, DRAWS = 4, 2**14
KINDS = ["positive", "hyperbolic", "relu"]
X, Y = 0.25 * np.random.default_rng(0).normal(size=(2, 5, D))  # five pairs of a query and a key


def exp_kernel(x, y):
    return np.exp((x * y).sum(-1))


def arc_cosine_kernel(x, y):
    sizes = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    angle = np.arccos((x * y).sum(-1) / sizes)
    return sizes * (np.sin(angle) + (np.pi - angle) * np.cos(angle)) / (2 * np.pi)


KERNELS = {"positive": exp_kernel, "hyperbolic": exp_kernel, "relu": arc_cosine_kernel}


@functools.cache
def all_estimates(m, orthogonal):
    """phi(x) . phi(y) by kind, for each pair and each of many draws, [DRAWS, 5]."""

    def draw(key):
        if orthogonal:
            maps = {kind: favor_plus(key, D, m, kind) for kind in KINDS}
        else:
            maps = {kind: FavorPlus(jax.random.normal(key, (m, D)), kind) for kind in KINDS}
        x, y = X.astype(np.float32), Y.astype(np.float32)
        return {kind: jnp.einsum("pn,pn->p", f(x), f(y)) for kind, f in maps.items()}

    return jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(7), DRAWS))


def estimates(m, kind, orthogonal=True):
    return np.asarray(all_estimates(m, orthogonal)[kind], np.float64)


def squared_errors(m, kind, orthogonal=True):
    return (estimates(m, kind, orthogonal) - KERNELS[kind](X, Y)) ** 2


def assert_ratio(numerator, denominator, expected):
    """The ratio of two means is as expected, to five standard errors of the draws."""
    a, b = numerator.mean(1), denominator.mean(1)  # over the pairs
    ratio = a.mean() / b.mean()
    error = ratio * math.hypot(*(x.std() / x.mean() / math.sqrt(len(x)) for x in (a, b)))
    assert abs(ratio - expected) < 5 * error < expected / 4


def assert_less(smaller, larger):
    """One mean is less than the other by more than three standard errors of the draws."""
    a, b = smaller.mean(1), larger.mean(1)
    assert b.mean() - a.mean() > 3 * math.hypot(a.std(), b.std()) / math.sqrt(DRAWS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [4, 6])  # a block of orthogonal vectors, and one and a half
def test_estimates_have_no_bias(kind, m) -> None:
    got, expected = estimates(m, kind), KERNELS[kind](X, Y)
    error = got.std(0) / math.sqrt(DRAWS)
    assert (abs(got.mean(0) - expected) < 5 * error).all()
    assert (5 * error < expected.mean() / 8).all()


@pytest.mark.parametrize("kind", ["positive", "hyperbolic"])
def test_variance_of_independent_features_is_that_of_lemma_2(kind) -> None:
    m = 4
    size = ((X + Y) ** 2).sum(-1)
    variance = np.exp(size) * exp_kernel(X, Y) ** 2 * (1 - np.exp(-size)) / m
    if kind == "hyperbolic":
        variance *= (1 - np.exp(-size)) / 2
    got = squared_errors(m, kind, orthogonal=False)
    assert_ratio(got, np.broadcast_to(variance, got.shape), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_four_times_the_features_give_a_quarter_of_the_variance(kind) -> None:
    assert_ratio(squared_errors(D, kind), squared_errors(4 * D, kind), 4)


@pytest.mark.parametrize("kind", KINDS)
def test_orthogonal_features_vary_less_than_independent_ones(kind) -> None:
    assert_less(squared_errors(D, kind), squared_errors(D, kind, orthogonal=False))


def test_hyperbolic_features_vary_less_than_as_many_positive_ones() -> None:
    hyperbolic = squared_errors(4, "hyperbolic", orthogonal=False)
    assert_less(hyperbolic, squared_errors(8, "positive", orthogonal=False))


def test_blocks_are_orthogonal_and_rows_as_long_as_gaussian_ones() -> None:
    w = np.asarray(favor_plus(jax.random.key(0), 16, 1000).projection, np.float64)
    gram = w[:16] @ w[:16].T
    assert w.shape == (1000, 16)
    assert abs(gram - np.diag(np.diag(gram))).max() < 1e-4
    squares = (w**2).sum(1)  # chi-squared: mean D and variance 2 D
    assert abs(squares.mean() - 16) < 5 * math.sqrt(2 * 16 / 1000)
    assert 0.75 < squares.var() / (2 * 16) < 1.25


def tokens(scale=1.0):
    q, k, v = (jnp.asarray(x[0]) for x in attention_inputs(B=1, H=2, K=1, D=D, seed=1))
    return scale * q, scale * k, v


def performer(favor, q, k, v):
    """Softmax attention, estimated."""
    return hla.linear_attention(q, k, v, feature_map=lambda x: favor(x / D**0.25), chunk_size=2)[0]


def test_attention_nears_softmax_as_the_square_root_of_the_features() -> None:
    q, k, v = tokens(scale=0.3)
    exact = naive.softmax_attention(q, k, v, np.tri(7)).out
    keys = jax.random.split(jax.random.key(2), 64)

    def error(m):
        got = jax.jit(
            lambda: jax.lax.map(lambda key: performer(favor_plus(key, D, m), q, k, v), keys)
        )()
        return rms_error(got, np.broadcast_to(exact, got.shape))

    few, many = error(64), error(1024)
    assert many < 0.02
    assert 3 < few / many < 5


@pytest.mark.parametrize("kind", KINDS)
def test_features_of_a_token_depend_on_no_other(kind) -> None:
    favor = favor_plus(jax.random.key(0), D, 6, kind)
    alone = jnp.stack([favor(x) for x in jnp.asarray(X)])
    np.testing.assert_allclose(favor(jnp.asarray(X)), alone, rtol=1e-6)


def test_later_tokens_change_nothing_before_them() -> None:
    q, k, v = tokens()
    favor = favor_plus(jax.random.key(0), D, 6)
    run = jax.jit(functools.partial(performer, favor))
    check_causal(functools.partial(performer, favor), (q[:4], k[:4], v[:4]), axis=0)
    out = run(q, k, v)
    np.testing.assert_array_equal(run(q, k.at[-1].multiply(4), v)[:-1], out[:-1])
    assert rms_error(run(q[:5], k[:5], v[:5]), out[:5]) < 1e-6


def test_steps_with_the_same_projection_equal_the_parallel_form() -> None:
    q, k, v = tokens()
    favor = favor_plus(jax.random.key(0), D, 6)

    @jax.jit
    def step(favor, *token):
        return hla.linear_attention_step(*token, feature_map=favor)

    out, final = hla.linear_attention(q, k, v, feature_map=favor)
    state = jax.tree.map(jnp.zeros_like, final)
    for t in range(len(q)):
        row, state = step(favor, q[t], k[t], v[t], state)
        assert rms_error(row, out[t]) < 1e-5
    assert rms_error(state.kv, final.kv) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_equals_its_definition_in_every_dtype(kind, x64) -> None:
    favor = favor_plus(jax.random.key(0), D, 6, kind)
    w = np.asarray(favor.projection, np.float64)
    wx, half = X @ w.T, (X**2).sum(-1, keepdims=True) / 2
    expected = {
        "positive": np.exp(wx - half) / np.sqrt(6),
        "hyperbolic": np.concatenate([np.exp(wx - half), np.exp(-wx - half)], -1) / np.sqrt(12),
        "relu": np.maximum(wx, 0) / np.sqrt(6),
    }[kind]
    for dtype, tolerance in {"float64": 1e-14, "float32": 1e-6, "bfloat16": 4e-3}.items():
        got = favor(jnp.asarray(X, dtype))
        assert got.dtype == dtype
        assert rms_error(got, expected) < tolerance
    assert favor(jnp.zeros((0, 2, D))).shape == (0, 2, expected.shape[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_slopes_are_finite_however_large_the_input(kind) -> None:
    slopes = jax.jacobian(favor_plus(jax.random.key(0), D, 6, kind))
    assert all(np.isfinite(slopes(size * jnp.ones(D))).all() for size in (0.0, 3.0, 30.0, 1e18))


def test_gradients_of_attention_are_finite_however_large_the_inputs() -> None:
    favor = favor_plus(jax.random.key(0), D, 6)
    q, k, v = tokens()

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    def loss(q, k, v):
        return (performer(favor, q, k, v) ** 2).sum()

    for size in (0.0, 3.0, 30.0, 1e18):
        for x in jax.tree.leaves(loss(size * q, size * k, v)):
            assert np.isfinite(x).all()


def test_a_key_draws_one_map_compiled_or_not_and_redraw_another() -> None:
    key, other = jax.random.split(jax.random.key(3))
    favor = favor_plus(key, D, 6, "hyperbolic")
    again = jax.jit(lambda key: favor_plus(key, D, 6, "hyperbolic"))(key)
    np.testing.assert_allclose(favor.projection, again.projection, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(favor(X), jax.jit(lambda f, x: f(x))(favor, X), rtol=1e-5)
    redrawn = favor.redraw(other)
    assert jax.tree.structure(redrawn) == jax.tree.structure(favor)
    assert redrawn.projection.shape == favor.projection.shape
    assert rms_error(redrawn.projection, favor.projection) > 0.5
    np.testing.assert_array_equal(favor.redraw(key).projection, favor.projection)


def test_the_draw_does_not_depend_on_x64() -> None:
    narrow = favor_plus(jax.random.key(0), D, 6).projection
    with jax.enable_x64(True):
        np.testing.assert_array_equal(favor_plus(jax.random.key(0), D, 6).projection, narrow)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(width=0), "width must be an integer at least 1, got 0"),
        (dict(num_features=2.0), "num_features must be an integer at least 1, got 2.0"),
        (dict(kind="trigonometric"), "kind must be one of .*'positive'.*, got 'trigonometric'"),
    ],
)
def test_a_wrong_argument_is_named(change, message, no_type_checks) -> None:
    options = dict(key=jax.random.key(0), width=D, num_features=3) | change
    with pytest.raises(ValueError, match=message):
        favor_plus(**options)


def test_a_wrong_width_is_named() -> None:
    favor = FavorPlus(np.ones((3, D)))
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., 4\], got shape \(2, 5\)"):
        favor(np.zeros((2, 5), np.float32))
