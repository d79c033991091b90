"""FlashAttention is softmax attention: outputs, log-sum-exp and gradients, in linear memory."""

import importlib
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
from helpers import attention_inputs, normals, rms_error
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from hla_jax.attention import flash
from hla_jax.attention.flash import flash_attention

sys.path.append(str(Path(__file__).parents[1] / "examples/benchmarks"))
costs = importlib.import_module("costs")

BLOCK = 32

tokens = partial(attention_inputs, B=1, T=65, H=2, K=1)


def with_cotangents(q, k, v):
    """Adds the cotangents of out and lse."""
    (d_out,) = normals((*q.shape[:-1], v.shape[-1]), dtype=v.dtype, seed=9)
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    return q, k, v, d_out, *normals(q.shape[:-1], dtype=dtype, seed=10)


@partial(jax.jit, static_argnames=("causal", "scale", "block_size"))
def everything(q, k, v, d_out, d_lse, **options):
    """Returns out, lse, dq, dk and dv."""
    results, pull = jax.vjp(lambda *x: flash_attention(*x, **options), q, k, v)
    return *results, *pull((d_out, d_lse))


def definition(q, k, v, d_out, d_lse, *, visible, scale=None):
    return naive.softmax_attention(q, k, v, visible, scale=scale, d_out=d_out, d_lse=d_lse)


def check(got, wanted, tolerance):
    for name, a, b in zip(wanted._fields, got, wanted, strict=True):
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
        (dict(T=64), True),
        (dict(T=130, H=3, K=3, E=9), True),
        (dict(T=33, S=130, D=6, E=4), False),  # 512 and 2048 tokens, widths 192 and 128, scaled
        (dict(T=5, S=0), False),
    ],
)
def test_equals_the_definition(sizes, causal):
    given = with_cotangents(*tokens(**sizes))
    T, S = given[0].shape[1], given[1].shape[1]
    visible = np.tri(T, S) if causal else np.ones((T, S))
    got = everything(*given, causal=causal, block_size=BLOCK)
    check(got, definition(*given, visible=visible), 2e-6)


def test_segments_and_masked_tokens_that_hold_nan():
    q, k, v, *cotangents = with_cotangents(*tokens(B=2))
    mask = np.random.default_rng(1).random((2, 65)) < 0.7
    mask[1, :40] = False  # a whole block of keys that nobody sees
    ids = np.broadcast_to(np.repeat([4, 2, 4], [20, 15, 30]), (2, 65))
    visible = np.tri(65, dtype=bool) & naive.same_segment(mask, ids)
    wanted = definition(q, k, v, *cotangents, visible=visible)
    poison = np.where(mask[..., None, None], 0, np.nan).astype(np.float32)
    poisoned = (x + poison for x in (q, k, v))
    got = everything(*poisoned, *cotangents, mask=mask, segment_ids=ids, block_size=BLOCK)
    check(got, wanted, 2e-6)


def test_where_not_causal_the_mask_speaks_of_keys_alone():
    given = with_cotangents(*tokens(T=40, S=70))
    mask = np.random.default_rng(1).random((1, 70)) < 0.5
    got = everything(*given, causal=False, mask=mask, scale=0.3, block_size=BLOCK)
    check(got, definition(*given, visible=mask[:, None, :], scale=0.3), 2e-6)


def test_a_query_without_keys_gives_zero_and_its_gradients_are_zero():
    *given, d_lse = with_cotangents(*tokens(T=3))
    d_lse = np.full_like(d_lse, -np.inf)  # as a function of lse = -inf would have it
    mask = np.zeros((1, 3), bool)
    out, lse, *gradients = everything(*given, d_lse, causal=False, mask=mask)
    np.testing.assert_array_equal(lse, -np.inf)
    for x in (out, *gradients):
        np.testing.assert_array_equal(x, 0)


def test_blocks_in_the_future_are_not_visited():
    # Multiplied by weights of 0, the NaNs would be seen.
    q, k, v, *cotangents = with_cotangents(*tokens(T=2 * BLOCK))
    k[:, BLOCK:], v[:, BLOCK:] = np.nan, np.nan
    out, lse, dq, *_ = everything(q, k, v, *cotangents, causal=True, block_size=BLOCK)
    for x in (out, lse, dq):
        assert np.isfinite(x[:, :BLOCK]).all()
        assert np.isnan(x[:, BLOCK:]).all()


def test_large_logits_do_not_overflow():
    q, k, v, *cotangents = with_cotangents(*tokens(T=2 * BLOCK))
    given = (10 * q, 10 * k, v, *cotangents)
    got = everything(*given, causal=True, block_size=BLOCK)
    check(got, definition(*given, visible=np.tri(2 * BLOCK)), 1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_is_for_products_not_for_sums(dtype):
    given = with_cotangents(*tokens(dtype=dtype))
    got = everything(*given, block_size=BLOCK)
    assert [x.dtype for x in got] == [dtype, jnp.float32, dtype, dtype, dtype]
    wanted = definition(*given, visible=np.tri(65))
    check(got, wanted, 4 * float(jnp.finfo(dtype).eps))
    assert rms_error(got[1], wanted.lse) < 1e-6  # lse is not rounded


def test_a_sum_of_many_equal_weights_grows_on():
    ones = jnp.ones((600, 1, 1), jnp.bfloat16)  # in which a sum of ones stops at 256
    attention = jax.jit(partial(flash_attention, block_size=1, causal=False))
    out, lse = attention(0 * ones, 0 * ones, ones)
    np.testing.assert_array_equal(out, 1)
    np.testing.assert_allclose(lse, np.log(600), rtol=1e-6)


def test_float64_is_kept(x64):
    given = with_cotangents(*tokens(dtype=np.float64))
    got = everything(*given, block_size=BLOCK)
    assert {x.dtype for x in got} == {np.dtype(np.float64)}
    check(got, definition(*given, visible=np.tri(65)), 1e-14)
    out, lse = jax.eval_shape(flash_attention, *tokens())
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
    given = with_cotangents(*tokens(T=4, H=1))
    with jax.disable_jit():
        got = everything(*given, block_size=2)
    check(got, definition(*given, visible=np.tri(4)), 2e-6)


def test_memory_grows_linearly_forward_and_backward():
    def gradient(q, k, v):
        return jax.grad(lambda *x: flash_attention(*x, block_size=64)[0].sum(), (0, 1, 2))(q, k, v)

    lengths = (1024, 2048, 4096)
    inputs = [[jax.ShapeDtypeStruct((T, 1, 8), jnp.float32)] * 3 for T in lengths]
    sizes = [costs.temp_bytes(gradient, *x) for x in inputs]
    assert costs.exponent(lengths, sizes) < 1.2


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
    """A library's outputs and gradients are right, and lse costs nothing where it is not used."""
    q, k, v, *cotangents = with_cotangents(*tokens(B=4, T=40, H=4, K=2, D=6, E=9))

    def compiled(causal, used):
        options = dict(causal=causal, scale=0.3, block_size=8, implementation=implementation)

        def run(q, k, v):
            results, pull = jax.vjp(lambda *x: flash_attention(*x, **options)[:used], q, k, v)
            return *results, *pull(tuple(cotangents[:used]))

        return jax.jit(run).lower(q, k, v).compile()

    for causal, visible in ((True, np.tri(40)), (False, np.ones((40, 40)))):
        run = compiled(causal, 2)
        check(run(q, k, v), definition(q, k, v, *cotangents, visible=visible, scale=0.3), 2e-6)
    assert "while(" in run.as_text()
    assert "while(" not in compiled(False, 1).as_text()


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
