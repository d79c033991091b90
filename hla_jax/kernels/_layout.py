"""The primitive's arrays, and how a function of one head is mapped over heads that share.

A state belongs to one kv head, and one or more query heads read it. With K kv heads, r states per
kv head and g query heads per state, H = K r g; either r = 1 (the group shares a state) or g = 1.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Operands(NamedTuple):
    """The inputs of the primitive; w and m are None without a row mass. Hk and Hv are K or N."""

    q: Float[Array, "*B T H D"]
    k: Float[Array, "*B T Hk D"]
    v: Float[Array, "*B T Hv E"]
    w: Float[Array, "*B T Hv"] | None
    log_decay: Float[Array, "*B T K"] | None
    P: Float[Array, "*B N D E"]
    m: Float[Array, "*B N D"] | None

    @property
    def token_axis(self) -> int:
        """The axis T, the same in all arrays of tokens."""
        return self.P.ndim - 3


class Results(NamedTuple):
    """Outputs and final state."""

    o: Float[Array, "*B T H E"]
    z: Float[Array, "*B T H"] | None
    P: Float[Array, "*B N D E"]
    m: Float[Array, "*B N D"] | None


class Cascade(NamedTuple):
    """The inputs of two levels of the primitive, of which the second takes what the first gives.

    U = LA(Q, K, K; S) where S is given, else K;  [R, r] = LA(Q, K, [V, w]; P, m) where P is given,
    else [V, w];  O = LA_power(Q, U, [R, r]; F, f). Without S and P it is the primitive, of state F.
    With one of them the second level has one state per query head, and k, v, S and P have K heads.
    """

    q: Float[Array, "*B T H D"]
    k: Float[Array, "*B T Hk D"]
    v: Float[Array, "*B T Hv E"]
    w: Float[Array, "*B T Hv"] | None
    log_decay: Float[Array, "*B T K"] | None
    S: Float[Array, "*B K D D"] | None
    P: Float[Array, "*B K D E"] | None
    m: Float[Array, "*B K D"] | None  # given with both w and P
    F: Float[Array, "*B N D E"]
    f: Float[Array, "*B N D"] | None  # given with w

    @property
    def token_axis(self) -> int:
        """The axis T, the same in all arrays of tokens."""
        return self.F.ndim - 3


class CascadeResults(NamedTuple):
    """Outputs and final states, None where the operand is."""

    o: Float[Array, "*B T H E"]
    z: Float[Array, "*B T H"] | None
    S: Float[Array, "*B K D D"] | None
    P: Float[Array, "*B K D E"] | None
    m: Float[Array, "*B K D"] | None
    F: Float[Array, "*B N D E"]
    f: Float[Array, "*B N D"] | None


class States(NamedTuple):
    """The states of a cascade's levels, as arrays or as what stands for them in a kernel."""

    S: Any
    P: Any
    m: Any
    F: Any
    f: Any


def as_cascade(x: Operands) -> Cascade:
    """Returns the primitive as a cascade of its second level alone."""
    return Cascade(*x[:5], None, None, None, *x[5:])


def as_operands(x: Cascade) -> Operands:
    """Returns the operands of the primitive from those of such a cascade."""
    return Operands(*x[:5], x.F, x.f)


def as_cascade_results(y: Results) -> CascadeResults:
    """Returns the results of the primitive as those of such a cascade."""
    return CascadeResults(y.o, y.z, None, None, None, y.P, y.m)


def as_results(y: CascadeResults) -> Results:
    """Returns the results of the primitive from those of such a cascade."""
    return Results(y.o, y.z, y.F, y.f)


_OPERAND_AXES = Operands._make((1, 1, 1, 1, 1, 0, 0))  # of the heads, in arrays without batch axes
_RESULT_AXES = Results._make((1, 1, 0, 0))


def per_head(function: Callable[[Operands], Results]) -> Callable[[Operands], Results]:
    """Maps a function of one state over batch, kv heads and states.

    The function sees q [T, g, D], k [T, D], v [T, E], w and log_decay [T], P [D, E], m [D], and
    returns o [T, g, E], z [T, g], P and m. What is shared is indexed, not repeated.
    """

    def of_kv_head(x: Operands) -> Results:  # q [T, r, g, D], k [T, r or 1, D], ..., P [r, D, E]
        axes, x = _shared_whole(x)
        return jax.vmap(function, (axes,), _RESULT_AXES)(x)

    def of_row(x: Operands) -> Results:
        y = jax.vmap(of_kv_head, (_OPERAND_AXES,), _RESULT_AXES)(_split_operands(x))
        return Results(_join(y.o, 1, 3), _join(y.z, 1, 3), _join(y.P, 0, 2), _join(y.m, 0, 2))

    return _over_batch(of_row)


def per_head_cotangents(
    function: Callable[[Operands, Results], Operands],
) -> Callable[[Operands, Results], Operands]:
    """The same for a function that turns cotangents of results into cotangents of operands.

    What several states share receives the sum of their cotangents.
    """

    def of_kv_head(x: Operands, ct: Results) -> Operands:
        axes, whole = _shared_whole(x)
        d = jax.vmap(function, (axes, _RESULT_AXES), _OPERAND_AXES)(whole, ct)

        def summed(dx, x):
            return dx if x is None or dx.shape == x.shape else jnp.sum(dx, 1, keepdims=True)

        log_decay = None if d.log_decay is None else jnp.sum(d.log_decay, 1)
        k, v, w = (summed(*pair) for pair in zip(d[1:4], x[1:4], strict=True))
        return d._replace(k=k, v=v, w=w, log_decay=log_decay)

    def of_row(x: Operands, ct: Results) -> Operands:
        parts = _split_operands(x)
        r, g = parts.q.shape[2:4]
        o, z = _split(ct.o, 1, r, g), _split(ct.z, 1, r, g)
        ct = Results(o, z, _split(ct.P, 0, r), _split(ct.m, 0, r))
        d = jax.vmap(of_kv_head, (_OPERAND_AXES, _RESULT_AXES), _OPERAND_AXES)(parts, ct)
        q, k, v, w = (_join(a, 1, n) for a, n in zip(d[:4], (3, 2, 2, 2), strict=True))
        return Operands(q, k, v, w, d.log_decay, _join(d.P, 0, 2), _join(d.m, 0, 2))

    return _over_batch(of_row)


def cast(tree, dtype):
    """Returns the tree with every array in `dtype`."""
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def _over_batch(of_row):
    def run(x: Operands, *ct: Results):
        f = of_row
        for _ in range(x.token_axis):
            f = jax.vmap(f)
        return f(x, *ct)

    return run


def _split_operands(x: Operands) -> Operands:
    """Splits the heads of one row: q [T, K, r, g, D], k [T, K, r or 1, D], P [K, r, D, E]."""
    heads, states = x.q.shape[1], x.P.shape[0]
    kv = min(x.k.shape[1], x.v.shape[1]) if x.log_decay is None else x.log_decay.shape[1]
    r, g = states // kv, heads // states
    k, v, w = (a if a is None else _split(a, 1, a.shape[1] // kv) for a in (x.k, x.v, x.w))
    q, P, m = _split(x.q, 1, r, g), _split(x.P, 0, r), _split(x.m, 0, r)
    return Operands._make((q, k, v, w, x.log_decay, P, m))


def _split(a, axis: int, *factors: int):
    """Splits an axis in two or three, the last ones of the given lengths."""
    if a is None:
        return None
    first = a.shape[axis] // math.prod(factors)
    return a.reshape(*a.shape[:axis], first, *factors, *a.shape[axis + 1 :])


def _join(a, axis: int, count: int):
    """Joins `count` axes from `axis` on."""
    if a is None:
        return None
    stop = axis + count
    return a.reshape(*a.shape[:axis], math.prod(a.shape[axis:stop]), *a.shape[stop:])


def _shared_whole(x: Operands) -> tuple[Operands, Operands]:
    """Returns vmap's axes over the states of one kv head, and the operands without shared axes.

    An operand with one head for several states is passed whole to each of them.
    """

    def shared(a):
        return a is not None and a.shape[1] < x.P.shape[0]

    axes: dict[str, Any] = {f: None if shared(getattr(x, f)) else 1 for f in ("k", "v", "w")}
    whole = {f: jnp.squeeze(getattr(x, f), 1) for f, axis in axes.items() if axis is None}
    return _OPERAND_AXES._replace(log_decay=None, **axes), x._replace(**whole)
