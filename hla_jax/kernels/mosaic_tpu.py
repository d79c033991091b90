"""The primitive and its cascades on TPUs, as Pallas kernels.

One program works through the chunks of one kv head: of its r states, and of the g query heads that
read each of them. The states, and in the backward pass their cotangents, stay in VMEM from the
first chunk to the last, and what a cascade's first level gives to the second never leaves the chip.

The order of axes is that of `_mosaic_tpu_blocks`: heads come before tokens.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from hla_jax.kernels import _mosaic_tpu_blocks as blocks
from hla_jax.kernels import _tile
from hla_jax.kernels._layout import Cascade, CascadeResults, States
from hla_jax.kernels._mosaic_tpu_blocks import Sizes

FUSES_BACKWARD = True  # of cascades


def unsupported(x: Cascade, *, chunk_size, power, strict, precision) -> str | None:
    """Returns why there is no kernel for this request, or None."""
    if any(a.dtype == jnp.float64 for a in jax.tree.leaves(x)):
        return "TPUs have no float64"
    if any(a.dtype == jnp.float16 for a in jax.tree.leaves(x)):
        return "TPUs have no float16"
    if x.F.dtype != jnp.float32:
        return f"states in {x.F.dtype} are not float32"
    if not _tile.knows(precision):
        return f"the precision {precision} is not one of jax.lax.Precision"
    s, _ = blocks.sizes(x, chunk_size)
    if blocks.vmem(s) > blocks.VMEM_BUDGET:
        return f"states of D = {s.D} and E = {s.E} do not fit into VMEM"
    return None


def forward(x: Cascade, *, out_dtype, chunk_size, power, strict, precision) -> CascadeResults:
    """Returns outputs, in `out_dtype`, and final states.

    Device memory: q, k, v and o once, each state read and written once. FLOPs: those of `_tile` for
    each level; the first level is worked once for all query heads of its kv head.
    """
    given, x, s = x, *blocks.fitted(x, chunk_size)
    y = blocks.heads_first(x, s)
    out = blocks.results(y, s, out_dtype)
    results = blocks.call(
        partial(_forward_kernel, s=s, power=power, strict=strict, dot=_dots(given, precision)),
        (y,),
        out,
        s,
        scratch=States(*out[2:]),
        aliases=blocks.in_place(y, out),
        products=1 + (x.S is not None) + (x.P is not None),
        name="hla_forward",
    )
    return blocks.results_in_order(results, given, s)


def backward(x: Cascade, ct: CascadeResults, *, chunk_size, power, strict, precision) -> Cascade:
    """Returns the cotangents of all operands.

    Two sweeps: the states before each chunk, from left to right, into device memory; then all
    cotangents from right to left. What passed between the levels is computed again. Device memory:
    k, v (and q in a cascade) twice, q and dO once, dq, dk and dv once, and the states of a chunk
    written and read, 2 D E / C elements per token and state. FLOPs: 2.5 times the forward's, and
    those of a cascade's first level twice more.
    """
    given, x, s = x, *blocks.fitted(x, chunk_size)
    y = blocks.heads_first(x, s)
    ct = blocks.results_cotangents(ct, y, s)
    levels = 1 + (x.S is not None) + (x.P is not None)
    dtype, _ = _tile.product_type(x, precision)
    options = dict(s=s, power=power, strict=strict, dot=_dots(given, precision))
    starts = blocks.starts(y, s, dtype)
    starts = blocks.call(
        partial(_starts_kernel, **options),
        (y if levels > 1 else Cascade._make((None, *y[1:])),),
        starts,
        s,
        scratch=States(*y[5:]),
        products=levels - 0.5,
        name="hla_starts",
    )
    d = blocks.call(
        partial(_backward_kernel, **options),
        (y, starts, ct),
        blocks.cotangents(y, s),
        s,
        scratch=States(*y[5:]),
        reverse=True,
        products=3.5 * levels - 1,
        name="hla_backward",
    )
    return blocks.cotangents_in_order(d, given, s)


def _dots(x, precision: lax.PrecisionLike) -> _tile.Dots:
    return _tile.dots(*_tile.product_type(x, precision))


# The kernels. Blocks have no batch and no kv head: q [r g, C, D], k [r or 1, C, D], w [r or 1, C],
# log_decay [3, C] as from `_tile.decay_rows`, states [r, D, E] and masses [r, D], with r = 1 in the
# first level. A cascade has g = 1; its first level takes the r query heads as rows of one product.


class _Weight(NamedTuple):
    """The row weights of one state's chunk, or None twice."""

    row: Any = None
    column: Any = None


def _forward_kernel(x, out, state, *, s: Sizes, power, strict, dot):
    _at(0, lambda: _copy(x[5:], state))
    q, k, v = (_valid(a[...], s) for a in x[:3])
    t = _terms(x.log_decay, s.g * s.C, s, power=power, strict=strict)
    key, value, weight = _first_level(q, k, v, x.w, x.log_decay, state, s, dot)
    _advance_first_level(k, v, x.w, x.log_decay, state, s, dot)
    for i in range(s.r):
        q_i, w = _queries(q, i, s), weight(i)
        F, f = state.F[i], _mass(state.f, i)
        A = dot.nt(q_i, key(i)) * t.D
        o, z = _tile.output(A, q_i, value(i), w.row, t, F, f, dot)
        out.o[_of(i, s)] = o.reshape(s.g, s.C, s.E).astype(out.o.dtype)
        for j in range(s.g if z is not None else 0):
            out.z[_row(i * s.g + j)] = _tile.row(z[j * s.C : (j + 1) * s.C])
        _store(state.F, state.f, i, *_tile.next_state(key(i), value(i), w.column, t, F, f, dot))
    _at(s.n - 1, lambda: _copy(state, out[2:]))


def _starts_kernel(x, starts, state, *, s: Sizes, power, strict, dot):
    _at(0, lambda: _copy(x[5:], state))
    _copy(state, starts)
    q, k, v = (None if a is None else _valid(a[...], s) for a in x[:3])
    t = _terms(x.log_decay, s.C, s, power=power, strict=strict)
    key, value, weight = _first_level(q, k, v, x.w, x.log_decay, state, s, dot)
    _advance_first_level(k, v, x.w, x.log_decay, state, s, dot)
    for i in range(s.r):
        F, f = state.F[i], _mass(state.f, i)
        after = _tile.next_state(key(i), value(i), weight(i).column, t, F, f, dot)
        _store(state.F, state.f, i, *after)


def _backward_kernel(x, starts, ct, out, end, *, s: Sizes, power, strict, dot):
    _at(0, lambda: _copy(ct[2:], end))
    q, k, v, do = (_valid(a[...], s, reverse=True) for a in (*x[:3], ct.o))
    R = s.g * s.C
    t = _terms(x.log_decay, R, s, power=power, strict=strict)
    cotangents = partial(_tile.cotangents, dot=dot, decays=x.log_decay is not None)
    key, value, weight = _first_level(q, k, v, x.w, x.log_decay, starts, s, dot)
    parts: list[Any] = []
    for i in range(s.r):
        q_i, do_i, dz = _queries(q, i, s), do[_of(i, s)].reshape(R, s.E), None
        if ct.z is not None:
            dz = jnp.concatenate(
                [_tile.column(ct.z[_row(i * s.g + j)], s.C) for j in range(s.g)], 0
            )
        F, f, L, mu = starts.F[i], _mass(starts.f, i), end.F[i], _mass(end.f, i)
        d = cotangents(q_i, key(i), value(i), weight(i).row, t, F, f, do_i, dz, L, mu)
        _store(end.F, end.f, i, *_tile.previous_cotangent(q_i, do_i, dz, t, L, mu, dot))
        parts.append(d)
    dq, dk, dv, dw = ([d[member] for d in parts] for member in range(4))
    paths = [] if x.log_decay is None else [power * d.log_decay for d in parts]

    # The first level, whose outputs' cotangents are those of the second level's keys and values.
    if starts.S is not None or starts.P is not None:
        t = _terms(x.log_decay, s.r * s.C, s)
        q_all = q.reshape(s.r * s.C, s.D)
    levels: list[Any] = []
    if starts.S is not None:
        du, S, L = jnp.concatenate(dk, 0), starts.S[0], end.S[0]
        d = cotangents(q_all, k[0], k[0], None, t, S, None, du, None, L, None)
        end.S[0], _ = _tile.previous_cotangent(q_all, du, None, t, L, None, dot)
        dk = [d.k + d.v]
        levels.append(d)
    if starts.P is not None:
        dr, dz, w = jnp.concatenate(dv, 0), None, _weight(x.w, 0, s.C).row
        if w is not None:
            dz = jnp.concatenate([_tile.column(row, s.C) for row in dw], 0)
        P, m, L, mu = starts.P[0], _mass(starts.m, 0), end.P[0], _mass(end.m, 0)
        d = cotangents(q_all, k[0], v[0], w, t, P, m, dr, dz, L, mu)
        _store(end.P, end.m, 0, *_tile.previous_cotangent(q_all, dr, dz, t, L, mu, dot))
        dk, dv, dw = [*dk, d.k], [d.v], [d.w]
        levels.append(d)
    for d in levels:
        dq = [dq_i + d.q[i * s.C : (i + 1) * s.C] for i, dq_i in enumerate(dq)]
        paths += [] if x.log_decay is None else [d.log_decay]
    for i, dq_i in enumerate(dq):
        out.q[_of(i, s)] = dq_i.reshape(s.g, s.C, s.D).astype(out.q.dtype)
    for ref, heads in ((out.k, dk), (out.v, dv), (out.w, dw), (out.log_decay, paths)):
        _store_heads(ref, heads)
    _at(s.n - 1, lambda: _copy(end, out[5:]))


def _first_level(q, k, v, w, rows, state, s: Sizes, dot):
    """Returns what the second level takes, as functions of its state: key, value and weight."""
    u = r = r_mass = None
    if state.S is not None or state.P is not None:
        q, t = q.reshape(s.r * s.C, s.D), _terms(rows, s.r * s.C, s)
        A = dot.nt(q, k[0]) * t.D
    if state.S is not None:
        u, _ = _tile.output(A, q, k[0], None, t, state.S[0], None, dot)
    if state.P is not None:
        w_row, m = _weight(w, 0, s.C).row, _mass(state.m, 0)
        r, r_mass = _tile.output(A, q, v[0], w_row, t, state.P[0], m, dot)

    def tile(level, tokens, i: int):
        if level is not None:
            return level[i * s.C : (i + 1) * s.C]
        return tokens[min(i, tokens.shape[0] - 1)]

    def weight(i: int) -> _Weight:
        if r_mass is None:
            return _weight(w, i, s.C)
        column = tile(r_mass, None, i)
        return _Weight(_tile.row(column), column)

    return partial(tile, u, k), partial(tile, r, v), weight


def _advance_first_level(k, v, w, rows, state, s: Sizes, dot):
    """Takes the first level's states, if any, over the chunk."""
    t = _terms(rows, s.C, s)
    if state.S is not None:
        state.S[0], _ = _tile.next_state(k[0], k[0], None, t, state.S[0], None, dot)
    if state.P is not None:
        P, m, w = state.P[0], _mass(state.m, 0), _weight(w, 0, s.C).column
        _store(state.P, state.m, 0, *_tile.next_state(k[0], v[0], w, t, P, m, dot))


def _at(chunk: int, action):
    """Runs `action` in the given chunk of the sweep."""
    pl.when(pl.program_id(2) == chunk)(action)


def _copy(sources, targets):
    for source, target in zip(sources, targets, strict=True):
        if target is not None:
            target[...] = source[...].astype(target.dtype)


def _valid(tokens, s: Sizes, reverse: bool = False):
    """Puts zeros in place of what lies beyond T, which is not defined."""
    if s.T % s.C == 0:
        return tokens
    chunk = pl.program_id(2)
    first = (s.n - 1 - chunk if reverse else chunk) * s.C
    token = first + lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
    return jnp.where(token < s.T, tokens, jnp.zeros((), tokens.dtype))


def _terms(rows, R: int, s: Sizes, **options) -> _tile.Decay:
    if rows is None:
        return _tile.decay(None, None, R, s.C, **options)
    rows = [rows[i : i + 1] for i in range(3)]
    return _tile.decay(rows, [_tile.column(row, R) for row in rows], R, s.C, **options)


def _of(i: int, s: Sizes) -> slice:
    """The query heads of state i."""
    return slice(i * s.g, (i + 1) * s.g)


def _row(i: int) -> slice:
    return slice(i, i + 1)


def _queries(q, i: int, s: Sizes):
    return q[_of(i, s)].reshape(s.g * s.C, s.D)


def _weight(w, i: int, C: int) -> _Weight:
    """Returns the weights of state i: its own, or those that all states share."""
    if w is None:
        return _Weight()
    row = w[_row(min(i, w.shape[0] - 1))]
    return _Weight(row, _tile.column(row, C))


def _mass(masses, i: int):
    return None if masses is None else masses[_row(i)]


def _store(states, masses, i: int, state, mass):
    states[i] = state
    if mass is not None:
        masses[_row(i)] = mass


def _store_heads(ref, parts):
    """Stores one part per state, or the sum of all where the states share."""
    if ref is None:
        return
    parts = parts if ref.shape[0] == len(parts) else [sum(parts)]
    for i, part in enumerate(parts):
        ref[_row(i)] = part.reshape(1, *ref.shape[1:]).astype(ref.dtype)
