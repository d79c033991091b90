"""A sequence over the devices of several processes, which talk over this machine's loopback."""

import json
import sys

import pytest
from helpers import processes

DEVICES = 2  # of each process


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_processes_compute_what_one_device_does(count):
    with processes(count, lambda address, i: [__file__, address, str(count), str(i)]) as started:
        outputs = [process.communicate() for process in started]
    for process, (out, err) in zip(started, outputs, strict=True):
        assert process.returncode == 0, err[-4000:]
        told = json.loads(out.splitlines()[-1])
        assert told["devices"] == count * DEVICES
        assert max(told["errors"].values()) < 1e-13, told


def measure(address, count, index):
    """Compares this process's parts of outputs and gradients with those of one device."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    from operators import FOUR, make_inputs, make_segments, operator, with_gradients

    import hla_jax as hla

    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.distributed.initialize(address, count, index)
    mesh = jax.make_mesh((count * DEVICES,), ("tokens",))
    errors = {}
    for name in FOUR:
        inputs = make_inputs(name, 48, batch=(1,), decay="token", normalize=True)
        ids = make_segments(48, batch=1, length=17)

        def run(op, x, ids=ids):
            def fn(x):
                return op(**x, segment_ids=ids)[0]

            return with_gradients(fn, x, x["v"].repeat(2, axis=2))

        def place(x, spec):
            sharding = NamedSharding(mesh, spec)
            return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

        op = operator(name, normalize=True, chunk_size=8)
        many = hla.parallel.sharded(op, mesh, sequence="tokens")
        spec = PartitionSpec(None, "tokens")
        placed = {key: place(x, spec) for key, x in inputs.items()}
        everywhere = place(ids, spec)
        actual = jax.jit(lambda x, ids, many=many: run(many, x, ids))(placed, everywhere)
        expected = jax.jit(lambda x, op=op: run(op, x))(inputs)
        errors[name] = max(
            float(np.abs(np.asarray(shard.data) - np.asarray(e)[shard.index]).max())
            for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
            for shard in a.addressable_shards
        )
    return {"devices": jax.device_count(), "errors": errors}


if __name__ == "__main__":
    address, *numbers = sys.argv[1:]
    print(json.dumps(measure(address, *map(int, numbers))))
