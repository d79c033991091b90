"""What the attention functions share: the checks of their arguments, and who may see whom."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Int

from hla_jax._check import (
    FLOATING,
    array,
    check_flag,
    check_number,
    checked_per_token,
    is_float,
    swapped_axes_hint,
)
from hla_jax._segments import segment_numbers
from hla_jax._sharding import left_to_the_compiler
from hla_jax._types import Keys, Mask, Queries, SegmentIds, Values


class Inputs(NamedTuple):
    """Checked tokens with zeros where masked, and labels that fold mask and segments into one.

    Query t may see key s where `query_labels[..., t] == key_labels[..., s]`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    query_labels: Int[jax.Array, "*B T"]
    key_labels: Int[jax.Array, "*B S"]


def prepare(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    causal: bool,
    mask: Mask | None = None,
    segment_ids: SegmentIds | None = None,
) -> Inputs:
    """Checks the arguments of an attention function and folds mask and segments into labels.

    A label is a segment's number, -1 for a masked key and -2 for a masked query. Where not causal,
    the mask speaks of keys alone.

    Raises:
      ValueError: an argument has a wrong shape or dtype, or T != S for causal attention or
        segments; the message names it.
    """
    check_flag("causal", causal)
    q, k, v = array("q", q), array("k", k), array("v", v)
    _check(q, k, v, one_length=causal or segment_ids is not None)
    batch, T, S = q.shape[:-3], q.shape[-3], k.shape[-3]
    mask = checked_per_token("mask", mask, k, jnp.bool_)
    segment_ids = checked_per_token("segment_ids", segment_ids, k, jnp.integer)
    if segment_ids is None:
        queries, keys = jnp.zeros((*batch, T), jnp.int32), jnp.zeros((*batch, S), jnp.int32)
    else:
        queries = keys = segment_numbers(segment_ids, mask)
    if mask is not None:
        keys = jnp.where(mask, keys, -1)
        k, v = (jnp.where(mask[..., None, None], x, 0) for x in (k, v))
        if causal:
            queries = jnp.where(mask, queries, -2)
            q = jnp.where(mask[..., None, None], q, 0)
    return Inputs(q, k, v, queries, keys)


def logit_scale(scale: Any, width: int) -> Any:
    """Returns what multiplies the products of queries and keys: D^(-1/2) where none is given."""
    if scale is None:
        return max(width, 1) ** -0.5
    check_number("scale", scale)
    return scale


def lying_as_queries(run: Callable[[Any], jax.Array], tokens: Any, q: jax.Array) -> jax.Array:
    """Returns the outputs run(tokens), which lie on explicit mesh axes as q does."""
    return left_to_the_compiler(
        run, tokens, lambda: PartitionSpec(*jax.typeof(q).sharding.spec[:-1], None)
    )


def visible_keys(inputs: Inputs, *, causal: bool) -> Bool[jax.Array, "*B T S"]:
    """Which keys each query sees, for the functions that look at all pairs."""
    visible = inputs.query_labels[..., :, None] == inputs.key_labels[..., None, :]
    T, S = visible.shape[-2:]
    return (
        visible & jnp.broadcast_to(jnp.tri(T, S, dtype=bool), visible.shape) if causal else visible
    )


def _check(q: jax.Array, k: jax.Array, v: jax.Array, one_length: bool) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim < 3 or not is_float(x.dtype):
            raise ValueError(
                f"{name} must be {FLOATING}, [*B, tokens, heads, width], got {x.dtype} {x.shape}"
            )
    hint = swapped_axes_hint(q, k, v, one_length=one_length)
    if k.shape[:-1] != v.shape[:-1] or k.shape[:-3] != q.shape[:-3] or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            "q, k and v must be [*B, T, H, D], [*B, S, K, D] and [*B, S, K, E], "
            f"got {q.shape}, {k.shape} and {v.shape}{hint}"
        )
    T, S, H, K = q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2]
    if one_length and T != S:
        raise ValueError(
            f"T and S must be equal for causal=True and for segment_ids, got T = {T} and S = {S}"
            f"{hint}"
        )
    if K == 0:
        raise ValueError(f"k must have at least one head, got shape {k.shape}")
    if H % K:
        raise ValueError(f"k's heads must divide q's, got {K} kv heads for {H}{hint}")
