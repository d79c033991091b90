"""Softmax attention, with the conventions of this library for padding, packing and head groups."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from hla_jax._check import checked
from hla_jax._types import Array, Keys, Mask, Outputs, Queries, SegmentIds, Values, result_type
from hla_jax.attention._inputs import logit_scale, prepare, visible_keys


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
      bias: added to the logits; broadcasts to [*B, H, T, S]. -inf hides a key.
      scale: multiplies every product q . k; None is D^(-1/2).

    Returns:
      Outputs [*B, T, H, E] in v's dtype. The softmax is in float32, or float64 if an input is.

    Raises:
      ValueError: an argument has a wrong shape or dtype; the message names it.

    Example:
      >>> import jax.numpy as jnp
      >>> q = k = jnp.zeros((3, 1, 4))
      >>> v = jnp.array([2.0, 4.0, 9.0]).reshape(3, 1, 1)
      >>> print(softmax_attention(q, k, v).ravel())
      [2. 3. 5.]
    """
    inputs = prepare(q, k, v, causal=causal, mask=mask, segment_ids=segment_ids)
    visible = visible_keys(inputs, causal=causal)
    return attend(inputs.q, inputs.k, inputs.v, visible, bias=bias, scale=scale)


def attend(
    q: Float[jax.Array, "*B T H D"],
    k: Float[jax.Array, "*B S K D"],
    v: Float[jax.Array, "*B S K E"],
    visible: Bool[jax.Array, "..."],
    *,
    bias: Float[Array, "..."] | None = None,
    scale: float | None = None,
) -> Float[jax.Array, "*B T H E"]:
    """Softmax attention of each query over the keys visible to it; 0 where there are none.

    visible is [*B, T, S], or [*B, H, T, S] where heads see different keys.
    """
    batch, (T, H, D), (S, _, E) = q.shape[:-3], q.shape[-3:], v.shape[-3:]
    out_dtype = v.dtype
    if 0 in (*batch, T, S, H, E):
        return jnp.zeros((*batch, T, H, E), out_dtype)
    scale, rows = logit_scale(scale, D), math.prod(batch)
    dtype = result_type(q, k, v)
    if visible.ndim == q.ndim - 1:
        visible = visible[..., None, :, :]
    if bias is not None:
        bias = _checked_bias(bias, (*batch, H, T, S)).astype(result_type(dtype, jnp.float32))
        visible &= bias > -jnp.inf
        # Above the finite number that stands in hidden places, or these would get the weight.
        bias = jnp.maximum(bias, jnp.finfo(bias.dtype).min / 2).reshape(rows, H, T, S)
    q, k, v = (x.astype(dtype).reshape(rows, *x.shape[-3:]) for x in (q, k, v))
    seen = visible.reshape(rows, *visible.shape[-3:])
    out = (_in_float64 if dtype == jnp.float64 else _in_jax)(q, k, v, bias, seen, scale)
    out = out.reshape(*batch, T, H, E).astype(out_dtype)
    return jnp.where(visible.any(-1).swapaxes(-1, -2)[..., None], out, 0)


def _checked_bias(bias: Any, shape: tuple[int, ...]) -> jax.Array:
    bias = checked("bias", bias, None, jnp.floating)
    try:
        return jnp.broadcast_to(bias, shape)
    except ValueError as error:
        raise ValueError(
            f"bias must broadcast to [*B, H, T, S] = {shape}, got {bias.shape}"
        ) from error


def _in_jax(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    visible: jax.Array,
    scale: float,
) -> jax.Array:
    D, E = q.shape[-1], v.shape[-1]
    width = max(D, E)  # jax's function wants D == E; zero columns change nothing
    q, k, v = (jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])]) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, bias, visible, scale=scale)[..., :E]


def _in_float64(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    visible: jax.Array,
    scale: float,
) -> jax.Array:
    """The same; jax's function takes the softmax in float32 whatever it is given."""
    k, v = (jnp.repeat(x, q.shape[-2] // x.shape[-2], axis=-2) for x in (k, v))
    logits = jnp.einsum("bthd,bshd->bhts", q, k) * scale + (0 if bias is None else bias)
    weights = jax.nn.softmax(jnp.where(visible, logits, jnp.finfo(logits.dtype).min))
    return jnp.einsum("bhts,bshe->bthe", weights, v)
