"""First-order linear attention, causal and not: linear_attention."""

from functools import partial
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hla_jax import feature_maps, kernels
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
class LinearState(NamedTuple):
    """All that linear attention keeps of the past.

    Attributes:
      kv: P, the sum of k^T v.
      k: its mass, the sum of k; None unless normalised.
    """

    kv: Float[Array, "*B K D E"]
    k: Float[Array, "*B K D"] | None


def linear_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    feature_map: FeatureMaps = feature_maps.elu_plus_one,
    causal: bool = True,
    normalize: bool = True,
    log_decay: LogDecay | None = None,
    scale: Number = 1.0,
    mask: Mask | None = None,
    segment_ids: SegmentIds | None = None,
    initial_state: LinearState | None = None,
    eps: Number = 1e-12,
    precision: lax.PrecisionLike = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    axis_name: str | None = None,
) -> tuple[Outputs, LinearState]:
    """Linear attention: softmax's exponential replaced by a product of features.

    With w(t, s) the product of the decays after s up to t, and q and k after the feature map:

        o_t = sum_{s <= t} w(t, s) (q_t . k_s) v_s  /  (sum_{s <= t} w(t, s) (q_t . k_s) + eps)

    where the denominator is 1 unless normalised, and the sums run over all s where not causal. Time
    O(T D E), state D E per kv head, whatever the length.

    Source: Transformers are RNNs (Katharopoulos et al. 2020, arXiv 2006.16236), sections 3.2 and
      3.3.

    Args:
      q: [*B, T, H, D].
      k: [*B, S, K, D]; K divides H, and query head h uses kv head h // (H // K). S = T where
        causal.
      v: [*B, S, K, E].
      feature_map: applied to q and k, or a pair (for q, for k); None is the identity.
      causal: whether token t only sees s <= t. Not causal, `mask` is of keys only, each token sees
        its own segment, the initial state is added to the sums, and there is no decay.
      normalize: whether to divide by the sum of the weights plus eps. Meaningful where q and k are
        not negative (a positive feature map); else the denominator can be near zero or negative.
      log_decay: log a_t <= 0, anything that broadcasts to [*B, T, K] ([K]: one constant per kv
        head); -inf resets the state before token t. None: no decay.
      scale: multiplies every affinity q.k.
      mask: [*B, S], False at padding: such a token adds nothing and decays nothing. Where causal it
        gets output 0; not causal, a padded query gets an output like any other.
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
      >>> out, state = hla.linear_attention(q, k, v)
      >>> out.shape, state.kv.shape, state.k.shape
      ((1, 10, 2, 4), (1, 2, 4, 4), (1, 2, 4))
    """
    if not causal and log_decay is not None:
        raise ValueError("log_decay must be None where causal=False, got one")
    if not causal and segment_ids is not None and axis_name is not None:
        raise ValueError("segment_ids must be None where causal=False over an axis_name, got some")
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
        causal=causal,
    )
    _, _, _, K, D, E = x.sizes
    s = _fold.start(x, LinearState, initial_state, kv=(K, D, E), k=(K, D) if normalize else None)
    if causal:
        o, state = x.la(x.q, x.k, x.v, Pair(*s), last=True)
    elif segment_ids is None:
        o, state = _all_to_all(x, Pair(*s))
    else:
        o, state = _within_segments(x, Pair(*s), x.log_decay)
    return _fold.finish(x, o, LinearState(*state), v, initial_state=initial_state, eps=eps)


def linear_attention_step(
    q_t: QueryStep,
    k_t: KeyStep,
    v_t: ValueStep,
    state: LinearState | None,
    **options: Unpack[StepOptions],
) -> tuple[OutputStep, LinearState]:
    """One token of causal `linear_attention`, from state to state: O(D E) whatever the position.

        P = a P + k^T v    m = a m + k    o = q P / (q . m + eps)

    Args:
      q_t: [*B, H, D].
      k_t: [*B, K, D].
      v_t: [*B, K, E].
      state: what `linear_attention` or the last step returned, under the same options; None is
        zeros.
      **options: normalize, feature_map, log_decay (broadcasts to [*B, K]), scale, mask ([*B]), eps
        and precision, with the defaults of `linear_attention`.

    Returns:
      The output [*B, H, E] and the next state.

    Raises:
      ValueError: an argument has a wrong shape, dtype or value.

    Example:
      >>> import jax, hla_jax as hla
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2, 4))  # [B, H, D]
      >>> out, state = hla.linear_attention_step(q, k, v, None)
      >>> out, state = hla.linear_attention_step(q, k, v, state)
      >>> out.shape
      (1, 2, 4)
    """
    return _fold.step(linear_attention, q_t, k_t, v_t, state, options)


def linear_attention_weights(
    q: Queries,
    k: Keys,
    *,
    causal: bool = True,
    normalize: bool = True,
    eps: Number = 1e-12,
    **options: Unpack[WeightOptions],
) -> Weights:
    """The dense weights of `linear_attention` from a zero state.

        out[t, h] = sum_s w[h, t, s] v[s, h // (H // K)]

    O(T S) time and memory: to look at, and to test with.

    Args:
      q: [*B, T, H, D].
      k: [*B, S, K, D].
      causal: as in `linear_attention`.
      normalize: whether each row is divided by its sum plus eps.
      eps: added to the row sums.
      **options: feature_map, log_decay, scale, mask, segment_ids and precision, with the defaults
        of `linear_attention`. Where causal, the rows of masked queries are 0; else only the columns
        of masked keys are.

    Returns:
      [*B, H, T, S] in float32 (float64 where an input is).

    Raises:
      ValueError: an argument has a wrong shape, dtype or value.

    Example:
      >>> import jax, hla_jax as hla
      >>> q, k = jax.random.normal(jax.random.key(0), (2, 1, 10, 2, 4))
      >>> hla.linear_attention_weights(q, k).shape
      (1, 2, 10, 10)
    """
    if not causal and options.get("log_decay") is not None:
        raise ValueError("log_decay must be None where causal=False, got one")
    options = {"feature_map": feature_maps.elu_plus_one, **options}
    x = _fold.fold_pairs(q, k, causal=causal, **options)
    w = x.weights(x.q, x.k) if causal else _dense(x)
    return _fold.finish_weights(x, w, normalize, eps)


def _dense(x: _fold.Folded) -> jax.Array:
    """Q K^T between all tokens, or between all of one segment."""
    w = kernels.affinities(
        x.q.astype(x.dtype), x.k.astype(x.dtype), precision=x.options["precision"]
    )
    if x.log_decay is None:
        return w
    segment = jnp.cumsum(x.log_decay[..., 0] < 0, axis=-1)  # each reset begins the next one
    same = segment[..., :, None] == segment[..., None, :]
    return jnp.where(same[..., None, :, :], w, 0)


def _all_to_all(x: _fold.Folded, state: Pair) -> tuple[Pair, Pair]:
    """Every query reads the sums over all keys."""
    dot = partial(jnp.einsum, precision=x.options["precision"])
    *batch, T, H, D = x.q.shape
    K = x.sizes.K
    q = x.q.astype(x.dtype).reshape(*batch, T, K, H // K, D)
    k, v = x.k.astype(x.dtype), x.v.v.astype(x.dtype)

    def read(state: Pair) -> Pair:
        z = None if state.one is None else dot("...tkgd,...kd->...tkg", q, state.one)
        return Pair(dot("...tkgd,...kde->...tkge", q, state.v), z)

    if x.axis_name is not None or x.options["implementation"] in (None, "xla", "quadratic"):
        total = Pair(dot("...skd,...ske->...kde", k, v), None if state.one is None else k.sum(-3))
        if x.axis_name is not None:
            total = lax.psum(total, x.axis_name)
        final = jax.tree.map(jnp.add, state, total)
    else:
        _, final = x.la(k, k, x.v, state)
    if x.axis_name is None and x.options["implementation"] == "quadratic":
        w = _dense(x).reshape(*batch, K, H // K, T, -1)
        z = None if state.one is None else jnp.einsum("...kgts->...tkg", w)
        o = jax.tree.map(jnp.add, read(state), Pair(dot("...kgts,...ske->...tkge", w, v), z))
    else:
        o = read(final)
    return Pair(
        *(a if a is None else a.reshape(*batch, T, H, *a.shape[len(batch) + 3 :]) for a in o)
    ), final


def _within_segments(x: _fold.Folded, state: Pair, resets) -> tuple[Pair, Pair]:
    """Two causal passes: what comes up to each token, and what comes after it."""
    past, final = x.la(x.q, x.k, x.v, state)

    def flip(tree):
        return jax.tree.map(lambda a: jnp.flip(a, axis=len(x.sizes.B)), tree)

    # A reset before token t + 1 lies, seen from the end, before token t.
    resets = jnp.concatenate([resets[..., 1:, :], resets[..., :1, :]], axis=-2)
    backwards = x._replace(log_decay=flip(resets))
    zero = jax.tree.map(jnp.zeros_like, state)
    future, _ = backwards.la(flip(x.q), flip(x.k), flip(x.v), zero, strict=True)
    return jax.tree.map(jnp.add, past, flip(future)), final
