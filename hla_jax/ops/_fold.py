"""What all operators share: checks, feature maps, padding, segments, decay, states, dividing.

Everything that is not an operator's own algebra is folded once into plain arrays, so that an
operator is its cascade and nothing else: a padded token becomes zeros that do not decay, a new
segment a decay of 0, and the scale is multiplied into q.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hla_jax import kernels
from hla_jax._check import (
    check_flag,
    check_number,
    checked,
    checked_int,
    checked_per_token,
    is_known,
    real,
    swapped_axes_hint,
    type_name,
)
from hla_jax._segments import segment_starts
from hla_jax._types import FeatureMaps, LogDecay, Mask, MaskStep, Number, SegmentIds
from hla_jax.ops import _sequence

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
    axis_name: str | None  # of the `shard_map` that divides T and S

    @property
    def sizes(self) -> Sizes:
        """The lengths of all axes."""
        *batch, T, H, D = self.q.shape
        return Sizes(tuple(batch), T, H, self.k.shape[-2], D, self.v.v.shape[-1])

    def la(self, q, k, v: Pair, state: Pair, *, power: int = 1, strict: bool = False, last=False):
        """LA_power(Q, K, [V, 1]; P, m): returns the outputs and the final state, each a pair.

        Outputs are in the state's dtype, those of the last stage in v's where nothing divides them.
        """
        options = dict(power=power, strict=strict, out_dtype=self._dtype(last), **self.options)
        if self.axis_name is None:
            y = kernels.causal_linear(q, k, *v, self.log_decay, *state, **options)
            return Pair(y.o, y.z), Pair(y.P, y.m)
        tokens = k, *v, self.log_decay
        before = _sequence.state_before(
            *tokens,
            *state,
            power=power,
            precision=self.options["precision"],
            axis_name=self.axis_name,
        )
        y = kernels.causal_linear(q, *tokens, *before, **options)
        return Pair(y.o, y.z), _sequence.last(Pair(y.P, y.m), self.axis_name)

    def cascade(self, S, P: Pair | None, F: Pair, *, power: int, last: bool = True):
        """O = LA_power(Q, U, R; F), of U = LA(Q, K, K; S) and R = LA(Q, K, [V, 1]; P).

        Without S, U is K; without P, R is [V, 1]. Returns the outputs and the final S, P and F.
        """
        if self.axis_name is not None:  # a stage's state must be known before the next begins
            u, r = self.k, self.v
            if S is not None:
                (u, _), (S, _) = self.la(self.q, self.k, Pair(self.k), Pair(S))
            if P is not None:
                r, P = self.la(self.q, self.k, self.v, P)
            o, F = self.la(self.q, u, r, F, power=power, last=last)
            return o, S, P or Pair(None), F
        P = P or Pair(None)
        y = kernels.causal_cascade(
            *(self.q, self.k, *self.v, self.log_decay, S, *P, *F),
            power=power,
            out_dtype=self._dtype(last),
            **self.options,
        )
        return Pair(y.o, y.z), y.S, Pair(y.P, y.m), Pair(y.F, y.f)

    def _dtype(self, last: bool):
        """Of a stage's outputs: v's where nothing is done to them any more, else the state's."""
        return self.v.v.dtype if last and self.v.one is None else None

    def weights(self, q, k, *, power: int = 1, strict: bool = False):
        """D^power * (Q K^T) as a dense array [*B, H, T, T]."""
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
    axis_name: str | None = None,
) -> Folded:
    """Checks the arguments and folds all that is not algebra into plain arrays."""
    maps = _pair(feature_map)
    tokens = "T" if causal else "S"
    q, k, v = _checked_tokens(q, k, v, tokens=tokens, one_width=maps[0] is maps[1])
    *batch, S, K, _ = k.shape
    if q.shape[: len(batch)] != tuple(batch):
        raise ValueError(f"k must have q's batch axes {q.shape[:-3]}, got shape {k.shape}")
    if segment_ids is not None and q.shape[-3] != S:
        raise ValueError(f"segment_ids needs T == S, got T = {q.shape[-3]} and S = {S}")
    mask = checked_per_token("mask", mask, k, jnp.bool_)
    segment_ids = checked_per_token("segment_ids", segment_ids, k, jnp.integer)
    check_number("scale", scale)
    check_flag("causal", causal)
    check_flag("normalize", normalize)
    if chunk_size is not None:
        chunk_size = checked_int("chunk_size", chunk_size)
    if implementation not in (None, *kernels.IMPLEMENTATIONS):
        names = kernels.IMPLEMENTATIONS
        raise ValueError(f"implementation must be None or one of {names}, got {implementation!r}")

    dtype = jnp.dtype(jnp.float32)
    arrays = [x for x in (q, k, v, *jax.tree.leaves(initial_state)) if hasattr(x, "dtype")]
    if any(x.dtype == jnp.float64 for x in arrays):
        dtype = jnp.dtype(jnp.float64)
    of_queries = mask if causal else None
    q = _features("q", maps[0], q, of_queries)
    k = _features("k", maps[1], k, mask)
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"feature_map must give q and k one width, got {q.shape[-1]} and {k.shape[-1]}"
        )
    if not (isinstance(scale, int | float) and scale == 1):
        q = q.astype(dtype) * jnp.asarray(scale, dtype)
    v = _where(mask, v)
    return Folded(
        q,
        k,
        Pair(v, jnp.ones(v.shape[:-1], dtype) if normalize else None),
        _folded_decay(log_decay, segment_ids, mask, (*batch, S, K), dtype, axis_name),
        of_queries,
        dtype,
        dict(precision=precision, chunk_size=chunk_size, implementation=implementation),
        axis_name,
    )


def fold_pairs(q, k, **options: Any) -> Folded:
    """Folds q and k alone, for dense weights; the inner attentions are dense as well."""
    for name in options.keys() - {*WeightOptions.__annotations__, "causal"}:
        raise TypeError(
            f"weights got an unexpected option {name!r}, "
            f"they take {', '.join(WeightOptions.__annotations__)}"
        )
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
            f"initial_state must be None or of type {kind.__name__}, got {type_name(initial_state)}"
        )
    members = {}
    for name, shape in shapes.items():
        member = getattr(initial_state, name)
        if shape is not None and member is not None:
            shape = (*x.sizes.B, *shape)
            member = checked(f"initial_state.{name}", member, shape, jnp.floating).astype(x.dtype)
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
    check_number("eps", eps)
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


def finish_weights(x: Folded, w: jax.Array, normalize: bool, eps) -> jax.Array:
    """Returns the weights, each row divided by its sum plus eps where normalised."""
    check_flag("normalize", normalize)
    check_number("eps", eps)
    if not normalize:
        return w
    mass = jnp.sum(w, -1, keepdims=True) + jnp.asarray(eps, w.dtype)
    if x.mask is not None:
        mass = jnp.where(x.mask[..., None, :, None], mass, 1)
    return w / mass


class StepOptions(TypedDict, total=False):
    """The options that every operator's step has."""

    normalize: bool
    feature_map: FeatureMaps
    log_decay: LogDecay | None
    scale: Number
    mask: MaskStep | None
    eps: Number
    precision: lax.PrecisionLike
    chunk_size: int | None  # of no meaning here, and ignored


class WeightOptions(TypedDict, total=False):
    """The options of every operator that concern queries and keys alone."""

    feature_map: FeatureMaps
    log_decay: LogDecay | None
    scale: Number
    mask: Mask | None
    segment_ids: SegmentIds | None
    precision: lax.PrecisionLike


def step(
    op: Callable, q_t, k_t, v_t, state, options: StepOptions, **own: Any
) -> tuple[jax.Array, Any]:
    """Runs an operator on one token: [*B, heads, width], log_decay [*B, K], mask [*B].

    `own` are the options that this operator alone has.
    """
    for name in options.keys() - StepOptions.__annotations__.keys():
        raise TypeError(
            f"{op.__name__}_step got an unexpected option {name!r}, "
            f"it takes {', '.join([*own, *StepOptions.__annotations__])}"
        )
    maps = _pair(options.get("feature_map"))
    one_width = maps[0] is maps[1]
    q_t, k_t, v_t = _checked_tokens(q_t, k_t, v_t, tokens="", suffix="_t", one_width=one_width)
    rest: dict[str, Any] = {**options}
    if (mask := rest.get("mask")) is not None:
        mask = checked("mask", mask, k_t.shape[:-2], jnp.bool_)
        rest["mask"] = jnp.expand_dims(mask, -1)
    if (log_decay := rest.get("log_decay")) is not None:
        log_decay = broadcast_decay(log_decay, mask, k_t.shape[:-1], axes="[*B, K]")
        rest["log_decay"] = jnp.expand_dims(log_decay, -2)
    q, k, v = (jnp.expand_dims(x, -3) for x in (q_t, k_t, v_t))
    try:
        out, state = op(q, k, v, initial_state=state, **own, **rest)
    except ValueError as error:
        if not (message := str(error)).startswith("initial_state"):
            raise
        shapes = ", ".join(f"{n}_t {x.shape}" for n, x in zip("qkv", (q_t, k_t, v_t), strict=True))
        raise ValueError(f"{message.removeprefix('initial_')}; the token has {shapes}") from None
    return jnp.squeeze(out, -3), state


def _folded_decay(log_decay, segment_ids, mask, shape, dtype, axis_name):
    if log_decay is not None:
        log_decay = broadcast_decay(log_decay, mask, shape, dtype)
        log_decay = _where(mask, log_decay, width_axes=1)
    if segment_ids is None:
        return log_decay
    before = None if axis_name is None else _sequence.id_before(segment_ids, mask, axis_name)
    starts = segment_starts(segment_ids, mask, before)[..., None]
    return jnp.where(starts, -jnp.inf, jnp.zeros(shape, dtype) if log_decay is None else log_decay)


def broadcast_decay(log_decay, mask, shape, dtype=None, axes: str = "[*B, T, K]") -> jax.Array:
    """Returns a decay for each token and kv head, once it is checked."""
    given, log_decay = log_decay, real("log_decay", log_decay)
    try:
        log_decay = jnp.broadcast_to(log_decay.astype(dtype or log_decay.dtype), shape)
    except ValueError:
        raise ValueError(
            f"log_decay must broadcast to {axes} = {shape}, got shape {jnp.shape(log_decay)}"
        ) from None
    _refuse_positive(given, mask, shape)
    return log_decay


def _refuse_positive(log_decay, mask, shape) -> None:
    """Raises where the decay was given in place of its log, as far as the values are known."""
    if not is_known(log_decay, mask):
        return
    known = np.broadcast_to(np.asarray(log_decay), shape)
    if mask is not None:
        known = known[np.asarray(mask)]
    if not (known <= 0).all():  # NaN neither
        raise ValueError(
            "log_decay must be at most 0 (it is the log of the decay: jnp.log(0.9), not 0.9), "
            f"got {known.max()}"
        )


def _features(name, feature_map, x, mask):
    """Applies a feature map to the tokens that the mask keeps; the rest is 0 before and after."""
    if feature_map is None:
        return _where(mask, x)
    y = checked("feature_map's result", feature_map(_where(mask, x)), None, jnp.floating)
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


def _pair(feature_map: FeatureMaps) -> tuple:
    """Returns the feature map of q and that of k."""
    maps = feature_map if isinstance(feature_map, tuple) else (feature_map, feature_map)
    if len(maps) != 2 or not all(f is None or callable(f) for f in maps):
        raise ValueError(f"feature_map must be None, a callable or a pair, got {feature_map!r}")
    return maps


def _checked_tokens(q, k, v, *, tokens: str, one_width: bool, suffix: str = ""):
    """Returns q, k and v as arrays that fit together.

    `tokens` is "T" where q and k share the token axis, "S" where k has its own, "" without one;
    `one_width` says that q and k have the same feature map.
    """
    before = {"T": "*B, T, ", "S": "*B, S, ", "": "*B, "}[tokens]
    ndim = 3 if tokens else 2
    names = [name + suffix for name in ("q", "k", "v")]
    arrays: list[jax.Array] = []
    for name, x, own in zip(names, (q, k, v), ("H, D", "K, D", "K, E"), strict=True):
        arrays.append(x := checked(name, x, None, jnp.floating))
        if x.ndim < ndim:
            layout = f"[*B, T, {own}]" if tokens and x is arrays[0] else f"[{before}{own}]"
            raise ValueError(f"{name} must be {layout}, got shape {x.shape}")
    q, k, v = arrays
    problem = _misfit(q, k, v, names, tokens=tokens, one_width=one_width)
    if problem is not None:
        hint = swapped_axes_hint(q, k, v, one_length=tokens == "T") if tokens else ""
        raise ValueError(problem + hint)
    return q, k, v


def _misfit(q, k, v, names, *, tokens: str, one_width: bool) -> str | None:
    """What is wrong with the shapes of q, k and v, which have enough axes."""
    q_name, k_name, v_name = names
    if k.shape[:-1] != v.shape[:-1]:
        return f"{v_name} must have {k_name}'s axes {k.shape[:-1]} before E, got shape {v.shape}"
    if tokens != "S" and q.shape[:-2] != k.shape[:-2]:
        return f"{k_name} must have {q_name}'s axes {q.shape[:-2]} before K, got shape {k.shape}"
    if one_width and q.shape[-1] != k.shape[-1]:
        return f"{k_name} must have {q_name}'s width {q.shape[-1]}, got {k.shape[-1]}"
    for name, x in zip(names, (q, k, v), strict=True):
        if 0 in x.shape[-2:]:
            return f"{name} must have at least one head and a width of at least 1, got {x.shape}"
    H, K = q.shape[-2], k.shape[-2]
    if H % K:
        return f"{k_name}'s heads must divide {q_name}'s, got K = {K} and H = {H}"
    return None
