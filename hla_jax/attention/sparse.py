"""Attention over the pairs of a sparse pattern, at the cost of its blocks alone."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from hla_jax._types import Keys, Mask, Outputs, Queries, SegmentIds, Values, result_type
from hla_jax.attention._inputs import Inputs, logit_scale, lying_as_queries, prepare
from hla_jax.attention.patterns import Pattern, Piece


def sparse_attention(
    q: Queries,
    k: Keys,
    v: Values,
    pattern: Pattern,
    *,
    causal: bool = True,
    mask: Mask | None = None,
    segment_ids: SegmentIds | None = None,
    scale: float | None = None,
) -> Outputs:
    """Softmax attention of each query over the keys that a pattern shows it.

        o_t = sum_s softmax_s(scale q_t . k_s) v_s,    s in pattern(t)

    It equals softmax attention under the pattern's dense mask, but only the blocks of the pattern
    are computed. A pair that several parts of a union show counts once. A query with no key to look
    at gives 0. Whatever a masked key contains, NaN included, reaches no output and no gradient; nor
    does a masked query where causal. Positions are those in the row: masked tokens take up places.

    Cost: time and memory are those of the pattern's blocks (see each pattern), forward and
    backward: O(T window) for windows, O(T sqrt(T)) for `strided` and `fixed`.

    Source: the patterns name theirs. Parts are joined by the online softmax (Milakov and
    Gimelshein 2018, arXiv 1805.02867, section 3.1).

    Args:
      q: [*B, T, H, D].
      k: [*B, T, K, D]; K divides H, and query head h uses kv head h // (H // K).
      v: [*B, T, K, E].
      pattern: of `hla_jax.attention.patterns`, or a union of them.
      causal: whether token t sees s <= t alone.
      mask: [*B, T], False at padding: masked keys are not seen. Where causal, tokens are queries
        too, and masked ones give 0.
      segment_ids: [*B, T], integers: each token sees its own segment alone. A segment starts where
        the id differs from that of the last unmasked token.
      scale: multiplies every product q . k; None is D^(-1/2).

    Returns:
      Outputs [*B, T, H, E] in v's dtype. Products and sums are in float32, or float64 if q, k or v
      is.

    Raises:
      ValueError: an argument has a wrong shape or dtype, q and k differ in length, or the pattern
        was made for another number of heads; the message names it.

    Example:
      >>> import jax.numpy as jnp
      >>> from hla_jax.attention.patterns import sliding_window
      >>> q = k = jnp.zeros((4, 1, 4))
      >>> v = jnp.array([2.0, 4.0, 9.0, 1.0]).reshape(4, 1, 1)
      >>> print(sparse_attention(q, k, v, sliding_window(2)).ravel())
      [2.  3.  6.5 5. ]
    """
    if not isinstance(pattern, Pattern):
        raise ValueError(f"pattern must be a Pattern, got {pattern!r}")
    inputs = prepare(q, k, v, causal=causal, mask=mask, segment_ids=segment_ids)
    *batch, T, H, D = inputs.q.shape
    S, E = inputs.k.shape[-3], inputs.v.shape[-1]
    scale = logit_scale(scale, D)
    if T != S:
        raise ValueError(f"q and k must have one length for sparse attention, got {T} and {S}")
    if 0 in (*batch, T, H, E):
        return jnp.zeros((*batch, T, H, E), inputs.v.dtype)

    def run(inputs: Inputs) -> Float[jax.Array, "*B T H E"]:
        return _by_pieces(inputs, pattern.pieces(T, causal), causal)

    dtype = result_type(*inputs[:3], jnp.float32)
    q = inputs.q.astype(dtype) * jnp.asarray(scale, dtype)
    return lying_as_queries(run, inputs._replace(q=q), inputs.q)


def _by_pieces(inputs: Inputs, pieces: tuple[Piece, ...], causal: bool) -> jax.Array:
    """The outputs; q is scaled, and in the dtype to compute in."""
    q, out_dtype, E = inputs.q, inputs.v.dtype, inputs.v.shape[-1]
    inputs = inputs._replace(k=inputs.k.astype(q.dtype), v=inputs.v.astype(q.dtype))
    zeros = jnp.zeros_like(q[..., :1])  # of q, so that it is sharded as q is
    nothing = _Sums(
        jnp.full_like(zeros, jnp.finfo(q.dtype).min), zeros, jnp.repeat(zeros, E, axis=-1)
    )
    # Those that heads share come first, so that what earlier ones show fits every later one.
    ordered = sorted(pieces, key=lambda piece: len(piece.queries))
    parts = [
        _sums_of(inputs, piece, ordered[:i], causal, nothing) for i, piece in enumerate(ordered)
    ]
    _, mass, out = functools.reduce(_merge, parts, nothing)
    # Both are 0 where nothing was seen; the division is masked for its gradient.
    return (out / jnp.where(mass > 0, mass, 1)).astype(out_dtype)


class _Sums(NamedTuple):
    """Sums over some keys of exp(logit - top), each query's top logit being `top`."""

    top: Float[jax.Array, "*rows 1"]
    mass: Float[jax.Array, "*rows 1"]
    out: Float[jax.Array, "*rows E"]


def _merge(a: _Sums, b: _Sums) -> _Sums:
    top = jnp.maximum(a.top, b.top)
    of_a, of_b = jnp.exp(a.top - top), jnp.exp(b.top - top)
    return _Sums(top, of_a * a.mass + of_b * b.mass, of_a * a.out + of_b * b.out)


def _sums_of(
    inputs: Inputs, piece: Piece, earlier: Sequence[Piece], causal: bool, nothing: _Sums
) -> _Sums:
    """The sums over one piece, without the pairs that earlier pieces have shown.

    Heads are split in three: A with tables of their own, and under each of them k kv heads that
    serve g query heads each. So k = K, g = H / K for a table that all share, and k = g = 1 for one
    a head. The other letters are those of `Piece`.
    """
    T, H, K = *inputs.q.shape[-3:-1], inputs.k.shape[-2]
    A = len(piece.queries)
    if A not in (1, H):
        raise ValueError(f"pattern must be for 1 head, or for q's {H}, got one for {A}")
    own = min(A, K)  # kv heads that are read through tables of their own
    heads = np.arange(A)[:, None, None]
    queries, keys = np.maximum(piece.queries, 0), jnp.maximum(piece.keys, 0)
    q = _split(inputs.q, A, K // own)[..., queries, heads, :, :, :]
    k, v = (_split(x, own)[..., keys, heads * own // A, :, :] for x in (inputs.k, inputs.v))

    t, s = jnp.asarray(piece.queries)[..., :, None], jnp.asarray(piece.keys)[..., None, :]
    visible = (t >= 0) & (s >= 0) & piece.sees(t, s)
    for other in earlier:
        visible &= ~other.sees(t, s)
    if causal:
        visible &= s <= t
    query_labels, key_labels = inputs.query_labels[..., queries], inputs.key_labels[..., keys]
    same = query_labels[..., :, None] == key_labels[..., None, :]
    visible = same & jnp.broadcast_to(visible, same.shape)
    visible = visible[..., None, :, None, :]  # [*B, A, N, 1, M, 1, L], for all k and g

    low = jnp.finfo(q.dtype).min
    logits = jnp.einsum("...anmkgd,...anlkd->...ankmgl", q, k)
    logits = jnp.where(visible, logits, low)
    top = jax.lax.stop_gradient(logits.max(-1, keepdims=True, initial=low))
    weights = jnp.where(visible, jnp.exp(logits - top), 0)
    out = jnp.einsum("...ankmgl,...anlke->...ankmge", weights, v)
    sums = _Sums(top, weights.sum(-1, keepdims=True), out)

    # Missing queries go to distinct places past the end, where they are dropped: the gradient of a
    # scatter to unique places is a plain gather.
    past = T + np.arange(piece.queries.size).reshape(piece.queries.shape)
    places = np.where(piece.queries < 0, past, piece.queries)

    def rows(empty: jax.Array, x: jax.Array) -> jax.Array:
        split = _split(empty, A, K // own).at[..., places, heads, :, :, :]
        x = x.swapaxes(-3, -4)  # [*B, A, N, M, k, g, .]
        return split.set(x, mode="drop", unique_indices=True).reshape(empty.shape)

    return _Sums(*map(rows, nothing, sums))


def _split(x: jax.Array, *heads: int) -> jax.Array:
    """Splits the head axis, the last but one, into the given sizes and what remains."""
    rest = x.shape[-2] // math.prod(heads)
    return x.reshape(*x.shape[:-2], *heads, rest, x.shape[-1])
