"""Third-order higher-order linear attention: hla3."""

from functools import partial
from typing import Literal, NamedTuple, Unpack, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hla_jax import kernels
from hla_jax._export import exported
from hla_jax._types import (
    FeatureMaps,
    Keys,
    KeyStep,
    LogDecay,
    Mask,
    Number,
    Outputs,
    OutputStep,
    Queries,
    QueryStep,
    SegmentIds,
    Values,
    ValueStep,
    Weights,
)
from hla_jax.ops import _fold
from hla_jax.ops._fold import Pair, StepOptions, WeightOptions

Variant = Literal["masked", "unmasked", "published"]


@exported
class HLA3State(NamedTuple):
    """All that third-order HLA keeps of the past; members that the options do not need are None.

    Attributes:
      kk: S, the sum of k^T k.
      qq: N, the sum of q^T q, of the unmasked and the published form.
      kv: P, the sum of k^T v.
      k: its mass, where normalised.
      f: F, of the masked and the published form.
      fz: its mass, where normalised.
    """

    kk: Float[Array, "*B K D D"]
    qq: Float[Array, "*B H D D"] | None
    kv: Float[Array, "*B K D E"]
    k: Float[Array, "*B K D"] | None
    f: Float[Array, "*B H D E"] | None
    fz: Float[Array, "*B H D"] | None


def hla3(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    variant: Variant = "masked",
    normalize: bool = False,
    feature_map: FeatureMaps = None,
    log_decay: LogDecay | None = None,
    scale: Number = 1.0,
    mask: Mask | None = None,
    segment_ids: SegmentIds | None = None,
    initial_state: HLA3State | None = None,
    eps: Number = 1e-12,
    precision: lax.PrecisionLike = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    axis_name: str | None = None,
) -> tuple[Outputs, HLA3State]:
    """Third-order HLA.

    With w(t, s) the product of the decays after s up to t, each form sums

        w(t, i) w(t, u) w(t, j) (q_t . k_i)(k_i . q_u)(q_u . k_j) v_j

    over other indices: "masked" over i <= u and j <= u, u <= t, the strictly causal third-order
    product [L * (W W^T)] W V; "unmasked" over i, u, j <= t; "published" over those i, u, j <= t of
    which at least two equal the largest, which is what Algorithm 3 of the paper computes at decay 1
    (its decayed form follows no rule of weights). As cascades of causal linear attentions, with
    U = LA(Q, K, K) and R = LA(Q, K, V):

        masked     O = LA(Q, U, R) at three times the log decay
        unmasked   O = LA(LA(U, Q, Q), K, V)
        published  O = LA(Q, c A, V) + LA(Q, K, s V + c P + c^2 V), both at three times it

    where A = LA(Q, K, K), P = LA(Q, K, V) and s_t = k_t . LA(K, Q, Q)_t are strict (of s < t), and
    c_t = q_t . k_t.

    Time O(T D (D + E)), states of D^2 and D E.

    Source: Higher-order Linear Attention (arXiv 2510.27258), section 7; docs/errata.md tells why
    "masked" differs from "published".

    Args:
      q: [*B, T, H, D].
      k: [*B, T, K, D]; K divides H, and query head h uses kv head h // (H // K).
      v: [*B, T, K, E].
      variant: which sum, as above.
      normalize: divides by the same operator applied to v = 1, plus eps. Meaningful where q and k
        are not negative (a positive feature map); else the denominator can be near zero or
        negative.
      feature_map: applied to q and k, or a pair (for q, for k).
      log_decay: log a_t <= 0, anything that broadcasts to [*B, T, K] ([K]: one constant per kv
        head); -inf resets the state before token t. None: no decay.
      scale: multiplies every affinity q.k.
      mask: [*B, T], False at padding: such a token adds nothing, decays nothing, and gets output 0.
      segment_ids: [*B, T], integers: the state restarts where the id changes between unmasked
        tokens. The initial state continues the first segment, and the returned state is the last
        segment's.
      initial_state: the state to continue from; None is zeros. Its dtype fixes the returned
        state's.
      eps: added to the denominator where normalised.
      precision: of the matmuls, a `jax.lax.Precision`; the default of a TPU or GPU is less than
        float32.
      chunk_size: tokens per chunk of "xla" and "associative"; None chooses.
      implementation: None (best for the device), "pallas" (kernels, or an error), "xla" (chunked
        matmuls), "associative" (`lax.associative_scan` over chunks), "serial" (`lax.scan`),
        "quadratic" (dense weights, O(T^2) memory). All agree; forward mode needs one of the last
        three.
      axis_name: the axis of an enclosing `jax.shard_map` that divides the tokens, in order; the
        states are the same on all its devices. `hla_jax.parallel.sharded` calls so.

    Returns:
      Outputs [*B, T, H, E] in v's dtype, and the final state in float32 (float64 where an input
      is).

    Raises:
      ValueError: an argument has a wrong shape, dtype or value; the message names it.

    Example:
      >>> import jax, hla_jax as hla
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 10, 2, 4))  # [B, T, H, D]
      >>> out, state = hla.hla3(q, k, v)
      >>> out.shape, state.kk.shape, state.kv.shape, state.f.shape
      ((1, 10, 2, 4), (1, 2, 4, 4), (1, 2, 4, 4), (1, 2, 4, 4))
    """
    _check(variant)
    x = _fold.fold(
        q,
        k,
        v,
        feature_map=feature_map,
        normalize=normalize,
        log_decay=log_decay,
        scale=scale,
        mask=mask,
        segment_ids=segment_ids,
        initial_state=initial_state,
        precision=precision,
        chunk_size=chunk_size,
        implementation=implementation,
        axis_name=axis_name,
    )
    _, _, H, K, D, E = x.sizes
    has_f = variant != "unmasked"
    s = _fold.start(
        x,
        HLA3State,
        initial_state,
        kk=(K, D, D),
        qq=(H, D, D) if variant != "masked" else None,
        kv=(K, D, E),
        k=(K, D) if normalize else None,
        f=(H, D, E) if has_f else None,
        fz=(H, D) if has_f and normalize else None,
    )
    kv, f = Pair(s.kv, s.k), Pair(s.f, s.fz)
    qq = None
    if variant == "masked":
        # U = LA(Q, K, K), R = LA(Q, K, V), O = LA_3(Q, U, R)
        o, kk, kv, f = x.cascade(s.kk, kv, f, power=3)
    elif variant == "unmasked":
        (u, _), (kk, _) = x.la(x.q, x.k, Pair(x.k), Pair(s.kk))
        (t, _), (qq, _) = x.la(u, x.q, Pair(x.q), Pair(s.qq))
        o, kv = x.la(t, x.k, x.v, kv, last=True)
    else:
        o, (kk, qq, kv, f) = _published(x, s.kk, s.qq, kv, f)
    state = HLA3State(kk, qq, kv.v, kv.one, f.v, f.one)
    return _fold.finish(x, o, state, v, initial_state=initial_state, eps=eps)


def _published(x, kk, qq, kv, f):
    """Algorithm 3 of the paper with a consistent decay, as five causal linear attentions."""
    x = _fold.in_state_dtype(x)
    a, c, d, kk, qq = _published_terms(x, kk, qq)
    p, kv = x.la(x.q, x.k, x.v, kv, strict=True)
    second = Pair(d[..., None] * _per_query_head(x, x.v.v) + c[..., None] * p.v)
    if x.v.one is not None:
        second = second._replace(one=d + c * p.one)
    first, f = x.la(x.q, c[..., None] * a, x.v, f, power=3)
    rest, more = x.la(x.q, x.k, second, jax.tree.map(jnp.zeros_like, f), power=3)
    o, f = jax.tree.map(jnp.add, (first, f), (rest, more))
    return o, (kk, qq, kv, f)


def _published_terms(x, kk, qq):
    """Returns A [*B, T, H, D], c_t = q_t . k_t and s_t + c_t^2 [*B, T, H], final S and N."""
    k = _per_query_head(x, x.k)
    (a, _), (kk, _) = x.la(x.q, x.k, Pair(x.k), Pair(kk), strict=True)
    (n, _), (qq, _) = x.la(k, x.q, Pair(x.q), Pair(qq), strict=True)
    c = jnp.sum(x.q * k, -1)
    return a, c, jnp.sum(k * n, -1) + c**2, kk, qq


def _per_query_head(x, a):
    """The published form pairs k_t and v_t with the q_t of each query head."""
    return kernels.repeat_heads(a, x.sizes.H // x.sizes.K)


def hla3_step(
    q_t: QueryStep,
    k_t: KeyStep,
    v_t: ValueStep,
    state: HLA3State | None,
    *,
    variant: Variant = "masked",
    **options: Unpack[StepOptions],
) -> tuple[OutputStep, HLA3State]:
    """One token of `hla3`, from state to state: O(D^2 + D E) whatever the position.

        masked     S = a S + k^T k    P = a P + k^T v    F = a^3 F + (q S)^T (q P)    o = q F
        unmasked   S, P, N = a N + q^T q    o = ((q S) N) P
        published  S, P, N and an F as in `hla3`

    Args:
      q_t: [*B, H, D].
      k_t: [*B, K, D].
      v_t: [*B, K, E].
      state: what `hla3` or the last step returned, under the same options; None is zeros.
      variant: as in `hla3`.
      **options: those of `hla3` that mean something for one token; log_decay broadcasts to [*B, K],
        and mask is [*B].

    Returns:
      The output [*B, H, E] and the next state.

    Raises:
      ValueError: an argument has a wrong shape, dtype or value.

    Example:
      >>> import jax, hla_jax as hla
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2, 4))  # [B, H, D]
      >>> out, state = hla.hla3_step(q, k, v, None)
      >>> out, state = hla.hla3_step(q, k, v, state)
      >>> out.shape
      (1, 2, 4)
    """
    return _fold.step(hla3, q_t, k_t, v_t, state, options, variant=variant)


def hla3_weights(
    q: Queries,
    k: Keys,
    *,
    variant: Variant = "masked",
    normalize: bool = False,
    eps: Number = 1e-12,
    **options: Unpack[WeightOptions],
) -> Weights:
    """The dense weights of `hla3` from a zero state.

        out[t, h] = sum_s w[h, t, s] v[s, h // (H // K)]

    O(T^2) memory and O(T^3) time: to look at, and to test with.

    Args:
      q: [*B, T, H, D].
      k: [*B, T, K, D].
      variant: as in `hla3`.
      normalize: whether each row is divided by its sum plus eps.
      eps: added to the row sums.
      **options: feature_map, log_decay, scale, mask, segment_ids and precision, with the defaults
        of `hla3`.

    Returns:
      [*B, H, T, T] in float32 (float64 where an input is).

    Raises:
      ValueError: an argument has a wrong shape, dtype or value.

    Example:
      >>> import jax, hla_jax as hla
      >>> q, k = jax.random.normal(jax.random.key(0), (2, 1, 10, 2, 4))
      >>> hla.hla3_weights(q, k).shape
      (1, 2, 10, 10)
    """
    _check(variant)
    x = _fold.fold_pairs(q, k, **options)
    _, _, H, K, D, _ = x.sizes
    matmul = partial(jnp.matmul, precision=x.options["precision"])
    kk, qq = _fold.zeros(x, K, D, D), _fold.zeros(x, H, D, D)
    if variant == "published":
        x = _fold.in_state_dtype(x)
        a, c, d, _, _ = _published_terms(x, kk, qq)
        outer = x.weights(x.q, x.k, power=3)
        inner = x.weights(x.q, x.k, strict=True)
        c_row, d_column = jnp.moveaxis(c, -1, -2)[..., None], jnp.moveaxis(d, -1, -2)[..., None, :]
        w = x.weights(x.q, c[..., None] * a, power=3) + outer * d_column
        return _fold.finish_weights(x, w + matmul(outer, c_row * inner), normalize, eps)
    (u, _), _ = x.la(x.q, x.k, Pair(x.k), Pair(kk))
    if variant == "unmasked":
        (t, _), _ = x.la(u, x.q, Pair(x.q), Pair(qq))
        w = x.weights(t, x.k)
    else:
        w = matmul(x.weights(x.q, u, power=3), x.weights(x.q, x.k))
    return _fold.finish_weights(x, w, normalize, eps)


def _check(variant) -> None:
    if variant not in get_args(Variant):
        raise ValueError(f"variant must be one of {get_args(Variant)}, got {variant!r}")
