"""Asymmetric higher-order linear attention: ahla."""

from typing import NamedTuple, Unpack

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

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


@exported
class AHLAState(NamedTuple):
    """All that asymmetric HLA keeps of the past; k and ez are None unless normalised.

    Attributes:
      kv: P, the sum of k^T v.
      k: its mass, the sum of k.
      e: E, the sum of k^T r, r_t = q_t P_t.
      ez: its mass.
    """

    kv: Float[Array, "*B K D E"]
    k: Float[Array, "*B K D"] | None
    e: Float[Array, "*B H D E"]
    ez: Float[Array, "*B H D"] | None


def ahla(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    normalize: bool = False,
    feature_map: FeatureMaps = None,
    log_decay: LogDecay | None = None,
    scale: Number = 1.0,
    mask: Mask | None = None,
    segment_ids: SegmentIds | None = None,
    initial_state: AHLAState | None = None,
    eps: Number = 1e-12,
    precision: lax.PrecisionLike = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    axis_name: str | None = None,
) -> tuple[Outputs, AHLAState]:
    """Asymmetric HLA: linear attention over the outputs of linear attention.

    With w(t, s) the product of the decays after s up to t:

        o_t = sum over j <= i <= t of w(t, j) (q_t . k_i)(q_i . k_j) v_j

    which is (W W) V for W = L * (Q K^T) without decay, and runs as R = LA(Q, K, V), O = LA(Q, K,
    R). Time O(T D E), state D E per kv head and D E per query head.

    Source: Higher-order Linear Attention (arXiv 2510.27258), section 6, with the corrected scan of
    docs/errata.md.

    Args:
      q: [*B, T, H, D].
      k: [*B, T, K, D]; K divides H, and query head h uses kv head h // (H // K).
      v: [*B, T, K, E].
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
      >>> out, state = hla.ahla(q, k, v)
      >>> out.shape, state.kv.shape, state.e.shape
      ((1, 10, 2, 4), (1, 2, 4, 4), (1, 2, 4, 4))
    """
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
    s = _fold.start(
        x,
        AHLAState,
        initial_state,
        kv=(K, D, E),
        k=(K, D) if normalize else None,
        e=(H, D, E),
        ez=(H, D) if normalize else None,
    )
    # R = LA(Q, K, V), O = LA(Q, K, R)
    o, _, p, e = x.cascade(None, Pair(s.kv, s.k), Pair(s.e, s.ez), power=1)
    return _fold.finish(
        x, o, AHLAState(p.v, p.one, e.v, e.one), v, initial_state=initial_state, eps=eps
    )


def ahla_step(
    q_t: QueryStep,
    k_t: KeyStep,
    v_t: ValueStep,
    state: AHLAState | None,
    **options: Unpack[StepOptions],
) -> tuple[OutputStep, AHLAState]:
    """One token of `ahla`, from state to state: O(D E) whatever the position.

        P = a P + k^T v    E = a E + k^T (q P)    o = q E

    Args:
      q_t: [*B, H, D].
      k_t: [*B, K, D].
      v_t: [*B, K, E].
      state: what `ahla` or the last step returned, under the same options; None is zeros.
      **options: those of `ahla` that mean something for one token; log_decay broadcasts to [*B, K],
        and mask is [*B].

    Returns:
      The output [*B, H, E] and the next state.

    Raises:
      ValueError: an argument has a wrong shape, dtype or value.

    Example:
      >>> import jax, hla_jax as hla
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2, 4))  # [B, H, D]
      >>> out, state = hla.ahla_step(q, k, v, None)
      >>> out, state = hla.ahla_step(q, k, v, state)
      >>> out.shape
      (1, 2, 4)
    """
    return _fold.step(ahla, q_t, k_t, v_t, state, options)


def ahla_weights(
    q: Queries,
    k: Keys,
    *,
    normalize: bool = False,
    eps: Number = 1e-12,
    **options: Unpack[WeightOptions],
) -> Weights:
    """The dense weights of `ahla` from a zero state.

        out[t, h] = sum_s w[h, t, s] v[s, h // (H // K)]

    O(T^2) memory and O(T^3) time: to look at, and to test with.

    Args:
      q: [*B, T, H, D].
      k: [*B, T, K, D].
      normalize: whether each row is divided by its sum plus eps.
      eps: added to the row sums.
      **options: feature_map, log_decay, scale, mask, segment_ids and precision, with the defaults
        of `ahla`.

    Returns:
      [*B, H, T, T] in float32 (float64 where an input is).

    Raises:
      ValueError: an argument has a wrong shape, dtype or value.

    Example:
      >>> import jax, hla_jax as hla
      >>> q, k = jax.random.normal(jax.random.key(0), (2, 1, 10, 2, 4))
      >>> hla.ahla_weights(q, k).shape
      (1, 2, 10, 10)
    """
    x = _fold.fold_pairs(q, k, **options)
    w = x.weights(x.q, x.k)
    w = jnp.matmul(w, w, precision=x.options["precision"])
    return _fold.finish_weights(x, w, normalize, eps)
