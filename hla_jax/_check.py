"""Checks of arguments: a ValueError names the argument, what was passed, and what was expected."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

FLOATS = tuple(map(jnp.dtype, ("float16", "bfloat16", "float32", "float64")))
FLOATING = "floating, 16 bits or wider"
TOKENS_FIRST = "tokens come before heads, [*B, T, H, D]"


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
    fits = is_float(x.dtype) if kind is jnp.floating else jnp.issubdtype(x.dtype, kind)
    if (shape is not None and x.shape != shape) or not fits:
        wanted = FLOATING + "," if kind is jnp.floating else kind.__name__
        wanted = wanted.rstrip(",") if shape is None else f"{wanted} of shape {shape}"
        raise ValueError(f"{name} must be {wanted}, got {x.dtype} of shape {x.shape}")
    return x


def checked_or_none(name: str, x: Any, shape: tuple[int, ...], kind: Any) -> jax.Array | None:
    """The same for an argument that may be left out."""
    return None if x is None else checked(name, x, shape, kind)


def array(name: str, x: Any) -> jax.Array:
    """Returns x as an array, if JAX can make one of it."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be an array, got {x!r}") from error


def is_float(dtype: Any) -> bool:
    """Whether it is a type that the operators compute with: not those of 8 bits or less."""
    return dtype in FLOATS


def checked_dtype(name: str, dtype: DTypeLike) -> jnp.dtype:
    """Returns a floating dtype, however it was written, as the one object that equals it."""
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        known = None
    if known is None or not is_float(known):
        raise ValueError(f"{name} must be {FLOATING}, got {dtype!r}")
    return known


def is_known(*trees: Any) -> bool:
    """Tells whether all arrays' values can be looked at: not while tracing, nor on other hosts."""
    return not any(
        isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True)
        for x in jax.tree.leaves(trees)
    )


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


def real(name: str, x: Any) -> jax.Array:
    """Returns numbers as floats: integers become those of the default dtype.

    Example:
      >>> print(real("log_decay", 0))
      0.0
    """
    if isinstance(x, int) and not isinstance(x, bool) and abs(x) < 2**1000:
        x = float(x)
    x = array(name, x)
    if jnp.issubdtype(x.dtype, jnp.integer):
        x = x.astype(jnp.result_type(float))
    if not is_float(x.dtype):
        raise ValueError(f"{name} must be real numbers, got {x.dtype} of shape {x.shape}")
    return x


def check_number(name: str, x: Any) -> None:
    """Raises unless x, traced or not, is one real number."""
    x = real(name, x)
    if x.ndim != 0:
        raise ValueError(f"{name} must be a real number, got {x.dtype} of shape {x.shape}")


def known_number(name: str, x: Any) -> float:
    """Returns one real number as a Python float; it has to be known while tracing."""
    if isinstance(x, jax.core.Tracer):
        raise ValueError(f"{name} must be known while tracing, got {x}")
    check_number(name, x)
    return float(x)


def checked_per_token(name: str, x: Any, tokens: jax.Array, kind: Any) -> jax.Array | None:
    """Returns an array with a number for each of the tokens [*B, T, heads, width], or None."""
    *batch, T, heads, _ = tokens.shape
    if heads != T and getattr(x, "shape", None) == (*batch, heads):
        raise ValueError(
            f"{name} must be of shape {(*batch, T)}, got {(*batch, heads)}; {TOKENS_FIRST}: "
            f"are the {tokens.shape} of [*B, H, T, D]?"
        )
    return checked_or_none(name, x, (*batch, T), kind)


def type_name(x: Any) -> str:
    """Returns what to call x in a message."""
    return "array" if isinstance(x, jax.Array | np.ndarray) else type(x).__name__


def swapped_axes_hint(q: jax.Array, k: jax.Array, v: jax.Array, *, one_length: bool) -> str:
    """Returns what to add to an error where shapes would fit as [*B, H, T, D]."""
    (*batch, H, T, _), (*of_keys, K, S, _) = q.shape, k.shape
    fits = batch == of_keys and v.shape[:-1] == k.shape[:-1] and K > 0 and H % K == 0
    if not fits or (one_length and T != S):
        return ""
    return f"; {TOKENS_FIRST}: are these [*B, H, T, D]?"


def check_flag(name: str, x: Any) -> None:
    """Raises unless x is a bool, which has to be known while tracing."""
    if not isinstance(x, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {x!r}")
