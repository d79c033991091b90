"""Operators on eight devices, the batch over two and the heads over four; measured by a script."""

import json
import re
import sys
from functools import partial

import pytest
from helpers import measured_apart

COLLECTIVES = r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
NAMES = ("linear", "hla2", "ahla", "hla3")


# Each is made of what the others are made of.
SLOW = ("hla2", "ahla", "hla3")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in NAMES]
)
def test_sharding_needs_no_communication_and_changes_no_value(name):
    measured = measured_apart(__file__, name)
    for axes in ("Auto", "Explicit"):
        inputs = measured[axes]
        assert inputs["collectives"] == [], axes
        assert inputs["results_sharded"], axes
        assert inputs["error_of_jit"] < 1e-12, axes
        assert inputs["error_of_sharded"] < 1e-12, axes
        assert not inputs["kernels_for_tpus"], axes  # which the compiler could not partition
    assert measured["error_of_shard_map"] < 1e-12
    assert measured["kernels_for_tpus_in_shard_map"]


def measure(name):
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P
    from operators import (
        apply,
        make_inputs,
        make_mask,
        make_segments,
        operator,
        with_gradients,
        worst_error,
    )

    import hla_jax as hla

    inputs = make_inputs(name, 40, heads=(8, 4), decay="token", normalize=True)
    fn = partial(apply, name, normalize=True, chunk_size=16)
    rng = np.random.default_rng(0)
    cotangents = jax.tree.map(lambda x: rng.normal(size=x.shape), jax.eval_shape(fn, inputs))
    run = partial(with_gradients, fn)
    expected = jax.jit(run)(inputs, cotangents)
    op = operator(name, normalize=True, chunk_size=16)
    rest = dict(mask=make_mask("interior", 40), segment_ids=make_segments(40, length=9))
    expected_rows = jax.jit(partial(op, **rest))(**inputs)

    tokens, state = P("batch", None, "heads"), P("batch", "heads")
    cotangent_specs = tokens, dict.fromkeys(cotangents[1], state)
    in_specs = dict.fromkeys(inputs, tokens), cotangent_specs
    out_specs = cotangent_specs, dict.fromkeys(inputs, tokens)
    float32 = partial(jax.tree.map, np.float32)  # what TPUs have

    def has_kernels(function, *arguments):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
        return "tpu_custom_call" in lowered.as_text()

    measured = {}
    for axes in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("batch", "heads"), axis_types=(axes,) * 2)
        shardings = jax.tree.map(partial(NamedSharding, mesh), in_specs)
        arguments = jax.device_put((inputs, cotangents), shardings)
        compiled = jax.jit(run).lower(*arguments).compile()
        results = compiled(*arguments)
        wanted = jax.tree.map(partial(NamedSharding, mesh), out_specs)
        sharded = jax.tree.map(
            lambda x, sharding: x.sharding.is_equivalent_to(sharding, x.ndim), results, wanted
        )
        sharded_op = hla.parallel.sharded(op, mesh, batch="batch", heads="heads")
        rows = jax.jit(partial(sharded_op, **rest))(**inputs)
        measured[axes.name] = {
            "collectives": re.findall(COLLECTIVES, compiled.as_text()),
            "results_sharded": all(jax.tree.leaves(sharded)),
            "kernels_for_tpus": has_kernels(
                run, *jax.device_put(float32((inputs, cotangents)), shardings)
            ),
            "error_of_jit": worst_error(results, expected),
            "error_of_sharded": worst_error(rows, expected_rows),
        }
    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
    return measured | {
        "error_of_shard_map": worst_error(mapped(*arguments), expected),
        "kernels_for_tpus_in_shard_map": has_kernels(
            mapped, *jax.device_put(float32((inputs, cotangents)), shardings)
        ),
    }


@pytest.mark.slow
def test_attention_needs_no_communication_and_changes_no_value():
    measured = measured_apart(__file__, "attention")
    assert len(measured) == 12
    for name, (collectives, error, sharded) in measured.items():
        assert collectives == [], name
        assert error < 1e-12, name
        assert sharded, name


def measure_attention():
    """Outputs and gradients of each attention function on either kind of mesh."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    from hla_jax import attention
    from hla_jax.attention import patterns

    T, key = 24, jax.random.key(0)
    random_blocks = patterns.random_blocks(key, num_blocks=1, block_size=4)
    functions = {
        "softmax": attention.softmax_attention,
        "flash": lambda q, k, v: attention.flash_attention(q, k, v, block_size=8)[0],
        "strided": lambda q, k, v: attention.sparse_attention(q, k, v, patterns.strided(4)),
        "random": lambda q, k, v: attention.sparse_attention(q, k, v, random_blocks),
        "linformer": lambda q, k, v: attention.linformer_attention(q, k, v, jnp.ones((3, T)) / 3),
        "lsh": lambda q, k, v: attention.lsh_attention(
            q + k, v, key=key, num_buckets=2, chunk_size=4
        ),
    }
    tokens = np.random.default_rng(0).normal(size=(4, 2, T, 4, 8))
    sharded_as, measured = P("batch", None, "heads", None), {}
    for axes in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("batch", "heads"), axis_types=(axes,) * 2)
        arguments = jax.device_put(tuple(tokens), NamedSharding(mesh, sharded_as))
        for name, function in functions.items():

            def run(q, k, v, cotangent, function=function):
                out, pullback = jax.vjp(function, q, k, v)
                return out, pullback(cotangent)

            wanted = jax.jit(run)(*tokens)
            compiled = jax.jit(run).lower(*arguments).compile()
            results = jax.tree.leaves(compiled(*arguments))
            pairs = zip(results, jax.tree.leaves(wanted), strict=True)
            measured[f"{name} on {axes.name}"] = (
                re.findall(COLLECTIVES, compiled.as_text()),
                max(float(jnp.abs(a - b).max()) for a, b in pairs),
                all(a.sharding.spec == sharded_as for a in results),
            )
    return measured


if __name__ == "__main__":
    name = sys.argv[1]
    print(json.dumps(measure_attention() if name == "attention" else measure(name)))
