"""Checks of arguments: a ValueError names the argument, what came and what is wanted."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def checked(name: str, x: Any, shape: tuple[int, ...] | None, kind: Any) -> jax.Array:
    """Returns x as an array if it has the kind of dtype and, where one is given, the shape.

    Example:
      >>> import jax.numpy as jnp
      >>> checked("mask", jnp.ones(3), (3,), jnp.bool_)
      Traceback (most recent call last):
        ...
      ValueError: mask must be bool of shape (3,), got float32 of shape (3,)
    """
    x = array(name, x)
    if (shape is not None and x.shape != shape) or not jnp.issubdtype(x.dtype, kind):
        wanted = kind.__name__ + ("" if shape is None else f" of shape {shape}")
        raise ValueError(f"{name} must be {wanted}, got {x.dtype} of shape {x.shape}")
    return x


def checked_or_none(name: str, x: Any, shape: tuple[int, ...], kind: Any) -> jax.Array | None:
    """The same for an argument that may be left out."""
    return None if x is None else checked(name, x, shape, kind)


def array(name: str, x: Any) -> jax.Array:
    """Returns x as an array, if JAX can make one of it."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array, got {x!r}") from error


def checked_int(name: str, x: Any, low: int = 1, high: int | None = None) -> int:
    """Returns x as a Python int if it is one, known while tracing, from low to high."""
    try:
        n = None if isinstance(x, bool | np.bool_) else operator.index(x)
    except TypeError:
        n = None
    if n is None or n < low or (high is not None and n > high):
        wanted = f"at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name} must be an integer {wanted}, got {x!r}")
    return n


def check_sizes(**sizes: Any) -> None:
    """Raises unless each size is an integer of at least 1."""
    for name, size in sizes.items():
        checked_int(name, size)


def checked_key(name: str, key: Any) -> jax.Array:
    """Returns a PRNG key, new or old style, if it is one."""
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    key = key if typed else array(name, key)
    if key.ndim != (0 if typed else 1) or not (typed or key.dtype == jnp.uint32):
        raise ValueError(
            f"{name} must be one PRNG key, as from jax.random.key(0), got {key.dtype} of shape "
            f"{key.shape}"
        )
    return key


def check_number(name: str, x: Any) -> None:
    """Raises unless x, traced or not, is one real number."""
    x = array(name, x)
    if x.ndim != 0 or jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise ValueError(f"{name} must be a real number, got {x.dtype} of shape {x.shape}")


def check_flag(name: str, x: Any) -> None:
    """Raises unless x is a bool, which has to be known while tracing."""
    if not isinstance(x, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {x!r}")
