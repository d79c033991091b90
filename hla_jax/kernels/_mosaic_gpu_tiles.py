"""Tiles in shared memory and numbers in registers: what the Mosaic GPU kernels are written in.

A program is one warpgroup. Matrices in registers have the layout of wgmma's results, vectors that
of its rows (a number for each row) or of its columns.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

F32, BF16 = jnp.float32, jnp.bfloat16
C = 64  # tokens in a chunk: the rows of one wgmma
W = 64  # columns that a program computes: one row of a swizzled tile

# Rows of decay per chunk: prefix sums as `_tile.decay_rows` gives them, and two products.
HI, LO, RESETS, FROM_START, TO_END = range(5)

WGMMA = plgpu.Layout.WGMMA


class Inputs(NamedTuple):
    """What a kernel reads of tokens and states, in device memory or in shared memory.

    Each array has a number of heads of its own. P and m are the states before each of n chunks of C
    tokens (after it, in a reversed pass), or only the first ones, without the axis n.
    """

    a: Any  # [B, T, Ha, D]
    b: Any  # [B, T, Hb, D]
    x: Any  # [B, T, Hx, E]
    w: Any  # [B, Hw, n, C]
    rows: Any  # [B, K, n, 5, C]
    P: Any  # [B, N, n, D, E]
    m: Any  # [B, N, n, D]


def kernel(body: Callable, name: str, inputs, *, flops: int, exps: int = 0, **settings):
    """Runs a kernel on a tuple of arrays. Its cost: each array moves once."""
    if "cost_estimate" in inspect.signature(plgpu.kernel).parameters:
        arrays = jax.tree.leaves((inputs, settings["out_type"]))
        moved = sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)
        settings["cost_estimate"] = pl.CostEstimate(
            flops=flops, bytes_accessed=moved, transcendentals=exps
        )
    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane,  # layouts are all written out
        approx_math=True,  # 1e-6 in exponentials, which bfloat16 operands follow
    )
    return plgpu.kernel(body, kernel_name=name, compiler_params=params, **settings)(inputs)


def matrix(*shape: int, dtype=BF16):
    """Returns a matrix in shared memory, or several, swizzled as wgmma and TMA both want it."""
    width = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def vectors(*shape: int):
    """Returns float32 numbers in shared memory."""
    return plgpu.SMEM(shape, F32)


def given(x, scratch):
    """Returns the scratch memory if there is something to keep there, or None."""
    return None if x is None else scratch


def at(refs, *index):
    """Returns the same part of each array; None of None."""
    return [None if ref is None else ref.at[index] for ref in refs]


def divmod_(index, size: int):
    """Returns quotient and remainder of a number that is not negative."""
    return lax.div(index, jnp.int32(size)), lax.rem(index, jnp.int32(size))


def head_of(a, row, head, heads: int, *chunk):
    """Returns what one of `heads` heads reads of `a` [B, some heads, ...]; None of None."""
    return None if a is None else a.at[row, lax.div(head, jnp.int32(heads // a.shape[1])), *chunk]


def tokens_of(a, row, head, heads: int, tokens, columns=slice(None)):
    """Returns the tokens that one of `heads` heads reads of `a` [B, T, some heads, D]."""
    return a.at[row, tokens, lax.div(head, jnp.int32(heads // a.shape[2])), columns]


def copy_in(sources, tiles, arrived):
    """Starts a TMA copy to each tile; `arrived` counts them."""
    for source, tile in zip(sources, tiles, strict=True):
        if source is not None:
            plgpu.copy_gmem_to_smem(source, tile, arrived)


def copy_out(tile, target):
    """Starts a TMA copy from a tile that was written before."""
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, target)


def rows(ref):
    """Loads a vector with a number for each row of a matrix."""
    return plgpu.layout_cast(ref[...], WGMMA.reduce(1))


def columns(ref):
    """Loads a vector with a number for each column of a matrix."""
    return plgpu.layout_cast(ref[...], WGMMA.reduce(0))


def floats(tile):
    """Loads a matrix."""
    return plgpu.layout_cast(tile[...], WGMMA).astype(F32)


def down(x, shape=(C, W)):
    """Returns a vector with a number for each row as a matrix."""
    return lax.broadcast_in_dim(x, shape, [0])


def across(x, shape=(C, W)):
    """Returns a vector with a number for each column as a matrix."""
    return lax.broadcast_in_dim(x, shape, [1])


def dots(*sums):
    """Returns one float32 matrix per argument, a list of pairs: the sum of the pairs' products."""

    def issue(*accumulators):
        for acc, pairs in zip(accumulators, sums, strict=True):
            for a, b in pairs:
                plgpu.wgmma(acc, a, b)
        return [acc[...] for acc in accumulators]

    shapes = [(pairs[0][0].shape[0], pairs[0][1].shape[1]) for pairs in sums]
    return pl.run_scoped(issue, *(plgpu.ACC(shape, F32) for shape in shapes))


def indices():
    """Returns the row and the column of each entry of a C x C matrix."""
    layouts = WGMMA.reduce(1), WGMMA.reduce(0)
    i, j = (plgpu.broadcasted_iota(jnp.int32, (C,), 0, layout=layout) for layout in layouts)
    # Without the barrier what is compared with them is hoisted out of loops, into 32 registers.
    i, j = lax.optimization_barrier((i, j))
    return down(i), across(j)


def decayed(A, decay, *, strict: bool, reverse: bool = False):
    """Returns A * D, or A * D^T in reverse; `decay` has the chunk's five rows, or is None."""
    i, j = indices()
    t, s = (j, i) if reverse else (i, j)
    seen = t > s if strict else t >= s
    if decay is None:
        return jnp.where(seen, A, 0.0)

    def since(row: int):
        of_i, of_j = down(rows(decay.at[row])), across(columns(decay.at[row]))
        return of_j - of_i if reverse else of_i - of_j

    seen &= since(RESETS) == 0
    return jnp.where(seen, A * jnp.exp(jnp.where(seen, since(HI) + since(LO), 0.0)), 0.0)


def outputs(a, b, decay, streams, mass, A_tile, *, strict: bool, reverse: bool = False):
    """For each (x, P, out) leaves A x + b . (a P) in `out`, with A = (a b^T) . D.

    `mass`, if not None, is (w, m, z) and leaves A w + b . (a m) in `z`. In reverse with D^T and e.
    """
    [A] = dots([(a, b.T)])
    A = decayed(A, decay, strict=strict, reverse=reverse)
    A_tile[...] = A.astype(BF16)
    plgpu.commit_smem()
    if mass is not None:
        w, m, z_row = mass
        z_row[...] = jnp.sum(A * across(columns(w)), 1)  # takes no registers from products
    scale = None if decay is None else rows(decay.at[TO_END if reverse else FROM_START])
    for x, P, out in streams:
        inside, from_state = dots([(A_tile, x)], [(a, P)])
        if scale is not None:
            from_state *= down(scale)
        out[...] = (inside + from_state).astype(out.dtype)
    if mass is None:
        return
    z = rows(z_row)
    for i in range(a.shape[1] // W):
        some = pl.ds(i * W, W)
        from_mass = jnp.sum(floats(a.at[:, some]) * across(columns(m.at[some])), 1)
        z += from_mass if scale is None else scale * from_mass
    z_row[...] = z


def scaled(tile, scale, into):
    """Returns a tile with each row times its number, in the place of another; None: as it is."""
    if scale is None:
        return tile
    into[...] = (floats(tile) * down(scale)).astype(BF16)
    plgpu.commit_smem()
    return into


def next_state(P, a, x, rho):
    """Returns rho P + a^T x for a block of the state; a rho of None is 1."""
    [new] = dots([(a.T, x)])
    return new + (P if rho is None else rho * P)


def next_mass(m, a, w, scale, rho):
    """Returns rho m + a^T (scale . w); all None of None."""
    if m is None:
        return None
    w = rows(w)
    if scale is not None:
        m, w = rho * m, scale * w
    return m + jnp.sum(floats(a) * down(w), 0)
