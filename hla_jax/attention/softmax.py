"""Softmax attention, with the conventions of this library for padding, packing and head groups."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from hla_jax._check import checked_or_none
from hla_jax._segments import segment_numbers
from hla_jax._types import Array, Keys, Mask, Outputs, Queries, SegmentIds, Values


def softmax_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    causal: bool = True,
    mask: Mask | None = None,
    segment_ids: SegmentIds | None = None,
    bias: Float[Array, "..."] | None = None,
    scale: float | None = None,
) -> Outputs:
    """Softmax attention, with this library's padding, packing and head groups.

        o_t = sum_s softmax_s(scale q_t . k_s + bias_ts) v_s

    A query with no key to look at gives 0. Whatever a masked key contains, NaN included, reaches no
    output and no gradient; nor does a masked query where causal.

    Source: Attention Is All You Need (Vaswani et al. 2017, arXiv 1706.03762), section 3.2.1.

    Args:
      q: [*B, T, H, D].
      k: [*B, S, K, D]; K divides H, and query head h uses kv head h // (H // K).
      v: [*B, S, K, E].
      causal: whether token t sees s <= t alone; needs T == S.
      mask: [*B, S], False at padding: masked keys are not seen. Where causal, tokens are queries
        too, and masked ones give 0.
      segment_ids: [*B, T], integers, for T == S: each token sees its own segment alone. A segment
        starts where the id differs from that of the last unmasked token.
      bias: added to the logits; broadcasts to [*B, H, T, S].
      scale: multiplies every product q . k; None is D^(-1/2).

    Returns:
      Outputs [*B, T, H, E] in v's dtype.

    Raises:
      ValueError: an argument has a wrong shape or dtype; the message names it.

    Example:
      >>> import jax.numpy as jnp
      >>> q = k = jnp.zeros((3, 1, 4))
      >>> v = jnp.array([2.0, 4.0, 9.0]).reshape(3, 1, 1)
      >>> print(softmax_attention(q, k, v).ravel())
      [2. 3. 5.]
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    _check(q, k, v)
    T, S = q.shape[-3], k.shape[-3]
    if (causal or segment_ids is not None) and T != S:
        raise ValueError(
            f"T and S must be equal for causal=True and for segment_ids, got T = {T} and S = {S}"
        )
    batch = q.shape[:-3]
    visible = jnp.ones((*batch, T, S), bool)
    if causal:
        visible &= jnp.tri(T, dtype=bool)
    mask = checked_or_none("mask", mask, (*batch, S), jnp.bool_)
    if mask is not None:
        visible &= mask[..., None, :]
        k, v = (jnp.where(mask[..., None, None], x, 0) for x in (k, v))
        if causal:
            visible &= mask[..., :, None]
            q = jnp.where(mask[..., None, None], q, 0)
    segment_ids = checked_or_none("segment_ids", segment_ids, (*batch, S), jnp.integer)
    if segment_ids is not None:
        number = segment_numbers(segment_ids, mask)
        visible &= number[..., :, None] == number[..., None, :]
    return attend(q, k, v, visible, bias=bias, scale=scale)


def attend(
    q: Float[jax.Array, "*B T H D"],
    k: Float[jax.Array, "*B S K D"],
    v: Float[jax.Array, "*B S K E"],
    visible: Bool[jax.Array, "*B T S"],
    *,
    bias: Float[Array, "..."] | None = None,
    scale: float | None = None,
) -> Float[jax.Array, "*B T H E"]:
    """Softmax attention of each query over the keys visible to it; 0 where there are none."""
    batch, (T, H, D), (S, _, E) = q.shape[:-3], q.shape[-3:], v.shape[-3:]
    if visible.size == 0:
        return jnp.zeros((*batch, T, H, E), v.dtype)
    scale = D**-0.5 if scale is None else scale
    if bias is not None:
        bias = jnp.broadcast_to(bias, (*batch, H, T, S)).reshape(-1, H, T, S)
    width = max(D, E)  # jax's function wants D == E; zero columns change nothing

    def pad(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.promote_types(q.dtype, v.dtype)).reshape(-1, *x.shape[-3:])
        return jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])])

    out = jax.nn.dot_product_attention(
        pad(q), pad(k), pad(v), bias, visible.reshape(-1, 1, T, S), scale=scale
    )
    out = out[..., :E].reshape(*batch, T, H, E).astype(v.dtype)
    return jnp.where(visible.any(-1)[..., None, None], out, 0)


def _check(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim < 3 or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"{name} must be floating, [*B, tokens, heads, width], got {x.dtype} {x.shape}"
            )
    if k.shape[:-1] != v.shape[:-1] or k.shape[:-3] != q.shape[:-3] or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            "q, k and v must be [*B, T, H, D], [*B, S, K, D] and [*B, S, K, E], "
            f"got {q.shape}, {k.shape} and {v.shape}"
        )
    H, K = q.shape[-2], k.shape[-2]
    if K == 0 or H % K:
        raise ValueError(f"k's heads must divide q's, got {K} kv heads for {H}")
