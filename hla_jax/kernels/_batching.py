"""Kernels under JAX's transformations: any number of batch axes, `jax.vmap`, many devices."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir


def over_batch(kernel: Callable) -> Callable:
    """Returns the kernel, which takes one batch axis, for any number of them and under any vmap.

    Left to itself, `jax.vmap` would give the kernel another grid axis; here it only makes B larger.
    """
    call = jax.custom_batching.custom_vmap(kernel)

    @call.def_vmap
    def _(size, is_mapped, *args):
        def whole(a, mapped):
            return a if mapped else jnp.broadcast_to(a, (size, *a.shape))

        y = _joined(call, jax.tree.map(whole, args, tuple(is_mapped)), 2)
        return y, jax.tree.map(lambda _: True, y)

    return lambda x, *rest: _joined(call, (x, *rest), x.token_axis)


def _joined(call: Callable, args, axes: int):
    """Calls with the first axes of all arrays joined, and splits those of the results again."""
    batch = args[0].q.shape[:axes]
    args = jax.tree.map(lambda a: a.reshape(math.prod(batch), *a.shape[axes:]), args)
    return jax.tree.map(lambda a: a.reshape(*batch, *a.shape[1:]), call(*args))


def unless_partitioned(kernel: Callable, otherwise: Callable | None, types: Callable) -> Callable:
    """Returns a function that is the kernel, but `otherwise` where the compiler shards the program.

    It cannot look into a kernel, and would gather all operands on every device. A kernel runs where
    a device has its own part: in `shard_map`, or alone. Without `otherwise` it is an error. Nor is
    there a kernel in a program that is exported for several platforms at once.

    Neither is traced before it is lowered, so that a machine without the kernel's platform does not
    pay for it: `types` computes arrays of the results' types.
    """

    def run(*args):
        flat, structure = jax.tree.flatten(args)
        jaxpr, results = jax.make_jaxpr(types, return_shape=True)(*args)

        def of_flat(function):
            return lambda *flat: jax.tree.leaves(function(*jax.tree.unflatten(structure, flat)))

        fallback = None if otherwise is None else of_flat(otherwise)
        y = _kernel_or_xla.bind(
            *flat, kernel=of_flat(kernel), otherwise=fallback, types=tuple(jaxpr.out_avals)
        )
        return jax.tree.unflatten(jax.tree.structure(results), y)

    return run


def _lower(ctx, *args, kernel, otherwise, types):
    del types
    platforms = ctx.platforms or ctx.module_context.platforms
    if len(platforms) == 1 and not _is_partitioned(ctx.module_context.axis_context):
        chosen = kernel
    elif otherwise is not None:
        chosen = otherwise
    else:
        raise ValueError(
            'implementation="pallas" must run where each device has its own part of the arrays, '
            "in jax.shard_map or hla_jax.parallel.sharded, and be lowered for one platform: a "
            "kernel cannot be partitioned"
        )
    return mlir.lower_fun(chosen, multiple_results=True)(ctx, *args)


def _is_partitioned(context) -> bool:
    """Tells whether what is lowered is for several devices, and not per device."""
    if hasattr(context, "mesh"):  # in `shard_map`, perhaps over some axes only
        manual = frozenset(context.manual_axes) | frozenset(context.mesh.manual_axes)
        return manual != frozenset(context.mesh.axis_names)
    return getattr(context, "num_devices", 1) != 1


_kernel_or_xla = Primitive("kernel_or_xla")
_kernel_or_xla.multiple_results = True
_kernel_or_xla.def_abstract_eval(lambda *_, types, **__: types)


@_kernel_or_xla.def_impl
def _(*args, **parameters):
    with jax.disable_jit(False):  # arrays that lie on several devices partition this too
        return jax.jit(lambda *args: _kernel_or_xla.bind(*args, **parameters))(*args)


mlir.register_lowering(_kernel_or_xla, _lower)
