"""Around the TPU kernels: what one program works on, its blocks, and the order of axes.

Heads come before tokens here, since a block that takes one head out of [T, H, D] cannot be tiled:
q [B, K, r g, T, D], k [B, K, r or 1, T, D], F [B, K, r, D, E], and per-token numbers as rows
[B, K, n, heads, C]. These transposes read and write each of q, k, v and the output once more,
unless XLA fuses them into what makes the first three and uses the last.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hla_jax.kernels import _tile
from hla_jax.kernels._layout import Cascade, CascadeResults, States

F32 = jnp.float32
# As many tokens as a v5e matrix unit has rows; decay rows are exact up to there.
CHUNK_SIZE = 128
# A program holds at most so many query heads, and so many bytes of VMEM by `_vmem`.
HEADS = 8
VMEM_BUDGET = 20 * 2**20
VMEM_LIMIT = 64 * 2**20  # what the compiler may take, temporaries included


class Sizes(NamedTuple):
    """Lengths: K kv heads with r states of g query heads each; n chunks of C tokens."""

    B: int
    K: int
    r: int
    g: int
    T: int
    C: int
    n: int
    D: int
    E: int


def call(
    kernel: Callable,
    operands: tuple,
    out,
    s: Sizes,
    *,
    scratch: States,
    products: float,
    name: str,
    reverse: bool = False,
    aliases: dict[int, int] | None = None,
):
    """Runs a kernel as one program for each (batch row, kv head, chunk).

    Args:
      kernel: takes a reference for each array of `operands`, `out` and `scratch`.
      operands: a tuple of trees of arrays.
      out: the types of the results.
      s: the lengths.
      scratch: arrays or types whose blocks the program keeps from chunk to chunk, in float32.
      products: FLOPs, as a multiple of one level's forward pass.
      name: the kernel's name in a profile.
      reverse: whether the chunks come from right to left.
      aliases: which operands' memory the results take, both counted without what is None.
    """
    flops = 2 * s.B * s.K * s.r * s.n * s.C * (s.g * s.C * (s.D + s.E) + (s.g + 1) * s.D * s.E)
    moved = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((operands, out)))
    (results,) = pl.pallas_call(
        kernel,
        out_shape=(out,),
        grid=(s.B, s.K, s.n),
        in_specs=[_specs(tree, s, reverse) for tree in operands],
        out_specs=(_specs(out, s, reverse),),
        scratch_shapes=[jax.tree.map(lambda a: pltpu.VMEM(a.shape[2:], F32), scratch)],
        input_output_aliases=aliases or {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        cost_estimate=pl.CostEstimate(
            flops=int(products * flops),
            bytes_accessed=moved,
            transcendentals=s.B * s.K * s.n * s.C * s.C,
        ),
        name=name,
    )(*operands)
    return results


def _specs(tree, s: Sizes, reverse: bool):
    """Returns a tree's blocks: of what has tokens a chunk, of everything else the whole."""

    def spec(a, shape, index):
        share = s.K // a.shape[1]  # programs that read the same head

        def block(b, k, c):
            return b, lax.div(k, jnp.int32(share)), *index(s.n - 1 - c if reverse else c)

        return pl.BlockSpec((None, None, *shape), block)

    def tokens(a):  # [B, K, heads, T, width]
        return spec(a, (a.shape[2], s.C, a.shape[4]), lambda c: (0, c, 0))

    def chunk(a):  # [B, K, n, ...]
        return spec(a, (None, *a.shape[3:]), lambda c: (c, *(0,) * (a.ndim - 3)))

    def whole(a):  # [B, K, ...]
        return spec(a, a.shape[2:], lambda _: (0,) * (a.ndim - 2))

    kinds: list[Callable] = {
        Cascade: [tokens] * 3 + [chunk] * 2 + [whole] * 5,
        CascadeResults: [tokens, chunk] + [whole] * 5,
        States: [chunk] * 5,
    }[type(tree)]
    return tree._make(a if a is None else kind(a) for kind, a in zip(kinds, tree, strict=True))


def sizes(x: Cascade, chunk_size: int | None) -> tuple[Sizes, int]:
    """Returns what one program works on, few enough heads for VMEM, and the parts of a state.

    A state with many query heads is split in several that each serve some of them, a kv head with
    many states in several kv heads; what is shared is read again, not repeated.
    """
    B, T, H, D = x.q.shape
    N, E = x.F.shape[1], x.F.shape[-1]
    K = min(x.k.shape[2], x.v.shape[2]) if x.log_decay is None else x.log_decay.shape[2]
    C = min(chunk_size or CHUNK_SIZE, CHUNK_SIZE, T)
    C = -(-C // 16) * 16  # bfloat16 tiles have 16 rows
    g = _largest_divisor(H // N, lambda g: g <= HEADS)
    parts = H // N // g
    s = Sizes(B, K, N * parts // K, g, T, C, -(-T // C), D, E)

    def fits(r: int) -> bool:
        return r == 1 or (r * g <= HEADS and vmem(s._replace(r=r)) <= VMEM_BUDGET)

    r = _largest_divisor(s.r, fits)
    return s._replace(K=K * s.r // r, r=r), parts


def fitted(x: Cascade, chunk_size: int | None) -> tuple[Cascade, Sizes]:
    """Returns the request with its states in parts, and what one program works on."""
    s, parts = sizes(x, chunk_size)
    if parts > 1:
        f = None if x.f is None else jnp.repeat(x.f, parts, 1)
        x = x._replace(F=jnp.repeat(x.F, parts, 1), f=f)
    return x, s


def _largest_divisor(n: int, accept) -> int:
    return next(d for d in range(n, 0, -1) if n % d == 0 and accept(d))


def vmem(s: Sizes) -> int:
    """Bytes of VMEM that a program of the backward pass takes, the largest; rows have 128 lanes."""
    s = s._replace(D=-(-s.D // 128) * 128, E=-(-s.E // 128) * 128)
    heads, widths = s.r * s.g, s.D + s.E
    blocks = s.C * (3 * heads * widths + 4 * s.r * widths) + 3 * s.r * s.D * s.E
    carried = s.r * s.D * s.E + s.D * widths
    temporaries = s.g * s.C * (4 * s.C + 3 * widths)
    return 4 * (2 * blocks + carried + temporaries)


def heads_first(x: Cascade, s: Sizes) -> Cascade:
    """Returns the operands in the kernels' order of axes, and the decay as `_tile.decay_rows`."""

    def state(a, single: bool):
        if a is None:
            return None
        return a.reshape(s.B, -1, 1 if single else s.r, *a.shape[2:])

    first = (state(a, True) for a in x[5:8])
    second = (state(a, False) for a in x[8:])
    q, k, v = (_tokens_of_heads(a, s) for a in x[:3])
    rows = None if x.log_decay is None else _tile.decay_rows(x.log_decay, s.C)
    return Cascade._make((q, k, v, _rows_of_heads(x.w, s), rows, *first, *second))


def _tokens_of_heads(a, s: Sizes):
    """[B, T, heads, W] -> [B, K, heads of a program, T, W]; fewer K where programs share a head."""
    heads = _heads_of_program(a.shape[2], s)
    return jnp.moveaxis(a, 2, 1).reshape(s.B, -1, heads, s.T, a.shape[-1])


def _rows_of_heads(a, s: Sizes):
    """[B, T, heads] -> [B, K, n, heads of a program, C], zeros at the end."""
    if a is None:
        return None
    heads = _heads_of_program(a.shape[2], s)
    a = jnp.pad(jnp.moveaxis(a, 2, 1), ((0, 0), (0, 0), (0, s.n * s.C - s.T)))
    return a.reshape(s.B, -1, heads, s.n, s.C).swapaxes(2, 3)


def _heads_of_program(heads: int, s: Sizes) -> int:
    return max(1, heads // s.K)


def _tokens_in_order(a, heads: int, s: Sizes):
    """[B, K, heads of a program, T, W] -> [B, T, heads, W], summed over programs that share one."""
    a = a.reshape(s.B, heads, -1, *a.shape[3:])
    return jnp.moveaxis(jnp.sum(a, 2), 1, 2)


def _rows_in_order(a, heads: int, s: Sizes):
    """[B, K, n, heads of a program, C] -> [B, T, heads], summed likewise."""
    if a is None:
        return None
    a = a.swapaxes(2, 3).reshape(s.B, heads, -1, s.n * s.C)[..., : s.T]
    return jnp.moveaxis(jnp.sum(a, 2), 1, 2)


def _states_in_order(a, heads: int, reduce):
    """[B, K, states of a program, ...] -> [B, heads, ...]."""
    if a is None:
        return None
    return reduce(a.reshape(a.shape[0], heads, -1, *a.shape[3:]), 2)


def _first(a, axis: int):
    return lax.index_in_dim(a, 0, axis, keepdims=False)


def results(y: Cascade, s: Sizes, dtype) -> CascadeResults:
    """Returns the types of the results in the kernels' order of axes."""
    heads = s.r * s.g
    o = _struct(y, s.B, s.K, heads, s.T, s.E, dtype=dtype)
    z = None if y.f is None else _struct(y, s.B, s.K, s.n, heads, s.C)
    return CascadeResults._make((o, z, *_states_of_programs(y, s)))


def starts(y: Cascade, s: Sizes, dtype) -> States:
    """Returns the types of the states before each chunk, which products take in `dtype`."""

    def of_chunks(a):
        return None if a is None else _struct(y, *a.shape[:2], s.n, *a.shape[2:], dtype=a.dtype)

    S, P, m, F, f = _states_of_programs(y, s, dtype)
    return States._make(map(of_chunks, (S, P, m, F, f)))


def cotangents(y: Cascade, s: Sizes) -> Cascade:
    """Returns the types of all cotangents: the operand's, but float32 where programs share it."""

    def like(a):
        if a is None:
            return None
        shared = a.shape[1] != s.K
        return _struct(y, s.B, s.K, *a.shape[2:], dtype=F32 if shared else a.dtype)

    row = None if y.log_decay is None else _struct(y, s.B, s.K, s.n, 1, s.C)
    return Cascade._make((*map(like, y[:4]), row, *_states_of_programs(y, s)))


def _states_of_programs(y: Cascade, s: Sizes, dtype=F32):
    """Returns the types of the states of every program, masses in float32."""

    def like(a):
        if a is None:
            return None
        return _struct(y, s.B, s.K, *a.shape[2:], dtype=dtype if a.ndim == 5 else F32)

    return map(like, y[5:])


def results_in_order(y: CascadeResults, x: Cascade, s: Sizes) -> CascadeResults:
    """Returns the results as the caller has its operands."""
    H = x.q.shape[2]
    o, z = _tokens_in_order(y.o, H, s), _rows_in_order(y.z, H, s)
    states = (
        None if a is None else _states_in_order(b, a.shape[1], _first)
        for a, b in zip(x[5:], y[2:], strict=True)
    )
    return CascadeResults._make((o, z, *states))


def results_cotangents(ct: CascadeResults, y: Cascade, s: Sizes) -> CascadeResults:
    """Returns the results' cotangents in the kernels' order of axes.

    Where several programs have a copy of a state, the first receives the final one's cotangent.
    """

    def state(a, like):
        if a is None:
            return None
        copies = s.K * like.shape[2] // a.shape[1]
        a = jnp.pad(
            a[:, :, None], [(0, copies - 1 if axis == 2 else 0) for axis in range(a.ndim + 1)]
        )
        return a.reshape(s.B, s.K, *like.shape[2:])

    states = map(state, ct[2:], y[5:])
    return CascadeResults._make((_tokens_of_heads(ct.o, s), _rows_of_heads(ct.z, s), *states))


def cotangents_in_order(d: Cascade, x: Cascade, s: Sizes) -> Cascade:
    """Returns the cotangents as the caller has its operands, summed over those who share."""

    def tokens(a, b):
        return _tokens_in_order(a, b.shape[2], s)

    def rows(a, b):
        return None if b is None else _rows_in_order(a, b.shape[2], s)

    def states(a, b):
        return None if b is None else _states_in_order(a, b.shape[1], jnp.sum)

    return Cascade._make(
        (*map(tokens, d[:3], x[:3]), *map(rows, d[3:5], x[3:5]), *map(states, d[5:], x[5:]))
    )


def in_place(y: Cascade, out: CascadeResults) -> dict[int, int]:
    """Returns which operand's memory each final state takes: a decoding step moves little else."""
    first, first_out = len(jax.tree.leaves(y[:5])), len(jax.tree.leaves(out[:2]))
    pairs = zip(jax.tree.leaves(y[5:]), jax.tree.leaves(out[2:]), strict=True)
    return {first + i: first_out + i for i, (a, b) in enumerate(pairs) if a.shape == b.shape}


def _struct(like, *shape: int, dtype=F32) -> jax.ShapeDtypeStruct:
    """Returns the type of a result, which varies over the `shard_map` axes that operands do."""
    varying = jax.typeof(like.q).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)
