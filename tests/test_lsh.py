"""LSH attention attends to the sets that its definition names, for any length, mask and rounds."""

from functools import partial

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
from helpers import attention_inputs, normals, rms_error
from jax.sharding import AxisType, PartitionSpec

from hla_jax.attention.lsh import lsh_attention, lsh_buckets, lsh_decode
from hla_jax.testing import check_causal

KEY = jax.random.key(3)
jitted = jax.jit(partial(lsh_attention, num_buckets=4))


def tokens(**sizes):
    qk, _, v = attention_inputs(**dict(B=1, H=2) | sizes)
    return qk, v


def found(buckets, labels, size, causal):
    """Which tokens each one finds: bool [B, H, T, T], by the definition, a token at a time."""
    buckets = np.asarray(buckets)
    B, T, H, R = buckets.shape
    sets = np.zeros((B, H, T, T), bool)
    for b, h, r, t in np.ndindex(B, H, R, T):
        if labels[b, t] >= 0:
            same = (labels[b] == labels[b, t]) & (buckets[b, :, h, r] == buckets[b, t, h, r])
            line = list(np.flatnonzero(same))
            for place, s in enumerate(line):
                if abs(place - line.index(t)) < size and (s <= t or not causal):
                    sets[b, h, t, s] = True
    return sets


def without_itself(sets):
    """A token that finds others leaves itself out."""
    own = np.eye(sets.shape[-1], dtype=bool)
    return np.where((sets & ~own).any(-1, keepdims=True), sets & ~own, sets)


def definition(qk, v, sets, scale=None, d_out=None):
    """Softmax attention over the sets to x / |x|: out, and the gradients of qk and v."""
    qk, K = qk.astype(np.float64), v.shape[-2]
    group = qk.shape[-2] // K
    sizes = np.sqrt((qk**2).sum(-1, keepdims=True))
    keys, values = qk / sizes, np.repeat(v, group, axis=-2)
    exact = naive.softmax_attention(qk, keys, values, sets, scale=scale, d_out=d_out)
    if d_out is None:
        return exact.out
    along = (exact.dk * keys).sum(-1, keepdims=True)
    dv = exact.dv.reshape(*v.shape[:-2], K, group, -1).sum(-2)
    return exact.out, exact.dq + (exact.dk - along * keys) / sizes, dv


MASK = np.random.default_rng(0).random((2, 40)) > 0.2
SEGMENTS = np.random.default_rng(1).integers(0, 3, (2, 5)).repeat(8, axis=1)


@pytest.mark.parametrize(
    ("sizes", "options", "packing"),
    [
        (dict(T=65, H=1, K=1), dict(num_buckets=4, num_rounds=2, chunk_size=8), {}),
        (dict(T=33), dict(num_rounds=4, chunk_size=5, causal=False), {}),
        (dict(T=7, D=3, E=5), dict(scale=2.0), {}),
        (dict(T=8, H=1, K=1), dict(chunk_size=4, causal=False), {}),
        (
            dict(B=2, T=40, H=4),
            dict(num_rounds=3, chunk_size=6),
            dict(mask=MASK, segment_ids=SEGMENTS),
        ),
        (
            dict(B=2, T=40, H=2, K=1),
            dict(num_buckets=4, num_rounds=2, chunk_size=7, causal=False),
            dict(mask=MASK, segment_ids=SEGMENTS),
        ),
    ],
)
def test_equals_the_definition_with_its_gradients(sizes, options, packing, x64):
    qk, v = tokens(**sizes, dtype=np.float64)
    mask = packing.get("mask", np.ones(qk.shape[:2], bool))
    labels = naive.segment_labels(mask, packing.get("segment_ids", np.zeros(qk.shape[:2], int)))
    options = dict(num_buckets=2, num_rounds=1, chunk_size=64, causal=True, scale=None) | options
    poison = np.where(mask, 0, np.nan)[..., None, None]
    (d_out,) = normals((*qk.shape[:3], v.shape[-1]), dtype=np.float64, seed=2)

    @jax.jit
    def run(qk, v):
        out, pull = jax.vjp(lambda *x: lsh_attention(*x, key=KEY, **packing, **options), qk, v)
        buckets = lsh_buckets(qk, KEY, options["num_buckets"], options["num_rounds"])
        return (out, *pull(d_out)), buckets

    got, buckets = run(qk + poison, v + poison)
    sets = without_itself(found(buckets, labels, options["chunk_size"], options["causal"]))
    wanted = definition(qk, v, sets, options["scale"], d_out)
    for x, reference, tolerance in zip(got, wanted, (1e-12, 1e-11, 1e-11), strict=True):
        assert rms_error(x, reference) < tolerance
        assert (np.asarray(x)[~mask] == 0).all()


def test_many_rounds_are_softmax_attention_to_the_other_tokens():
    qk, v = tokens(T=24)
    qk = abs(qk)  # at right angles at most: a round finds a pair with a chance of a half or more
    others = without_itself(np.tri(24, dtype=bool))
    exact = definition(qk, v, others)
    keys = jax.random.split(KEY, 4)

    def error(num_rounds):
        forward = partial(lsh_attention, qk, v, num_buckets=2, num_rounds=num_rounds)
        got = jax.jit(jax.vmap(lambda key: forward(key=key)))(keys)
        return rms_error(got, np.stack([exact] * 4))

    errors = [error(num_rounds) for num_rounds in (1, 4, 32)]
    assert errors[0] > 2 * errors[1] > 0.02
    assert errors[2] < 1e-6


def test_a_token_attends_to_itself_only_when_alone():
    qk = jnp.array([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]])[:, None] * 1e6  # however low the logits
    v = jnp.array([1.0, 2.0, 4.0]).reshape(3, 1, 1)
    options = dict(num_buckets=2, num_rounds=3, scale=-1.0)
    forward = jax.jit(partial(lsh_attention, key=KEY, **options), static_argnames="chunk_size")
    out = forward(qk, v, chunk_size=2)
    np.testing.assert_array_equal(out.ravel(), [1, 2, 1])
    np.testing.assert_array_equal(forward(qk, v, chunk_size=1), v)
    np.testing.assert_array_equal(forward(qk[:1], v[:1], chunk_size=2), v[:1])


def test_the_key_alone_decides():
    qk, v = tokens(B=2)
    np.testing.assert_allclose(
        jitted(qk, v, key=KEY), lsh_attention(qk, v, key=KEY, num_buckets=4), rtol=1e-5, atol=1e-6
    )
    assert rms_error(jitted(qk, v, key=jax.random.key(4)), jitted(qk, v, key=KEY)) > 0.1


def test_rows_do_not_depend_on_what_follows():
    qk, v = tokens(T=40, H=1, K=1)
    forward = partial(lsh_attention, key=KEY, num_buckets=4, num_rounds=2, chunk_size=4)
    rows = jax.jit(forward)
    assert rms_error(rows(qk[:, :17], v[:, :17]), rows(qk, v)[:, :17]) < 1e-6
    check_causal(forward, (qk[:, :6], v[:, :6]), axis=1)


def test_decoding_gives_the_rows_of_the_whole_sequence():
    qk, v = tokens(B=2, T=40, H=4)
    options = dict(num_buckets=4, num_rounds=2)
    rows = jax.jit(partial(lsh_attention, key=KEY, chunk_size=3, **options))(
        qk, v, mask=MASK, segment_ids=SEGMENTS
    )
    buckets = lsh_buckets(qk, KEY, **options)
    visible = naive.same_segment(MASK, SEGMENTS) & np.tri(40, dtype=bool)
    decode = jax.jit(partial(lsh_decode, chunk_size=3))
    for t in (np.s_[:7], np.s_[39:]):
        got = decode(qk[:, t], buckets[:, t], qk, v, buckets, visible[:, t])
        assert rms_error(got, rows[:, t]) < 1e-6


def test_buckets_are_sectors_of_direction():
    qk, _ = tokens(T=200, D=8)
    buckets = lsh_buckets(qk, KEY, 8, 3)
    assert buckets.dtype == jnp.int32
    assert set(np.unique(buckets)) == set(range(8))
    np.testing.assert_array_equal(lsh_buckets(2 * qk, KEY, 8, 3), buckets)
    np.testing.assert_array_equal(lsh_buckets(-qk, KEY, 8, 3), (buckets + 4) % 8)
    np.testing.assert_array_equal(lsh_buckets(qk[:, 5:8], KEY, 8, 3), buckets[:, 5:8])
    near, far = (
        np.mean(lsh_buckets(qk + c * np.roll(qk, 1, 1), KEY, 8, 3) == buckets) for c in (0.2, 2)
    )
    assert near > 0.7 > 0.5 > far


def test_heads_and_rounds_hash_by_themselves():
    x = np.random.default_rng(0).normal(size=(200, 1, 4)).repeat(2, axis=1).astype(np.float32)
    (a, b), (c, d) = np.moveaxis(lsh_buckets(x, KEY, 4, 2), 0, -1)
    for one, other in ((a, b), (a, c), (a, d), (c, d)):
        assert np.mean(one == other) < 0.9


def test_no_tokens_any_leading_axes_and_low_precision():
    qk, v = tokens(B=2)
    forward = partial(jitted, key=KEY)
    assert forward(qk[:, :0], v[:, :0]).shape == (2, 0, 2, 3)
    rows = forward(qk, v)
    np.testing.assert_allclose(forward(qk[0], v[0]), rows[0], rtol=1e-5)
    np.testing.assert_allclose(forward(qk[:, None], v[:, None]), rows[:, None], rtol=1e-5)
    low = jnp.asarray(qk, jnp.bfloat16), jnp.asarray(v, jnp.bfloat16)
    out = forward(*low)
    assert out.dtype == jnp.bfloat16
    assert rms_error(out, forward(*(x.astype(jnp.float32) for x in low))) < 4e-3


def test_works_in_shard_map_vmap_and_remat():
    qk, v = tokens(B=2)
    forward = partial(lsh_attention, key=KEY, num_buckets=2)
    mesh = jax.make_mesh((1,), ("x",), (AxisType.Auto,))
    rows = PartitionSpec("x")
    sharded = jax.shard_map(forward, mesh=mesh, in_specs=(rows, rows), out_specs=rows)

    @jax.jit
    def gradients(qk, v):
        forms = forward, sharded, jax.vmap(jax.checkpoint(forward))
        return [jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1))(qk, v) for f in forms]

    plain, *others = gradients(qk, v)
    for other in others:
        for one, another in zip(plain, other, strict=True):
            assert rms_error(another, one) < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(sizes=dict(H=4, K=3)), r"K a divisor of H, got .*\(1, 7, 4, 4\)"),
        (dict(v=np.zeros((1, 6, 2, 3))), "qk and v must be"),
        (dict(v=np.zeros((1, 7, 2, 3), int)), "qk and v must be floating, .* and int"),
        (dict(mask=np.ones((2, 3), bool)), "mask"),
        (dict(segment_ids=np.zeros((2, 7), int)), "segment_ids"),
        (dict(num_buckets=3), "num_buckets must be even, got 3"),
        (dict(num_buckets=0), "num_buckets must be an integer at least 1, got 0"),
        (dict(num_rounds=1.0), "num_rounds must be an integer at least 1, got 1.0"),
        (dict(chunk_size=0), "chunk_size must be an integer at least 1, got 0"),
    ],
)
def test_a_wrong_argument_is_named(change, message, no_type_checks):
    change = dict(change)
    qk, v = tokens(**change.pop("sizes", {}))
    with pytest.raises(ValueError, match=message):
        lsh_attention(qk, change.pop("v", v), key=KEY, **change)
