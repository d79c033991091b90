"""Linformer attention is softmax attention over mixtures of the tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
from helpers import attention_inputs, rms_error

from hla_jax.attention.linformer import linformer_attention, linformer_projection

tokens = partial(attention_inputs, S=9)
jitted = jax.jit(linformer_attention, static_argnames="scale")


def projections(*shapes):
    random = np.random.default_rng(1)
    return tuple(random.normal(size=shape) / 2 for shape in shapes)


def definition(q, k, v, e, f, mask):
    """Softmax attention to mixtures, which are made token by token."""
    (B, _, K, _), n = k.shape, e.shape[-2]
    e, f = (np.broadcast_to(x, (K, n, x.shape[-1])) for x in (e, f))
    keys, values = (np.zeros((B, n, K, x.shape[-1])) for x in (k, v))
    for b, s in np.argwhere(mask):
        for g in range(K):
            keys[b, :, g] += np.outer(e[g, :, s], k[b, s, g])
            values[b, :, g] += np.outer(f[g, :, s], v[b, s, g])
    return naive.softmax_attention(q, keys, values, np.ones((q.shape[1], n))).out


@pytest.mark.parametrize(
    ("sizes", "e", "f"),
    [
        (dict(), (5, 12), None),
        (dict(T=1, H=3, K=1, D=3, E=5), (4, 9), (4, 10)),
        (dict(), (2, 3, 12), (3, 9)),
        (dict(S=1), (2, 3, 12), (2, 3, 12)),
    ],
)
def test_equals_the_definition_and_masked_tokens_are_not_in_it(sizes, e, f, x64):
    q, k, v = tokens(**sizes, dtype=np.float64)
    e, f = projections(e, f or e)
    mask = np.random.default_rng(2).random(k.shape[:2]) > 0.3
    mask[1] = False  # a row without keys gives 0
    poison = np.where(mask, 0, np.nan)[..., None, None]

    def loss(q, k, v, e, f):
        out = linformer_attention(q, k, v, e, f, mask=mask)
        return (out**2).sum(), out

    value_and_grad = jax.jit(jax.value_and_grad(loss, range(5), has_aux=True))
    (_, out), gradients = value_and_grad(q, k + poison, v + poison, e, f)
    assert rms_error(out, definition(q, k, v, e, f, mask)) < 1e-12
    assert (out[1] == 0).all()

    step = np.random.default_rng(3)
    for i, gradient in enumerate(gradients):  # a central difference along a random direction
        x = [q, k, v, e, f]
        direction = step.normal(size=x[i].shape)
        values = []
        for h in (1e-5, -1e-5):
            moved = [y + h * direction if j == i else y for j, y in enumerate(x)]
            values.append((definition(*moved, mask) ** 2).sum())
        slope = (values[0] - values[1]) / 2e-5
        np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-8)


def test_the_identity_gives_softmax_attention():
    q, k, v = tokens()
    got = jitted(q, k, v, np.eye(9, 12), scale=0.7)
    assert rms_error(got, naive.softmax_attention(q, k, v, np.ones((7, 9)), scale=0.7).out) < 1e-6


def test_means_of_equal_keys_are_exact():
    q, k, v = tokens(S=3)
    means = np.eye(3).repeat(3, axis=1) / 3
    got = jitted(q, k.repeat(3, axis=1), v.repeat(3, axis=1), means)
    assert rms_error(got, naive.softmax_attention(q, k, v, np.ones((7, 3))).out) < 1e-6


def test_random_projections_keep_inner_products_better_the_more_rows_they_have():
    x, y = np.random.default_rng(0).normal(size=(2, 50, 30)).astype(np.float32)
    e_of = partial(linformer_projection, N=50)
    e = {n: e_of(jax.random.key(n), n) for n in (100, 10_000)}
    errors = {n: rms_error((e[n] @ x).T @ (e[n] @ y), x.T @ y) for n in e}
    # Each product has a variance of (|x|^2 |y|^2 + (x . y)^2) / n, and a mean square of |x|^2.
    size = np.sqrt((50 + 1) / 100)
    assert 0.8 * size < errors[100] < 1.2 * size
    assert 0.08 * size < errors[10_000] < 0.12 * size


def test_no_tokens_any_leading_axes_and_low_precision():
    q, k, v = tokens()
    e = linformer_projection(jax.random.key(0), 6, 9)
    assert jitted(q[:, :0], k, v, e).shape == (2, 0, 4, 3)
    assert (jitted(q, k[:, :0], v[:, :0], e) == 0).all()
    folded = jitted(*(x[:, None] for x in (q, k, v)), e)
    np.testing.assert_allclose(folded[:, 0], jitted(q, k, v, e), rtol=1e-5)
    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    out = jitted(*low, e)
    assert out.dtype == jnp.bfloat16
    assert rms_error(out, jitted(*(x.astype(np.float32) for x in low), e)) < 4e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(causal=True), "a mixture of all tokens, later ones too"),
        (dict(e=np.zeros((5, 8))), r"e must be floating, .* N >= S = 9, got float64.*\(5, 8\)"),
        (dict(e=np.zeros((3, 5, 9))), "K = 2"),
        (dict(e=np.zeros((5, 9), int)), "e must be floating"),
        (dict(e=np.zeros(9)), "e must be"),
        (dict(e=np.zeros((0, 9))), "n > 0"),
        (dict(f=np.zeros((5, 8))), "f must be"),
        (dict(f=np.zeros((4, 9))), "f must have as many rows as e, 5, got 4"),
        (dict(mask=np.ones((2, 7), bool)), "mask"),
    ],
)
def test_a_wrong_argument_is_named(change, message, no_type_checks, x64):
    q, k, v = tokens(dtype=np.float64)
    arguments = dict(e=np.zeros((5, 9))) | change
    with pytest.raises(ValueError, match=message):
        linformer_attention(q, k, v, **arguments)


@pytest.mark.parametrize(("n", "N", "message"), [(0, 3, "n must"), (2, 1.5, "N must")])
def test_sizes_of_a_projection_are_positive(n, N, message, no_type_checks):
    with pytest.raises(ValueError, match=message):
        linformer_projection(jax.random.key(0), n, N)
