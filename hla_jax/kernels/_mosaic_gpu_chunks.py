"""The Mosaic GPU kernels that work on all chunks at once, and the sweep that gives them states.

Costs are per token and query head, for bfloat16 operands and chunks of C = 64. Programs compute 64
columns each, side by side: what they share of a head's tokens they find in the L2 cache.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hla_jax.kernels._mosaic_gpu_tiles import (
    BF16,
    F32,
    FROM_START,
    TO_END,
    C,
    Inputs,
    W,
    across,
    at,
    columns,
    copy_in,
    copy_out,
    decayed,
    divmod_,
    dots,
    down,
    floats,
    given,
    head_of,
    indices,
    kernel,
    matrix,
    next_mass,
    next_state,
    outputs,
    rows,
    scaled,
    tokens_of,
    vectors,
)


class Pairs(NamedTuple):
    """What `query_key_cotangents` reads: tokens, states and their cotangents, as in `Inputs`."""

    q: Any
    k: Any
    v: Any
    do: Any
    w: Any
    dz: Any
    rows: Any
    P: Any
    L: Any
    m: Any
    mu: Any


def sweep(x: Inputs, *, segments: int, reverse: bool = False, keep: bool = True):
    """Returns the states (P, m) before each chunk (unless not to `keep`) and after each segment.

    P' = rho P + (e . a)^T x and m' = rho m + (e . a)^T w; in reverse from the last chunk to the
    first, and with b in place of e. A program carries a 64 x 64 block of a state through a segment
    of the chunks, from what x.P [B, N, segments, D, E] and x.m say. Where g heads of tokens add to
    one state, each is to read a g-th of it: that is what is kept.

    Bytes: 2 (D + E) + 2 D E / C.  FLOPs: 2 D E.
    """
    B, T, _, D = x.a.shape
    N, E, n = x.P.shape[1], x.x.shape[-1], pl.cdiv(T, C)
    heads = max(x.a.shape[2], x.x.shape[2])
    g, length = heads // N, pl.cdiv(n, segments)
    streams = (x.a, x.x, x.w, x.rows)

    def body(x, P_kept, m_kept, P_end, m_end, tiles, P_tile, m_row, block, arrived, started):
        state, segment, part = (lax.axis_index(name) for name in ("state", "segment", "part"))
        row, state = divmod_(state, N)
        own = [pl.ds(i * W, W) for i in divmod_(part, E // W)]
        first = segment * length
        steps = g * (jnp.minimum(first + length, n) - first)

        def chunk_of(step):
            chunk = first + lax.div(step, jnp.int32(g))
            return n - 1 - chunk if reverse else chunk

        def load(step):
            chunk, slot = chunk_of(step), lax.rem(step, lax.full_like(step, 2))
            head = state * g + lax.rem(step, jnp.int32(g))
            of = partial(tokens_of, row=row, head=head, heads=heads, tokens=pl.ds(chunk * C, C))
            per_chunk = (head_of(a, row, head, heads, chunk) for a in (x.w, x.rows))
            sources = [of(x.a, columns=own[0]), of(x.x, columns=own[1]), *per_chunk]
            copy_in(sources, at(tiles, slot), arrived.at[slot])

        def put(state, P_tile, P_out, m_out):
            P, m = state
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            P_tile[...] = P.astype(P_tile.dtype)
            if m is not None:
                m_row[...] = m
            copy_out(P_tile, P_out.at[*own])
            if m is not None:
                of_m = lax.rem(part, jnp.int32(E // W)) == 0
                pl.when(of_m)(lambda: plgpu.copy_smem_to_gmem(m_row, m_out.at[own[0]]))

        def advance(step, carry):
            P, m = carry
            slot, begins = lax.rem(step, lax.full_like(step, 2)), lax.rem(step, jnp.int32(g)) == 0
            if keep:

                @pl.when(begins)
                def _():
                    share = [a if a is None else a / g for a in carry]
                    put(share, P_tile, *at((P_kept, m_kept), row, state, chunk_of(step)))

            plgpu.commit_smem()  # ends the reads of the slot that is loaded next
            pl.when(step + 1 < steps)(lambda: load(step + 1))
            plgpu.barrier_wait(arrived.at[slot])
            a, values, w, decay = at(tiles, slot)
            scale = None if decay is None else rows(decay.at[FROM_START if reverse else TO_END])
            rho = None if decay is None else jnp.where(begins, decay[FROM_START, C - 1], 1.0)
            m = next_mass(m, a, w, scale, rho)
            return next_state(P, a, scaled(values, scale, into=values), rho), m

        load(jnp.int32(0))
        P, m = at((x.P, x.m), row, state, segment)
        copy_in([P.at[*own], *at([m], own[0])], [block, m_row], started)
        plgpu.barrier_wait(started)
        start = floats(block), None if m_row is None else columns(m_row)
        end = lax.fori_loop(0, steps, advance, start)
        put(end, block, *at((P_end, m_end), row, state, segment))
        plgpu.wait_smem_to_gmem(0)

    kept, ends = (B, N, n, D, E), (B, N, segments, D, E)
    P, m, P_end, m_end = kernel(
        body,
        "hla_sweep",
        x,
        flops=2 * B * heads * n * C * D * E,
        out_type=(
            jax.ShapeDtypeStruct(kept, BF16) if keep else None,
            given(x.m, jax.ShapeDtypeStruct(kept[:-1], F32)) if keep else None,
            jax.ShapeDtypeStruct(ends, F32),
            given(x.m, jax.ShapeDtypeStruct(ends[:-1], F32)),
        ),
        scratch_types=(
            [
                matrix(2, C, W),
                matrix(2, C, W),
                given(x.w, vectors(2, C)),
                given(x.rows, vectors(2, 5, C)),
            ],
            matrix(W, W) if keep else None,
            given(x.m, vectors(W)),
            matrix(W, W, dtype=F32),
            plgpu.Barrier(num_arrivals=sum(a is not None for a in streams), num_barriers=2),
            plgpu.Barrier(num_arrivals=1 if x.m is None else 2),
        ),
        grid=(B * N, segments, (D // W) * (E // W)),
        grid_names=("state", "segment", "part"),
    )
    return (P, m), (P_end, m_end)


def side_by_side(x: Inputs, *, strict: bool, reverse: bool = False, out_dtype=F32):
    """Returns o [B, T, H, E] in `out_dtype` and z [B, H, n, C], each chunk from its state.

    o = A x + b . (a P) and z = A w + b . (a m) with A = (a b^T) . D and the state before the chunk;
    in reverse with D^T, e and the state after it. Each program computes A again: what bounds it is
    memory.

    Bytes: 4 (D + E) + 2 D E / C (bfloat16).  FLOPs: 2 (C D E / 64 + C E + D E).
    """
    B, T, _, D = x.a.shape
    heads = max(x.a.shape[2], x.b.shape[2])
    E, n = x.x.shape[-1], pl.cdiv(T, C)

    def body(x, o, z, tiles, A_tile, o_tile, z_row, arrived):
        head, chunk, part = (lax.axis_index(name) for name in ("head", "chunk", "part"))
        row, head = divmod_(head, heads)
        tokens, own = pl.ds(chunk * C, C), pl.ds(part * W, W)
        of = partial(tokens_of, row=row, head=head, heads=heads, tokens=tokens)
        w, decay, P, m = (head_of(a, row, head, heads, chunk) for a in x[3:])
        sources = [of(x.a), of(x.b), of(x.x, columns=own), w, decay, P.at[:, own], m]
        copy_in(sources, tiles, arrived)
        plgpu.barrier_wait(arrived)
        mass = None if z is None else (tiles.w, tiles.m, z_row)
        streams = [(tiles.x, tiles.P, o_tile)]
        outputs(tiles.a, tiles.b, tiles.rows, streams, mass, A_tile, strict=strict, reverse=reverse)
        copy_out(o_tile, o.at[row, tokens, head, own])
        if z is not None:
            pl.when(part == 0)(lambda: plgpu.copy_smem_to_gmem(z_row, z.at[row, head, chunk]))
        plgpu.wait_smem_to_gmem(0)

    return kernel(
        body,
        "hla_outputs",
        x,
        flops=2 * B * heads * n * C * (E // W) * (C * D + C * W + D * W),
        exps=B * heads * n * C * C * (E // W),
        out_type=(
            jax.ShapeDtypeStruct((B, T, heads, E), out_dtype),
            given(x.m, jax.ShapeDtypeStruct((B, heads, n, C), F32)),
        ),
        scratch_types=(
            Inputs(
                matrix(C, D),
                matrix(C, D),
                matrix(C, W),
                given(x.w, vectors(C)),
                given(x.rows, vectors(5, C)),
                matrix(D, W),
                given(x.m, vectors(D)),
            ),
            matrix(C, C),
            matrix(C, W, dtype=out_dtype),
            given(x.m, vectors(C)),
            plgpu.Barrier(num_arrivals=sum(a is not None for a in x)),
        ),
        grid=(B * heads, n, E // W),
        grid_names=("head", "chunk", "part"),
    )


def query_key_cotangents(x: Pairs, *, strict: bool, out_dtype=F32):
    """Returns dq and dk [B, T, H, D] in `out_dtype`, and d log_decay [B, H, n, C] if it decays.

    With X = dO V^T + dz w^T and H = X . D, for 64 columns of q and k:
    dq = H k + b . (dO P^T + dz m^T) and dk = H^T q + e . (v L^T + w mu^T). The decay before token u
    multiplies all paths from tokens s < u to tokens t >= u: those inside the chunk, sums of
    M = (q k^T) . H; those that enter it, q . dq's second part; those that leave it, k . dk's second
    part; and those through it, rho <P, L>. All of them add up over columns as well.

    Bytes: 4 (D + E) + 4 D E / C + 4 D (bfloat16).  FLOPs: 2 (C E D / 64 + 5 C D + 2 D E).
    """
    B, T, H, D = x.q.shape
    E, n = x.v.shape[-1], pl.cdiv(T, C)

    def body(x, dq, dk, flow, tiles, H_tile, out_tile, paths, arrived):
        head, chunk, part = (lax.axis_index(name) for name in ("head", "chunk", "part"))
        row, head = divmod_(head, H)
        tokens, own = pl.ds(chunk * C, C), pl.ds(part * W, W)
        of = partial(tokens_of, row=row, head=head, heads=H, tokens=tokens)
        per_chunk = [head_of(a, row, head, H, chunk) for a in x[4:]]
        states = at(per_chunk[3:], own)
        whole = [of(x.v), of(x.do)]
        sources = [of(x.q, columns=own), of(x.k, columns=own), *whole, *per_chunk[:3], *states]
        copy_in(sources, tiles, arrived)
        plgpu.barrier_wait(arrived)

        [X] = dots([(tiles.do, tiles.v.T)])
        if tiles.w is not None:
            X += down(rows(tiles.dz)) * across(columns(tiles.w))
        H_tile[...] = decayed(X, tiles.rows, strict=strict).astype(BF16)
        plgpu.commit_smem()

        def cotangent(inside, state, w, m, scale: int, out):
            """Writes a cotangent of tokens, and returns its second part."""
            inside, from_state = dots([inside], [state])
            if w is not None:
                from_state += down(rows(w)) * across(columns(m))
            if tiles.rows is not None:
                from_state *= down(rows(tiles.rows.at[scale]))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_tile[...] = (inside + from_state).astype(out_tile.dtype)
            copy_out(out_tile, out.at[row, tokens, head, own])
            return from_state

        q, k, v, do, w, dz, decay, P, L, m, mu = tiles
        second = cotangent((H_tile, k), (do, P.T), dz, m, FROM_START, dq)
        if decay is not None:
            paths.at[0][...] = jnp.sum(floats(q) * second, 1)
        second = cotangent((H_tile.T, q), (v, L.T), w, mu, TO_END, dk)
        if decay is not None:
            paths.at[1][...] = jnp.sum(floats(k) * second, 1)
            through = jnp.zeros(W, F32) if m is None else rows(m) * rows(mu)
            for i in range(E // W):
                some = pl.ds(i * W, W)
                through += jnp.sum(floats(P.at[:, some]) * floats(L.at[:, some]), 1)
            paths.at[2][...] = through * decay[FROM_START, C - 1]

            # Sums over t >= u as a product with ones, M in two parts: as exact as float32 has it.
            # The tiles of q, k and H have been read.
            [M] = dots([(q, k.T)])
            M *= floats(H_tile)
            high = M.astype(BF16)
            u, t = indices()
            ones, high_tile, low_tile = q, H_tile, k
            ones[...] = jnp.where(t >= u, 1.0, 0.0).astype(BF16)
            high_tile[...] = high
            low_tile[...] = (M - high.astype(F32)).astype(BF16)
            plgpu.commit_smem()
            [M] = dots([(ones, high_tile), (ones, low_tile)])
            entering, leaving = (across(columns(paths.at[i])) for i in (0, 1))
            paths.at[0][...] = jnp.sum(jnp.where(t >= u, entering, M + leaving), 1)
            copy_out(paths, flow.at[row, head, part, chunk])
        plgpu.wait_smem_to_gmem(0)

    dq, dk, flow = kernel(
        body,
        "hla_query_key_cotangents",
        x,
        flops=2 * B * H * n * C * (D // W) * (C * E + 5 * C * W + 2 * E * W),
        exps=B * H * n * C * C * (D // W),
        out_type=(
            jax.ShapeDtypeStruct((B, T, H, D), out_dtype),
            jax.ShapeDtypeStruct((B, T, H, D), out_dtype),
            given(x.rows, jax.ShapeDtypeStruct((B, H, D // W, n, 3, C), F32)),
        ),
        scratch_types=(
            Pairs(
                matrix(C, W),
                matrix(C, W),
                matrix(C, E),
                matrix(C, E),
                given(x.w, vectors(C)),
                given(x.w, vectors(C)),
                given(x.rows, vectors(5, C)),
                matrix(W, E),
                matrix(W, E),
                given(x.w, vectors(W)),
                given(x.w, vectors(W)),
            ),
            matrix(C, C),
            matrix(C, W, dtype=out_dtype),
            given(x.rows, vectors(3, C)),
            plgpu.Barrier(num_arrivals=sum(a is not None for a in x)),
        ),
        grid=(B * H, n, D // W),
        grid_names=("head", "chunk", "part"),
    )
    if flow is None:
        return dq, dk, None
    flow = jnp.sum(flow, 2)
    return dq, dk, flow[..., 0, :] + jnp.sum(flow[..., 2, :], -1, keepdims=True)
