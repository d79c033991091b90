"""Softmax attention follows this library's conventions for head groups, padding and packing."""

from functools import partial

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
from helpers import attention_inputs, normals, rms_error

from hla_jax.attention import softmax_attention

CAUSAL = np.tri(7, dtype=bool)


@partial(jax.jit, static_argnames="causal")
def everything(q, k, v, d_out, *, causal=True, **options):
    """Returns out, dq, dk and dv."""
    out, pull = jax.vjp(lambda *x: softmax_attention(*x, causal=causal, **options), q, k, v)
    return out, *pull(d_out)


def inputs_and_cotangent(**sizes):
    q, k, v = attention_inputs(**sizes)
    return q, k, v, *normals((*q.shape[:-1], v.shape[-1]), dtype=v.dtype, seed=9)


def check(got, q, k, v, d_out, visible, tolerance=1e-6, **options):
    wanted = naive.softmax_attention(q, k, v, visible, d_out=d_out, **options)
    for name, x in zip(("out", "dq", "dk", "dv"), got, strict=True):
        assert rms_error(x, getattr(wanted, name)) < tolerance, name


@pytest.mark.parametrize(
    ("sizes", "causal"),
    [
        (dict(), True),
        (dict(H=3, K=1, D=5, E=7), True),
        (dict(T=3, S=6), False),
        (dict(T=1), True),
        (dict(T=0), True),
    ],
)
def test_equals_the_definition(sizes, causal):
    given = inputs_and_cotangent(**sizes)
    T, S = given[0].shape[1], given[1].shape[1]
    visible = np.tri(T, S) if causal else np.ones((T, S))
    check(everything(*given, causal=causal), *given, visible)


def test_bias_is_added_to_the_logits_of_each_head():
    given = inputs_and_cotangent()
    (bias,) = normals((4, 7, 7), seed=1)
    check(everything(*given, bias=bias), *given, CAUSAL, bias=bias)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("hidden", [-np.inf, np.finfo(np.float32).min])
def test_no_bias_gives_weight_to_keys_that_are_not_visible(dtype, hidden, x64):
    q, k, v, d_out = inputs_and_cotangent(dtype=dtype)
    bias = np.zeros((7, 7), dtype)
    bias[2, :3] = hidden
    got = everything(q, k, v, d_out, bias=bias)
    kept = np.delete(np.arange(7), 2)
    wanted = naive.softmax_attention(q, k, v, CAUSAL)
    assert rms_error(got[0][:, kept], wanted.out[:, kept]) < 1e-6
    v[:, 3:] += 100
    later = everything(q, k, v, d_out, bias=bias)
    np.testing.assert_array_equal(later[0][:, 2], got[0][:, 2])
    assert all(np.isfinite(x).all() for x in got)
    assert (np.asarray(got[0][:, 2]) == 0).all() == np.isinf(hidden)


def test_a_masked_token_has_no_influence_whatever_it_holds():
    q, k, v, d_out = inputs_and_cotangent()
    mask = np.ones((2, 7), bool)
    mask[0, [0, 3]] = mask[1, 6] = False
    poison = np.where(mask[..., None, None], 0, np.nan).astype(np.float32)
    visible = CAUSAL & mask[:, None, :] & mask[:, :, None]
    clean = everything(q, k, v, d_out, mask=mask)
    poisoned = everything(q + poison, k + poison, v + poison, d_out, mask=mask)
    check(clean, q, k, v, d_out, visible)
    for a, b in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (np.asarray(b)[~mask] == 0).all()


def test_a_query_without_keys_gives_zero_and_its_gradients_are_zero():
    for x in everything(*inputs_and_cotangent(), causal=False, mask=np.zeros((2, 7), bool)):
        np.testing.assert_array_equal(x, 0)


def test_segments_are_packed_as_if_alone_and_ids_of_masked_tokens_start_none():
    given = inputs_and_cotangent()
    mask = np.array([[0, 1, 0, 1, 1, 0, 1], [1] * 7], bool)
    ids = np.array([[9, 1, 9, 1, 2, 1, 2], [3, 3, 1, 1, 3, 3, 3]])
    labels = np.array([[-1, 0, -1, 0, 1, -1, 1], [0, 0, 1, 1, 2, 2, 2]])
    visible = CAUSAL & (labels[:, :, None] == labels[:, None, :]) & mask[:, :, None]
    check(everything(*given, mask=mask, segment_ids=ids), *given, visible)
    np.testing.assert_array_equal(naive.same_segment(mask, ids) & CAUSAL, visible)


def test_any_leading_axes():
    given = inputs_and_cotangent()
    folded = everything(*(x[:, None] for x in given))
    first = everything(*(x[0] for x in given))
    for x, a, b in zip(everything(*given), folded, first, strict=True):
        np.testing.assert_allclose(a[:, 0], x, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(b, x[0], rtol=1e-5, atol=1e-6)


def test_bfloat16_values_give_bfloat16_outputs():
    given = inputs_and_cotangent(dtype=jnp.bfloat16)
    got = everything(*given)
    assert {x.dtype for x in got} == {np.dtype(jnp.bfloat16)}
    check(got, *given, CAUSAL, tolerance=1e-2)


def test_float64_is_kept_throughout(x64):
    given = inputs_and_cotangent(dtype=np.float64)
    (bias,) = normals((4, 7, 7), dtype=np.float64, seed=1)
    check(everything(*given, bias=bias), *given, CAUSAL, tolerance=1e-14, bias=bias)


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
    q, k, v = attention_inputs(**change.pop("sizes", {}))
    with pytest.raises(ValueError, match=message):
        softmax_attention(q, k, v, **change)
