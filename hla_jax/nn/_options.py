"""Keyword arguments that a layer keeps for its operator, arrays among them."""

from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx


class Options(nnx.Module):
    """Keeps pytrees as parts of a layer, and returns them when called.

    An array becomes a variable that is saved, stacked and passed to compiled functions with the
    parameters, but is not trained. Modules and variables stay what they are, so that an `nnx.Param`
    is trained. All else is static: it must be hashable, and layers with equal options are equal.

    Args:
      **options: any pytrees; a `functools.partial` is one as well.

    Raises:
      ValueError: a part of an option is neither an array nor hashable.
    """

    def __init__(self, **options: Any):
        leaves, self.structure = jax.tree.flatten(_opened(options), is_leaf=_is_part)
        self.leaves = nnx.List(map(_kept, leaves))

    def __call__(self) -> dict[str, Any]:
        leaves = [x[...] if isinstance(x, nnx.Variable) else x for x in self.leaves]
        return jax.tree.unflatten(self.structure, leaves)


def _kept(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array | np.ndarray):
        return nnx.Variable(jax.numpy.asarray(leaf))
    if not _is_part(leaf):
        try:
            hash(leaf)
        except TypeError as error:
            raise ValueError(
                f"a layer's options must be hashable, arrays or pytrees of these, got {leaf!r}"
            ) from error
    return leaf


def _is_part(x: Any) -> bool:
    return isinstance(x, nnx.Module | nnx.Variable)


def _opened(tree: Any) -> Any:
    """Replaces each `functools.partial`, which is only equal to itself, by a pytree."""

    def opened(x: Any) -> Any:
        if type(x) is not partial:
            return x
        function, args, options = _opened((x.func, x.args, x.keywords))
        return jax.tree_util.Partial(_call, function, *args, **options)

    return jax.tree.map(opened, tree, is_leaf=_is_part)


def _call(function: Any, *args: Any, **options: Any) -> Any:
    return function(*args, **options)
