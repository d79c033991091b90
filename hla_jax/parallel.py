"""Operators over several devices."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hla_jax import _compiled
from hla_jax._check import checked_or_none
from hla_jax._layout import Layout, check_axes
from hla_jax.ops._fold import broadcast_decay

__all__ = ["Layout", "sharded"]


def sharded(
    op: Callable[..., Any],
    mesh: Mesh,
    *,
    batch: str | None = None,
    heads: str | None = None,
    sequence: str | None = None,
) -> Callable[..., Any]:
    """Makes an operator that computes each part of its tokens on a device of its own.

    Parts of the batch and of the heads have nothing to exchange. Over a sequence, devices exchange
    one state for each stage of the operator, and the id of their last segment, whatever the length:
    a device adds up what its tokens do to the state, an exclusive scan over the devices gives it
    the state before its tokens, and from there it goes on as on one device.

    XLA runs the products of one CPU device on one core, so on a CPU two devices
    (`jax.config.update("jax_num_cpu_devices", 2)` before anything else) are what makes a second
    core work.

    Args:
      op: `linear_attention`, `hla2`, `ahla` or `hla3`, or a partial of one with its options.
      mesh: the devices.
      batch: the mesh axis that divides the first batch axis; None leaves it whole.
      heads: the mesh axis that divides the heads; it must divide the kv heads. None leaves them
        whole.
      sequence: the mesh axis that divides the tokens; None leaves them whole. It need not divide
        their number, but then inputs and outputs are gathered. States are the same on all its
        devices.

    Returns:
      A function with op's arguments and results.

    Raises:
      ValueError: an axis is not the mesh's or comes twice, or (when called) does not divide the
        batch or heads.

    Example:
      >>> import jax, hla_jax as hla
      >>> mesh = jax.make_mesh((jax.device_count(),), ("tokens",))
      >>> hla2 = hla.parallel.sharded(hla.hla2, mesh, sequence="tokens")
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 10, 8, 4))
      >>> out, state = jax.jit(hla2)(q, k, v)
      >>> out.shape
      (1, 10, 8, 4)
    """
    check_axes(mesh, batch=batch, heads=heads, sequence=sequence)
    defaults: dict[str, Any] = {}
    if isinstance(op, partial) and not op.args:  # two partials are never equal, their parts may be
        defaults, op = op.keywords, op.func

    def run(q, k, v, *, log_decay=None, mask=None, segment_ids=None, initial_state=None, **options):
        q, k, v = (jnp.asarray(x) for x in (q, k, v))
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim != q.ndim or x.ndim < 3:
                raise ValueError(f"{name} must be [*B, T, heads, width], got shape {x.shape}")
            if batch is not None and x.ndim == 3:
                raise ValueError(
                    f"{name} must be [B, T, heads, width] where batch={batch!r}, "
                    f"got shape {x.shape}"
                )
            for axis, length, what in ((batch, x.shape[0], "batch"), (heads, x.shape[-2], "heads")):
                if axis is not None and length % mesh.shape[axis]:
                    raise ValueError(
                        f"{name} must have {what} that mesh axis {axis!r} of {mesh.shape[axis]} "
                        f"devices divides, got shape {x.shape}"
                    )
            if sequence is not None and x.shape[-3] != q.shape[-3]:
                raise ValueError(f"{name} must have q's {q.shape[-3]} tokens, got {x.shape[-3]}")
        mask = checked_or_none("mask", mask, k.shape[:-2], jnp.bool_)
        segment_ids = checked_or_none("segment_ids", segment_ids, k.shape[:-2], jnp.integer)
        if log_decay is not None:
            log_decay = broadcast_decay(log_decay, mask, k.shape[:-1])
        given = dict(
            log_decay=log_decay, mask=mask, segment_ids=segment_ids, initial_state=initial_state
        )
        arrays, rest = _compiled.split({**defaults, **options})
        return _compiled.call(
            _run,
            *(q, k, v, given, arrays),
            op=op,
            options=rest,
            mesh=mesh,
            batch=batch,
            heads=heads,
            sequence=sequence,
        )

    return run


@partial(jax.jit, static_argnames=("op", "options", "mesh", "batch", "heads", "sequence"))
def _run(q, k, v, given, arrays, *, op, options, mesh, batch, heads, sequence):
    """Runs an operator, of which the arrays are a part of the options."""
    T, rows = q.shape[-3], (batch, *(None,) * (q.ndim - 4)) if q.ndim > 3 else ()
    # Explicit axes know no unequal parts; on others XLA fails on them: a gradient that goes on
    # into an embedding came out wrong, or the partitioner stopped the program.
    whole = NamedSharding(mesh, PartitionSpec(*rows, None, heads))
    explicit = AxisType.Explicit in mesh.axis_types
    if sequence is not None and T % mesh.shape[sequence] and not explicit:
        q, k, v = jax.lax.with_sharding_constraint((q, k, v), whole)
    if sequence is not None:
        q, k, v, given = _padded(mesh.shape[sequence], q, k, v, given)
    of_tokens = PartitionSpec(*rows, sequence, heads)
    of_places, of_states = PartitionSpec(*rows, sequence), PartitionSpec(*rows, heads)
    specs = dict(
        log_decay=of_tokens, mask=of_places, segment_ids=of_places, initial_state=of_states
    )
    given = {name: x for name, x in given.items() if x is not None}
    inputs = q, k, v, given, arrays
    in_specs = (*(of_tokens,) * 3, {name: specs[name] for name in given}, PartitionSpec())

    def local(q, k, v, given, arrays):
        more = _compiled.join(arrays, options)
        if sequence is not None:
            more["axis_name"] = sequence
        return op(q, k, v, **given, **more)

    if explicit:  # shard_map then takes only what lies as it says

        def place(spec, x):
            sharding = NamedSharding(mesh, spec)
            return jax.tree.map(lambda a: jax.sharding.reshard(a, sharding), x)

        inputs = jax.tree.map(place, in_specs, inputs)
    out_specs = of_tokens, of_states
    mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    out, state = mapped(*inputs)
    if out.shape[-3] == T:
        return out, state
    place = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
    out = place(out, whole)
    return out[..., :T, :, :], state


def _padded(devices: int, q, k, v, given):
    """Pads T on the right to a multiple of the devices, at least one token each."""
    T, rows = q.shape[-3], q.ndim - 3
    more = max(1, -(-T // devices)) * devices - T
    if more == 0:
        return q, k, v, given
    if given["mask"] is None:
        given = given | {"mask": jnp.ones(q.shape[:-2], bool)}

    def pad(x):
        if x is None:
            return None
        return jnp.pad(x, [(0, more if axis == rows else 0) for axis in range(jnp.ndim(x))])

    tokens = {name: pad(given[name]) for name in ("log_decay", "mask", "segment_ids")}
    return pad(q), pad(k), pad(v), given | tokens
