"""Calls outside of jit: the second compiles nothing, and every array of a state is its own."""

from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import hla_jax as hla
from hla_jax import attention, feature_maps, models, monoids, nn, scan
from hla_jax.models.speech import BiLSTM

COMPILED = []


def count(name, *_, **__):
    if "backend_compile" in name:
        COMPILED.append(name)


jax.monitoring.register_event_duration_secs_listener(count)

T, F, V = 40, 8, 16
OPERATORS = ("linear_attention", "hla2", "ahla", "hla3")
q, k, v = jax.random.normal(jax.random.key(0), (3, 1, T, 2, 4))
log_decay = -jax.random.uniform(jax.random.key(1), (1, T, 2))
packed = dict(
    mask=jnp.arange(T)[None] > 2, segment_ids=jnp.arange(T)[None] // 20, log_decay=log_decay
)
x = jax.random.normal(jax.random.key(2), (1, T, F))
tokens = jnp.arange(T)[None] % V
log_probs = jax.nn.log_softmax(jax.random.normal(jax.random.key(3), (2, 9, 5)))
image = np.zeros((1, 3, 2, 2), np.uint8)
labels = jnp.array([9, 7]), jnp.array([[1, 2], [3, 0]]), jnp.array([2, 1])
token_arrays = q[0, :, 0], k[0, :, 0], v[0, :, 0], log_decay[0, :, 0]
favor = feature_maps.favor_plus(jax.random.key(0), 4, 8)
mesh = jax.make_mesh((1,), ("tokens",), axis_types=(AxisType.Auto,))
layout = hla.parallel.Layout(mesh, sequence="tokens")


def operator(name, **options):
    return lambda: getattr(hla, name)(q, k, v, **packed, **options)


def step(name):
    one = q[:, 0], k[:, 0], v[:, 0], None
    return lambda: getattr(hla, name + "_step")(*one, log_decay=log_decay[:, 0])


def gradient(run, *inputs):
    """The gradient of a function, which is made in each call as users do."""

    def loss(*inputs):
        return sum(jnp.sum(a) for a in jax.tree.leaves(run(*inputs)) if a.dtype == jnp.float32)

    return lambda: jax.grad(lambda *inputs: loss(*inputs), tuple(range(len(inputs))))(*inputs)


@cache
def layer(name, **options):
    return getattr(nn, name)(num_heads=2, in_features=F, rngs=nnx.Rngs(0), **options)


@cache
def model(**options):
    sizes = dict(num_layers=2, num_heads=2, features=F)
    return models.TransformerLM(V, **sizes, **options, rngs=nnx.Rngs(0))


@cache
def bilstm():
    return BiLSTM(F, rngs=nnx.Rngs(0))


@cache
def encoder():
    sizes = dict(num_layers=1, features=F, in_features=F, subsampling=2)
    return models.CTCEncoder(V, mixer="bilstm", **sizes, rngs=nnx.Rngs(0))


@cache
def images():
    sizes = dict(num_layers=1, num_heads=2, features=F, num_logistics=2)
    return models.ImageModel(image.shape[1:], **sizes, rngs=nnx.Rngs(0))


def call(make, *inputs):
    return lambda: make()(*inputs)


def model_gradient(**options):
    return lambda: nnx.grad(lambda m: m(tokens)[0].sum())(model(**options))


def engine(name, **options):
    return lambda tokens: getattr(scan, name)(monoids.HLA2(), tokens, **options)


def sharded(op, **options):
    return lambda: hla.parallel.sharded(op, mesh, sequence="tokens")(q, k, v, **options)


LAYERS = {
    "HLA2": {},
    "FlashAttention": {},
    "Longformer": dict(window=8),
    "BigBird": dict(window=8, block_size=8),
    "Performer": {},
    "Reformer": {},
}
MODELS = {"scan": dict(scan=True), "remat": dict(remat=True), "both": dict(scan=True, remat=True)}

CALLS = {
    **{name: operator(name) for name in OPERATORS},
    **{
        f"hla2 {implementation}": operator("hla2", implementation=implementation)
        for implementation in ("associative", "serial", "quadratic")
    },
    "hla2_step": step("hla2"),
    **{f"gradient of {name}": gradient(getattr(hla, name), q, k, v) for name in OPERATORS[::3]},
    "gradient of serial": gradient(partial(hla.hla2, implementation="serial"), q, k, v),
    "published": lambda: hla.hla3(q, k, v, variant="published"),
    "not causal": lambda: hla.linear_attention(q, k, v, causal=False),
    "vmap": lambda: jax.vmap(lambda q: hla.hla2(q, k[0], v[0]))(q),
    "jvp": lambda: jax.jvp(
        lambda q: hla.ahla(q, k, v, implementation="associative")[0], (q,), (q,)
    ),
    "a feature map with arrays": lambda: hla.linear_attention(q, k, v, feature_map=favor),
    "a feature map made in the call": lambda: hla.ahla(q, k, v, feature_map=lambda a: favor(a)),
    "a ridge in an array": lambda: hla.hla2(q, k, v, ridge=jnp.float32(0.1)),
    "flash_attention": lambda: attention.flash_attention(q, k, v),
    "gradient of flash_attention": gradient(attention.flash_attention, q, k, v),
    "softmax_attention": lambda: attention.softmax_attention(q, k, v),
    "sparse_attention": lambda: attention.sparse_attention(
        q, k, v, pattern=attention.patterns.sliding_window(8)
    ),
    "lsh_attention": lambda: attention.lsh_attention(q, v, key=jax.random.key(0)),
    **{f"layer {n}": call(partial(layer, n, **o), x) for n, o in LAYERS.items()},
    "layer with a layout": call(partial(layer, "HLA2", layout=layout), x),
    **{f"model {n}": call(partial(model, **o), tokens) for n, o in MODELS.items()},
    **{f"gradient of model {n}": model_gradient(**o) for n, o in MODELS.items()},
    "init_state": lambda: model(scan=True).init_state(2),
    "generate": lambda: models.generate(model(), tokens, max_new_tokens=2, temperature=0),
    "sample": lambda: models.sample(x, jax.random.key(0), top_p=np.full((1, T), 0.9)),
    "BiLSTM": call(bilstm, x),
    "gradient of BiLSTM": lambda: nnx.grad(lambda m: m(x)[0].sum())(bilstm()),
    "CTCEncoder": call(encoder, x, np.array([T - 3])),
    "log_mel": lambda: models.log_mel(np.zeros((1, 900)), 8000),
    "complete": lambda: images().complete(image, 1, jax.random.key(0)),
    "ctc_loss": lambda: models.ctc_loss(log_probs, *labels),
    "gradient of ctc_loss": gradient(lambda a: models.ctc_loss(a, *labels)[0], log_probs),
    **{f"scan.{n}": partial(engine(n), token_arrays) for n in ("serial", "associative", "chunked")},
    "gradient of scan.serial": gradient(engine("serial"), token_arrays),
    "gradient of scan.chunked": gradient(engine("chunked", chunk_size=16), token_arrays),
    "sharded": sharded(hla.hla2, log_decay=log_decay),
    "sharded, a partial": sharded(partial(hla.hla2, masked=False, ridge=jnp.float32(0.1))),
    "sharded, a feature map with arrays": sharded(hla.linear_attention, feature_map=favor),
    "gradient of sharded": gradient(
        lambda q: hla.parallel.sharded(hla.hla2, mesh, sequence="tokens")(q, k, v), q
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_call_after_the_first_compiles(name):
    counts = []
    for _ in range(3):
        before = len(COMPILED)
        jax.block_until_ready(jax.tree.leaves(CALLS[name]()))
        counts.append(len(COMPILED) - before)
    assert counts[1:] == [0, 0]


def test_that_compilations_are_counted():
    before = len(COMPILED)
    jax.jit(lambda x: x + 1)(jnp.ones(7))
    assert len(COMPILED) > before


@pytest.mark.parametrize("size", [np.int64(8), np.array(8), jnp.int32(8)])
def test_a_size_may_be_any_integer(size, no_type_checks):
    out, _ = hla.hla2(q, k, v, chunk_size=size)
    np.testing.assert_array_equal(out, hla.hla2(q, k, v, chunk_size=8)[0])
    out, _ = engine("chunked", chunk_size=size)(token_arrays)
    np.testing.assert_array_equal(out, engine("chunked", chunk_size=8)(token_arrays)[0])


@dataclass
class Sum:
    """Adds numbers up, times a factor; it has no hash."""

    factor: float

    def identity(self, like):
        return jnp.zeros_like(like)

    def lift(self, x):
        return self.factor * x

    def combine(self, a, b):
        return a + b

    def read(self, element, x):
        return element


class HashableSum(Sum):
    """Its hash is of the object, whatever its factor."""

    __hash__ = object.__hash__


@jax.tree_util.register_dataclass
@dataclass
class TracedSum(Sum):
    """A pytree: its factor is traced."""

    factor: jax.Array


@pytest.mark.parametrize("kind", [Sum, HashableSum])
def test_a_monoid_that_was_changed_is_seen_as_it_is(kind):
    m = kind(1.0)
    before, _ = scan.serial(m, (jnp.ones(3),))
    m.factor = 2.0
    after, _ = scan.serial(m, (jnp.ones(3),))
    assert (before.tolist(), after.tolist()) == ([1, 2, 3], [2, 4, 6])


class Weighted:
    """A feature map that may be changed, and its hash says nothing of it."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return x * self.weight


@pytest.mark.parametrize("weights", [(1.0, 2.0), (jnp.float32(1), jnp.float32(2))])
@pytest.mark.parametrize("method", [False, True])
def test_a_feature_map_that_was_changed_is_seen_as_it_is(weights, method):
    given = Weighted(weights[0])
    run = hla.parallel.sharded(hla.ahla, mesh, sequence="tokens")
    for weight in weights:
        given.weight = weight
        feature_map = given.__call__ if method else given
        out, _ = run(q, k, v, feature_map=feature_map)
        expected, _ = hla.ahla(q, k, v, feature_map=Weighted(weight))
        np.testing.assert_allclose(out, expected, rtol=1e-4)


def test_scalars_of_numpy_are_options_of_sharded(no_type_checks):
    run = hla.parallel.sharded(hla.hla2, mesh, sequence="tokens")
    out, _ = run(q, k, v, masked=np.bool_(False), chunk_size=np.int64(8), ridge=np.float32(0.1))
    expected, _ = hla.hla2(q, k, v, masked=False, ridge=0.1)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_arrays_in_a_monoid_are_traced():
    def run(factor):
        return scan.associative(TracedSum(factor), (jnp.ones(3),))[1]

    assert [run(jnp.float32(f)) for f in (1, 2)] == [3, 6]
    before = len(COMPILED)
    assert run(jnp.float32(3)) == 9
    assert len(COMPILED) == before
    assert jax.grad(run)(jnp.float32(1)) == 3


def addresses(state):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("scanned", [False, True])
def test_every_array_of_a_state_is_its_own(scanned, jitted):
    mixers = ["hla2", "softmax"] * 2
    sizes = dict(num_layers=4, num_heads=2, features=F)
    lm = models.TransformerLM(V, mixer=mixers, scan=scanned, **sizes, rngs=nnx.Rngs(0))
    begin = jax.jit(lm.init_state, static_argnums=0) if jitted else lm.init_state
    state = begin(1)
    assert len({*addresses(state)}) == len(jax.tree.leaves(state))
    run = jax.jit(lambda token, state: lm(token, state), donate_argnums=1)
    for token in (1, 2):
        logits, state = run(jnp.array([[token]]), state)
    expected, _ = lm(jnp.array([[1, 2]]))
    np.testing.assert_allclose(logits[:, 0], expected[:, 1], rtol=1e-4, atol=1e-5)
