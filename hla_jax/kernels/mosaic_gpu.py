"""The primitive and its cascades on Hopper GPUs, as Mosaic GPU kernels.

All products are wgmma of bfloat16 tiles in shared memory, accumulated in float32. Tiles travel by
TMA, which takes one head out of [B, T, H, D] as it lies, fills what is past the last token with
zeros and drops what is written there. Widths that are no multiple of 64, and lengths that are no
multiple of 8, cost a padded copy of the operands.

Forward, one of two: `in_sequence` keeps the states on the chip, of both levels for a cascade;
`sweep` and `side_by_side` pass the states before all chunks through memory, and work on all chunks
at once. Backward, these two give the states, their cotangents (in reverse, from q and dO) and, with
L the cotangent of the state after a chunk, dv = reversed LA(K, Q, dO; L). A third kernel gives dq,
dk and the decay's cotangent.

Costs of the parts are with the kernels. Altogether, per token and query head that has its own k, v
and state, with chunks of C = 64:

    forward in sequence     4 D + 4 E bytes                    4 D E + 2 C (D E / 64 + E) FLOPs
    forward side by side    6 D + 6 E + 4 D E / C bytes        as many
    backward                16 D + 12 E + 10 D E / C bytes     10 D E + 2 C (D E / 32 + E + 5 D)

with outputs and cotangents in bfloat16; in float32 they are twice that, and XLA rounds them.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hla_jax.kernels import _tile
from hla_jax.kernels._batched import serial_starts
from hla_jax.kernels._layout import Cascade, CascadeResults
from hla_jax.kernels._mosaic_gpu_chunks import Pairs, query_key_cotangents, side_by_side, sweep
from hla_jax.kernels._mosaic_gpu_sequence import Levels, in_sequence
from hla_jax.kernels._mosaic_gpu_tiles import BF16, F32, FROM_START, C, Inputs, W

FUSES_BACKWARD = False  # of cascades: they are differentiated level by level

MAX_WIDTH = 256
# More of a state does not fit the registers of one program.
MAX_CARRIED = 128
PROCESSORS = 132  # of an H100 or H200
# Chunks that a program walks through at least, where there are too few states.
MIN_SEGMENT = 16


def unsupported(x: Cascade, *, chunk_size, power, strict, precision) -> str | None:
    """Returns why these kernels do not serve the request, or None."""
    if jax.__version_info__ < (0, 11):
        return f"jax {jax.__version__} is older than 0.11"
    D, E = x.F.shape[-2:]
    if _levels(x) > 1 and D > W:
        return f"the states of both levels at D = {D} do not fit one program"
    if _levels(x) > 1 and _programs(x) < PROCESSORS:
        return f"{_programs(x)} programs leave most of the device idle, level by level it is busy"
    if x.q.shape[-3] == 1:
        return "a single token is no chunk"
    if max(D, E) > MAX_WIDTH:
        return f"a width of {max(D, E)} is over {MAX_WIDTH}"
    if BF16 not in (x.q.dtype, x.k.dtype, x.v.dtype):
        return "none of q, k and v is bfloat16, and float32 products need other kernels"
    if precision not in (None, lax.Precision.DEFAULT):
        return f"the precision {precision} is more than bfloat16 products have"
    if x.F.dtype != F32:
        return f"states in {x.F.dtype} are not float32"
    if chunk_size not in (None, C):
        return f"a chunk size of {chunk_size} is not {C}"
    return None


def forward(x: Cascade, *, out_dtype, chunk_size, power, strict, precision) -> CascadeResults:
    """Returns outputs, in `out_dtype`, and final states."""
    del chunk_size, precision
    T, H, (D, E) = x.q.shape[1], x.q.shape[2], x.F.shape[-2:]
    q, k, v, w, rows = _of_tokens(x, power)
    S, P, F = (_padded(a, W, W, dtype=F32) for a in (x.S, x.P, x.F))
    m, f = (_padded(a, W, dtype=F32) for a in (x.m, x.f))
    if _in_one_kernel(x):
        first = _decay_rows(x.log_decay, 1) if _levels(x) > 1 else None
        o, z, ends = in_sequence(
            Levels(q, k, v, w, first, rows, S, P, m, F, f), strict=strict, out_dtype=out_dtype
        )
        S, P, m, F, f = ends
    else:
        before, (F, f) = _states(Inputs(k, None, v, w, rows, F, f))
        o, z = side_by_side(Inputs(q, k, v, w, rows, *before), strict=strict, out_dtype=out_dtype)
    return CascadeResults(
        _cropped(o, T, H, E),
        _per_token(z, T),
        _cropped(S, D, D),
        _cropped(P, D, E),
        _cropped(m, D),
        _cropped(F, D, E),
        _cropped(f, D),
    )


def backward(x: Cascade, ct: CascadeResults, *, chunk_size, power, strict, precision) -> Cascade:
    """Returns the cotangents of the primitive's operands, in theirs or a wider type.

    The chunks' states are computed again, not kept.
    """
    del chunk_size, precision
    T, H, (D, E) = x.q.shape[1], x.q.shape[2], x.F.shape[-2:]
    q, k, v, w, rows = _of_tokens(x, power)
    do, dz = _padded(ct.o, 8, 1, W), _per_chunk(ct.z)
    P, m = _padded(x.F, W, W, dtype=F32), _padded(x.f, W, dtype=F32)
    dP, dm = _padded(ct.F, W, W, dtype=F32), _padded(ct.f, W, dtype=F32)

    (P, m), _ = _states(Inputs(k, None, v, w, rows, P, m))
    (L, mu), (dP, dm) = _states(Inputs(q, None, do, dz, rows, dP, dm), reverse=True)
    dv, dw = side_by_side(
        Inputs(k, q, do, dz, rows, L, mu), strict=strict, reverse=True, out_dtype=_sum_dtype(x.v, H)
    )
    pairs = Pairs(q, k, v, do, w, dz, rows, P, L, m, mu)
    dtype = jnp.promote_types(_sum_dtype(x.q, H), _sum_dtype(x.k, H))
    dq, dk, d_log_decay = query_key_cotangents(pairs, strict=strict, out_dtype=dtype)

    def shared(d, like):
        """Sums over the query heads that read the same head of an operand."""
        if like is None:
            return None
        return jnp.sum(d.reshape(*d.shape[:2], like.shape[2], -1, *d.shape[3:]), 3)

    if d_log_decay is not None:
        d_log_decay = power * shared(_per_token(d_log_decay, T), x.log_decay)
    return Cascade(
        _cropped(dq, T, H, D),
        shared(_cropped(dk, T, H, D), x.k),
        shared(_cropped(dv, T, H, E), x.v),
        shared(_per_token(dw, T), x.w),
        d_log_decay,
        None,
        None,
        None,
        _cropped(dP, D, E),
        _cropped(dm, D),
    )


def _sum_dtype(a: Array, H: int):
    """Returns the type of a cotangent that each of H heads writes: float32 where some are added."""
    return BF16 if a.dtype == BF16 and a.shape[2] == H else F32


def _levels(x: Cascade) -> int:
    """Returns 1 for the primitive, 2 for a cascade."""
    return 1 if x.S is None and x.P is None else 2


def _in_one_kernel(x: Cascade) -> bool:
    """Tells whether one program for each query head and 64 columns walks through all chunks.

    It must for a cascade. Otherwise that moves no states through memory, and reads k and v once,
    but needs a program for each multiprocessor, and registers for D x 64 numbers.
    """
    return _levels(x) > 1 or (x.q.shape[-1] <= MAX_CARRIED and _programs(x) >= PROCESSORS)


def _programs(x: Cascade) -> int:
    """Returns how many programs there are in sequence."""
    return math.prod(x.q.shape[:-3]) * x.q.shape[-2] * -(-x.v.shape[-1] // W)


def _states(x: Inputs, *, reverse: bool = False):
    """Returns the states (P, m) before each chunk (after it, in reverse) and at the end.

    Where there are fewer blocks of states than multiprocessors, long sequences are cut in segments,
    and a first sweep finds what each adds to the state.
    """
    B, N, D, E = x.P.shape
    n = -(-x.a.shape[1] // C)
    programs = B * N * (D // W) * (E // W)
    length = -(-n // max(1, min(PROCESSORS // programs, n // MIN_SEGMENT)))
    segments = -(-n // length)

    first = jax.tree.map(lambda a: a[:, :, None], (x.P, x.m))
    if segments > 1:
        zeros = jax.tree.map(lambda a: jnp.repeat(jnp.zeros_like(a), segments, 2), first)
        added = sweep(_starting(x, zeros), segments=segments, reverse=reverse, keep=False)[1]
        rho = jnp.ones((B, N, segments), F32)
        if x.rows is not None:
            rho *= _segment_decay(x.rows, N, length, reverse)
        first, _ = jax.vmap(jax.vmap(serial_starts))(rho, added, (x.P, x.m))
    kept, ends = sweep(_starting(x, first), segments=segments, reverse=reverse)
    return kept, jax.tree.map(lambda a: a[:, :, -1], ends)


def _starting(x: Inputs, state) -> Inputs:
    """Returns the inputs of a sweep from another state."""
    return x._replace(P=state[0], m=state[1])


def _segment_decay(rows, N: int, length: int, reverse: bool) -> Float[Array, "B N segments"]:
    """Returns the decay over each segment of `length` chunks, in the order of the sweep."""
    rho = rows[..., FROM_START, -1]
    rho = jnp.flip(rho, -1) if reverse else rho
    rho = jnp.pad(rho, ((0, 0), (0, 0), (0, -rho.shape[-1] % length)), constant_values=1)
    rho = jnp.prod(rho.reshape(*rho.shape[:2], -1, length), -1)
    return jnp.repeat(rho, N // rho.shape[1], 1)


def _of_tokens(x: Cascade, power: int):
    """Returns q, k, v, w and the rows of decay as the kernels take them."""
    q, k, v = (_padded(a, 8, 1, W) for a in (x.q, x.k, x.v))
    return q, k, v, _per_chunk(x.w), _decay_rows(x.log_decay, power)


def _padded(a, *multiples: int, dtype=BF16):
    """Returns `a` with zeros after its last axes, up to multiples of the given numbers."""
    if a is None:
        return None
    sizes = a.shape[-len(multiples) :]
    ends = [(0, -size % multiple) for size, multiple in zip(sizes, multiples, strict=True)]
    return jnp.pad(a.astype(dtype), [(0, 0)] * (a.ndim - len(ends)) + ends)


def _cropped(a, *sizes: int):
    """Returns the first numbers of the last axes."""
    return None if a is None else a[(..., *map(slice, sizes))]


def _per_chunk(w: Float[Array, "B T H"] | None) -> Float[Array, "B H n C"] | None:
    """Returns numbers per token and head chunk by chunk, with zeros past the end."""
    if w is None:
        return None
    w = jnp.pad(jnp.moveaxis(w.astype(F32), 1, 2), ((0, 0), (0, 0), (0, -w.shape[1] % C)))
    return w.reshape(*w.shape[:2], -1, C)


def _per_token(z: Float[Array, "B H n C"] | None, T: int) -> Float[Array, "B T H"] | None:
    """Returns numbers chunk by chunk as numbers per token and head."""
    return None if z is None else jnp.moveaxis(z.reshape(*z.shape[:2], -1)[..., :T], 1, 2)


def _decay_rows(
    log_decay: Float[Array, "B T K"] | None, power: int
) -> Float[Array, "B K n 5 C"] | None:
    """Returns each chunk's prefix sums of power log_decay and decays from its start, to its end."""
    if log_decay is None:
        return None
    sums = _tile.decay_rows(log_decay, C)
    hi, lo, resets = power * sums[..., 0, :], power * sums[..., 1, :], sums[..., 2, :]

    def exp(x, mask):
        return jnp.where(mask, jnp.exp(jnp.where(mask, x, 0.0)), 0.0)

    from_start = exp(hi + lo, resets == 0)
    to_end = exp(hi[..., -1:] - hi + (lo[..., -1:] - lo), resets == resets[..., -1:])
    return jnp.stack([hi, lo, resets, from_start, to_end], -2)
