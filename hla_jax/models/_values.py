"""Checks of values, where they are known: not inside jit, nor on other hosts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hla_jax._check import checked, is_known


def check_range(
    name: str, x: Any, low: int, high: int, where: Any = True, *, which: str = ""
) -> None:
    """Raises if known integers, those which count, are not in low..high.

    It looks at x as it was passed, for a conversion to int32 makes other numbers of large ones.

    Args:
      name: of the argument.
      x: an array, or what NumPy makes one of.
      low: the least value.
      high: the largest value.
      where: which ones count; broadcasts against x.
      which: the same in words, for the message.

    Example:
      >>> check_range("tokens", np.array([3, 9]), 0, 7, np.array([True, False]))
      >>> check_range("tokens", np.array([3, 9]), 0, 7)
      Traceback (most recent call last):
        ...
      ValueError: tokens must be in 0..7, got 9
    """
    if not is_known(x, where):
        return
    x = np.asarray(x)
    if (wrong := x[((x < low) | (x > high)) & np.asarray(where)]).size:
        raise ValueError(f"{name} must be in {low}..{high}{which}, got {wrong[0]}")


def checked_lengths(name: str, lengths: Any, rows: int, longest: int) -> jax.Array:
    """Returns lengths as an array if they are integers [rows], known ones in 0..longest."""
    array = checked(name, lengths, (rows,), jnp.integer)
    check_range(name, lengths, 0, longest)
    return array
