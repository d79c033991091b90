"""What arrays' types say of meshes: explicit axes, and the axes of a `shard_map`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def has_explicit_axes(tree: Any) -> bool:
    """Tells whether any array's type carries a sharding."""
    leaves = jax.tree.leaves(tree)
    return any(axis is not None for x in leaves for axis in jax.typeof(x).sharding.spec)


def specs_of(tree: Any) -> Any:
    """The `PartitionSpec` that each array's type carries."""
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)


def left_to_the_compiler(run: Callable[[Any], Any], tree: Any, specs: Callable[[], Any]) -> Any:
    """Returns run(tree), also on explicit mesh axes: there the compiler shards the inside.

    Otherwise each reshape and gather inside would have to say how its result lies.

    Args:
      run: a function of the tree.
      tree: arrays, at least one.
      specs: called where there are explicit axes, for the `PartitionSpec`s of run's results.
    """
    if not has_explicit_axes(tree):
        return run(tree)
    with jax.sharding.use_abstract_mesh(jax.typeof(jax.tree.leaves(tree)[0]).sharding.mesh):
        return jax.sharding.auto_axes(run, out_sharding=specs())(tree)


def vary_like(tree: Any, like: Any) -> Any:
    """Makes `tree` vary over all `shard_map` axes that any array of `like` varies over.

    A loop's carry must have one type from the start, and a cotangent the type of its operand.
    `zeros_like` is what passes such a type on; the sum with 0 is folded away.
    """
    zeros = (jnp.zeros_like(x, jnp.float32, ()) for x in jax.tree.leaves(like))
    zero = sum(zeros, jnp.zeros((), jnp.float32))
    return jax.tree.map(lambda x: x + zero.astype(x.dtype), tree)
