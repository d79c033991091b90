"""The letters of every shape in this library, and the array types made of them.

| letter | axis |
|---|---|
| B | any leading batch axes (written `*B`) |
| T | tokens that ask (queries) |
| S | tokens that answer (keys and values) |
| H | query heads |
| K | key/value heads; K divides H, and query head h uses kv head h // (H // K) |
| D | width of queries and keys |
| E | width of values |
| F | features of a layer's input and output |
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

Array: TypeAlias = jax.Array | np.ndarray

Queries: TypeAlias = Float[Array, "*B T H D"]
Keys: TypeAlias = Float[Array, "*B S K D"]
Values: TypeAlias = Float[Array, "*B S K E"]
Outputs: TypeAlias = Float[jax.Array, "*B T H E"]
Weights: TypeAlias = Float[jax.Array, "*B H T S"]


def result_type(*xs: Any) -> jnp.dtype:
    """Returns the dtype to compute in, also where JAX is told to promote nothing by itself."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*xs)


# A Python number or a traced one.
Number: TypeAlias = float | Float[Array, ""]

# Anything that broadcasts to [*B, S, K]; Python floats included.
LogDecay: TypeAlias = Shaped[Array, "..."] | float
Mask: TypeAlias = Bool[Array, "*B S"]
SegmentIds: TypeAlias = Int[Array, "*B S"]

QueryStep: TypeAlias = Float[Array, "*B H D"]
KeyStep: TypeAlias = Float[Array, "*B K D"]
ValueStep: TypeAlias = Float[Array, "*B K E"]
OutputStep: TypeAlias = Float[jax.Array, "*B H E"]
MaskStep: TypeAlias = Bool[Array, "*B"]

# A feature map acts on the last axis; a pair is one for queries and one for keys.
FeatureMap: TypeAlias = Callable[[Any], Any]
FeatureMaps: TypeAlias = FeatureMap | tuple[FeatureMap, FeatureMap] | None
