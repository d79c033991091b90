"""Operators on eight devices, the batch over two and the heads over four; measured by a script."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

COLLECTIVES = r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
NAMES = ("linear", "hla2", "ahla", "hla3")


@pytest.fixture(scope="module")
def measured():
    """What this file prints, run in a process of its own, where eight devices can be asked for."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent)])
    flags = "--xla_force_host_platform_device_count=8"
    env = os.environ | {"PYTHONPATH": path, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    env["JAX_ENABLE_X64"] = "1"
    run = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_sharded_inputs_need_no_communication_forward_or_backward(measured, name):
    assert measured[name]["collectives"] == []


@pytest.mark.parametrize("name", NAMES)
def test_outputs_states_and_gradients_stay_sharded(measured, name):
    assert measured[name]["sharded"]


@pytest.mark.parametrize("name", NAMES)
def test_sharding_changes_no_value(measured, name):
    assert measured[name]["jit"] < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_shard_map_with_its_checks_changes_no_value(measured, name):
    assert measured[name]["shard_map"] < 1e-12


def measure(name):
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P
    from operators import apply, make_inputs, with_gradients, worst_error

    inputs = make_inputs(name, 40, heads=(8, 4), decay="token", normalize=True)
    fn = partial(apply, name, normalize=True, chunk_size=16)
    rng = np.random.default_rng(0)
    cotangents = jax.tree.map(lambda x: rng.normal(size=x.shape), jax.eval_shape(fn, inputs))
    arguments = inputs, cotangents
    run = partial(with_gradients, fn)
    expected = jax.jit(run)(*arguments)

    mesh = jax.make_mesh((2, 4), ("batch", "heads"), axis_types=(AxisType.Auto,) * 2)
    tokens, state = P("batch", None, "heads"), P("batch", "heads")
    cotangent_specs = tokens, dict.fromkeys(cotangents[1], state)
    in_specs = dict.fromkeys(inputs, tokens), cotangent_specs
    out_specs = cotangent_specs, dict.fromkeys(inputs, tokens)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), in_specs)
    arguments = jax.device_put(arguments, shardings)
    compiled = jax.jit(run).lower(*arguments).compile()
    results = compiled(*arguments)
    sharded = jax.tree.map(
        lambda x, spec: x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim),
        results,
        out_specs,
    )
    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
    return {
        "collectives": re.findall(COLLECTIVES, compiled.as_text()),
        "sharded": all(jax.tree.leaves(sharded)),
        "jit": worst_error(results, expected),
        "shard_map": worst_error(mapped(*arguments), expected),
    }


if __name__ == "__main__":
    print(json.dumps({name: measure(name) for name in NAMES}))
