"""Operators over several devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def sharded(
    op: Callable[..., Any], mesh: Mesh, *, batch: str | None = None, heads: str | None = None
) -> Callable[..., Any]:
    """Makes an operator that computes each shard of the batch and of the heads on its own device.

    Nothing is exchanged between the devices. XLA runs the products of one CPU device on one core,
    so on a CPU two devices (`jax.config.update("jax_num_cpu_devices", 2)` before anything else) are
    what makes a second core work.

    Args:
      op: `linear_attention`, `hla2`, `ahla` or `hla3`.
      mesh: the devices.
      batch: the mesh axis that divides the first batch axis; None leaves it whole.
      heads: the mesh axis that divides the heads; it must divide the kv heads. None leaves them
        whole.

    Returns:
      A function with op's arguments and results.

    Raises:
      ValueError: an axis is not the mesh's, or (when called) does not divide the batch or heads.

    Example:
      >>> import jax, hla_jax as hla
      >>> mesh = jax.make_mesh((jax.device_count(),), ("heads",))
      >>> hla2 = hla.parallel.sharded(hla.hla2, mesh, heads="heads")
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 10, 8, 4))
      >>> out, state = jax.jit(hla2)(q, k, v)
      >>> out.shape
      (1, 10, 8, 4)
    """
    for name, axis in (("batch", batch), ("heads", heads)):
        if axis is not None and axis not in mesh.axis_names:
            raise ValueError(f"{name} must be None or one of {mesh.axis_names}, got {axis!r}")
    if batch is not None and batch == heads:
        raise ValueError(f"heads must be another axis than batch, got {heads!r} for both")

    def run(q, k, v, *, log_decay=None, mask=None, segment_ids=None, initial_state=None, **options):
        q, k, v = (jnp.asarray(x) for x in (q, k, v))
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim < (3 if batch is None else 4):
                raise ValueError(f"{name} must be [*B, T, heads, width], got shape {x.shape}")
            for axis, length, what in ((batch, x.shape[0], "batch"), (heads, x.shape[-2], "heads")):
                if axis is not None and length % mesh.shape[axis]:
                    raise ValueError(
                        f"{name} must have {what} that mesh axis {axis!r} of {mesh.shape[axis]} "
                        f"devices divides, got shape {x.shape}"
                    )
        rows = (batch, *(None,) * (q.ndim - 4)) if q.ndim > 3 else ()
        if log_decay is not None:
            try:
                log_decay = jnp.broadcast_to(log_decay, k.shape[:-1])
            except ValueError:
                raise ValueError(
                    f"log_decay must broadcast to [*B, T, K] = {k.shape[:-1]}, "
                    f"got {jnp.shape(log_decay)}"
                ) from None
        of_tokens, of_rows = PartitionSpec(*rows, None, heads), PartitionSpec(*rows)
        of_states = PartitionSpec(*rows, heads)
        arrays = dict(
            log_decay=log_decay, mask=mask, segment_ids=segment_ids, initial_state=initial_state
        )
        specs = dict(
            log_decay=of_tokens, mask=of_rows, segment_ids=of_rows, initial_state=of_states
        )
        arrays = {name: x for name, x in arrays.items() if x is not None}
        in_specs = (of_tokens, of_tokens, of_tokens, {name: specs[name] for name in arrays})

        def local(q, k, v, arrays):
            return op(q, k, v, **arrays, **options)

        inputs = q, k, v, arrays
        if AxisType.Explicit in mesh.axis_types:  # shard_map then takes only what lies as it says

            def place(spec, x):
                sharding = NamedSharding(mesh, spec)
                return jax.tree.map(lambda a: jax.sharding.reshard(a, sharding), x)

            inputs = jax.tree.map(place, in_specs, inputs)
        out_specs = of_tokens, of_states
        return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(*inputs)

    return run
