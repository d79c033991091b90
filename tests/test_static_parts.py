"""Layers and patterns made alike are equal, hash and copy; arrays among options are variables."""

import copy
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import rms_error
from test_nn import OPTIONS, F, H, features, make

import hla_jax as hla
from hla_jax import nn
from hla_jax.attention import patterns
from hla_jax.feature_maps import favor_plus

pytestmark = pytest.mark.usefixtures("no_type_checks")


def key():
    return jax.random.key(3)


PATTERNS = {
    "sliding_window": lambda: patterns.sliding_window(3),
    "dilated_window": lambda: patterns.dilated_window(3, 2),
    "global_tokens": lambda: patterns.global_tokens([4, 1]),
    "strided": lambda: patterns.strided(3),
    "fixed": lambda: patterns.fixed(3, np.int64(2)),
    "random_blocks": lambda: patterns.random_blocks(key(), num_blocks=1, block_size=2),
    "longformer": lambda: patterns.longformer(2, [0]),
    "big_bird": lambda: patterns.big_bird(
        key(), window=2, num_random=1, global_positions=[0], block_size=2
    ),
    "joined": lambda: patterns.fixed(3) | patterns.sliding_window(2) | patterns.strided(4),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_made_alike_are_equal_and_pickled(name):
    a, b = PATTERNS[name](), PATTERNS[name]()
    assert a == b
    assert hash(a) == hash(b)
    for again in (pickle.loads(pickle.dumps(a)), copy.deepcopy(a)):
        assert again == a
        np.testing.assert_array_equal(again.mask(7, causal=True), a.mask(7, causal=True))
    assert len({make() for make in PATTERNS.values()}) == len(PATTERNS)


def test_patterns_of_ones_own_are_equal_if_their_functions_are():
    def pieces(length, causal):
        return ()

    assert patterns.Pattern(pieces) == patterns.Pattern(pieces)
    assert patterns.Pattern(pieces) != patterns.Pattern(pieces, relative=True)
    assert patterns.Pattern(pieces) != patterns.Pattern(lambda length, causal: ())


def test_other_keys_make_other_patterns_and_traced_ones_are_equal_to_themselves():
    def blocks(key):
        return patterns.random_blocks(key, num_blocks=1, block_size=2)

    assert blocks(key()) != blocks(jax.random.key(4))
    assert blocks(key()) == blocks(jax.random.PRNGKey(3))

    @jax.jit
    def traced(key):
        pattern = blocks(key)
        assert pattern == pattern
        assert pattern != blocks(key)
        assert hash(blocks(jax.random.key(5)))  # known, though the caller is traced
        return pattern.mask(8, causal=True)

    np.testing.assert_array_equal(traced(key()), blocks(key()).mask(8, causal=True))


def scaled(gain, x):
    return jnp.exp(gain * x)


def learned(linear, x):
    return jnp.exp(linear(x))


D = 3
MAPS = {  # what makes an option, and how many arrays are in it
    "favor": (lambda: favor_plus(key(), D, 4), 1),
    "pair": (lambda: (favor_plus(key(), D, 4), favor_plus(key(), D, 4, "positive")), 2),
    "mixed pair": (lambda: (jnp.exp, favor_plus(key(), D, D)), 1),
    "partial": (lambda: partial(scaled, 0.5), 0),
    "partial of an array": (lambda: partial(scaled, jnp.ones(D)), 1),
    "partial of numpy": (lambda: partial(scaled, np.ones(D, np.float32)), 1),
    "partial of a map": (lambda: partial(favor_plus(key(), D, 4)), 1),
    "module": (lambda: partial(learned, nnx.Linear(D, D, rngs=nnx.Rngs(0))), 2),
}
WITH_OPTIONS = {
    f"feature_map: {name}": (
        partial(lambda m: nn.LinearAttention(2, 2 * D, feature_map=m(), rngs=nnx.Rngs(0)), make),
        count,
    )
    for name, (make, count) in MAPS.items()
} | {
    f"ridge: {kind}": (
        partial(lambda r: nn.HLA2(2, 2 * D, ridge=r(), rngs=nnx.Rngs(0)), ridge),
        count,
    )
    for kind, ridge, count in (
        ("array", lambda: jnp.float32(0.1), 1),
        ("numpy array", lambda: np.array(0.1), 1),
        ("numpy number", lambda: np.float32(0.1), 0),
        ("int", lambda: 1, 0),
        ("parameter", lambda: nnx.Param(jnp.float32(0.1)), 1),
    )
}


def variables(layer):
    return nnx.split(layer)[1]


@pytest.mark.parametrize("case", WITH_OPTIONS)
def test_arrays_among_options_are_variables(case):
    make, count = WITH_OPTIONS[case]
    layer, again = make(), make()
    assert len(jax.tree.leaves(variables(layer).get("kept_options", {}))) == count
    trained = jax.tree.leaves(nnx.state(layer, nnx.Param).get("kept_options", {}))
    assert len(trained) == (count if "module" in case or "parameter" in case else 0)
    assert nnx.graphdef(layer) == nnx.graphdef(again)
    assert hash(nnx.graphdef(layer)) == hash(nnx.graphdef(again))
    x = features()[:, :4, : 2 * D]
    y, _ = nnx.jit(lambda layer, x: layer(x))(layer, x)
    (op,), options = {type(layer).operator}, layer.operator_options
    q, k, v = layer._project(x, jnp.broadcast_to(jnp.arange(4), (2, 4)))
    o, _ = op(q, k, v, log_decay=-jax.nn.softplus(layer.decay(x)), **options)
    assert rms_error(y, layer.out(layer.output_norm(o))) < 1e-6
    for copied in (copy.deepcopy(layer), nnx.merge(*nnx.split(layer))):
        jax.tree.map(np.testing.assert_array_equal, variables(copied), variables(layer))


def test_a_model_with_arrays_among_options_is_stacked_trained_and_scanned():
    make = partial(
        hla.models.TransformerLM,
        7,
        num_layers=2,
        num_heads=2,
        features=2 * D,
        mixer="linear",
        feature_map=favor_plus(key(), D, 4),
    )
    plain, model = make(rngs=nnx.Rngs(0)), make(rngs=nnx.Rngs(0), scan=True)
    assert len(model.blocks) == 1
    tokens = jnp.arange(5)[None]
    assert rms_error(nnx.jit(plain)(tokens)[0], nnx.jit(model)(tokens)[0]) < 1e-5
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Not(nnx.Param)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def train(model, optimizer):
        gradient = nnx.grad(lambda m: m(tokens)[0].var())(model)
        optimizer.update(model, gradient)

    train(model, optimizer)
    after = nnx.state(model, nnx.Not(nnx.Param))
    assert jax.tree.leaves(after)
    jax.tree.map(np.testing.assert_array_equal, before, after)


LAYERS = OPTIONS | {
    "linformer": (nn.Linformer, dict(num_projected=3, max_length=9)),
    "joined": (nn.SparseAttention, dict(pattern=PATTERNS["joined"]())),
    "both ways": (nn.BigBird, dict(window=2, num_random=1, block_size=2, causal=False)),
}


@pytest.mark.parametrize("mixer", LAYERS)
def test_layers_made_alike_are_equal(mixer):
    """However a dtype, a number or a sequence was written."""
    layer, options = LAYERS[mixer]
    a = layer(H, F, rngs=nnx.Rngs(0), **options)
    other = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}
    other |= {k: np.int64(v) for k, v in options.items() if type(v) is int}
    if "pattern" in options:
        other["pattern"] = pickle.loads(pickle.dumps(options["pattern"]))
    b = layer(
        np.int64(H),
        np.int64(F),
        rngs=nnx.Rngs(0),
        param_dtype="float32",
        rotary_base=10_000,
        **other,
    )
    graphs = [nnx.graphdef(m) for m in (a, b)]
    assert graphs[0] == graphs[1]
    assert hash(graphs[0]) == hash(graphs[1])
    names = [layer(H, F, rngs=nnx.Rngs(0), dtype=t, **options) for t in (jnp.bfloat16, "bfloat16")]
    assert nnx.graphdef(names[0]) == nnx.graphdef(names[1]) != graphs[0]
    for again in (copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
        assert nnx.graphdef(again) == graphs[0]
        jax.tree.map(np.testing.assert_array_equal, variables(again), variables(a))


@pytest.mark.parametrize("mixer", ["strided", "big_bird", "performer"])
def test_blocks_of_one_kind_are_stacked(mixer):
    kind, options = OPTIONS[mixer]
    options = {k: v for k, v in options.items() if k != "pattern"}

    def block(**given):
        more = {} if mixer != "strided" else dict(pattern=patterns.strided(3))
        return kind(**given, **options, **more)

    model = hla.models.TransformerLM(
        5, num_layers=4, num_heads=H, features=F, mixer=block, scan=True, rngs=nnx.Rngs(0)
    )
    assert len(model.blocks) == 1


def test_unhashable_options_are_named():
    class Unhashable:
        __hash__ = None

        def __call__(self, x):
            return x

    with pytest.raises(ValueError, match="options must be hashable, arrays or pytrees of these"):
        nn.LinearAttention(2, 6, feature_map=Unhashable(), rngs=nnx.Rngs(0))


def test_performer_redraws_its_own_variable():
    layer = make("performer")
    graph, before = nnx.split(layer)
    before = jax.tree.map(np.asarray, before)
    nnx.jit(lambda layer: layer.redraw(jax.random.key(9)))(layer)
    assert nnx.graphdef(layer) == graph
    wanted = favor_plus(jax.random.key(9), 5, 7).projection
    (projection,) = jax.tree.leaves(variables(layer)["kept_options"])
    np.testing.assert_allclose(projection, wanted, rtol=1e-5, atol=1e-6)
    assert rms_error(*(jax.tree.leaves(s["kept_options"])[0] for s in (before, variables(layer))))
