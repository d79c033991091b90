"""Sparse attention is softmax attention under a pattern's mask, at the cost of its blocks."""

import functools

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
from helpers import attention_inputs, normals, rms_error

from hla_jax.attention import sparse_attention
from hla_jax.attention.patterns import (
    big_bird,
    dilated_window,
    fixed,
    global_tokens,
    longformer,
    random_blocks,
    sliding_window,
    strided,
)

KEY = jax.random.key(0)

# Each pattern, and what the paper says: whether query t sees key s.
DEFINITIONS = {
    "window 4": (sliding_window(4), lambda t, s: abs(t - s) < 4),
    "window 1": (sliding_window(1), lambda t, s: t == s),
    "window 33": (sliding_window(33), lambda t, s: abs(t - s) < 33),
    "window past T": (sliding_window(10**12), lambda t, s: True),
    "dilated": (dilated_window(3, 4), lambda t, s: t - s in (-8, -4, 0, 4, 8)),
    "dilated past T": (dilated_window(2, 10**12), lambda t, s: t == s),
    "global": (global_tokens([5, 0, 64, 5, 10**12]), lambda t, s: bool({t, s} & {0, 5, 64})),
    "no global": (global_tokens([]), lambda t, s: False),
    "strided": (strided(8), lambda t, s: abs(t - s) < 8 or t % 8 == s % 8),
    "strided past T": (strided(10**12), lambda t, s: True),
    "fixed": (fixed(8), lambda t, s: t // 8 == s // 8 or s % 8 == 7),
    "fixed, 2 of 5": (fixed(5, 2), lambda t, s: t // 5 == s // 5 or s % 5 in (3, 4)),
    "fixed past T": (fixed(10**12), lambda t, s: True),
    "longformer": (
        longformer(3, [0, 9], 2),
        lambda t, s: t - s in (-4, -2, 0, 2, 4) or bool({t, s} & {0, 9}),
    ),
}


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="causal")
def mask_of(pattern, T, causal):
    return pattern.mask(T, causal=causal)


def dense(sees, T):
    return np.array([[sees(t, s) for s in range(T)] for t in range(T)], bool).reshape(T, T)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_pattern_is_its_definition_and_each_pair_of_a_piece_is_in_one_block(name):
    pattern, sees = DEFINITIONS[name]
    for T in (0, 1, 7, 63, 65, 130):
        t, s = np.arange(T)[None, :, None], np.arange(T)[None, None, :]
        wanted = dense(sees, T)
        for causal, allowed in ((False, np.ones((T, T), bool)), (True, np.tri(T, dtype=bool))):
            shown = np.zeros((T, T), bool)
            for piece in pattern.pieces(T, causal):
                here = piece.sees(t, s)[0] & allowed
                assert (blocks_holding(piece, T)[here] == 1).all()
                shown |= here
            np.testing.assert_array_equal(shown, wanted & allowed)


def blocks_holding(piece, T):
    """In how many blocks each pair (t, s) lies."""
    held = np.zeros((T, T), int)
    for queries, keys in zip(piece.queries[0], piece.keys[0], strict=True):
        assert piece.queries.dtype == piece.keys.dtype == np.int32
        np.add.at(held, np.ix_(queries[queries >= 0], keys[keys >= 0]), 1)
    return held


def test_the_dense_mask_is_the_union_of_the_pieces():
    pattern = sliding_window(4) | strided(8) | global_tokens([3])
    wanted = dense(lambda t, s: abs(t - s) < 8 or t % 8 == s % 8 or 3 in (t, s), 20)
    np.testing.assert_array_equal(pattern.mask(20, causal=False)[0], wanted)
    np.testing.assert_array_equal(pattern.mask(20, causal=True)[0], wanted & np.tri(20, dtype=bool))


def test_the_window_holds_the_last_tokens_and_the_token_itself():
    seen = np.asarray(sliding_window(4).mask(12, causal=True)[0])
    assert [list(seen[t].nonzero()[0]) for t in (0, 2, 8, 11)] == [
        [0],
        [0, 1, 2],
        [5, 6, 7, 8],
        [8, 9, 10, 11],
    ]


@pytest.mark.parametrize("causal", [True, False])
def test_random_blocks_are_distinct_and_as_many_as_asked(causal):
    pattern = random_blocks(KEY, num_blocks=3, block_size=4, num_heads=2)
    T, total = 30, 8
    (piece,) = pattern.pieces(T, causal)
    for head in range(2):
        for n, keys in enumerate(np.asarray(piece.keys[head]).reshape(total, 3, 4)):
            blocks = [block[0] // 4 for block in keys if block[0] >= 0]
            there_are = n + 1 if causal else total
            assert len(set(blocks)) == len(blocks) == min(3, there_are)
            assert max(blocks) < there_are
            seen = {int(s) for s in keys.ravel() if s >= 0}
            assert seen == {s for b in blocks for s in range(4 * b, min(4 * b + 4, T))}
            row = np.asarray(piece.sees(np.full((1, 1, 1), 4 * n), np.arange(T)[None, None]))
            assert set(row[head, 0].nonzero()[0]) == seen


def test_random_blocks_depend_on_the_key_and_the_head_alone():
    def mask(key, T):
        return random_blocks(key, num_blocks=2, block_size=2, num_heads=2).mask(T, causal=True)

    jitted = jax.jit(mask, static_argnums=1)
    first = np.asarray(jitted(KEY, 32))
    np.testing.assert_array_equal(first[:, :21, :21], mask(KEY, 21))
    assert (first != jitted(jax.random.key(1), 32)).any()
    assert (first[0] != first[1]).any()
    with jax.enable_x64(True):
        np.testing.assert_array_equal(first, jitted(KEY, 32))


def test_all_blocks_are_drawn():
    pattern = random_blocks(KEY, num_blocks=1, block_size=1, num_heads=400)
    drawn = np.asarray(mask_of(pattern, 4, causal=False)).sum(0)
    assert (drawn > 60).all()  # of 400 heads, 100 on average with a deviation of 9
    assert (drawn < 140).all()


def tokens(dtype=np.float64, **sizes):
    """Inputs and the cotangent of the outputs."""
    q, k, v = attention_inputs(**dict(T=65, D=5) | sizes, dtype=dtype)
    return q, k, v, *normals((*q.shape[:-1], v.shape[-1]), dtype=dtype, seed=9)


@functools.partial(jax.jit, static_argnames=("pattern", "causal"))
def output_and_gradients(q, k, v, cotangent, *, pattern, causal=True, mask=None, segment_ids=None):
    def attention(q, k, v):
        options = dict(causal=causal, mask=mask, segment_ids=segment_ids)
        return sparse_attention(q, k, v, pattern, **options)

    out, pull = jax.vjp(attention, q, k, v)
    return out, *pull(cotangent)


def check(got, q, k, v, cotangent, visible, tolerance):
    wanted = naive.softmax_attention(q, k, v, visible, d_out=cotangent)
    for name, x in zip(("out", "dq", "dk", "dv"), got, strict=True):
        assert rms_error(x, getattr(wanted, name)) < tolerance, name


HEADS_DIFFER = random_blocks(jax.random.key(1), num_blocks=1, block_size=8, num_heads=4)
BIG_BIRD = dict(window=3, num_random=2, global_positions=[0, 20], block_size=4)


@pytest.mark.parametrize(
    ("pattern", "causal", "sizes"),
    [
        (sliding_window(4), True, dict()),
        (sliding_window(20), False, dict(T=63, H=3, K=1)),
        (sliding_window(100), True, dict(T=7, D=1)),
        (sliding_window(1), True, dict(T=1)),
        (dilated_window(5, 3), False, dict()),
        (strided(9), False, dict()),
        (fixed(11, 2), True, dict(T=130, B=1, H=2, K=2)),
        # Most pairs are in two or three of the pieces: each counts once.
        (global_tokens([0, 9]) | strided(4), False, dict(T=33)),
        # Heads differ, before a piece that they share; where causal, after one: see below.
        (HEADS_DIFFER | big_bird(KEY, **BIG_BIRD), False, dict()),
    ],
)
def test_equals_dense_attention_and_its_gradients(pattern, causal, sizes, x64):
    given = tokens(**sizes)
    visible = mask_of(pattern, given[0].shape[1], causal=causal)[None]
    check(output_and_gradients(*given, pattern=pattern, causal=causal), *given, visible, 1e-12)


def test_masked_tokens_and_other_segments_have_no_influence_whatever_they_hold(x64):
    pattern = big_bird(KEY, **BIG_BIRD, num_heads=4)
    q, k, v, cotangent = tokens()
    random = np.random.default_rng(0)
    mask = random.random((2, 65)) < 0.8
    mask[1, :12] = False
    ids = random.integers(0, 3, (2, 65)).repeat(10, axis=1)[:, :65]
    visible = mask_of(pattern, 65, causal=True) & naive.same_segment(mask, ids)[:, None]
    poison = np.where(mask, 0, np.nan)[..., None, None]
    got = output_and_gradients(
        q + poison, k + poison, v + poison, cotangent, pattern=pattern, mask=mask, segment_ids=ids
    )
    check(got, q, k, v, cotangent, visible, 1e-12)
    for x in got:
        np.testing.assert_array_equal(np.asarray(x)[~mask], 0)


def test_without_causality_the_mask_speaks_of_keys_alone(x64):
    pattern = longformer(3, [0, 64])
    q, k, v, cotangent = tokens()
    mask = np.ones((2, 65), bool)
    mask[:, [0, 7, 30]] = mask[1] = False  # the second row has no key at all
    visible = mask_of(pattern, 65, causal=False) & mask[:, None, None]
    poison = np.where(mask, 0, np.nan)[..., None, None]
    got = output_and_gradients(
        q, k + poison, v + poison, cotangent, pattern=pattern, causal=False, mask=mask
    )
    check(got, q, k, v, cotangent, visible, 1e-12)
    for x in got:
        np.testing.assert_array_equal(x[1], 0)


def test_a_query_without_keys_gives_zero_and_finite_gradients():
    *qkv, cotangent = tokens(B=1, T=7, dtype=np.float32)
    out, *gradients = output_and_gradients(*qkv, cotangent, pattern=global_tokens([5]))
    np.testing.assert_array_equal(out[:, :5], 0)
    assert (out[:, 5:] != 0).all()
    np.testing.assert_array_equal(gradients[0][:, :5], 0)
    assert all(np.isfinite(g).all() for g in gradients)


def test_low_logits_lose_nothing_where_pieces_are_joined():
    q, k, v, _ = tokens(T=33, dtype=np.float32)
    q, k = np.full_like(q, 20), np.full_like(k, -20)  # exp(logit) is 0 in float32
    pattern = longformer(3, [0])
    out = jax.jit(sparse_attention, static_argnums=3)(q, k, v, pattern)
    visible = mask_of(pattern, 33, causal=True)[None]
    assert rms_error(out, naive.softmax_attention(q, k, v, visible).out) < 1e-6


def test_bfloat16_is_rounded_at_the_end_alone():
    q, k, v, _ = tokens(B=1, T=300, H=1, K=1, dtype=jnp.bfloat16)
    out = jax.jit(sparse_attention, static_argnums=3)(q, k, v, sliding_window(300))
    assert out.dtype == jnp.bfloat16
    assert rms_error(out, naive.softmax_attention(q, k, v, np.tri(300)).out) < 2.0**-8


def test_any_leading_axes_vmap_and_no_tokens():
    q, k, v, _ = tokens(B=4, T=7, dtype=np.float32)
    pattern = sliding_window(3)
    attention = jax.jit(functools.partial(sparse_attention, pattern=pattern))
    flat = attention(q, k, v)
    split = attention(*(x.reshape(2, 2, *x.shape[1:]) for x in (q, k, v)))
    np.testing.assert_allclose(split.reshape(flat.shape), flat, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(attention)(q, k, v), flat, rtol=1e-5)
    assert attention(q[:, :0], k[:, :0], v[:, :0]).shape == (4, 0, 4, 3)


def test_works_under_shard_map_with_its_checks_remat_and_scan():
    q, k, v, _ = tokens(T=9, E=5, dtype=np.float32)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def layer(x, _):
        return jax.checkpoint(sparse_attention, static_argnums=3)(x, k, v, sliding_window(3)), None

    def run(x):
        return jax.grad(lambda x: (jax.lax.scan(layer, x, length=2)[0] ** 2).sum())(x)

    spec = jax.sharding.PartitionSpec("x")
    mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
    definition = functools.partial(naive.softmax_attention, visible=np.tri(9) - np.tri(9, k=-3))
    first = definition(q, k, v).out
    second = definition(first, k, v).out
    toward_first = definition(first, k, v, d_out=2 * second).dq
    wanted = definition(q, k, v, d_out=toward_first).dq
    assert rms_error(jax.jit(mapped)(q), wanted) < 1e-5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sliding_window(0), "window must be an integer at least 1, got 0"),
        (lambda: sliding_window(2.5), "window must be an integer"),
        (lambda: dilated_window(2, -1), "dilation must be an integer at least 1"),
        (lambda: global_tokens([3, -1]), "positions must be an integer at least 0, got -1"),
        (lambda: global_tokens(4), "positions must be a sequence of integers, got 4"),
        (lambda: strided(True), "stride must be an integer"),
        (lambda: fixed(4, 5), "summary must be an integer in 1..4, got 5"),
        (lambda: random_blocks(0, num_blocks=1, block_size=1), "key must be"),
        (lambda: random_blocks(KEY, num_blocks=0, block_size=1), "num_blocks"),
    ],
)
def test_a_wrong_argument_of_a_pattern_is_named(make, message, no_type_checks):
    with pytest.raises(ValueError, match=message):
        make()


SHORTER = dict(k=np.zeros((2, 6, 2, 5)), v=np.zeros((2, 6, 2, 3)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(pattern=4), "pattern must be"),
        (
            dict(pattern=random_blocks(KEY, num_blocks=1, block_size=2, num_heads=3)),
            "q's 4, got one for 3",
        ),
        (dict(causal=1), "causal must be"),
        (SHORTER, "T and S must be equal"),
        (SHORTER | dict(causal=False), "one length"),
        (dict(mask=np.ones((2, 3), bool)), "mask"),
    ],
)
def test_a_wrong_argument_of_attention_is_named(change, message, no_type_checks):
    q, k, v, _ = tokens(T=7)
    arguments = dict(q=q, k=k, v=v, pattern=sliding_window(2)) | change
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: sparse_attention(**arguments))


def test_a_pattern_knows_whether_the_distance_alone_decides():
    assert (sliding_window(4) | strided(3)).relative
    assert longformer(3).relative
    assert not longformer(3, [0]).relative
    assert not (sliding_window(4) | fixed(3)).relative
