"""Functions that loop, for calls outside of jit: compiled once, not at every call.

Outside of jit a loop is compiled when it is called, and again at the next call if it holds a
function that was made anew. So each function that loops is one of `jax.jit`, at the top of its
module: arrays are its arguments, all else is static.

None of them is inlined: on jax 0.10 an eager `jax.grad` would compile the transposed loops anew.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def call(compiled: Callable[..., Any], *arrays: Any, **static: Any) -> Any:
    """Calls a jitted function; as if it were not where a static argument cannot be hashed."""
    try:
        hash(tuple(static.values()))
    except TypeError:
        return compiled.__wrapped__(*arrays, **static)  # type: ignore[attr-defined]
    return compiled(*arrays, **static)


def split(tree: Any) -> tuple[list[Any], Any]:
    """Splits a tree into its arrays and the rest, which is static; `join` puts them together.

    Example:
      >>> arrays, rest = split({"ridge": np.float32(0.5), "masked": True})
      >>> arrays, join(arrays, rest)
      ([np.float32(0.5)], {'masked': True, 'ridge': np.float32(0.5)})
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays = [x for x in leaves if _is_array(x)]
    return arrays, (structure, tuple(_ARRAY if _is_array(x) else x for x in leaves))


def join(arrays: list[Any], rest: Any) -> Any:
    """Puts a tree together again."""
    structure, leaves = rest
    left = iter(arrays)
    return jax.tree.unflatten(structure, [next(left) if x is _ARRAY else x for x in leaves])


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


_ARRAY = object()
