"""Rows without holes, for attention that goes by the distance or the number of tokens."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Int

from hla_jax._sharding import left_to_the_compiler, specs_of
from hla_jax.nn.mixer import Tokens


def padding_moved_to_the_end(
    tokens: Tokens, *arrays: jax.Array
) -> tuple[Tokens, list[jax.Array], Callable[[jax.Array], jax.Array]]:
    """Sorts each row's tokens before its padding, which would otherwise count in distances.

    Args:
      tokens: mask, segments and positions, [B, T].
      *arrays: [B, T, ...].

    Returns:
      Tokens and arrays of the sorted rows, and a function that puts [B, T, ...] back in order.
    """
    if tokens.mask is None:
        return tokens, list(arrays), lambda x: x
    order = jnp.argsort(~tokens.mask, axis=1, stable=True)
    tokens, arrays = _taken((tokens, arrays), order)
    return tokens, list(arrays), lambda x: _taken(x, jnp.argsort(order, axis=1))


def _taken(tree: Any, order: Int[jax.Array, "B T"]) -> Any:
    def take(trees: tuple[Any, jax.Array]) -> Any:
        tree, order = trees
        rows = jnp.arange(len(order))[:, None]
        return jax.tree.map(lambda x: x[rows, order], tree)

    return left_to_the_compiler(take, (tree, order), lambda: specs_of(tree))
