"""The Mosaic GPU kernel that walks through the chunks, with one or two levels of states.

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

from hla_jax.kernels._layout import States
from hla_jax.kernels._mosaic_gpu_tiles import (
    BF16,
    F32,
    FROM_START,
    TO_END,
    C,
    W,
    at,
    columns,
    copy_in,
    copy_out,
    divmod_,
    floats,
    given,
    head_of,
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


class Levels(NamedTuple):
    """What `in_sequence` reads: as in `_layout.Cascade`, with each level's rows of decay."""

    q: Any
    k: Any
    v: Any
    w: Any
    first: Any
    second: Any
    S: Any
    P: Any
    m: Any
    F: Any
    f: Any


def in_sequence(x: Levels, *, strict: bool, out_dtype=F32):
    """Returns o [B, T, H, E] in `out_dtype`, z [B, H, n, C] and the final states S, P, m, F and f.

    One program walks through all chunks with its part of every state on the chip, D x D of S and
    D x 64 of P and F, while the next chunk's tokens are on their way. What the first level gives
    never leaves the chip either. Query heads that share a state each compute it. D is 64 for two
    levels.

    Bytes: 2 (2 D + E) + 4 E.  FLOPs: 2 (C D E / 64 + C E + 2 D E) for the second level; the first
    adds E / 64 times 2 (C D + 2 D D) for S and 2 (C E + 2 D E) for P, and 2 C D E / 64.
    """
    B, T, H, D = x.q.shape
    K, N, E, n = x.k.shape[2], x.F.shape[1], x.v.shape[-1], pl.cdiv(T, C)
    blocks = [pl.ds(i * W, W) for i in range(D // W)]
    has_S, has_P = x.S is not None, x.P is not None
    # Registers hold two states, and S and F not with the sums for masses of more than one program:
    # there the first level's lie in shared memory.
    parked = has_S and (has_P or (x.f is not None and E > W))

    def body(x, o, z, ends, tiles, parks, level, A_tile, o_tile, block, z_row, arrived, started):
        block = o_tile if block is None else block  # for states, in float32
        S_park, P_park = parks
        u_tile, r_tile, r_row = level
        head, part = lax.axis_index("head"), lax.axis_index("part")
        row, head = divmod_(head, H)
        own = pl.ds(part * W, W)

        def to_end(decay):
            """Returns e of the chunk, and rho."""
            return (
                (None, None)
                if decay is None
                else (rows(decay.at[TO_END]), decay[FROM_START, C - 1])
            )

        def get(state, park):
            """Returns a state from registers, or from where it lies."""
            return state if park is None else floats(park)

        def put(state, park):
            """Returns a state to be kept in registers, or leaves it in shared memory."""
            if park is None:
                return state
            park[...] = state
            return None

        def load(chunk):
            slot = lax.rem(chunk, lax.full_like(chunk, 2))
            of = partial(tokens_of, row=row, head=head, heads=H, tokens=pl.ds(chunk * C, C))
            per_chunk = (head_of(a, row, head, H, chunk) for a in x[3:6])
            sources = [of(x.q), of(x.k), of(x.v, columns=own), *per_chunk]
            copy_in(sources, at(tiles[:6], slot), arrived.at[slot])

        def step(chunk, carry):
            S, P, F = carry
            slot, tokens = lax.rem(chunk, lax.full_like(chunk, 2)), pl.ds(chunk * C, C)
            if has_S:
                tiles.S[...] = get(S, S_park).astype(BF16)
            if has_P:
                tiles.P[...] = get(P, P_park).astype(BF16)
            for some, state in zip(blocks, F, strict=True):
                tiles.F.at[some][...] = state.astype(BF16)
            plgpu.commit_smem()  # also ends the reads of the slot that is loaded next
            pl.when(chunk + 1 < n)(lambda: load(chunk + 1))
            plgpu.barrier_wait(arrived.at[slot])
            q, k, v, w, first, second = at(tiles[:6], slot)

            u, r, r_mass = k, v, w
            if has_S or has_P:
                streams, mass = [], None
                if has_S:
                    u = u_tile
                    streams.append((k, tiles.S, u))
                if has_P:
                    r, r_mass = r_tile, r_row
                    streams.append((v, tiles.P, r))
                    mass = None if w is None else (w, tiles.m, r_mass)
                outputs(q, k, first, streams, mass, A_tile, strict=False)
                plgpu.commit_smem()
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            mass = None if w is None else (r_mass, tiles.f, z_row)
            outputs(q, u, second, [(r, tiles.F, o_tile)], mass, A_tile, strict=strict)
            copy_out(o_tile, o.at[row, tokens, head, own])
            if w is not None:
                pl.when(part == 0)(lambda: plgpu.copy_smem_to_gmem(z_row, z.at[row, head, chunk]))

            e, rho = to_end(second)
            if w is not None:
                for some in blocks:
                    f = columns(tiles.f.at[some])
                    tiles.f.at[some][...] = next_mass(f, u.at[:, some], r_mass, e, rho)
            r = scaled(r, e, into=r)
            F = [
                next_state(state, u.at[:, some], r, rho)
                for some, state in zip(blocks, F, strict=True)
            ]
            e, rho = to_end(first)
            if has_S:
                k_scaled = scaled(k, e, into=A_tile)
                S = put(next_state(get(S, S_park), k, k_scaled, rho), S_park)
            if has_P:
                if w is not None:
                    tiles.m[...] = next_mass(columns(tiles.m), k, w, e, rho)
                P = put(next_state(get(P, P_park), k, scaled(v, e, into=v), rho), P_park)
            return S, P, F

        def start_of(state, some, columns):
            """Returns a block of an initial state."""
            source = head_of(state, row, head, H, some, columns)
            plgpu.copy_gmem_to_smem(source, block, started)
            plgpu.barrier_wait(started)
            start = floats(block)
            plgpu.commit_smem()
            return start

        load(jnp.int32(0))
        S = put(start_of(x.S, slice(None), slice(None)), S_park) if has_S else None
        P = put(start_of(x.P, slice(None), own), P_park) if has_P else None
        F = [start_of(x.F, some, own) for some in blocks]
        for mass, tile in ((x.m, tiles.m), (x.f, tiles.f)):
            if mass is not None:
                plgpu.copy_gmem_to_smem(head_of(mass, row, head, H), tile, started)
                plgpu.barrier_wait(started)
        S, P, F = lax.fori_loop(0, n, step, (S, P, F))

        def end_of(state, end, some, columns):
            """Writes a block of a final state."""
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            block[...] = state
            copy_out(block, head_of(end, row, head, H, some, columns))

        of_state, of_k = (lax.rem(head, jnp.int32(H // heads)) == 0 for heads in (N, K))

        @pl.when(of_state)
        def _():
            for some, state in zip(blocks, F, strict=True):
                end_of(state, ends.F, some, own)

        @pl.when(of_k)
        def _():
            if has_P:
                end_of(get(P, P_park), ends.P, slice(None), own)

        @pl.when(of_k & (part == 0))
        def _():
            if has_S:
                end_of(get(S, S_park), ends.S, slice(None), slice(None))
            if ends.m is not None:
                copy_out(tiles.m, head_of(ends.m, row, head, H))

        @pl.when(of_state & (part == 0))
        def _():
            if ends.f is not None:
                copy_out(tiles.f, head_of(ends.f, row, head, H))

        plgpu.wait_smem_to_gmem(0)

    like = partial(jax.tree.map, lambda a: jax.ShapeDtypeStruct(a.shape, F32))
    per_part = C * D + C * W + 2 * D * W
    per_part += (has_S or has_P) * C * D
    per_part += has_S * (C * D + 2 * D * D) + has_P * (C * W + 2 * D * W)
    return kernel(
        body,
        "hla_forward",
        x,
        flops=2 * B * H * n * C * (E // W) * per_part,
        exps=B * H * n * C * C * (E // W),
        out_type=(
            jax.ShapeDtypeStruct((B, T, H, E), out_dtype),
            given(x.f, jax.ShapeDtypeStruct((B, H, n, C), F32)),
            States(*like(x[6:])),
        ),
        scratch_types=(
            Levels(
                matrix(2, C, D),
                matrix(2, C, D),
                matrix(2, C, W),
                given(x.w, vectors(2, C)),
                given(x.first, vectors(2, 5, C)),
                given(x.second, vectors(2, 5, C)),
                given(x.S, matrix(D, D)),
                given(x.P, matrix(D, W)),
                given(x.m, vectors(D)),
                matrix(D, W),
                given(x.f, vectors(D)),
            ),
            [matrix(D, W, dtype=F32) if parked and has else None for has in (has_S, has_P)],
            [given(x.S, matrix(C, D)), given(x.P, matrix(C, W)), given(x.m, vectors(C))],
            matrix(C, C),
            matrix(C, W, dtype=out_dtype),
            None if out_dtype == F32 else matrix(W, W, dtype=F32),
            given(x.f, vectors(C)),
            plgpu.Barrier(num_arrivals=sum(a is not None for a in x[:6]), num_barriers=2),
            plgpu.Barrier(),
        ),
        grid=(B * H, E // W),
        grid_names=("head", "part"),
    )
