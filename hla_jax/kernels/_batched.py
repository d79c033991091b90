"""All chunks at once: batched matmuls, and between the chunks a scan of their small summaries.

The form for accelerators, where products of many chunks run side by side, and for forward mode.
Each function is of one state head, q [T, g, D], mapped over the rest. Between the chunks stands
P_{i+1} = rho_i P_i + (summary of chunk i).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from hla_jax.kernels import _chunk
from hla_jax.kernels._layout import Operands, Results, cast, per_head, per_head_cotangents

# As many tokens as matmul units want rows.
CHUNK_SIZE = 64


def serial_starts(rho, total, first, reverse=False):
    """Returns the state before each chunk and after the last one, by `lax.scan` over the chunks."""

    def step(state, chunk):
        return _chunk.advance(chunk[0], state, chunk[1]), state

    final, starts = lax.scan(step, first, (rho, total), reverse=reverse)
    return starts, final


def associative_starts(rho, total, first):
    """The same by `lax.associative_scan`."""

    def scaled(rho, s):
        return rho.reshape(rho.shape + (1,) * (s.ndim - rho.ndim)) * s

    def combine(a, b):
        (rho_a, state_a), (rho_b, state_b) = a, b
        return rho_a * rho_b, jax.tree.map(lambda s, x: scaled(rho_b, s) + x, state_a, state_b)

    total = jax.tree.map(lambda s, x: x.at[0].add(rho[0] * s), first, total)
    _, ends = lax.associative_scan(combine, (rho, total))
    starts = jax.tree.map(lambda s, x: jnp.concatenate([s[None], x[:-1]]), first, ends)
    return starts, jax.tree.map(lambda x: x[-1], ends)


def forward(x: Operands, *, starts, chunk_size, power, strict, precision) -> Results:
    """Returns outputs and final state; `starts` is one of the two scans above."""
    chunk_size = _size(chunk_size, x)

    @per_head
    def run(x: Operands) -> Results:
        q, k, v, w, log_decay = _into_chunks(chunk_size, x[:5])
        terms = _decay_terms(q, log_decay, power, strict)
        into_state = jax.vmap(partial(_chunk.into_state, precision=precision))
        decays = 0 if log_decay is None else power
        output = jax.vmap(partial(_chunk.output, power=decays, precision=precision))
        (P, m), final = starts(terms.rho, into_state(k, v, w, terms), (x.P, x.m))
        o, z = output(q, k, v, w, terms, P, m)
        return Results(*_out_of_chunks(len(x.q), (o, z)), *final)

    return run(cast(x, x.P.dtype))


def backward(x: Operands, ct: Results, *, chunk_size, power, strict, precision) -> Operands:
    """Returns the cotangents of the operands. The chunks' states are computed again, not kept."""
    chunk_size = _size(chunk_size, x)

    @per_head_cotangents
    def run(x: Operands, ct: Results) -> Operands:
        q, k, v, w, log_decay, do, dz = _into_chunks(chunk_size, (*x[:5], ct.o, ct.z))
        terms = _decay_terms(q, log_decay, power, strict)
        into_state = jax.vmap(partial(_chunk.into_state, precision=precision))
        into_cotangent = jax.vmap(partial(_chunk.into_cotangent, precision=precision))
        decays = 0 if log_decay is None else power
        cotangents = jax.vmap(partial(_chunk.cotangents, power=decays, precision=precision))
        (P, m), _ = serial_starts(terms.rho, into_state(k, v, w, terms), (x.P, x.m))
        (L, mu), first = serial_starts(
            terms.rho, into_cotangent(q, do, dz, terms), (ct.P, ct.m), reverse=True
        )
        d = cotangents(q, k, v, w, terms, P, m, do, dz, L, mu)
        return Operands(*_out_of_chunks(len(x.q), d), *first)

    return run(cast(x, x.P.dtype), ct)


def _size(chunk_size: int | None, x: Operands) -> int:
    return min(chunk_size or CHUNK_SIZE, x.q.shape[x.token_axis])


def _decay_terms(q, log_decay, power, strict):
    n, c = q.shape[:2]
    one = partial(_chunk.decay, c=c, power=power, strict=strict, dtype=q.dtype)
    return jax.vmap(one, axis_size=n)(log_decay)


def _into_chunks(c: int, tree):
    """Splits [T, ...] into [n, c, ...]; zeros fill the last chunk, and change nothing."""

    def split(x):
        n = -(-len(x) // c)
        x = jnp.pad(x, [(0, n * c - len(x))] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(n, c, *x.shape[1:])

    return jax.tree.map(split, tree)


def _out_of_chunks(length: int, tree):
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:length], tree)
