"""FlashAttention is softmax attention: outputs, log-sum-exp and gradients, in linear memory."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import rms_error
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from hla_jax.attention import flash, softmax_attention
from hla_jax.attention.flash import flash_attention

BLOCK = 32


def tokens(*, B=1, T=65, S=None, H=2, K=1, D=4, E=3, dtype=np.float32, seed=0):
    random = np.random.default_rng(seed)
    S = T if S is None else S
    shapes = (B, T, H, D), (B, S, K, D), (B, S, K, E)
    return tuple(random.normal(size=shape).astype(dtype) for shape in shapes)


def definition(q, k, v, d_out, d_lse, *, visible, scale=None):
    """Returns out, lse, dq, dk and dv in float64, one query at a time; visible is [B, T, S]."""
    q, k, v, d_out, d_lse = (np.asarray(x, np.float64) for x in (q, k, v, d_out, d_lse))
    (B, T, H, D), (_, _, K, E) = q.shape, v.shape
    scale = D**-0.5 if scale is None else scale
    out, lse = np.zeros((B, T, H, E)), np.full((B, T, H), -np.inf)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b, t, h in np.ndindex(B, T, H):
        s, g = np.flatnonzero(visible[b, t]), h // (H // K)
        if len(s):
            logits = scale * k[b, s, g] @ q[b, t, h]
            lse[b, t, h] = logits.max() + np.log(np.exp(logits - logits.max()).sum())
            p = np.exp(logits - lse[b, t, h])
            out[b, t, h] = p @ v[b, s, g]
            dp = v[b, s, g] @ d_out[b, t, h]
            d_logits = scale * p * (dp - p @ dp + d_lse[b, t, h])
            dq[b, t, h] = d_logits @ k[b, s, g]
            dk[b, s, g] += np.outer(d_logits, q[b, t, h])
            dv[b, s, g] += np.outer(p, d_out[b, t, h])
    return out, lse, dq, dk, dv


def everything(q, k, v, d_out, d_lse, **options):
    """Returns out, lse, dq, dk and dv; the cotangents are those of out and lse."""

    @jax.jit
    def run(q, k, v, d_out, d_lse):
        results, vjp = jax.vjp(lambda *x: flash_attention(*x, **options), q, k, v)
        return *results, *vjp((d_out, d_lse))

    return run(q, k, v, d_out, d_lse)


def cotangents(q, v):
    random = np.random.default_rng(9)
    d_out = random.normal(size=(*q.shape[:-1], v.shape[-1])).astype(v.dtype)
    return d_out, random.normal(size=q.shape[:-1]).astype(jnp.promote_types(q.dtype, jnp.float32))


def check(got, wanted, tolerance):
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, wanted, strict=True):
        assert a.shape == b.shape, name
        finite = np.isfinite(b)  # the lse of a query without keys is -inf in both
        np.testing.assert_array_equal(np.asarray(a)[~finite], b[~finite])
        assert rms_error(np.where(finite, a, 0), np.where(finite, b, 0)) < tolerance, name


@pytest.mark.parametrize(
    ("sizes", "causal"),
    [
        (dict(T=0), True),
        (dict(T=1), True),
        (dict(T=63, H=6, K=2, B=2), True),
        (dict(T=65, D=6, E=4), True),  # widths 192 and 128, scaled down
        (dict(T=130, H=3, K=3, E=9), True),
        (dict(T=33, S=130), False),  # 512 queries and 2048 keys, scaled down
        (dict(T=70, S=1), False),
        (dict(T=5, S=0), False),
    ],
)
def test_equals_the_definition(sizes, causal):
    q, k, v = tokens(**sizes)
    (B, T), S = q.shape[:2], k.shape[1]
    visible = np.broadcast_to(np.tri(T, S) if causal else np.ones((T, S)), (B, T, S))
    given = (q, k, v, *cotangents(q, v))
    got = everything(*given, causal=causal, block_size=BLOCK)
    check(got, definition(*given, visible=visible), 2e-6)


def test_segments_and_masked_tokens_that_hold_nan():
    q, k, v = tokens(B=2, T=65)
    mask = np.random.default_rng(1).random((2, 65)) < 0.7
    mask[1, :40] = False  # a whole block of keys that nobody sees
    ids = np.broadcast_to(np.repeat([4, 2, 4], [20, 15, 30]), (2, 65))
    same = np.repeat([0, 1, 2], [20, 15, 30])[:, None] == np.repeat([0, 1, 2], [20, 15, 30])
    visible = np.tri(65, dtype=bool) & same & mask[:, None, :] & mask[:, :, None]
    wanted = definition(q, k, v, *cotangents(q, v), visible=visible)
    poison = np.where(mask[..., None, None], 0, np.nan).astype(np.float32)
    got = everything(
        q + poison,
        k + poison,
        v + poison,
        *cotangents(q, v),
        mask=mask,
        segment_ids=ids,
        block_size=BLOCK,
    )
    check(got, wanted, 2e-6)


def test_where_not_causal_the_mask_speaks_of_keys_alone():
    q, k, v = tokens(T=40, S=70)
    mask = np.random.default_rng(1).random((1, 70)) < 0.5
    given = (q, k, v, *cotangents(q, v))
    got = everything(*given, causal=False, mask=mask, scale=0.3, block_size=BLOCK)
    visible = np.broadcast_to(mask[:, None, :], (1, 40, 70))
    check(got, definition(*given, visible=visible, scale=0.3), 2e-6)


def test_a_query_without_keys_gives_zero_and_its_gradients_are_zero():
    q, k, v = tokens(T=3)
    d_out, d_lse = cotangents(q, v)
    d_lse = np.full_like(d_lse, -np.inf)  # as a function of lse = -inf would have it
    mask = np.zeros((1, 3), bool)
    out, lse, *gradients = everything(q, k, v, d_out, d_lse, causal=False, mask=mask)
    np.testing.assert_array_equal(lse, -np.inf)
    for x in (out, *gradients):
        np.testing.assert_array_equal(x, 0)


def test_blocks_in_the_future_are_not_visited():
    # Multiplied by weights of 0, the NaNs would be seen.
    q, k, v = tokens(T=2 * BLOCK)
    k[:, BLOCK:], v[:, BLOCK:] = np.nan, np.nan
    d_out, d_lse = cotangents(q, v)
    out, lse, dq, *_ = everything(q, k, v, d_out, d_lse, block_size=BLOCK)
    for x in (out, lse, dq):
        assert np.isfinite(x[:, :BLOCK]).all()
        assert np.isnan(x[:, BLOCK:]).all()


def test_large_logits_do_not_overflow():
    q, k, v = tokens(T=40)
    given = (10 * q, 10 * k, v, *cotangents(q, v))
    got = everything(*given, block_size=16)
    check(got, definition(*given, visible=np.tri(40)[None]), 1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_is_for_products_not_for_sums(dtype):
    q, k, v = (jnp.asarray(x, dtype) for x in tokens(T=65))
    given = (q, k, v, jnp.asarray(cotangents(q, v)[0], dtype), cotangents(q, v)[1])
    got = everything(*given, block_size=BLOCK)
    assert [x.dtype for x in got] == [dtype, jnp.float32, dtype, dtype, dtype]
    wanted = definition(*given, visible=np.tri(65)[None])
    check(got, wanted, 4 * float(jnp.finfo(dtype).eps))
    assert rms_error(got[1], wanted[1]) < 1e-6  # lse is not rounded

    # The sum of many equal weights grows on: bfloat16 would stop at 256.
    ones = jnp.ones((600, 1, 1), dtype)
    out, lse = flash_attention(0 * ones, 0 * ones, ones, block_size=1, causal=False)
    np.testing.assert_array_equal(out, 1)
    np.testing.assert_allclose(lse, np.log(600), rtol=1e-6)


def test_float64_is_kept(x64):
    q, k, v = tokens(dtype=np.float64)
    given = (q, k, v, *cotangents(q, v))
    got = everything(*given, block_size=BLOCK)
    assert {x.dtype for x in got} == {np.dtype(np.float64)}
    check(got, definition(*given, visible=np.tri(65)[None]), 1e-14)
    out, lse = flash_attention(*(x.astype(np.float32) for x in (q, k, v)), block_size=BLOCK)
    assert (out.dtype, lse.dtype) == (np.float32, np.float32)


def test_any_batch_axes_vmap_remat_and_meshes():
    q, k, v = tokens(B=4, T=20)

    def loss(q, k, v):
        out, lse = flash_attention(q, k, v, block_size=8)
        return (out**2).sum() + lse.sum()

    gradient = jax.grad(loss, (0, 1, 2))
    wanted = jax.jit(gradient)(q, k, v)
    rows, everywhere = PartitionSpec("rows"), PartitionSpec()
    auto, explicit = (
        jax.make_mesh((1,), ("rows",), axis_types=(kind,))
        for kind in (AxisType.Auto, AxisType.Explicit)
    )
    sharded = jax.shard_map(
        lambda q, k, v: jax.lax.psum(loss(q, k, v), "rows"),
        mesh=auto,
        in_specs=(rows, everywhere, rows),
        out_specs=everywhere,
    )
    placed = jax.device_put((q, k, v), NamedSharding(explicit, rows))
    for name, other, given in (
        ("batch axes", gradient, [x.reshape(2, 2, *x.shape[1:]) for x in (q, k, v)]),
        ("vmap", jax.vmap(gradient), (q, k, v)),
        ("remat", jax.grad(jax.checkpoint(loss), (0, 1, 2)), (q, k, v)),
        ("shard_map", jax.grad(sharded, (0, 1, 2)), (q, k, v)),
        ("explicit axes", gradient, placed),
    ):
        for a, b in zip(jax.jit(other)(*given), wanted, strict=True):
            assert rms_error(np.reshape(a, b.shape), b) < 1e-6, name


def test_without_jit():
    q, k, v = tokens(T=5, H=1)
    given = (q, k, v, *cotangents(q, v))
    with jax.disable_jit():
        got = everything(*given, block_size=3)
    check(got, definition(*given, visible=np.tri(5)[None]), 2e-6)


def test_memory_grows_linearly_forward_and_backward():
    def temporaries(attention, T):
        tokens = jax.ShapeDtypeStruct((T, 1, 8), jnp.float32)
        gradient = jax.jit(jax.grad(lambda q, k, v: attention(q, k, v).sum(), (0, 1, 2)))
        return gradient.lower(tokens, tokens, tokens).compile().memory_analysis().temp_size_in_bytes

    def exponent(attention, lengths):
        sizes = [temporaries(attention, T) for T in lengths]
        return np.polyfit(np.log(lengths), np.log(sizes), 1)[0]

    lengths = (1024, 2048, 4096)
    assert exponent(lambda *x: flash_attention(*x, block_size=64)[0], lengths) < 1.2
    assert exponent(softmax_attention, lengths) > 1.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(block_size=0), "block_size must be"),
        (dict(scale="small"), "scale must be"),
        (dict(implementation="triton"), "implementation must be"),
        (dict(implementation="cudnn"), "cudnn.*the backend is cpu"),
        (dict(implementation="cudnn", mask=np.ones((1, 65), bool)), "mask and segment_ids"),
        (dict(implementation="tokamax", segment_ids=np.ones((1, 65), int)), "mask and segment_ids"),
    ],
)
def test_what_cannot_be_served_is_refused_while_tracing(options, message, no_type_checks):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: flash_attention(*tokens(), **options))


def check_adapter(implementation):
    """A library's outputs and gradients are those of "xla", and lse costs nothing where unused."""
    given = tokens(B=4, T=40, H=4, K=2, D=6, E=9)

    def loss(which, options, q, k, v):
        return sum((flash_attention(q, k, v, **options)[i] ** 2).sum() for i in which)

    def gradient(which, **options):
        loss_of_tokens = partial(loss, which, dict(block_size=8, scale=0.3) | options)
        return jax.jit(jax.grad(loss_of_tokens, (0, 1, 2)))

    for causal in (True, False):
        got = gradient((0, 1), causal=causal, implementation=implementation)(*given)
        for a, b in zip(got, gradient((0, 1), causal=causal)(*given), strict=True):
            assert rms_error(a, b) < 2e-6
    for which, has_loops in (((0,), False), ((0, 1), True)):
        compiled = gradient(which, implementation=implementation).lower(*given).compile()
        assert ("while(" in compiled.as_text()) == has_loops


def test_the_arguments_of_cudnn_mean_the_same(monkeypatch):
    def in_xla(q, k, v, *, implementation, **options):
        assert implementation == "cudnn"
        assert q.shape[-1] % 8 == 0
        return dense(q, k, v, implementation="xla", **options)

    dense = jax.nn.dot_product_attention
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", in_xla)
    check_adapter("cudnn")


def test_the_arguments_of_tokamax_mean_the_same(monkeypatch):
    pytest.importorskip("tokamax")
    monkeypatch.setattr(sys, "argv", sys.argv[:1])  # which it parses
    monkeypatch.setattr(flash, "_FUSED", ("xla",))
    check_adapter("tokamax")


def test_tokamax_is_refused_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    with pytest.raises(ValueError, match=r'"tokamax" cannot serve this request here .*import'):
        flash_attention(*tokens(), implementation="tokamax")
