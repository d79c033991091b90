"""A sequence over eight TPUs compiles into kernels, and into an exchange of states alone."""

import importlib
import math
import os
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from kernels.targets import TPU_ENVIRONMENT
from operators import FOUR, operator

import hla_jax as hla

sys.path.append(str(Path(__file__).parents[2] / "examples" / "benchmarks"))
exchange = importlib.import_module("exchange")

SIZES = exchange.Layer(T=0, H=4, K=4, D=64, E=64)


def tpus(topology):
    jax.config.update("jax_platforms", "cpu")  # jax would look for the real machine
    os.environ.update(TPU_ENVIRONMENT)
    return np.array(topologies.get_topology_desc(topology, "tpu").devices)


@pytest.mark.kernels
@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x2"])
@pytest.mark.parametrize("name", FOUR)
def test_eight_tpus_exchange_states_and_run_kernels(name, topology) -> None:
    devices = tpus(topology)
    mesh = Mesh(devices, ("tokens",))
    one = operator(name, normalize=name == "linear")
    op = hla.parallel.sharded(one, mesh, sequence="tokens")
    decay = -jnp.geomspace(0.01, 0.5, SIZES.K)

    def both(q, k, v):
        out, pullback = jax.vjp(lambda *x: op(*x, log_decay=decay)[0], q, k, v)
        return out, pullback(out)

    compiled = []
    for T in (2048, 16384):
        tokens = jax.ShapeDtypeStruct(
            (1, T, SIZES.H, SIZES.D),
            jnp.bfloat16,
            sharding=NamedSharding(mesh, PartitionSpec(None, "tokens")),
        )
        text = jax.jit(both).lower(tokens, tokens, tokens).compile().as_text()
        assert text.count("tpu_custom_call") >= 2 * len(exchange.STAGES[name](SIZES))  # both ways
        assert not re.search(r"(all-gather|all-reduce|all-to-all|reduce-scatter)(-start)?\(", text)
        sent = re.findall(r"= \(?(\w+)\[([\d,]*)\][^=]*? collective-permute-start\(", text)
        compiled.append(sorted(sent))
    assert compiled[0] == compiled[1]
    # Not bytes: the compiler sends in bfloat16 what only a product of bfloat16 reads.
    numbers = sum(math.prod(map(int, shape.split(","))) for _, shape in compiled[0])
    formula, decays = (
        2 * exchange.states(name, sizes, len(devices)) / exchange.STATE
        for sizes in (SIZES, SIZES._replace(D=0))
    )
    assert formula - decays <= numbers <= formula


@pytest.mark.kernels
def test_eight_tpus_train_a_model_with_kernels_and_gather_no_tokens() -> None:
    devices = tpus("v5e:2x4").reshape(2, 2, 2)
    mesh = Mesh(devices, ("data", "model", "seq"), axis_types=(AxisType.Auto,) * 3)
    axes = dict(batch="data", heads="model", sequence="seq", parameters=("data", "seq"))
    sizes = dict(num_layers=2, num_heads=4, features=256, mixer="hla2", scan=True, remat=True)

    def make():
        layout = hla.parallel.Layout(mesh, **axes)
        kinds = dict(dtype=jnp.bfloat16, layout=layout, rngs=nnx.Rngs(0))
        model = hla.models.TransformerLM(512, **sizes, **kinds)
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    graph, state = nnx.split(nnx.eval_shape(make))
    places = nnx.get_named_sharding(state, mesh)
    state = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, places
    )
    T = 6144
    place = NamedSharding(mesh, PartitionSpec("data", "seq"))
    tokens = jax.ShapeDtypeStruct((4, T), jnp.int32, sharding=place)

    def step(state, tokens, targets):
        model, optimiser = nnx.merge(graph, state)

        def loss(model):
            logits = model(tokens)[0].astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        value, gradient = nnx.value_and_grad(loss)(model)
        optimiser.update(model, gradient)
        return value, nnx.state((model, optimiser))

    text = jax.jit(step, donate_argnums=0).lower(state, tokens, tokens).compile().as_text()
    assert text.count("tpu_custom_call") >= 2 * 2  # of two stages, both ways
    moved = re.findall(r"= \(?(\w+)\[([\d,]*)\][^=]*? (?:all-gather|collective-permute)", text)
    shapes = [(kind, [int(n) for n in shape.split(",")]) for kind, shape in moved if "," in shape]
    weights = [shape for kind, shape in shapes if kind == "bf16"]
    # A state and the log of its decay, in one array.
    states = [shape for kind, shape in shapes if kind == "f32" and shape[-1] == 64 * 64 + 1]
    assert len(weights) > 10
    assert states
    assert not any({T, T // 2} & set(shape) for _, shape in shapes)
