"""What the monoids of this package share."""

from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from hla_jax._decay import pairwise
from hla_jax._types import Array

# One token of one head, and a chunk of c tokens.
Key: TypeAlias = Float[Array, " D"]
Value: TypeAlias = Float[Array, " E"]
LogDecay: TypeAlias = Float[Array, ""] | float
Keys: TypeAlias = Float[Array, "c D"]
Values: TypeAlias = Float[Array, "c E"]
LogDecays: TypeAlias = Float[Array, " c"]

# Members of an element; prefixes of a sequence have leading axes.
Scalar: TypeAlias = Float[Array, "*T"]
KeySum: TypeAlias = Float[Array, "*T D"]
Square: TypeAlias = Float[Array, "*T D D"]
Matrix: TypeAlias = Float[Array, "*T D E"]

Element = TypeVar("Element", bound=tuple)


def neutral(self: Any, like: Element) -> Element:
    """The element of no tokens, shaped as `like`: zeros, but rho = 1. The monoids' `identity`."""
    zeros: Any = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return zeros._replace(rho=jnp.ones_like(zeros.rho))


def widen(*token: Any) -> tuple[jax.Array, ...]:
    """q, k, v and log_decay in float32, or in float64 if q, k or v is."""
    dtype = jnp.result_type(*token[:3], jnp.float32)
    return tuple(jnp.asarray(x, dtype) for x in token)


def to_end(log_decay: Float[jax.Array, " c"]) -> Float[jax.Array, " c"]:
    """e_s = w(c, s), the product of the decays after token s."""
    after = jnp.append(log_decay, 0.0)[1:]
    return jnp.exp(lax.cumsum(after, reverse=True))


def affinities(
    q: Float[jax.Array, "c D"], k: Float[jax.Array, "c D"], log_decay: Float[jax.Array, " c"]
) -> Float[jax.Array, "c c"]:
    """A_ts = w(t, s) (q_t . k_s) for s <= t, else 0: A V is linear attention within the chunk."""
    return jnp.exp(pairwise(log_decay)) * (q @ k.T)
