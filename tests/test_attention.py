"""Softmax attention follows this library's conventions for head groups, padding and packing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import rms_error

from hla_jax._segments import segment_numbers
from hla_jax.attention import softmax_attention


def tokens(*, B=2, T=7, S=7, H=4, K=2, D=4, E=3, seed=0):
    random = np.random.default_rng(seed)
    shapes = (B, T, H, D), (B, S, K, D), (B, S, K, E)
    return tuple(jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)


def definition(q, k, v, visible, bias=0.0):
    """Float64, one query at a time; visible is [B, T, S]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (B, T, H, D), (_, S, K, E) = q.shape, v.shape
    bias = np.broadcast_to(bias, (B, H, T, S))
    out = np.zeros((B, T, H, E))
    for b, t, h in np.ndindex(B, T, H):
        seen = np.flatnonzero(visible[b, t])
        if len(seen):
            kv = h // (H // K)
            logits = k[b, seen, kv] @ q[b, t, h] / np.sqrt(D) + bias[b, h, t, seen]
            weights = np.exp(logits - logits.max())
            out[b, t, h] = weights / weights.sum() @ v[b, seen, kv]
    return out


@pytest.mark.parametrize(
    ("sizes", "causal"),
    [
        (dict(), True),
        (dict(H=3, K=1, D=5, E=7), True),
        (dict(T=3, S=6), False),
        (dict(T=1, S=1), True),
    ],
)
def test_equals_the_definition(sizes, causal):
    q, k, v = tokens(**sizes)
    B, T, S = len(q), q.shape[1], k.shape[1]
    visible = np.broadcast_to(np.tri(T, S) if causal else np.ones((T, S)), (B, T, S))
    assert rms_error(softmax_attention(q, k, v, causal=causal), definition(q, k, v, visible)) < 1e-6


def test_bias_is_added_to_the_logits_of_each_head():
    q, k, v = tokens()
    bias = np.random.default_rng(1).normal(size=(4, 7, 7)).astype(np.float32)
    visible = np.broadcast_to(np.tri(7), (2, 7, 7))
    got = softmax_attention(q, k, v, bias=bias)
    assert rms_error(got, definition(q, k, v, visible, bias)) < 1e-6


def test_a_masked_token_has_no_influence_whatever_it_holds():
    q, k, v = tokens()
    mask = np.ones((2, 7), bool)
    mask[0, [0, 3]] = mask[1, 6] = False
    poison = jnp.where(mask[..., None, None], 0.0, jnp.nan)
    visible = np.tri(7, dtype=bool) & mask[:, None, :] & mask[:, :, None]

    def loss(q, k, v):
        return (softmax_attention(q, k, v, mask=mask) ** 2).sum()

    got = softmax_attention(q + poison, k + poison, v + poison, mask=mask)
    assert rms_error(got, definition(q, k, v, visible)) < 1e-6
    clean = jax.grad(loss, (0, 1, 2))(q, k, v)
    poisoned = jax.grad(loss, (0, 1, 2))(q + poison, k + poison, v + poison)
    for a, b in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (np.asarray(b)[~mask] == 0).all()


def test_a_query_without_keys_gives_zero_and_finite_gradients():
    q, k, v = tokens(T=3, S=3)

    def out(q, k, v):
        return softmax_attention(q, k, v, causal=False, mask=jnp.zeros((2, 3), bool))

    np.testing.assert_array_equal(out(q, k, v), 0)
    for gradient in jax.grad(lambda *x: out(*x).sum(), (0, 1, 2))(q, k, v):
        np.testing.assert_array_equal(gradient, 0)


def test_segments_are_packed_as_if_alone():
    q, k, v = tokens(B=1, T=12, S=12)
    ids = jnp.array([[3] * 5 + [1] * 4 + [3] * 3])
    packed = softmax_attention(q, k, v, segment_ids=ids)
    alone = [
        softmax_attention(q[:, s], k[:, s], v[:, s]) for s in (np.s_[:5], np.s_[5:9], np.s_[9:])
    ]
    np.testing.assert_allclose(packed, jnp.concatenate(alone, axis=1), rtol=2e-6, atol=1e-6)


def test_ids_of_masked_tokens_do_not_start_segments():
    mask = jnp.array([[False, True, False, True, True, False, True]])
    ids = jnp.array([[9, 1, 9, 1, 2, 1, 2]])
    np.testing.assert_array_equal(segment_numbers(ids, mask), [[0, 0, 0, 0, 1, 1, 1]])


def test_any_leading_axes_and_no_tokens():
    q, k, v = tokens(B=4)
    q2, k2, v2 = (x.reshape(2, 2, *x.shape[1:]) for x in (q, k, v))
    got = softmax_attention(q2, k2, v2).reshape(4, 7, 4, 3)
    np.testing.assert_allclose(got, softmax_attention(q, k, v), rtol=1e-6)
    assert softmax_attention(q[:, :0], k[:, :0], v[:, :0]).shape == (4, 0, 4, 3)


def test_bfloat16_values_give_bfloat16_outputs():
    q, k, v = (x.astype(jnp.bfloat16) for x in tokens())
    got = softmax_attention(q, k, v)
    visible = np.broadcast_to(np.tri(7), (2, 7, 7))
    assert got.dtype == jnp.bfloat16
    assert rms_error(got, definition(q, k, v, visible)) < 1e-2


def test_float64_is_kept_throughout(x64):
    q, k, v = (x.astype(jnp.float64) for x in tokens())
    visible = np.broadcast_to(np.tri(7), (2, 7, 7))
    bias = np.random.default_rng(1).normal(size=(4, 7, 7))
    got = softmax_attention(q, k, v, bias=bias)
    assert rms_error(got, definition(q, k, v, visible, bias)) < 1e-14


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(sizes=dict(H=6, K=4)), "4 kv heads for 6"),
        (dict(sizes=dict(T=3, S=5)), "causal"),
        (dict(mask=np.ones((2, 3), bool)), "mask"),
        (dict(segment_ids=np.zeros((1, 7), int)), "segment_ids"),
    ],
)
def test_a_wrong_argument_is_named(change, message, no_type_checks):
    change = dict(change)
    q, k, v = tokens(**change.pop("sizes", {}))
    with pytest.raises(ValueError, match=message):
        softmax_attention(q, k, v, **change)
