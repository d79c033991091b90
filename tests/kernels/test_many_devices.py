"""A sequence over eight TPUs compiles into kernels, and into an exchange of states alone."""

import math
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kernels.targets import TPU_ENVIRONMENT
from operators import FOUR, operator

import hla_jax as hla

H, D = 4, 64
STAGES = {"linear": 1, "hla2": 2, "ahla": 2, "hla3": 3}


@pytest.mark.kernels
@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x2"])
@pytest.mark.parametrize("name", FOUR)
def test_eight_tpus_exchange_states_and_run_kernels(name, topology) -> None:
    jax.config.update("jax_platforms", "cpu")  # jax would look for the real machine
    os.environ.update(TPU_ENVIRONMENT)
    devices = topologies.get_topology_desc(topology, "tpu").devices
    mesh = Mesh(np.array(devices), ("tokens",))
    op = hla.parallel.sharded(operator(name), mesh, sequence="tokens")
    decay = -jnp.geomspace(0.01, 0.5, H)

    def both(q, k, v):
        out, pullback = jax.vjp(lambda *x: op(*x, log_decay=decay)[0], q, k, v)
        return out, pullback(out)

    compiled = []
    for T in (2048, 16384):
        tokens = jax.ShapeDtypeStruct(
            (1, T, H, D),
            jnp.bfloat16,
            sharding=NamedSharding(mesh, PartitionSpec(None, "tokens")),
        )
        text = jax.jit(both).lower(tokens, tokens, tokens).compile().as_text()
        assert text.count("tpu_custom_call") >= 2 * STAGES[name]  # forward and backward
        assert not re.search(r"(all-gather|all-to-all|reduce-scatter)(-start)?\(", text)
        sent = re.findall(r"= \(?(\w+)\[([\d,]*)\][^=]*? collective-permute-start\(", text)
        assert {math.prod(map(int, shape.split(","))) for _, shape in sent} == {H, H * D * D}
        compiled.append(sorted(sent))
    assert compiled[0] == compiled[1]
