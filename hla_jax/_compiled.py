"""Functions that loop, for calls outside of jit: compiled once, not at every call.

Outside of jit a loop is compiled when it is called, and again at the next call if it holds a
function that was made anew. So each function that loops is one of `jax.jit`, at the top of its
module: arrays are its arguments, all else is static.

None of them is inlined: on jax 0.10 an eager `jax.grad` would compile the transposed loops anew.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def call(compiled: Callable[..., Any], *arrays: Any, **static: Any) -> Any:
    """Calls a jitted function; as if it were not where a static argument cannot be hashed."""
    try:
        hash(tuple(static.values()))
    except TypeError:
        return inspect.unwrap(compiled)(*arrays, **static)
    return compiled(*arrays, **static)


def split(tree: Any) -> tuple[list[Any], Any]:
    """Splits a tree into its arrays and the rest, which is static; `join` puts them together.

    The rest has the attributes of objects beside them, so that one whose attributes were changed
    since is not taken for what it was.

    Example:
      >>> arrays, rest = split({"ridge": np.array(0.5), "masked": True})
      >>> arrays, join(arrays, rest)
      ([array(0.5)], {'masked': True, 'ridge': array(0.5)})
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays = [x for x in leaves if _is_array(x)]
    static = tuple(_ARRAY if _is_array(x) else x for x in leaves)
    return arrays, (structure, static, tuple(map(_attributes, static)))


def join(arrays: list[Any], rest: Any) -> Any:
    """Puts a tree together again."""
    structure, leaves, _ = rest
    left = iter(arrays)
    return jax.tree.unflatten(structure, [next(left) if x is _ARRAY else x for x in leaves])


def _attributes(x: Any) -> tuple[Any, ...]:
    x = getattr(x, "__self__", x)  # of a bound method
    return tuple(getattr(x, "__dict__", {}).items())


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


_ARRAY = object()
