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
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kernels.targets import TPU_ENVIRONMENT
from operators import FOUR, operator

import hla_jax as hla

sys.path.append(str(Path(__file__).parents[2] / "examples" / "benchmarks"))
exchange = importlib.import_module("exchange")

SIZES = exchange.Layer(T=0, H=4, K=4, D=64, E=64)


@pytest.mark.kernels
@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x2"])
@pytest.mark.parametrize("name", FOUR)
def test_eight_tpus_exchange_states_and_run_kernels(name, topology) -> None:
    jax.config.update("jax_platforms", "cpu")  # jax would look for the real machine
    os.environ.update(TPU_ENVIRONMENT)
    devices = topologies.get_topology_desc(topology, "tpu").devices
    mesh = Mesh(np.array(devices), ("tokens",))
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
