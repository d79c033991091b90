"""One chunk at a time, in place: the form for the CPU.

Each chunk of all heads is sliced out of the arrays as they lie, and its results are written back,
so there is no transpose of a whole array and no temporary larger than a chunk: on a CPU the page
faults of big temporaries cost more than the arithmetic, and a chunk stays in the cache.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hla_jax._sharding import vary_like
from hla_jax.kernels import _chunk
from hla_jax.kernels._layout import (
    Operands,
    Results,
    cast,
    per_head,
    per_head_cotangents,
)

# Measured: longer chunks do more work per token (2 c (D + E) FLOPs), shorter ones slower products.
CHUNK_SIZE = 32

# The backward keeps the state before each block of so many chunks, and for one block at a time the
# states inside it: a 16th of what all chunks' states would take, for a second pass over the states.
CHUNKS_PER_BLOCK = 16


def forward(x: Operands, *, chunk_size, power, strict, precision) -> Results:
    """Returns outputs and final state."""
    run = per_head(partial(_chunk.forward, power=power, strict=strict, precision=precision))
    chunk_size = chunk_size or CHUNK_SIZE

    def step(y: Results, start, size) -> Results:
        new = run(_chunk_of(x, start, size)._replace(P=y.P, m=y.m))
        o, z = _write((y.o, y.z), (new.o, new.z), start, x)
        return Results(o, z, new.P, new.m)

    o = _zeros(x, x.q.shape[:-1] + x.v.shape[-1:])
    z = None if x.w is None else _zeros(x, x.q.shape[:-1])
    return _walk(step, Results(o, z, x.P, x.m), 0, x.q.shape[x.token_axis], chunk_size)


def backward(x: Operands, ct: Results, *, chunk_size, power, strict, precision) -> Operands:
    """Returns the cotangents of the operands: forward once for the states, then backward."""
    options: dict[str, Any] = dict(power=power, strict=strict, precision=precision)
    run = per_head(partial(_chunk.forward, **options))
    run_back = per_head_cotangents(partial(_chunk.backward, **options))
    T = x.q.shape[x.token_axis]
    chunk_size = chunk_size or CHUNK_SIZE
    block_size = chunk_size * CHUNKS_PER_BLOCK

    def advance(state, start, size):
        new = run(_chunk_of(x, start, size)._replace(P=state[0], m=state[1]))
        return new.P, new.m

    def states_before(state, start, length, size):
        """Returns the states before each piece of `size` tokens, given the first one."""

        def keep(states, state, index):
            put = partial(lax.dynamic_update_index_in_dim, index=index, axis=0)
            return jax.tree.map(put, states, state)

        def step(carry, at, size):
            state, states = carry
            state = _walk(advance, state, at, size, chunk_size)
            return state, keep(states, state, (at - start) // size + 1)

        pieces = -(-length // size)
        states = jax.tree.map(lambda s: _zeros(x, (pieces, *s.shape)), state)
        states = keep(states, state, 0)
        return _walk(step, (state, states), start, (pieces - 1) * size, size)[1]

    before_blocks = states_before((x.P, x.m), 0, T, block_size)

    def of_block(d: Operands, block, length) -> Operands:
        state = _at(before_blocks, block // block_size)
        before_chunks = states_before(state, block, length, chunk_size)

        def of_chunk(d: Operands, start, size) -> Operands:
            P, m = _at(before_chunks, (start - block) // chunk_size)
            do, dz = _read((ct.o, ct.z), start, size, x)
            new = run_back(_chunk_of(x, start, size)._replace(P=P, m=m), Results(do, dz, d.P, d.m))
            return Operands._make((*_write(d[:5], new[:5], start, x), new.P, new.m))

        return _walk(of_chunk, d, block, length, chunk_size, reverse=True)

    # Each token of the cotangents gets written, so they may begin as anything: as copies of the
    # operands they need no array of zeros beside them.
    d = cast(vary_like(x, x), x.P.dtype)._replace(P=ct.P, m=ct.m)
    return _walk(of_block, d, 0, T, block_size, reverse=True)


def _walk(step, carry, start, length: int, size: int, *, reverse=False):
    """Runs carry = step(carry, start, size) over pieces of `size` tokens, and over the rest."""
    n, rest = divmod(length, size)
    if rest and reverse:
        carry = step(carry, start + n * size, rest)
    if n:
        order = (lambda i: n - 1 - i) if reverse else (lambda i: i)
        carry = lax.fori_loop(0, n, lambda i, y: step(y, start + order(i) * size, size), carry)
    if rest and not reverse:
        carry = step(carry, start + n * size, rest)
    return carry


def _chunk_of(x: Operands, start, size) -> Operands:
    return Operands._make((*_read(x[:5], start, size, x), x.P, x.m))


def _read(tree, start, size, x: Operands):
    """Slices tokens out of arrays, in the dtype of the arithmetic."""

    def read(a):
        return lax.dynamic_slice_in_dim(a, start, size, x.token_axis).astype(x.P.dtype)

    return jax.tree.map(read, tree)


def _write(tree, chunk, start, x: Operands):
    """Writes a chunk's tokens into the arrays."""
    write = partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=x.token_axis)
    return jax.tree.map(write, tree, chunk)


def _at(states, index):
    return jax.tree.map(partial(lax.dynamic_index_in_dim, index=index, keepdims=False), states)


def _zeros(x: Operands, shape):
    return vary_like(jnp.zeros(shape, x.P.dtype), x)
