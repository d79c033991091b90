"""Second-order higher-order linear attention: hla2."""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hla_jax._check import check_flag, check_number
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
class HLA2State(NamedTuple):
    """All that second-order HLA keeps of the past; members that the options do not need are None.

    Attributes:
      kk: S, the sum of k^T k.
      f: F, the state of the masked form.
      fz: its mass, where normalised.
      c: C, the sum of q^T v: of the unmasked form, and of the ridge.
      cz: its mass, where normalised.
    """

    kk: Float[Array, "*B K D D"]
    f: Float[Array, "*B H D E"] | None
    fz: Float[Array, "*B H D"] | None
    c: Float[Array, "*B H D E"] | None
    cz: Float[Array, "*B H D"] | None


def hla2(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    masked: bool = True,
    normalize: bool = False,
    ridge: Number = 0.0,
    feature_map: FeatureMaps = None,
    log_decay: LogDecay | None = None,
    scale: Number = 1.0,
    mask: Mask | None = None,
    segment_ids: SegmentIds | None = None,
    initial_state: HLA2State | None = None,
    eps: Number = 1e-12,
    precision: lax.PrecisionLike = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    axis_name: str | None = None,
) -> tuple[Outputs, HLA2State]:
    """Second-order HLA: each token attends through the second moment of the keys.

    Masked, with w(t, s) the product of the decays after s up to t:

        o_t = sum over i <= j <= t of w(t, i) w(t, j) (q_t . k_i)(k_i . q_j) v_j

    which is ((W W^T) * L) V for W = L * (Q K^T) without decay, and runs as two causal linear
    attentions: U = LA(Q, K, K), O = LA(Q, U, V) at twice the log decay. Unmasked, i and j are only
    <= t: O = LA(U, Q, V). Time O(T D (D + E)), state D^2 per kv head and D E per query head.

    Source: Higher-order Linear Attention (arXiv 2510.27258), sections 3 and 4, with the corrected
    decay of docs/errata.md.

    Args:
      q: [*B, T, H, D].
      k: [*B, T, K, D]; K divides H, and query head h uses kv head h // (H // K).
      v: [*B, T, K, E].
      masked: whether the causal mask is applied to the product of weights (i <= j).
      normalize: divides by the same operator applied to v = 1, plus eps. Meaningful where q and k
        are not negative (a positive feature map); else the denominator can be near zero or
        negative.
      ridge: adds ridge LA(Q, Q, V), in numerator and denominator alike.
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
      >>> out, state = hla.hla2(q, k, v)
      >>> out.shape, state.kk.shape, state.f.shape
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
    check_flag("masked", masked)
    has_ridge = _has(ridge)
    _, _, H, K, D, E = x.sizes
    fz = (H, D) if normalize else None
    s = _fold.start(
        x,
        HLA2State,
        initial_state,
        kk=(K, D, D),
        f=(H, D, E) if masked else None,
        fz=fz if masked else None,
        c=(H, D, E) if has_ridge or not masked else None,
        cz=fz if has_ridge or not masked else None,
    )
    f = c = Pair(None)
    if not masked:
        (u, _), (kk, _) = x.la(x.q, x.k, Pair(x.k), Pair(s.kk))
        if has_ridge:
            u += jnp.asarray(ridge, x.dtype) * x.q.astype(x.dtype)
        o, c = x.la(u, x.q, x.v, Pair(s.c, s.cz), last=True)
    else:
        # U = LA(Q, K, K), O = LA_2(Q, U, V)
        o, kk, _, f = x.cascade(s.kk, None, Pair(s.f, s.fz), power=2, last=not has_ridge)
        if has_ridge:
            r, c = x.la(x.q, x.q, x.v, Pair(s.c, s.cz))
            o = jax.tree.map(lambda o, r: o + jnp.asarray(ridge, x.dtype) * r, o, r)
    state = HLA2State(kk, f.v, f.one, c.v, c.one)
    return _fold.finish(x, o, state, v, initial_state=initial_state, eps=eps)


def hla2_step(
    q_t: QueryStep,
    k_t: KeyStep,
    v_t: ValueStep,
    state: HLA2State | None,
    *,
    masked: bool = True,
    ridge: Number = 0.0,
    **options: Unpack[StepOptions],
) -> tuple[OutputStep, HLA2State]:
    """One token of `hla2`, from state to state: O(D^2 + D E) whatever the position.

        masked     S = a S + k^T k    F = a^2 F + (q S)^T v    o = q F
        unmasked   S = a S + k^T k    C = a C + q^T v          o = (q S) C
        ridge      C = a C + q^T v    o += ridge q C

    Args:
      q_t: [*B, H, D].
      k_t: [*B, K, D].
      v_t: [*B, K, E].
      state: what `hla2` or the last step returned, under the same options; None is zeros.
      masked: as in `hla2`.
      ridge: as in `hla2`.
      **options: those of `hla2` that mean something for one token; log_decay broadcasts to [*B, K],
        and mask is [*B].

    Returns:
      The output [*B, H, E] and the next state.

    Raises:
      ValueError: an argument has a wrong shape, dtype or value.

    Example:
      >>> import jax, hla_jax as hla
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2, 4))  # [B, H, D]
      >>> out, state = hla.hla2_step(q, k, v, None)
      >>> out, state = hla.hla2_step(q, k, v, state)
      >>> out.shape
      (1, 2, 4)
    """
    return _fold.step(hla2, q_t, k_t, v_t, state, options, masked=masked, ridge=ridge)


def hla2_weights(
    q: Queries,
    k: Keys,
    *,
    masked: bool = True,
    ridge: Number = 0.0,
    normalize: bool = False,
    eps: Number = 1e-12,
    **options: Unpack[WeightOptions],
) -> Weights:
    """The dense weights of `hla2` from a zero state.

        out[t, h] = sum_s w[h, t, s] v[s, h // (H // K)]

    O(T^2) time and memory: to look at, and to test with.

    Args:
      q: [*B, T, H, D].
      k: [*B, T, K, D].
      masked: as in `hla2`.
      ridge: as in `hla2`.
      normalize: whether each row is divided by its sum plus eps.
      eps: added to the row sums.
      **options: feature_map, log_decay, scale, mask, segment_ids and precision, with the defaults
        of `hla2`.

    Returns:
      [*B, H, T, T] in float32 (float64 where an input is).

    Raises:
      ValueError: an argument has a wrong shape, dtype or value.

    Example:
      >>> import jax, hla_jax as hla
      >>> q, k = jax.random.normal(jax.random.key(0), (2, 1, 10, 2, 4))
      >>> hla.hla2_weights(q, k).shape
      (1, 2, 10, 10)
    """
    x = _fold.fold_pairs(q, k, **options)
    _, _, _, K, D, _ = x.sizes
    (u, _), _ = x.la(x.q, x.k, Pair(x.k), Pair(_fold.zeros(x, K, D, D)))
    w = x.weights(x.q, u, power=2) if masked else x.weights(u, x.q)
    if _has(ridge):
        w += jnp.asarray(ridge, x.dtype) * x.weights(x.q, x.q)
    return _fold.finish_weights(x, w, normalize, eps)


def _has(ridge) -> bool:
    """Whether there is a ridge; a traced one may be anything but absent."""
    check_number("ridge", ridge)
    return not (isinstance(ridge, int | float) and ridge == 0)
