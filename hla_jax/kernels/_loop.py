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

from hla_jax.kernels import _chunk
from hla_jax.kernels._layout import Operands, Results, per_head, per_head_cotangents, vary_like


def forward(x: Operands, *, chunk_size, power, strict, precision) -> Results:
    """Returns outputs and final state."""
    run = per_head(partial(_chunk.forward, power=power, strict=strict, precision=precision))

    def step(y: Results, i, size) -> Results:
        start = i * chunk_size
        new = run(_chunk_of(x, start, size)._replace(P=y.P, m=y.m))
        o, z = _write((y.o, y.z), (new.o, new.z), start, x)
        return Results(o, z, new.P, new.m)

    o = _zeros(x, x.q.shape[:-1] + x.v.shape[-1:])
    z = None if x.w is None else _zeros(x, x.q.shape[:-1])
    return _for_each_chunk(step, Results(o, z, x.P, x.m), x.q.shape[x.token_axis], chunk_size)


def backward(x: Operands, ct: Results, *, chunk_size, power, strict, precision) -> Operands:
    """Returns the cotangents: once forward for the states, once backward for all the rest.

    The states at the chunks' starts, [T / c, *B, N, D, E], are all that is kept between the two.
    """
    options: dict[str, Any] = dict(power=power, strict=strict, precision=precision)
    run = per_head(partial(_chunk.forward, **options))
    run_back = per_head_cotangents(partial(_chunk.backward, **options))
    T = x.q.shape[x.token_axis]

    def record(carry, i, size):
        state, states = carry
        new = run(_chunk_of(x, i * chunk_size, size)._replace(P=state[0], m=state[1]))
        keep = partial(lax.dynamic_update_index_in_dim, index=i, axis=0)
        return (new.P, new.m), jax.tree.map(keep, states, state)

    chunks = -(-T // chunk_size)
    states = jax.tree.map(lambda s: _zeros(x, (chunks, *s.shape)), (x.P, x.m))
    _, states = _for_each_chunk(record, ((x.P, x.m), states), T, chunk_size)

    def step(d: Operands, i, size) -> Operands:
        start = i * chunk_size
        P, m = jax.tree.map(partial(lax.dynamic_index_in_dim, index=i, keepdims=False), states)
        do, dz = _read((ct.o, ct.z), start, size, x)
        new = run_back(_chunk_of(x, start, size)._replace(P=P, m=m), Results(do, dz, d.P, d.m))
        return Operands._make((*_write(d[:5], new[:5], start, x), new.P, new.m))

    d = jax.tree.map(lambda a: _zeros(x, a.shape), x)
    return _for_each_chunk(step, d._replace(P=ct.P, m=ct.m), T, chunk_size, reverse=True)


def _for_each_chunk(step, carry, length, chunk_size, *, reverse=False):
    """Runs carry = step(carry, index, size) over the full chunks and the rest."""
    n, rest = divmod(length, chunk_size)
    if rest and reverse:
        carry = step(carry, n, rest)
    if n:
        carry = lax.fori_loop(
            0, n, lambda i, y: step(y, n - 1 - i if reverse else i, chunk_size), carry
        )
    if rest and not reverse:
        carry = step(carry, n, rest)
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


def _zeros(x: Operands, shape):
    return vary_like(jnp.zeros(shape, x.P.dtype), x)
