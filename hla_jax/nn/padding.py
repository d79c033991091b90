"""Rows without holes, for attention that goes by the distance or the number of tokens."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float

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
    rows = jnp.arange(len(tokens.mask))[:, None]
    order = jnp.argsort(~tokens.mask, axis=1, stable=True)
    back = jnp.argsort(order, axis=1)

    def put_back(x: Float[jax.Array, "B T *rest"]) -> Float[jax.Array, "B T *rest"]:
        return x[rows, back]

    tokens, arrays = jax.tree.map(lambda x: x[rows, order], (tokens, arrays))
    return tokens, list(arrays), put_back
