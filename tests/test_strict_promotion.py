"""Everything runs where JAX promotes neither dtypes nor ranks by itself."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from operators import FUNCTIONS, IMPLEMENTATIONS, operator
from test_nn import OPTIONS, PLACES, F, make

import hla_jax as hla
from hla_jax.attention import patterns


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


TYPES = dict(
    q=jax.ShapeDtypeStruct((2, 6, 4, 3), jnp.bfloat16),
    k=jax.ShapeDtypeStruct((2, 6, 2, 3), jnp.float32),
    v=jax.ShapeDtypeStruct((2, 6, 2, 5), jnp.bfloat16),
)
MASK = jax.ShapeDtypeStruct((2, 6), jnp.bool_)
IDS = jax.ShapeDtypeStruct((2, 6), jnp.int32)
DECAY = jax.ShapeDtypeStruct((2, 6, 2), jnp.float32)


def traced(fn, *differentiable, **others):
    """Traces a function, and the gradient of a sum over all that it returns."""

    def total(arguments, others):
        results = fn(*arguments, **others)
        return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(results))

    jax.eval_shape(jax.value_and_grad(total), differentiable, others)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators(name, implementation):
    fn = operator(name, normalize=True, implementation=implementation, chunk_size=4)
    options = {} if name == "linear" else dict(feature_map=hla.feature_maps.elu_plus_one)
    _, state = jax.eval_shape(fn, *TYPES.values())

    def call(q, k, v, log_decay, state, **others):
        return fn(q, k, v, log_decay=log_decay, initial_state=state, scale=2, **options, **others)

    traced(call, *TYPES.values(), DECAY, state, mask=MASK, segment_ids=IDS)
    traced(operator(name, implementation=implementation), *TYPES.values())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_steps_and_weights(name):
    step = operator(name, "_step", normalize=True)
    _, state = jax.eval_shape(operator(name, normalize=True), *TYPES.values())
    token = [jax.ShapeDtypeStruct((2, *x.shape[2:]), x.dtype) for x in TYPES.values()]
    traced(partial(step, log_decay=-0.1, scale=2), *token, state, mask=MASK.update(shape=(2,)))
    weights = operator(name, "_weights", normalize=True, log_decay=-1)
    traced(weights, TYPES["q"], TYPES["k"], mask=MASK, segment_ids=IDS)


@pytest.mark.parametrize("implementation", [None, "associative", "serial", "quadratic"])
def test_attention_to_all_tokens(implementation):
    fn = partial(hla.linear_attention, causal=False, implementation=implementation)
    traced(fn, *TYPES.values(), mask=MASK)
    traced(fn, *TYPES.values(), mask=MASK, segment_ids=IDS)


ATTENTION = {
    "softmax": hla.attention.softmax_attention,
    "flash": partial(hla.attention.flash_attention, block_size=4),
    "linformer": lambda q, k, v, **o: hla.attention.linformer_attention(
        q, k, v, jnp.ones((2, 8)), mask=o["mask"]
    ),
    "lsh": lambda q, k, v, **o: hla.attention.lsh_attention(
        q, v, key=jax.random.key(0), num_rounds=2, chunk_size=2, **o
    ),
} | {
    name: partial(hla.attention.sparse_attention, pattern=pattern)
    for name, pattern in {
        "strided": patterns.strided(2),
        "fixed": patterns.fixed(3),
        "big_bird": patterns.big_bird(
            jax.random.key(0), window=2, num_random=1, global_positions=[1], block_size=2
        ),
    }.items()
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, causal):
    options = {} if name == "linformer" else dict(causal=causal)
    traced(partial(ATTENTION[name], **options), *TYPES.values(), mask=MASK, segment_ids=IDS)
    if name == "softmax":
        traced(lambda *x: ATTENTION[name](*x[:3], bias=x[3]), *TYPES.values(), jnp.ones((4, 1, 6)))


MAPS = [n for n in hla.feature_maps.__all__ if n.islower() and n != "favor_plus"]


@pytest.mark.parametrize("name", [*MAPS, "positive", "hyperbolic", "relu "])
def test_feature_maps(name):
    fn = getattr(hla.feature_maps, name, None) or hla.feature_maps.favor_plus(
        jax.random.key(0), 3, 4, name.strip()
    )
    traced(fn, TYPES["q"])


@pytest.mark.parametrize("mixer", [*OPTIONS, "linformer"])
def test_layers(mixer):
    if mixer == "linformer":
        layer = hla.nn.Linformer(4, F, num_projected=3, max_length=9, rngs=nnx.Rngs(0))
    else:
        layer = make(mixer)
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    x = jax.ShapeDtypeStruct((2, 6, F), jnp.float32)
    ids = {} if mixer in (*PLACES, "linformer") else dict(segment_ids=IDS)

    def call(params, x, **others):
        layer = nnx.merge(graph, params, rest)
        y, state = layer(x, **others)
        return (y, layer(x[:, :1], state)[0]) if layer.causal else y

    traced(call, params, x, mask=MASK, **ids)
