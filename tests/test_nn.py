"""All layers keep one promise: the same outputs and states however tokens are cut and padded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import rms_error

from hla_jax import nn
from hla_jax.attention import patterns

F, H, K, D, E, MAX_LENGTH = 12, 4, 2, 5, 3, 12

HEADS = dict(num_kv_heads=K, head_dim=D, value_head_dim=E)
CACHED = HEADS | dict(max_length=MAX_LENGTH)
OPTIONS = {
    "linear": (nn.LinearAttention, HEADS | dict(decay=0.9)),
    "hla2": (nn.HLA2, HEADS),
    "ahla": (nn.AHLA, HEADS | dict(decay=(0.9, 0.7))),
    "hla3": (nn.HLA3, HEADS | dict(decay=None)),
    "performer": (nn.Performer, HEADS | dict(num_features=7)),
    "softmax": (nn.SoftmaxAttention, CACHED),
    "flash": (nn.FlashAttention, CACHED),
    "mla": (nn.MLA, dict(kv_rank=5, query_rank=6, rotary_dim=4, max_length=MAX_LENGTH)),
    "window": (nn.SlidingWindowAttention, HEADS | dict(window=4)),
    "strided": (nn.SparseAttention, CACHED | dict(pattern=patterns.strided(3))),
    "fixed": (nn.SparseAttention, CACHED | dict(pattern=patterns.fixed(3))),
    "longformer": (nn.Longformer, CACHED | dict(window=2, global_positions=(5, 1))),
    "big_bird": (nn.BigBird, CACHED | dict(window=2, num_random=1, block_size=2)),
    "reformer": (nn.Reformer, CACHED | dict(num_buckets=2, num_rounds=2, chunk_size=2)),
}
every_mixer = pytest.mark.parametrize("mixer", OPTIONS)
PLACES = ["fixed", "longformer", "big_bird"]  # what a token sees depends on its place in the row


def make(mixer, **more):
    layer, options = OPTIONS[mixer]
    return layer(H, F, rngs=nnx.Rngs(0), **options | more)


def features(B=2, T=9, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, T, F)), jnp.float32)


@nnx.jit
def call(layer, x, state=None, mask=None, segment_ids=None):
    return layer(x, state, mask, segment_ids)


@nnx.jit
def steps(layer, x, state):
    def step(state, token):
        y, state = layer(token[:, None], state)
        return state, y[:, 0]

    state, y = jax.lax.scan(step, state, x.swapaxes(0, 1))
    return y.swapaxes(0, 1), state


def assert_close(got, want, tolerance=1e-5):
    jax.tree.map(lambda a, b: rms_error(a, b) < tolerance or pytest.fail(f"{a} != {b}"), got, want)
    assert jax.tree.structure(got) == jax.tree.structure(want)


@every_mixer
def test_steps_give_what_the_whole_sequence_gives(mixer):
    layer, x = make(mixer), features()
    assert_close(steps(layer, x, layer.init_state(2)), call(layer, x))


def packed():
    """The rows of `features()` as segments of one, with NaN before, inside, between and after."""
    mask = np.ones((1, 24), bool)
    mask[0, [0, 4, 5, 12, 20, 23]] = False
    ids = np.repeat([[0, 1]], 12, axis=1)
    ids[~mask] = 7
    x = jnp.full((1, 24, F), jnp.nan).at[mask].set(features().reshape(18, F))
    return x, mask, ids


def live(layer, state):
    """Without what a cache of one row holds past its position."""
    if not hasattr(layer, "max_length"):
        return state
    return jax.tree.map(lambda a: a if a.ndim == 1 else a[:, : int(state.position[0])], state)


@every_mixer
@pytest.mark.parametrize("pieces", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_packed_and_padded_rows_equal_rows_alone_in_one_call_or_several(mixer, pieces):
    layer, rows = make(mixer), 2
    x, mask, ids = packed()
    if mixer in PLACES:  # padded only
        x, mask, ids, rows = x[:, :12], mask[:, :12], None, 1
    cuts = [[None] * pieces if a is None else np.split(a, pieces, axis=1) for a in (x, mask, ids)]
    state, y = None if pieces == 1 else layer.init_state(1), []
    for piece in zip(*cuts, strict=True):
        part, state = call(layer, piece[0], state, *piece[1:])
        y.append(part)
    y = jnp.concatenate(y, axis=1)
    alone, last = steps(layer, features()[:rows], layer.init_state(rows))
    np.testing.assert_array_equal(y[~mask], 0)
    assert_close(y[mask], alone.reshape(-1, F))
    assert_close(live(layer, state), live(layer, jax.tree.map(lambda a: a[-1:], last)))


@pytest.mark.parametrize("mixer", PLACES)
def test_segments_are_refused_where_places_in_the_row_matter(mixer):
    with pytest.raises(ValueError, match="segment_ids must be None"):
        jax.eval_shape(make(mixer), features(), None, None, jnp.zeros((2, 9), int))


@pytest.mark.parametrize("mixer", ["linear", "softmax"])
def test_padding_adds_nothing_to_gradients(mixer):
    layer = make(mixer)
    x, mask, ids = packed()

    @nnx.jit
    def gradients(layer, x, mask, ids):
        def loss(layer, x):
            return (layer(x, None, mask, ids)[0] ** 2).sum()

        return nnx.grad(loss, argnums=(0, 1))(layer, x)

    d_layer, d_x = gradients(layer, x, mask, ids)
    real = mask[0]
    d_alone, d_real = gradients(layer, x[:, real], mask[:, real], ids[:, real])
    np.testing.assert_array_equal(d_x[~mask], 0)
    assert_close(d_x[mask], d_real[0])
    assert_close(nnx.to_pure_dict(d_layer), nnx.to_pure_dict(d_alone))


@every_mixer
def test_a_masked_step_changes_nothing(mixer):
    layer, x = make(mixer), features()
    _, state = call(layer, x)
    poison = jnp.full((2, 1, F), jnp.nan)
    y, after = call(layer, poison, state, jnp.array([[False], [False]]))
    np.testing.assert_array_equal(y, 0)
    jax.tree.map(np.testing.assert_array_equal, after, state)


def described(state):
    return jax.tree.map(lambda a: (a.shape, a.dtype, a.weak_type), state)


@every_mixer
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_states_keep_shape_and_dtype_from_step_to_step(mixer, dtype, x64):
    layer = make(mixer)
    x = jnp.zeros((2, 1, F), dtype)

    def twice(x, state):
        _, once = layer(x, state)
        return once, layer(x, once)[1]

    start = layer.init_state(2)
    once, again = jax.eval_shape(twice, x, start)
    assert described(start) == described(once) == described(again)
    assert {a.dtype for a in jax.tree.leaves(start)} <= {jnp.dtype("float32"), jnp.dtype("int32")}


@every_mixer
def test_no_token_leaves_the_state_as_it_was(mixer):
    layer = make(mixer)
    y, state = call(layer, jnp.zeros((2, 0, F)), layer.init_state(2))
    assert y.shape == (2, 0, F)
    jax.tree.map(np.testing.assert_array_equal, state, layer.init_state(2))


@every_mixer
def test_computing_in_bfloat16_keeps_sums_in_float32_and_caches_in_bfloat16(mixer):
    layer = make(mixer, dtype=jnp.bfloat16)
    y, state = jax.eval_shape(layer, features())
    assert y.dtype == jnp.bfloat16
    kept = {a.dtype for a in jax.tree.leaves(state.memory)} - {jnp.dtype("int32")}
    assert kept == {jnp.dtype("bfloat16" if hasattr(layer, "max_length") else "float32")}


def test_query_heads_share_kv_heads_in_order():
    """With the keys and values of kv head 1 silenced, only query heads 2 and 3 change."""
    layer = make("softmax")
    x = features()
    layer.out.kernel[...] = jnp.eye(H * E).reshape(H, E, F)  # so that the heads lie side by side
    heads = []
    for silence in (1.0, 0.0):
        layer.value.kernel[...] = layer.value.kernel[...].at[:, 1].multiply(silence)
        heads.append(np.asarray(call(layer, x)[0]).reshape(2, 9, H, E))
    np.testing.assert_array_equal(heads[0][:, :, :2], heads[1][:, :, :2])
    assert (heads[0][:, :, 2:] != heads[1][:, :, 2:]).any()


def test_learned_decay_depends_on_the_token_and_starts_between_2_and_512_tokens():
    layer = make("hla2", num_kv_heads=4)
    rate = jax.nn.softplus(layer.decay(jnp.zeros((1, 1, F))))
    np.testing.assert_allclose(1 / rate[0, 0], [2, 12.7, 80.6, 512], rtol=1e-2)
    assert np.ptp(np.asarray(layer.decay(features())), axis=1).min() > 0.1


class TestCapacity:
    def test_a_sequence_longer_than_the_cache_raises(self):
        layer = make("softmax")
        with pytest.raises(ValueError, match=r"max_length=12 positions; .* position 12"):
            jax.eval_shape(layer, features(T=13))

    def test_a_step_past_the_cache_raises_outside_jit(self):
        layer = make("softmax", max_length=2)
        state = layer.init_state(2)._replace(position=jnp.array([2, 0]))
        with pytest.raises(ValueError, match="position 2"):
            layer(features(T=1), state)

    def test_a_step_past_the_cache_is_nan_under_jit_in_its_row_only(self):
        layer, x = make("softmax"), features(T=12)
        _, state = call(layer, x, None, jnp.ones((2, 12), bool).at[1, 0].set(False))
        y, _ = call(layer, features(T=1), state)
        assert np.isnan(y[0]).all()
        assert np.isfinite(y[1]).all()

    def test_padding_and_packing_do_not_fill_the_cache(self):
        layer, x = make("softmax"), features(T=20)
        ids = jnp.arange(20)[None].repeat(2, 0) // 10
        y, state = call(layer, x, None, None, ids)
        assert np.isfinite(y).all()
        np.testing.assert_array_equal(state.position, 10)


class TestRotary:
    def test_products_depend_on_the_distance_only(self):
        q, k = features(1, 1, seed=1)[..., None, :], features(1, 1, seed=2)[..., None, :]

        def product(t, s):
            a, b = (nn.rotary(x, jnp.array([[at]])) for x, at in ((q, t), (k, s)))
            return float((a * b).sum())

        assert product(7, 3) == pytest.approx(product(1004, 1000), abs=1e-3)
        assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-3)

    def test_an_odd_channel_stays(self):
        x = jnp.ones((1, 2, 1, 3), jnp.bfloat16)
        y = nn.rotary(x, jnp.array([[0, 5]]))
        np.testing.assert_array_equal(y[..., 2], 1)
        assert y.dtype == x.dtype


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(num_heads=6, num_kv_heads=4), "num_kv_heads must divide num_heads=6, got 4"),
        (dict(num_heads=5), "num_heads=5 must divide in_features=12 .* num_heads, in_features"),
        (dict(num_heads=0), "num_heads must be an integer at least 1, got 0"),
        (dict(in_features=0), "in_features must be an integer at least 1, got 0"),
        (dict(num_kv_heads=0), "num_kv_heads must be an integer at least 1, got 0"),
        (dict(head_dim=0), "head_dim must be an integer at least 1, got 0"),
        (dict(value_head_dim=-1), "value_head_dim must be an integer at least 1, got -1"),
        (dict(decay="learnt"), "decay must be 'learned'"),
        (dict(decay=1.5), r"decay must be in \(0, 1\]"),
        (dict(decay=(0.9, 0.9)), "one number or 4"),
        (dict(variant="third"), "variant must be .* got 'third'"),
        (dict(implementation="fast"), "implementation must be .* got 'fast'"),
        (dict(chunk_size=0), "chunk_size must be .* got 0"),
    ],
)
def test_a_wrong_option_is_named(arguments, message, no_type_checks):
    with pytest.raises(ValueError, match=message):
        nn.HLA3(**dict(num_heads=4, in_features=F, rngs=nnx.Rngs(0)) | arguments)


def test_an_unknown_option_is_refused_in_the_layers_name():
    with pytest.raises(TypeError, match="SoftmaxAttention got unexpected options decay"):
        make("softmax", decay=0.9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(x=jnp.zeros((2, 9, 5))), "x must be .* F=12"),
        (dict(x=jnp.zeros((2, 9, F), int)), "x must be floating, .* got int32"),
        (dict(x="text"), "x must be an array"),
        (dict(mask=jnp.ones((2, 8), bool)), r"mask must be bool.* \(2, 9\)"),
        (dict(mask=jnp.ones((2, 9), int)), "mask must be bool"),
        (dict(segment_ids=jnp.zeros((2, 9))), "segment_ids must be integer"),
    ],
)
def test_a_wrong_input_is_named(arguments, message, no_type_checks):
    with pytest.raises(ValueError, match=message):
        make("hla2")(**dict(x=features()) | arguments)


@pytest.mark.parametrize(
    ("mixer", "change", "message"),
    [
        ("hla2", lambda state: jnp.ones((2, 9), bool), "state must be None or a MixerState, got"),
        ("hla2", lambda state: state.memory, "a MixerState, got HLA2State"),
        ("hla2", tuple, "a MixerState, got tuple"),
        ("hla2", lambda state: state._replace(position=None), "with a position, got none"),
        ("hla2", lambda state: make("ahla").init_state(2), "state must be .* got AHLAState"),
        ("hla2", lambda state: make("hla2").init_state(3), "state must have x's 2 rows"),
        ("softmax", lambda state: make("hla2").init_state(2), "state must be .* got HLA2State"),
        (
            "softmax",
            lambda state: make("softmax", max_length=9).init_state(2),
            "state must be .* 9",
        ),
    ],
)
def test_a_state_of_another_kind_is_refused(mixer, change, message, no_type_checks):
    layer = make(mixer)
    with pytest.raises(ValueError, match=message):
        layer(features(), change(layer.init_state(2)))


def test_a_state_with_positions_is_refused_by_a_layer_without(no_type_checks):
    with pytest.raises(ValueError, match="with no position, got one"):
        make("hla2", rotary=False)(features(), make("hla2").init_state(2))
