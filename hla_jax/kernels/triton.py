"""The primitive and its cascades through Triton: NVIDIA cards of any age, and ROCm.

Arrays stay as they are, [B, T, H, D]: a program reads (C, D) tiles of one head. Query heads that
share k, v or a state read the same ones; cotangents of what they share are summed outside.

Forward, one of two:
- in sequence: a program goes through all chunks of one query head and one block of E, with the
  states in registers, those of both levels for HLA2 and AHLA. Per token and query head it reads q,
  k, v and writes o: 2 (D + E) s bytes for items of s bytes (q and k once per block of E).
- side by side: the summary of each chunk, a sweep over the summaries, the outputs of each chunk.
  The states' 4 D E / C bytes per token cross device memory four times more.

Backward: the states before each chunk and the cotangents of those after it, by the same summaries
and sweep, then all cotangents of each chunk at once: eight times 4 D E / C bytes per token and
head, 4 (D + E) s for the sums, and for the cotangents 2 (D + E) s read and (2 D + E) s written.

Tile sizes are those with which nothing spills when compiled for sm_90a. The row mass takes part in
products as a tile of 16 columns: next to the sums of `_tile`, that takes far fewer registers.

FLOPs as in `_tile`. Products are in bfloat16 where q, k or v is and `precision` asks for no more;
else float32 on tensor cores, rounded to TF32 (11 bits) by default, or as three products of TF32
parts (22 bits) for HIGH and HIGHEST.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hla_jax.kernels import _tile
from hla_jax.kernels._layout import (
    Cascade,
    CascadeResults,
    Operands,
    Results,
    as_cascade,
    as_operands,
    as_results,
)

F32 = jnp.dtype(jnp.float32)
FUSES_BACKWARD = False  # of cascades: they are differentiated level by level
MAX_WIDTH = 256
BUSY = 128  # programs that keep a large card busy
# Elements of a state that a decoding step holds at a time.
BLOCK = 4096

# The axes of the arrays. A program sees one of b (batch), h (heads) and i (chunks), a block of e
# (E, or a flat state), and all of t (tokens), d (D) and others.
_OPERANDS: Any = Operands._make(("bthd", "bthd", "bthe", "bth", "bth", "bhde", "bhd"))
_RESULTS: Any = Results._make(("bthe", "bth", "bhde", "bhd"))
_FIRST = ("bhdd", "bhde", "bhd")  # of the first level's states
_CASCADE: Any = Cascade._make((*_OPERANDS[:5], *_FIRST, *_OPERANDS[5:]))
_CASCADE_RESULTS: Any = CascadeResults._make((*_RESULTS[:2], *_FIRST, *_RESULTS[2:]))
_DECAY = "bh..."  # of `_decay_rows`
_CHUNK_STATES = {"P": "bhide", "m": "bhid"}


class Sizes(NamedTuple):
    """What kernels are specialised to."""

    C: int  # tokens of a tile,
    d: int  # of D
    e: int  # and of E
    widest: int  # the largest D with which a state stays in registers
    dot: _tile.Dots


def unsupported(x: Cascade, *, chunk_size, power, strict, precision) -> str | None:
    """Returns why these kernels do not serve the request, or None."""
    D, E = x.F.shape[-2:]
    if max(D, E) > MAX_WIDTH:
        return f"a width of {max(D, E)} is over {MAX_WIDTH}"
    if x.F.dtype != F32:
        return f"states in {x.F.dtype} are not float32"
    if chunk_size not in (None, 16, 32, 64):
        return f"a chunk size of {chunk_size} is not 16, 32 or 64"
    if not _tile.knows(precision):
        return f"the precision {precision} is not one of jax.lax.Precision"
    if (x.S is None and x.P is None) or x.q.shape[1] == 1:
        return None
    three = x.S is not None and x.P is not None
    if three or max(D, E) > 64 or _tile.product_type(x, precision)[0] == F32:
        return "registers hold two states of D, E <= 64, in bfloat16, and no more"
    if _side_by_side(x, _sizes(x, chunk_size, precision, False)):
        return f"{x.q.shape[2]} heads of {x.q.shape[1]} tokens are faster level by level"
    return None


def _sizes(x: Cascade | Operands, chunk_size, precision, interpret: bool) -> Sizes:
    """Returns tile sizes with which nothing spills out of registers, as compiled for sm_90a."""
    T, D, E = x.q.shape[1], _width(x.q.shape[-1]), _width(x.v.shape[-1])
    dtype, precision = _tile.product_type(x, precision)
    dot = _float32_dots(precision, interpret) if dtype == F32 else _tile.dots(dtype, None)
    if dtype == jnp.bfloat16:
        side, widest = 64, 128
    else:
        side, widest = (32, 128) if precision is None else (16, 32)
    return Sizes(min(chunk_size or side, _width(T)), min(D, side), min(E, side), widest, dot)


def _float32_dots(precision, interpret: bool) -> _tile.Dots:
    if precision is None or interpret:  # XLA's CPU backend knows no TF32, and computes in float32
        return _tile.dots(F32, precision)
    return _tile.dots(F32, lax.DotAlgorithmPreset.TF32_TF32_F32_X3)


def _side_by_side(x: Cascade, sizes: Sizes) -> bool:
    """Returns whether to compute chunks side by side.

    For states too large for registers; and for few heads of many chunks: most of a large card has
    nothing to do in sequence, and four more passes over the states cost less than that.
    """
    B, T, H, D = x.q.shape
    few = B * H * pl.cdiv(x.v.shape[-1], sizes.e) < BUSY
    return _width(D) > sizes.widest or (few and T > 8 * sizes.C)


def forward(
    x: Cascade, *, out_dtype, chunk_size, power, strict, precision, interpret: bool = False
) -> CascadeResults:
    """Returns outputs, in `out_dtype`, and final states."""
    if x.q.shape[1] == 1 and not strict:
        y = step(x, power=power, precision=precision, interpret=interpret)
        return y._replace(o=y.o.astype(out_dtype))
    sizes = _sizes(x, chunk_size, precision, interpret)
    rows = _decay_rows(x.log_decay, sizes)
    wide = _widened(x._replace(log_decay=None), _CASCADE)
    side_by_side = x.S is None and x.P is None and _side_by_side(x, sizes)
    run = _forward_side_by_side if side_by_side else _forward_in_sequence
    y = run(wide, rows, out_dtype, power, strict, sizes, interpret)
    return _narrowed(y, _CASCADE_RESULTS, x.F.shape)


def backward(
    x: Cascade, ct: CascadeResults, *, chunk_size, power, strict, precision, interpret: bool = False
) -> Cascade:
    """Returns the cotangents of the primitive's operands."""
    d = _backward_of_primitive(
        *(as_operands(x), as_results(ct)),
        *(chunk_size, power, strict, precision, interpret),
    )
    return as_cascade(d)


def _backward_of_primitive(x, ct, chunk_size, power, strict, precision, interpret) -> Operands:
    sizes = _sizes(x, chunk_size, precision, interpret)
    sizes = sizes._replace(d=min(sizes.d, 32), e=min(sizes.e, 32))  # for sm_80 too
    rows = _decay_rows(x.log_decay, sizes)
    wide, ct = _widened(x._replace(log_decay=None), _OPERANDS), _widened(ct, _RESULTS)
    d = _backward(wide, ct, rows, power, strict, sizes, interpret)
    if rows is not None:
        d = d._replace(log_decay=power * d.log_decay)
    return _narrowed(Operands(*map(_sum_heads, d, x, _OPERANDS)), _OPERANDS, x.P.shape)


def _forward_in_sequence(
    x: Cascade, rows, out_dtype, power, strict, sizes, interpret
) -> CascadeResults:
    B, _, H, D = x.q.shape
    states = x[5:]
    if D > 64:
        sizes = sizes._replace(e=min(sizes.e, 32))
    levels = 1 + (x.S is not None) + (x.P is not None)
    return _call(
        partial(
            _forward_kernel,
            shares=[a if a is None else H // a.shape[1] for a in states],
            power=power,
            strict=strict,
            sizes=sizes,
        ),
        (x, rows),
        (_CASCADE, _DECAY),
        CascadeResults(
            *_outputs(x, out_dtype), *(a if a is None else _array(a, *a.shape) for a in states)
        ),
        _CASCADE_RESULTS,
        grid=(x.v.shape[-1] // sizes.e, 1, H, B),
        warps=4 if levels == 1 and D <= 64 else 8,
        stages=2 if sizes.C == 64 and D <= 64 and levels == 1 else 1,
        block=sizes.e,
        flops=levels * _flops(x, sizes),
        exps=levels * _exps(x, rows, sizes),
        interpret=interpret,
    )


def _forward_kernel(x, rows, y, *, shares, power, strict, sizes: Sizes):
    """All chunks of one query head and one block of E, at both levels."""
    C, dot, (e, h) = sizes.C, sizes.dot, (pl.program_id(0), pl.program_id(2))
    cascade = x.S is not None or x.P is not None

    def chunk(i, states):
        S, P, F = states
        q, k, v = _load_operands(x, i, C)
        t = _decay(rows, i, C, 1 if cascade else power, strict)
        u, r = k, v
        if S is not None:
            [u], S = _level(q, k, [k], t, S, dot)
        if P is not None:
            r, P = _level(q, k, v, t, P, dot)
        if cascade:
            t = _tile.Decay(*(a**power for a in t))
        o, F = _level(q, u, r, t, F, dot)
        _store_tokens(y.o, i, C, o[0])
        if y.z is not None:
            z = _from_column(o[1])

            @pl.when(e == 0)
            def _():
                _store_tokens(y.z, i, C, z)

        return S, P, F

    first = [_with_mass(*state) for state in ((x.S, None), (x.P, x.m), (x.F, x.f))]
    S, P, F = lax.fori_loop(0, pl.cdiv(x.q.shape[0], C), chunk, tuple(first))
    new = [*(S or [None]), *_without_mass(P), *_without_mass(F)]
    for ref, state, share, axes in zip(y[2:], new, shares, _CASCADE_RESULTS[2:], strict=True):
        if ref is not None:
            # Of the programs that computed the same, one writes.
            @pl.when((lax.rem(h, jnp.int32(share)) == 0) & ((e == 0) | ("e" in axes)))
            def _(ref=ref, state=state):
                ref[...] = state


def _level(q, k, v, t: _tile.Decay, P, dot: _tile.Dots):
    """Returns the outputs and next states of one level, for values of one or more kinds."""
    # This order takes the fewest registers.
    new_P = [_tile.next_state(k, a, None, t, p, None, dot)[0] for a, p in zip(v, P, strict=True)]
    A = dot.nt(q, k) * t.D
    o = [_tile.output(A, q, a, None, t, p, None, dot)[0] for a, p in zip(v, P, strict=True)]
    return o, new_P


def _with_mass(P, m):
    """Loads a state, and a mass as one more state, of which all columns but the first are 0."""
    if P is None:
        return None
    return [P[...]] if m is None else [P[...], _as_column(m[...])]


def _without_mass(states):
    """Returns a state and its mass as arrays that are stored."""
    if states is None or len(states) == 1:
        return *(states or [None]), None
    return states[0], _from_column(states[1])


def _as_column(a):
    """Returns a vector as the first of 16 columns, as few as products have; the rest is 0."""
    column = lax.broadcasted_iota(jnp.int32, (a.shape[0], 16), 1)
    return jnp.where(column == 0, a[:, None].astype(F32), 0.0)


def _from_column(a):
    return jnp.sum(a, 1)


def _forward_side_by_side(
    x: Cascade, rows, out_dtype, power, strict, sizes, interpret
) -> CascadeResults:
    B, T, H, _ = x.q.shape
    (P, m), (F, f) = _chunk_states(
        (x.k, x.v, x.w), rows, (x.F, x.f), power, to_end=True, sizes=sizes, interpret=interpret
    )
    y = _call(
        partial(_output_kernel, power=power, strict=strict, sizes=sizes),
        (Operands(*x[:4], None, P, m), rows),
        (_OPERANDS._replace(**_CHUNK_STATES), _DECAY),
        Results._make((*_outputs(x, out_dtype), None, None)),
        _RESULTS,
        grid=(x.v.shape[-1] // sizes.e, pl.cdiv(T, sizes.C), H, B),
        warps=8 if sizes.C == 64 else 4,
        block=sizes.e,
        flops=_flops(x, sizes),
        exps=_exps(x, rows, sizes),
        interpret=interpret,
    )
    return CascadeResults(y.o, y.z, None, None, None, F, f)


def _output_kernel(x, rows, y, *, power, strict, sizes: Sizes):
    """One chunk of one query head and one block of E."""
    i, C, dot = pl.program_id(1), sizes.C, sizes.dot
    t = _decay(rows, i, C, power, strict)
    over_D = partial(_over, x.q.shape[1], sizes.d)

    def q(at):
        return _tokens(x.q, i, C, at)

    A = over_D(lambda at: dot.nt(q(at), _tokens(x.k, i, C, at)), C, C) * t.D
    through = over_D(lambda at: dot.nn(q(at), x.P[at, :]), C, sizes.e)
    _store_tokens(y.o, i, C, dot.nn(A, _tokens(x.v, i, C)) + t.b * through)
    if x.w is not None:
        through = over_D(lambda at: dot.nn(q(at), _as_column(x.m[at])), C, 16)
        z = _from_column(dot.nn(A, _as_column(_tokens(x.w, i, C))) + t.b * through)

        @pl.when(pl.program_id(0) == 0)
        def _():
            _store_tokens(y.z, i, C, z)


def _over(width: int, side: int, add, *shape: int):
    """Returns the sum of what `add` returns for each block of a width."""

    def body(j, total):
        return total + add(pl.ds(j * side, side))

    return lax.fori_loop(0, width // side, body, jnp.zeros(shape, F32))


def _backward(x: Operands, ct: Results, rows, power, strict, sizes, interpret) -> Operands:
    """Returns what each query head adds to the cotangents of what it reads."""
    (B, T, H, _), E = x.q.shape, x.v.shape[-1]
    states = partial(_chunk_states, power=power, sizes=sizes, interpret=interpret)
    (P, m), _ = states((x.k, x.v, x.w), rows, (x.P, x.m), to_end=True)
    last = [a if a is None else _first_of_group(a, H) for a in (ct.P, ct.m)]
    (L, mu), (dP, dm) = states((x.q, ct.o, ct.z), rows, last, to_end=False)
    row = _array(x.q, B, T, H)
    dw, d_log_decay = None if x.w is None else row, None if rows is None else row

    def of_tokens(a):  # those that query heads share are added in float32
        shared = a.shape[2] < H
        return _array(x.q, B, T, H, a.shape[-1], dtype=F32 if shared else a.dtype)

    d = Operands._make((*map(of_tokens, x[:3]), dw, d_log_decay, None, None))
    d = _call(
        partial(_backward_kernel, power=power, strict=strict, sizes=sizes),
        (x._replace(P=P, m=m), ct._replace(P=L, m=mu), rows),
        (_OPERANDS._replace(**_CHUNK_STATES), _RESULTS._replace(**_CHUNK_STATES), _DECAY),
        d,
        _OPERANDS,
        grid=(1, pl.cdiv(T, sizes.C), H, B),
        block=E,
        flops=5 * _flops(x, sizes) // 2,
        exps=_exps(x, rows, sizes),
        interpret=interpret,
    )
    return d._replace(P=dP, m=dm)


def _backward_kernel(x, ct, rows, d, *, power, strict, sizes: Sizes):
    """All cotangents of one chunk of one query head: `_tile.cotangents` block by block."""
    i, C, dot = pl.program_id(1), sizes.C, sizes.dot
    t = _decay(rows, i, C, power, strict)

    def tokens(ref, at):
        return _tokens(ref, i, C, at)

    if x.w is not None:  # the row mass is one more block of E
        w, dz = (_as_column(_tokens(a, i, C)) for a in (x.w, ct.z))

    over_D = partial(_over, x.q.shape[1], sizes.d)
    over_E = partial(_over, x.v.shape[1], sizes.e)
    A = over_D(lambda at: dot.nt(tokens(x.q, at), tokens(x.k, at)), C, C) * t.D
    X = over_E(lambda at: dot.nt(tokens(ct.o, at), tokens(x.v, at)), C, C)
    if x.w is not None:
        X += dot.nt(dz, w)
    H = X * t.D
    if rows is not None:
        s, u = _tile.token_indices(C, C)
        before = s < u
        from_before = dot.nn(A * X, before.astype(F32))
        crossing = jnp.sum(jnp.where(before, 0.0, from_before), 0)

    def of_queries(at):
        start = over_E(lambda e: dot.nt(tokens(ct.o, e), x.P[at, e]), C, sizes.d)
        if x.w is not None:
            start += dot.nt(dz, _as_column(x.m[at]))
        start *= t.b
        _store_tokens(d.q, i, C, dot.nn(H, tokens(x.k, at)) + start, at)
        return jnp.sum(tokens(x.q, at) * start, 1, keepdims=True)

    def of_keys(at):
        end = over_E(lambda e: dot.nt(tokens(x.v, e), ct.P[at, e]), C, sizes.d)
        if x.w is not None:
            end += dot.nt(w, _as_column(ct.m[at]))
        end *= t.e
        _store_tokens(d.k, i, C, dot.tn(H, tokens(x.q, at)) + end, at)
        return jnp.sum(tokens(x.k, at) * end, 1, keepdims=True)

    def of_values(j, _):
        at = pl.ds(j * sizes.e, sizes.e)
        end = over_D(lambda d: dot.nn(tokens(x.k, d), ct.P[d, at]), C, sizes.e)
        _store_tokens(d.v, i, C, dot.tn(A, tokens(ct.o, at)) + t.e * end, at)

    lax.fori_loop(0, x.v.shape[1] // sizes.e, of_values, None)
    if x.w is not None:
        end = over_D(lambda at: dot.nn(tokens(x.k, at), _as_column(ct.m[at])), C, 16)
        _store_tokens(d.w, i, C, _from_column(dot.tn(A, dz) + t.e * end))
    entering, leaving = over_D(of_queries, C, 1), over_D(of_keys, C, 1)
    if rows is not None:
        tile = (sizes.d, sizes.e)
        through = over_D(lambda at: over_E(lambda e: x.P[at, e] * ct.P[at, e], *tile), *tile)
        through = jnp.sum(through)
        if x.w is not None:
            through += jnp.sum(x.m[...] * ct.m[...])
        crossing += jnp.sum(jnp.where(before, leaving, entering), 0) + t.rho * through
        _store_tokens(d.log_decay, i, C, crossing)


def _chunk_states(x, rows, first, power, *, to_end: bool, sizes: Sizes, interpret: bool):
    """Returns the state before each chunk, and that after all, for matrices [D, E] and masses [D].

    P' = rho P + (c . X)^T Y and m' = rho m + (c . X)^T w of x = (X, Y, w). `to_end`: c is the decay
    from each token to its chunk's end; else that from its start, and the last chunk is the first.
    """
    (B, T, _, D), E, N = x[0].shape, x[1].shape[-1], first[0].shape[1]
    n = pl.cdiv(T, sizes.C)
    mass = None if x[2] is None else _array(x[0], B, N, n, D)
    total = _call(
        partial(_summary_kernel, power=power, to_end=to_end, sizes=sizes),
        (*x, rows),
        ("bthd", "bthe", "bth", _DECAY),
        [_array(x[0], B, N, n, D, E), mass],
        ["bhide", "bhid"],
        grid=(E // sizes.e, n, N, B),
        block=sizes.e,
        flops=2 * B * N * T * D * E,
        interpret=interpret,
    )
    rho = None if rows is None else _whole_decay(rows, power)
    sweep = partial(_sweep, rho=rho, reverse=not to_end, interpret=interpret)
    swept = [(None, None) if a is None else sweep(a, s) for a, s in zip(total, first, strict=True)]
    return tuple(zip(*swept, strict=True))


def _summary_kernel(x, y, w, rows, out, *, power, to_end, sizes: Sizes):
    """(c . X)^T Y of one chunk of one state and one block of E."""
    i, C, (total, mass) = pl.program_id(1), sizes.C, out
    t = _decay(rows, i, C, power)
    y = _tokens(y, i, C)
    for start in range(0, x.shape[1], sizes.d):
        at = pl.ds(start, sizes.d)
        x_d = _tokens(x, i, C, at) * (t.e if to_end else t.b)
        total[at] = sizes.dot.tn(x_d, y)
        if mass is not None:
            mass_d = jnp.sum(x_d * _tokens(w, i, C)[:, None], 0)

            @pl.when(pl.program_id(0) == 0)
            def _(at=at, mass_d=mass_d):
                mass[at] = mass_d


def _sweep(total, first, *, rho, reverse, interpret):
    """Returns [B, N, n, ...] and [B, N, ...], the states before each chunk and after all."""
    shape, size = total.shape, math.prod(first.shape[2:])
    B, N, n = shape[:3]
    inputs = (total.reshape(B, N, n, size), rho, first.reshape(B, N, size))
    block = min(size, 256)
    starts, last = _call(
        partial(_sweep_kernel, reverse=reverse),
        inputs,
        ("bhte", "bht", "bhe"),
        [_array(total, *inputs[0].shape), _array(total, *inputs[2].shape)],
        ["bhte", "bhe"],
        grid=(size // block, 1, N, B),
        warps=1,
        block=block,
        flops=2 * total.size,
        interpret=interpret,
        aliases={0: 0},
    )
    return starts.reshape(shape), last.reshape(first.shape)


def _sweep_kernel(total, rho, first, out, *, reverse):
    """One block of one state, chunk after chunk: from state to rho state + total, in place."""
    (starts, last), n = out, total.shape[0]
    together = math.gcd(n, 4)  # loads under way at once

    def chunks(i, state):
        indices = [i * together + j for j in range(together)]
        indices = [n - 1 - j if reverse else j for j in indices]
        for j, into in [(j, total[j]) for j in indices]:
            starts[j] = state
            state = into + (state if rho is None else rho[j] * state)
        return state

    last[...] = lax.fori_loop(0, n // together, chunks, first[...])


def step(x: Cascade, *, power, precision, interpret: bool = False) -> CascadeResults:
    """Returns the output of one token and the states after it, which take the old ones' place.

    A program updates the states of one kv head, and those of its query heads. Bytes: the states,
    read and written; FLOPs: 4 per element of a state. Exact to float32 whatever `precision` is.
    """
    del precision
    if x.S is None and x.P is None:  # a first level alone
        first = Cascade._make((*x[:5], None, x.F, x.f, None, None))
        y = _step(first, (power, 0), interpret)
        return CascadeResults._make((y.o, y.z, None, None, None, y.P, y.m))
    return _step(x, (1, power), interpret)


def _step(x: Cascade, powers, interpret) -> CascadeResults:
    (B, _, H, D), E = x.q.shape, x.v.shape[-1]
    N = next(a.shape[1] for a in (x.S, x.P) if a is not None)
    G = H // N
    x = _widened(x, _CASCADE)

    def split(a):  # into the heads of each state of the first level
        return None if a is None else a.reshape(B, N, G, *a.shape[2:])

    def column(a):  # a mass is a state of width 1
        return None if a is None else a[..., None]

    q = x.q[:, 0].astype(F32).reshape(B, N, G, -1)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, _width(G) - G), (0, 0)))
    k, v, w, log_decay = (None if a is None else a[:, 0].astype(F32) for a in x[1:5])
    states = (x.S, x.P, column(x.m), split(x.F), split(column(x.f)))
    x = Cascade._make((q, k, v, column(w), log_decay, *states))
    outputs = (None if a is None else _array(q, *q.shape[:3], a.shape[-1]) for a in (x.v, x.w))
    new_states = (None if a is None else _array(a, *a.shape) for a in states)
    y = CascadeResults._make((*outputs, *new_states))
    given, returned = ([f for f, a in t._asdict().items() if a is not None] for t in (x, y))
    axes = ("bhdd", "bhde", "bhd.", "bhgde", "bhgd.")
    dot = _float32_dots(lax.Precision.HIGHEST, interpret)
    y = _call(
        partial(_step_kernel, powers=powers, G=G, dot=dot),
        (x,),
        (Cascade._make(("bhgd", "bhd", "bhe", "bh.", "bh", *axes)),),
        y,
        CascadeResults._make(("bhge", "bhg.", *axes)),
        grid=(1, 1, N, B),
        block=x.v.shape[-1],
        flops=4 * sum(a.size for a in jax.tree.leaves(states)),
        interpret=interpret,
        aliases={given.index(f): returned.index(f) for f in returned if f in given},
    )

    def joined(a, *shape):
        return None if a is None else a[:, :, :G].reshape(B, *shape)

    width, height = y.o.shape[-1], q.shape[-1]
    m = None if y.m is None else y.m[..., 0]
    o, z = joined(y.o, 1, H, width), joined(y.z, 1, H)
    F, f = joined(y.F, H, height, width), joined(y.f, H, height)
    return _narrowed(CascadeResults._make((o, z, y.S, y.P, m, F, f)), _CASCADE_RESULTS, (D, E))


def _step_kernel(x, y, *, powers, G, dot: _tile.Dots):
    """One token of one state of the first level and of its G query heads."""
    (heads, D), E, k = x.q.shape, x.v.shape[0], x.k[...]
    head = lax.broadcasted_iota(jnp.int32, (heads, 1), 0)
    first, second = (1.0 if x.log_decay is None else jnp.exp(p * x.log_decay[...]) for p in powers)

    def of_head(tile, h):
        return jnp.sum(jnp.where(head == h, tile, 0.0), 0)

    def first_level(P, new_P, v, columns, rows, product):
        """Updates columns of a state with v, and returns what q reads there, for all heads."""

        def add(i, total):
            at = pl.ds(i * rows, rows)
            new_P[at, columns] = P_i = first * P[at, columns] + x.k[at][:, None] * v
            return total + product(x.q[:, at], P_i)

        return lax.fori_loop(0, D // rows, add, jnp.zeros((heads, v.shape[0]), F32))

    u = None
    if x.S is not None:
        u = first_level(x.S, y.S, k, pl.ds(0, D), min(D, BLOCK // D), dot.nn)

    def both_levels(old, new, columns, product):
        """Updates columns of P and F with the same of v, and writes the same of the output."""
        (v, P, F), (o, new_P, new_F) = old, new
        v = r = v[columns]
        if P is not None:
            r = first_level(P, new_P, v, columns, min(D, 32), product)
        if F is None:
            o[:, columns] = r
            return

        def second_level(h, _):
            u_h, r_h = k if u is None else of_head(u, h), v if P is None else of_head(r, h)
            new_F[h, :, columns] = F_h = second * F[h, :, columns] + u_h[:, None] * r_h
            o[h, columns] = jnp.sum(x.q[h][:, None] * F_h, 0)

        lax.fori_loop(0, G, second_level, None)

    def block(j, _):
        columns = pl.ds(j * width, width)
        both_levels((x.v, x.P, x.F), (y.o, y.P, y.F), columns, dot.nn)

    width = min(E, BLOCK // D)
    lax.fori_loop(0, E // width, block, None)
    if x.w is not None:
        both_levels((x.w, x.m, x.f), (y.z, y.m, y.f), pl.ds(0, 1), _times_column)


def _times_column(q, m):
    return jnp.sum(q * m[:, 0], 1, keepdims=True)


def _call(
    kernel: partial,
    inputs,
    axes,
    outputs,
    output_axes,
    *,
    grid,
    warps=8,
    stages=1,
    block,
    flops,
    exps=0,
    interpret,
    aliases=(),
):
    """Runs a kernel on a grid (blocks of E, chunks, heads, batch) of what `axes` tell of arrays."""
    arrays = (*inputs, outputs)
    cost = pl.CostEstimate(
        flops=flops,
        transcendentals=exps,
        bytes_accessed=sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(arrays)),
    )

    def body(*refs):
        kernel(*jax.tree.unflatten(jax.tree.structure(arrays), refs))

    def specs(arrays, axes):
        spec = partial(_spec, heads=grid[2], block=block)
        specs = jax.tree.map(spec, arrays, axes, is_leaf=lambda a: a is None)
        return jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, pl.BlockSpec))

    flat = pl.pallas_call(
        body,
        out_shape=jax.tree.leaves(outputs),
        grid=grid,
        in_specs=specs(inputs, axes),
        out_specs=specs(outputs, output_axes),
        input_output_aliases=dict(aliases),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        cost_estimate=cost,
        interpret=interpret,
        name="hla" + kernel.func.__name__.removesuffix("_kernel"),
    )(*jax.tree.leaves(inputs))
    return jax.tree.unflatten(jax.tree.structure(outputs), flat)


def _spec(a, axes: str, *, heads: int, block: int) -> pl.BlockSpec | None:
    """Returns what one program sees of an array: of fewer than `heads` heads, the one it shares."""
    if a is None:
        return None
    sizes = {"b": None, "h": None, "i": None, "e": block}
    share = heads // a.shape[axes.index("h")]

    def index(e, i, h, b):
        at = {"e": e, "i": i, "h": lax.div(h, jnp.int32(share)), "b": b}
        return tuple(at.get(axis, 0) for axis in axes)

    shape = (sizes.get(axis, n) for axis, n in zip(axes, a.shape, strict=True))
    return pl.BlockSpec(tuple(shape), index)


def _load_operands(x, i, C: int):
    """Returns q, k and the values of one chunk: v, and the row weights as one more tile."""
    q, k, v = (_tokens(a, i, C) for a in (x.q, x.k, x.v))
    return q, k, [v] if x.w is None else [v, _as_column(_tokens(x.w, i, C))]


def _tokens(ref, i, C: int, columns=None):
    """Loads chunk i of [T, ...]: zeros behind the last token."""
    at, mask = _chunk_of(ref, i, C, columns)
    return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=0)


def _store_tokens(ref, i, C: int, a, columns=None):
    at, mask = _chunk_of(ref, i, C, columns)
    plgpu.store(at, a.astype(ref.dtype), mask=mask)


def _chunk_of(ref, i, C: int, columns):
    T = ref.shape[0]
    index = (pl.ds(i * C, C), slice(None) if columns is None else columns)[: ref.ndim]
    if T % C == 0:
        return ref.at[index], None
    token = i * C + lax.broadcasted_iota(jnp.int32, (C, 1)[: ref.ndim], 0)
    return ref.at[index], token < T


def _decay_rows(log_decay, sizes: Sizes):
    """Returns prefix sums of log_decay within chunks, hi and lo as in `_tile`: [B, K, n, 2, C].

    A reset is -128 in hi, of which exp is 0: two rows take fewer registers than three.
    """
    if log_decay is None:
        return None
    hi, lo, resets = jnp.moveaxis(_tile.decay_rows(log_decay, sizes.C), 3, 0)
    return jnp.stack([hi - 128 * resets, lo], 3)


def _decay(ref, i, C: int, power: int = 1, strict: bool = False) -> _tile.Decay:
    """Returns the decay terms of chunk i."""
    if ref is None:
        return _tile.decay(None, None, C, C, strict=strict)
    t, s = _tile.token_indices(C, C)
    hi_s, lo_s = ref[i, 0], ref[i, 1]
    hi_t, lo_t = hi_s[:, None], lo_s[:, None]
    hi_c, lo_c = ref[i, 0, C - 1], ref[i, 1, C - 1]
    between = jnp.where(t > s if strict else t >= s, hi_t - hi_s + (lo_t - lo_s), -jnp.inf)
    to_end = hi_c - hi_t + (lo_c - lo_t)
    exponents = (between, hi_t + lo_t, to_end, hi_c + lo_c)
    return _tile.Decay(*(jnp.exp(power * x) for x in exponents))


def _whole_decay(rows, power: int):
    """Returns rho of each chunk, [B, K, n]."""
    return jnp.exp(power * (rows[..., 0, -1] + rows[..., 1, -1]))


def _exps(x, rows, sizes: Sizes) -> int:
    return 0 if rows is None else math.prod(x.q.shape[:3]) * sizes.C


def _flops(x, sizes: Sizes) -> int:
    """Returns those of one level, forward."""
    (B, T, H, D), E = x.q.shape, x.v.shape[-1]
    return 2 * B * T * H * (sizes.C * (D + E) + 2 * D * E)


def _outputs(x, dtype):
    B, T, H, _ = x.q.shape
    z = None if x.w is None else _array(x.q, B, T, H)
    return _array(x.q, B, T, H, x.v.shape[-1], dtype=dtype), z


def _array(like, *shape, dtype=F32):
    """Returns the type of an array, varying as `like` does under `shard_map`."""
    return jax.eval_shape(lambda a: jnp.zeros_like(a, dtype, shape), like)


def _first_of_group(a, H: int):
    """Returns [B, H, ...] of states [B, N, ...]: each at the first head that shares it, else 0."""
    a = a[:, :, None]
    a = jnp.pad(a, [(0, H // a.shape[1] - 1 if axis == 2 else 0) for axis in range(a.ndim)])
    return a.reshape(a.shape[0], H, *a.shape[3:])


def _sum_heads(d, x, axes: str):
    """Returns the cotangent of an operand, summed over the query heads that share it."""
    if x is None:
        return None
    axis = axes.index("h")
    n = x.shape[axis]
    return jnp.sum(d.reshape(*d.shape[:axis], n, -1, *d.shape[axis + 1 :]), axis + 1)


def _width(n: int) -> int:
    """Returns the size of a tile's side: a power of two, and at least 16 for its products."""
    return max(16, pl.next_power_of_2(n))


def _widened(x, axes):
    """Pads D and E with zeros."""

    def widen(a, axes):
        pads = [(0, _width(n) - n if c in "de" else 0) for c, n in zip(axes, a.shape, strict=True)]
        return jnp.pad(a, pads) if any(p for _, p in pads) else a

    return type(x)(*(a if a is None else widen(a, s) for a, s in zip(x, axes, strict=True)))


def _narrowed(x, axes, state_shape):
    """Cuts D and E off again, to those of a state."""
    D, E = state_shape[-2:]

    def narrow(a, axes):
        return a[tuple(slice({"d": D, "e": E}.get(c)) for c in axes)]

    return type(x)(*(a if a is None else narrow(a, s) for a, s in zip(x, axes, strict=True)))
