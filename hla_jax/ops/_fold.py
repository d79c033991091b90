"""What all operators share: checks, feature maps, padding, segments, decay, states, dividing.

Everything that is not an operator's own algebra is folded once into plain arrays, so that an
operator is its cascade and nothing else: a padded token becomes zeros that do not decay, a new
segment a decay of 0, and the scale is multiplied into q.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from hla_jax import kernels
from hla_jax._types import FeatureMaps, LogDecay, Mask, MaskStep, Number, SegmentIds

State = TypeVar("State", bound=tuple)


class Pair(NamedTuple):
    """[V, 1]: values, and beside them the ones whose sum normalises; or what became of both."""

    v: Any
    one: Any = None


class Sizes(NamedTuple):
    """The lengths of the axes after the feature map."""

    B: tuple[int, ...]
    T: int
    H: int
    K: int
    D: int
    E: int


class Folded(NamedTuple):
    """The inputs of an operator after folding."""

    q: jax.Array  # [*B, T, H, D]
    k: jax.Array  # [*B, S, K, D]
    v: Pair  # [*B, S, K, E] and [*B, S, K]
    log_decay: jax.Array | None  # [*B, S, K]
    mask: jax.Array | None  # [*B, T], of the outputs
    dtype: jnp.dtype  # of states, accumulators, and whatever passes between two stages
    options: dict[str, Any]

    @property
    def sizes(self) -> Sizes:
        """The lengths of all axes."""
        *batch, T, H, D = self.q.shape
        return Sizes(tuple(batch), T, H, self.k.shape[-2], D, self.v.v.shape[-1])

    def la(self, q, k, v: Pair, state: Pair, *, power: int = 1, strict: bool = False):
        """LA_power(Q, K, [V, 1]; P, m): returns the outputs and the final state, each a pair."""
        y = kernels.causal_linear(
            q, k, *v, self.log_decay, *state, power=power, strict=strict, **self.options
        )
        return Pair(y.o, y.z), Pair(y.P, y.m)

    def weights(self, q, k, *, power: int = 1, strict: bool = False):
        """D^power . (Q K^T) as a dense array [*B, H, T, T]."""
        return kernels.weights(
            q.astype(self.dtype),
            k.astype(self.dtype),
            self.log_decay,
            power=power,
            strict=strict,
            precision=self.options["precision"],
        )


def fold(
    q,
    k,
    v,
    *,
    feature_map: FeatureMaps,
    normalize: bool,
    log_decay: LogDecay | None,
    scale,
    mask,
    segment_ids,
    precision: lax.PrecisionLike,
    chunk_size: int | None = None,
    implementation: str | None = None,
    initial_state: tuple | None = None,
    causal: bool = True,
) -> Folded:
    """Checks the arguments and folds all that is not algebra into plain arrays."""
    q, k, v = _checked_tokens(q, k, v, causal)
    *batch, S, K, _ = k.shape
    if segment_ids is not None and q.shape[-3] != S:
        raise ValueError(f"segment_ids needs T == S, got T = {q.shape[-3]} and S = {S}")
    mask = _checked("mask", mask, (*batch, S), jnp.bool_)
    segment_ids = _checked("segment_ids", segment_ids, (*batch, S), jnp.integer)
    if chunk_size is not None and not (isinstance(chunk_size, int) and chunk_size >= 1):
        raise ValueError(f"chunk_size must be None or an int >= 1, got {chunk_size!r}")
    if implementation not in (None, *kernels.IMPLEMENTATIONS):
        raise ValueError(
            f"implementation must be None or one of {kernels.IMPLEMENTATIONS}, "
            f"got {implementation!r}"
        )
    if jnp.ndim(scale) != 0:
        raise ValueError(f"scale must be a number, got an array of shape {jnp.shape(scale)}")

    dtype = jnp.dtype(jnp.float32)
    if any(x.dtype == jnp.float64 for x in (q, k, v, *jax.tree.leaves(initial_state))):
        dtype = jnp.dtype(jnp.float64)
    of_queries = mask if causal else None
    for_q, for_k = feature_map if isinstance(feature_map, tuple) else (feature_map, feature_map)
    q = _features("q", for_q, q, of_queries)
    k = _features("k", for_k, k, mask)
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"feature_map must give q and k one width, got {q.shape[-1]} and {k.shape[-1]}"
        )
    if not (isinstance(scale, int | float) and scale == 1):
        q = q * jnp.asarray(scale, q.dtype)
    v = _where(mask, v)
    return Folded(
        q,
        k,
        Pair(v, jnp.ones(v.shape[:-1], dtype) if normalize else None),
        _folded_decay(log_decay, segment_ids, mask, (*batch, S, K), dtype),
        of_queries,
        dtype,
        dict(precision=precision, chunk_size=chunk_size, implementation=implementation),
    )


def fold_pairs(q, k, **options: Any) -> Folded:
    """Folds q and k alone, for dense weights; the inner attentions are dense as well."""
    defaults = dict(feature_map=None, log_decay=None, scale=1.0, mask=None, segment_ids=None)
    shared = {**defaults, "precision": None, **options}
    return fold(q, k, k, normalize=False, implementation="quadratic", **shared)


def in_state_dtype(x: Folded) -> Folded:
    """Returns the tokens in the state's dtype, for a cascade that multiplies them elementwise."""
    q, k, v = (a.astype(x.dtype) for a in (x.q, x.k, x.v.v))
    return x._replace(q=q, k=k, v=x.v._replace(v=v))


def zeros(x: Folded, *shape: int) -> jax.Array:
    """Returns zeros [*B, *shape] in the state's dtype."""
    return jnp.zeros((*x.sizes.B, *shape), x.dtype)


def start(
    x: Folded, kind: type[State], initial_state: State | None, **shapes: tuple[int, ...] | None
) -> State:
    """Returns the initial state in x.dtype: zeros, or the given one after a check.

    `shapes` are those of the members after the batch axes, None where the options need none.
    """
    if initial_state is None:
        return kind(**{name: s if s is None else zeros(x, *s) for name, s in shapes.items()})
    if not isinstance(initial_state, kind):
        raise ValueError(
            f"initial_state must be None or a {kind.__name__}, got {type(initial_state).__name__}"
        )
    members = {}
    for name, shape in shapes.items():
        member = getattr(initial_state, name)
        if shape is not None and member is not None:
            shape = (*x.sizes.B, *shape)
            member = _checked(f"initial_state.{name}", member, shape, jnp.floating).astype(x.dtype)
        elif shape is not None or member is not None:
            wanted = "None" if shape is None else f"an array of shape {(*x.sizes.B, *shape)}"
            given = "None" if member is None else f"an array of shape {jnp.shape(member)}"
            raise ValueError(
                f"initial_state.{name} must be {wanted} under these options, got {given}"
            )
        members[name] = member
    return kind(**members)


def finish(x: Folded, o: Pair, state: State, like, *, initial_state: State | None, eps):
    """Returns outputs over their mass, in the dtype of `like` (v), and the state in its own."""
    out = o.v
    if o.one is not None:
        mass = o.one + jnp.asarray(eps, x.dtype)
        if x.mask is not None:  # its sum may be exactly 0
            mass = jnp.where(x.mask[..., None], mass, 1)
        # Not out / mass[..., None]: the transpose of that broadcast is a sum over the last axis,
        # which XLA's CPU backend computes one number at a time.
        out = jnp.einsum("...e,...->...e", out, 1 / mass, precision=lax.Precision.HIGHEST)
    if initial_state is not None:
        state = jax.tree.map(
            lambda s, given: s.astype(jnp.result_type(given)), state, initial_state
        )
    return _where(x.mask, out).astype(jnp.result_type(like)), state


def finish_weights(w: jax.Array, normalize: bool, eps) -> jax.Array:
    """Divides each row of weights by its sum plus eps."""
    return w / (jnp.sum(w, -1, keepdims=True) + jnp.asarray(eps, w.dtype)) if normalize else w


class StepOptions(TypedDict, total=False):
    """The options that every operator's step has."""

    normalize: bool
    feature_map: FeatureMaps
    log_decay: LogDecay | None
    scale: Number
    mask: MaskStep | None
    eps: Number
    precision: lax.PrecisionLike


class WeightOptions(TypedDict, total=False):
    """The options of every operator that concern queries and keys alone."""

    feature_map: FeatureMaps
    log_decay: LogDecay | None
    scale: Number
    mask: Mask | None
    segment_ids: SegmentIds | None
    precision: lax.PrecisionLike


def step(op: Callable, q_t, k_t, v_t, state, *, log_decay=None, mask=None, **options):
    """Runs an operator on one token: [*B, heads, width], log_decay [*B, K], mask [*B]."""
    for name, x in (("q_t", q_t), ("k_t", k_t), ("v_t", v_t)):
        if jnp.ndim(x) < 2:
            raise ValueError(f"{name} must be [*B, heads, width], got shape {jnp.shape(x)}")
    if log_decay is not None:
        log_decay = jnp.expand_dims(jnp.atleast_1d(log_decay), -2)
    out, state = op(
        jnp.expand_dims(q_t, -3),
        jnp.expand_dims(k_t, -3),
        jnp.expand_dims(v_t, -3),
        log_decay=log_decay,
        mask=None if mask is None else jnp.expand_dims(mask, -1),
        initial_state=state,
        implementation="serial",
        **options,
    )
    return jnp.squeeze(out, -3), state


def segment_starts(segment_ids: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Returns [*B, T], true at an unmasked token whose id differs from the last unmasked one's."""
    T = segment_ids.shape[-1]
    index = jnp.broadcast_to(jnp.arange(T), segment_ids.shape)
    known = index if mask is None else jnp.where(mask, index, -1)
    last = lax.cummax(known, axis=known.ndim - 1)
    previous = jnp.concatenate([jnp.full_like(last[..., :1], -1), last[..., :-1]], -1)
    id_before = jnp.take_along_axis(segment_ids, jnp.maximum(previous, 0), -1)
    starts = (previous >= 0) & (segment_ids != id_before)
    return starts if mask is None else starts & mask


def _folded_decay(log_decay, segment_ids, mask, shape, dtype):
    if log_decay is not None:
        if not jnp.issubdtype(jnp.result_type(log_decay), jnp.floating):
            raise ValueError(f"log_decay must be floating, got dtype {jnp.result_type(log_decay)}")
        try:
            log_decay = jnp.broadcast_to(jnp.asarray(log_decay, dtype), shape)
        except ValueError:
            raise ValueError(
                f"log_decay must broadcast to [*B, T, K] = {shape}, got {jnp.shape(log_decay)}"
            ) from None
        log_decay = _where(mask, log_decay, width_axes=1)
    if segment_ids is None:
        return log_decay
    starts = segment_starts(segment_ids, mask)[..., None]
    return jnp.where(starts, -jnp.inf, jnp.zeros(shape, dtype) if log_decay is None else log_decay)


def _features(name, feature_map, x, mask):
    """Applies a feature map to the tokens that the mask keeps; the rest is 0 before and after."""
    if feature_map is None:
        return _where(mask, x)
    y = feature_map(_where(mask, x))
    if y.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"feature_map must change the last axis of {name} alone, got {x.shape} -> {y.shape}"
        )
    return _where(mask, y)


def _where(mask, x, width_axes: int = 2):
    """Returns x with zeros where the mask [*B, T] is false; NaN there reaches no gradient."""
    if mask is None:
        return x
    return jnp.where(mask.reshape(mask.shape + (1,) * width_axes), x, jnp.zeros((), x.dtype))


def _checked(name, x, shape, kind):
    if x is None:
        return None
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, kind):
        wanted = {jnp.bool_: "boolean", jnp.integer: "integer", jnp.floating: "floating"}[kind]
        raise ValueError(f"{name} must be {wanted}, got dtype {x.dtype}")
    if shape is not None and x.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
    return x


def _checked_tokens(q, k, v, causal):
    layouts = {"q": "[*B, T, H, D]", "k": "[*B, S, K, D]", "v": "[*B, S, K, E]"}
    arrays = {}
    for (name, layout), x in zip(layouts.items(), (q, k, v), strict=True):
        arrays[name] = x = _checked(name, x, None, jnp.floating)
        if x.ndim < 3:
            raise ValueError(f"{name} must be {layout}, got shape {x.shape}")
    q, k, v = arrays.values()
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"v must be [*B, S, K, E] with k's [*B, S, K] = {k.shape[:-1]}, got {v.shape}"
        )
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(f"k must have q's batch axes {q.shape[:-3]}, got shape {k.shape}")
    if causal and q.shape[-3] != k.shape[-3]:
        raise ValueError(f"k must have q's T = {q.shape[-3]} tokens, got shape {k.shape}")
    H, K = q.shape[-2], k.shape[-2]
    if K == 0 or H % K:
        raise ValueError(f"k's heads must divide q's, got K = {K} and H = {H}")
    return q, k, v
