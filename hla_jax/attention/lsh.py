"""LSH attention (Reformer): each token attends to tokens whose vectors point its way."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int

from hla_jax._check import FLOATING, array, check_flag, check_sizes, checked_key, is_float
from hla_jax._types import Array, Mask, Outputs, Queries, SegmentIds, Values, result_type
from hla_jax.attention._inputs import logit_scale, lying_as_queries, prepare
from hla_jax.attention.softmax import attend

# A token's logit for itself: below every other logit, and finite, so that it counts when alone.
_OWN_LOGIT = -1e30


def lsh_attention(
    qk: Queries,
    v: Values,
    *,
    key: jax.Array,
    num_buckets: int = 32,
    num_rounds: int = 1,
    chunk_size: int = 64,
    causal: bool = True,
    mask: Mask | None = None,
    segment_ids: SegmentIds | None = None,
    scale: float | None = None,
) -> Outputs:
    """Softmax attention of each token over near tokens of its hash buckets.

    Queries and keys are the same vectors, keys being divided by their length:

        o_t = sum_{s in P_t} softmax_s(scale x_t . x_s / |x_s|) v_s

    In each round the tokens of a head and segment are hashed (`lsh_buckets`), and those of a bucket
    stand in a line, by position. P_t, one set for all rounds, holds the tokens less than chunk_size
    places from t in a round (before t, where causal); it holds t itself only if it holds no other.

    The paper cuts the sorted tokens into chunks, and a token sees its own chunk and the one before.
    There later tokens move the borders of chunks, and with them what earlier tokens see. Counted in
    places, what t sees depends on tokens up to t alone: the first rows of a longer sequence are
    those of a shorter one, and decoding (`lsh_decode`) gives the rows of the whole sequence.

    Time is O(T R (D N + C (D + E + R))) and a sort, memory O(T R (N + C + D + E)), with N buckets,
    R rounds and chunks of C. N does not follow T by itself: a bucket that holds more tokens than
    chunk_size is seen in part.

    Source: Reformer (Kitaev et al. 2020, arXiv 2001.04451), section 2 and appendix A.

    Args:
      qk: [*B, T, H, D], queries and keys.
      v: [*B, T, K, E]; K divides H, and head h uses kv head h // (H // K).
      key: of `jax.random`, for the hashes. The same key gives the same output.
      num_buckets: N, even.
      num_rounds: R. More rounds find more of the tokens that softmax attention would weigh most.
      chunk_size: C, how far a token looks along a bucket's line.
      causal: whether token t sees s <= t alone.
      mask: [*B, T], False at padding: such tokens are in no set and give 0.
      segment_ids: [*B, T], integers: each token sees its own segment alone. A segment starts where
        the id differs from that of the last unmasked token.
      scale: multiplies every product of query and key; None is D^(-1/2).

    Returns:
      Outputs [*B, T, H, E] in v's dtype.

    Raises:
      ValueError: an argument has a wrong shape, dtype or value; the message names it.

    Example:
      Each token finds the one before it that points the same way; the first two find only
      themselves.

      >>> import jax, jax.numpy as jnp
      >>> qk = jnp.array([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.1], [-1.0, 0.1]])[:, None]
      >>> v = jnp.arange(4.0).reshape(4, 1, 1)
      >>> print(lsh_attention(qk, v, key=jax.random.key(0), num_buckets=2).ravel())
      [0. 1. 0. 1.]
    """
    qk, v = array("qk", qk), array("v", v)
    _check_tokens(qk, v)
    check_sizes(chunk_size=chunk_size)
    check_flag("causal", causal)
    (*batch, T, H, D), (K, E) = qk.shape, v.shape[-2:]
    # A token asks and answers, so that the mask speaks of queries too, causal or not.
    inputs = prepare(qk, qk[..., :K, :], v, causal=True, mask=mask, segment_ids=segment_ids)
    scale = logit_scale(scale, D)
    key = _check_hashes(key, num_buckets, num_rounds)
    if 0 in (*batch, T, E):
        return jnp.zeros((*batch, T, H, E), v.dtype)

    def run(tokens: tuple[jax.Array, ...]) -> Float[jax.Array, "*B T H E"]:
        qk, v, labels, key = tokens
        dtype = result_type(qk, v, jnp.float32)
        q, buckets = qk.astype(dtype), lsh_buckets(qk, key, num_buckets, num_rounds)
        heads = q * jnp.asarray(scale, dtype), _unit(q), v.astype(dtype), buckets
        out = _all_heads(*heads, labels, size=min(chunk_size, T), causal=causal)
        return out.astype(v.dtype)

    return lying_as_queries(run, (inputs.q, inputs.v, inputs.key_labels, key), inputs.q)


def _all_heads(
    q: Float[jax.Array, "*B T H D"],
    k: Float[jax.Array, "*B T H D"],
    v: Float[jax.Array, "*B T K E"],
    buckets: Int[jax.Array, "*B T H R"],
    labels: Int[jax.Array, "*B T"],
    *,
    size: int,
    causal: bool,
) -> Float[jax.Array, "*B T H E"]:
    *batch, T, K, E = v.shape

    def by_head(x: jax.Array) -> jax.Array:  # [*B, T, H or K, ...] -> [*B, K, H // K or 1, T, ...]
        x = x.reshape(*batch, T, K, x.shape[-2] // K, x.shape[-1])
        return jnp.moveaxis(x, len(batch), -2)

    one_head = jnp.vectorize(
        partial(_one_head, size=size, causal=causal),
        signature="(t,d),(t,d),(t,e),(t,r),(t)->(t,e)",
    )
    out = one_head(*map(by_head, (q, k, v, buckets)), labels[..., None, None, :])
    return jnp.moveaxis(out, -2, len(batch)).reshape(*batch, T, -1, E)


def lsh_buckets(
    qk: Queries, key: jax.Array, num_buckets: int, num_rounds: int
) -> Int[jax.Array, "*B T H R"]:
    """Hashes vectors by direction: near directions fall into the same bucket more often than not.

    With x R the projections on num_buckets / 2 random vectors, the bucket is the largest entry of
    [x R, -x R]. Heads and rounds have their own random vectors. No gradient flows through.

    Time is O(T R D N), memory O(T R N), for N buckets and R rounds.

    Source: Reformer (Kitaev et al. 2020, arXiv 2001.04451), section 2; Practical and optimal LSH
    for angular distance (Andoni et al. 2015, arXiv 1509.02897).

    Args:
      qk: [*B, T, H, D].
      key: of `jax.random`; the random vectors follow from it, H and D, and not from T.
      num_buckets: N, even.
      num_rounds: R, how many hashes each vector gets.

    Returns:
      [*B, T, H, R], int32, from 0 to N - 1.

    Raises:
      ValueError: num_buckets or num_rounds has a wrong value.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.array([[1.0, 0.0], [5.0, 0.1], [-1.0, 0.0]])[:, None]
      >>> print(lsh_buckets(x, jax.random.key(0), num_buckets=2, num_rounds=1).ravel())
      [0 0 1]
    """
    key = _check_hashes(key, num_buckets, num_rounds)
    qk = jnp.asarray(qk)
    H, D = qk.shape[-2:]
    rotations = jax.random.normal(key, (H, num_rounds, D, num_buckets // 2), jnp.float32)
    x = qk.astype(result_type(qk.dtype, jnp.float32))
    # A bucket is a decision, which the rounding of the products should not turn.
    x = jnp.einsum("...thd,hrdn->...thrn", x, rotations, precision=lax.Precision.HIGHEST)
    return lax.argmax(jnp.concatenate([x, -x], axis=-1), x.ndim - 1, jnp.int32)


def _check_hashes(key: jax.Array, num_buckets: int, num_rounds: int) -> jax.Array:
    check_sizes(num_rounds=num_rounds, num_buckets=num_buckets)
    if num_buckets % 2:
        raise ValueError(f"num_buckets must be even, got {num_buckets}")
    return checked_key("key", key)


def lsh_decode(
    qk_t: Queries,
    buckets_t: Int[Array, "*B T H R"],
    qk: Float[Array, "*B M H D"],
    v: Float[Array, "*B M K E"],
    buckets: Int[Array, "*B M H R"],
    visible: Bool[Array, "*B T M"],
    *,
    chunk_size: int = 64,
    scale: float | None = None,
) -> Outputs:
    """Causal LSH attention of new tokens over a cache: the rows that the whole sequence would give.

    Every slot is looked at: O(T M (R + D + E)) time per head, which for a token at a time is less
    than the sort.

    Args:
      qk_t: [*B, T, H, D], the new tokens.
      buckets_t: [*B, T, H, R], their buckets by `lsh_buckets`.
      qk: [*B, M, H, D], the cache, in order of position, with the new tokens in it.
      v: [*B, M, K, E].
      buckets: [*B, M, H, R].
      visible: [*B, T, M], the slots up to each new token that are of its segment and unmasked, the
        last of them its own. A token to which none is visible gives 0.
      chunk_size: see `lsh_attention`.
      scale: see `lsh_attention`.

    Returns:
      Outputs [*B, T, H, E] in v's dtype.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> qk = jnp.array([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.1], [-1.0, 0.1]])[:, None]
      >>> v = jnp.arange(4.0).reshape(4, 1, 1)
      >>> buckets = lsh_buckets(qk, jax.random.key(0), num_buckets=2, num_rounds=1)
      >>> visible = jnp.ones((1, 4), bool)
      >>> print(lsh_decode(qk[3:], buckets[3:], qk, v, buckets, visible).ravel())
      [1.]
    """
    qk_t, qk, v, visible = (jnp.asarray(x) for x in (qk_t, qk, v, visible))
    buckets_t, buckets = (jnp.moveaxis(jnp.asarray(x), -3, -1) for x in (buckets_t, buckets))
    together = buckets_t[..., :, None] == buckets[..., None, :]  # [*B, H, R, T, M]
    together &= visible[..., None, None, :, :]
    places = lax.cumsum(together.astype(jnp.int32), axis=together.ndim - 1, reverse=True) - 1
    found = (together & (places < chunk_size)).any(-3)
    own = (together & (places == 0)).any(-3)
    others = found & ~own
    seen = jnp.where(others.any(-1, keepdims=True), others, own)
    q, keys = (x.astype(result_type(x.dtype, jnp.float32)) for x in (qk_t, qk))
    values = jnp.repeat(v, qk.shape[-2] // v.shape[-2], axis=-2)
    return attend(q, _unit(keys), values, seen, scale=scale)


def _one_head(
    q: Float[jax.Array, "T D"],
    k: Float[jax.Array, "T D"],
    v: Float[jax.Array, "T E"],
    buckets: Int[jax.Array, "T R"],
    labels: Int[jax.Array, "T"],
    *,
    size: int,
    causal: bool,
) -> Float[jax.Array, "T E"]:
    """The attention of one head; size is at most T.

    Masked tokens, labelled -1, see one another alone, and their values are zeros. Those that fill
    the last chunk are such tokens, so that every token sees itself at least.
    """
    T = len(q)

    def fill(x: jax.Array, value: int = 0) -> jax.Array:
        return jnp.pad(x, [(0, -T % size)] + [(0, 0)] * (x.ndim - 1), constant_values=value)

    q, k, v, buckets, labels = fill(q), fill(k), fill(v), fill(buckets), fill(labels, -1)
    order, line = jax.vmap(partial(_line_up, size=size), (None, 1))(labels, buckets)
    back = jnp.argsort(order, axis=1)
    places = jnp.take_along_axis(line, back, axis=1)  # [R, T]: of each token in each round

    def chunks(x: jax.Array) -> jax.Array:
        return x.reshape(-1, size, *x.shape[1:])

    def windows(x: jax.Array, empty: int = 0) -> jax.Array:
        """Each chunk with the one before it, and the one after it where not causal."""
        sides = [(1, 0 if causal else 1)] + [(0, 0)] * x.ndim
        padded = jnp.pad(chunks(x), sides, constant_values=empty)
        count = len(x) // size
        return jnp.concatenate([padded[i : i + count] for i in range(2 if causal else 3)], axis=1)

    def distances(places: Int[jax.Array, "T"]) -> Int[jax.Array, "N C W"]:
        return chunks(places)[:, :, None] - windows(places, -size)[:, None, :]

    def one_round(
        order: Int[jax.Array, "T"], line: Int[jax.Array, "T"]
    ) -> tuple[Float[jax.Array, "T E"], Float[jax.Array, "T"]]:
        """Outputs, and the logarithm of the sum of weights, in the order of this round."""
        ahead = distances(line)
        near = (ahead < size) & (ahead >= 0 if causal else ahead > -size)
        # A pair that several rounds find shares its weight among them.
        rounds = (jnp.abs(jax.vmap(distances)(places[:, order])) < size).sum(0)
        logits = jnp.einsum("ncd,nwd->ncw", chunks(q[order]), windows(k[order]))
        logits -= jnp.log(jnp.maximum(rounds, 1).astype(q.dtype))
        logits = jnp.where(near, jnp.where(ahead == 0, _OWN_LOGIT, logits), -jnp.inf)
        total = jax.nn.logsumexp(logits, axis=-1)
        weights = jnp.exp(logits - total[..., None])
        out = jnp.einsum("ncw,nwe->nce", weights, windows(v[order]))
        return out.reshape(v.shape), total.reshape(-1)

    outs, totals = jax.vmap(one_round)(order, line)
    outs, totals = (jax.vmap(lambda x, i: x[i])(x, back) for x in (outs, totals))
    return jnp.einsum("rt,rte->te", jax.nn.softmax(totals, axis=0), outs)[:T]


def _line_up(
    labels: Int[jax.Array, "T"], buckets: Int[jax.Array, "T"], *, size: int
) -> tuple[Int[jax.Array, "T"], Int[jax.Array, "T"]]:
    """The tokens sorted by label, bucket and position, and the places where they stand.

    Those of one label and bucket stand side by side; between such groups `size` places stay empty.
    So tokens less than `size` places apart are near each other in the same group.
    """
    here = jnp.arange(len(labels), dtype=jnp.int32)
    labels, buckets, order = lax.sort((labels, buckets, here), num_keys=2)
    starts = (labels[1:] != labels[:-1]) | (buckets[1:] != buckets[:-1])
    group = jnp.pad(jnp.cumsum(starts, dtype=jnp.int32), (1, 0))
    return order, here + size * group


def _unit(x: Float[jax.Array, "*B D"]) -> Float[jax.Array, "*B D"]:
    """Vectors divided by their lengths; zero ones stay zero, with gradient zero."""
    largest = lax.stop_gradient(jnp.abs(x).max(-1, keepdims=True, initial=0))
    x /= jnp.where(largest > 0, largest, 1)  # so that no square is too large or too small
    square = jnp.einsum("...d,...d->...", x, x)[..., None]
    return jnp.where(square > 0, x * lax.rsqrt(jnp.where(square > 0, square, 1)), 0)


def _check_tokens(qk: jax.Array, v: jax.Array) -> None:
    if (
        not all(is_float(x.dtype) for x in (qk, v))
        or qk.ndim < 3
        or qk.shape[:-2] != v.shape[:-2]
        or 0 in (*qk.shape[-2:], v.shape[-2])
        or qk.shape[-2] % v.shape[-2]
    ):
        raise ValueError(
            f"qk and v must be {FLOATING}, [*B, T, H, D] with D > 0, and [*B, T, K, E] with K a "
            f"divisor of H, got {qk.dtype} {qk.shape} and {v.dtype} {v.shape}"
        )
