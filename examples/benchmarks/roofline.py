"""Counts what the kernels move and multiply, on paper, and prints the tables of docs/kernels.md.

    python examples/benchmarks/roofline.py

Everything is per token and query head, of heads that share nothing. Operands, outputs that nothing
divides, and the cotangents of both are bfloat16; what passes between two levels, and sums, are
float32. A kernel reads each of its operands once: tiles that several of its programs read come from
the cache. Left out: decays and row masses, a few numbers per token, and initial and final states.
"""

from collections.abc import Callable
from typing import NamedTuple

from report import Table, markdown

# A level reads queries, keys and values, and writes outputs. u and r pass between levels.
CASCADES = {
    "linear attention": ("qkvo",),
    "HLA2": ("qkku", "quvo"),
    "AHLA": ("qkvr", "qkro"),
    "HLA3": ("qkku", "qkvr", "quro"),
}
DEVICES = {  # bf16 FLOP/s and bytes/s, as published
    "TPU v5e": (197e12, 819e9),
    "TPU v6e": (918e12, 1640e9),
    "H100 SXM": (989e12, 3.35e12),
    "H200": (989e12, 4.8e12),
}
TOKENS = 2**20  # tokens times heads of the times


class Sizes(NamedTuple):
    """Widths of keys and of values, and tokens per chunk."""

    D: int
    E: int
    C: int


class Cost(NamedTuple):
    """Bytes to and from device memory, and FLOPs."""

    bytes: float
    flops: float


Program = Callable[[str, Sizes], Cost]  # of one level


def width(arrays: str, s: Sizes) -> int:
    """Returns the numbers per token of some arrays."""
    return sum(s.D if a in "qku" else s.E for a in arrays)


def moved(arrays: str, s: Sizes) -> int:
    """Returns the bytes per token of some arrays, or of their cotangents, in device memory."""
    return sum((4 if a in "ur" else 2) * width(a, s) for a in arrays)


def state(level: str, s: Sizes) -> float:
    """Returns the numbers per token of one state per chunk."""
    return width(level[1], s) * width(level[2], s) / s.C


def total(*costs: Cost) -> Cost:
    """Returns the sum of costs."""
    return Cost(*map(sum, zip(*costs, strict=True)))


# FLOPs. Products of whole chunks: what the causal mask zeroes is computed as well.


def forward_flops(level: str, s: Sizes) -> float:
    """Returns those of A = Q K^T, A V, Q P, and K^T V."""
    _, k, v, _ = (width(a, s) for a in level)
    return 2 * s.C * (k + v) + 4 * k * v


def backward_flops(level: str, s: Sizes) -> float:
    """Returns those of K^T V, A, dO V^T, dO P^T, V L^T, A^T dO, K L, H K, H^T Q, Q^T dO.

    And of the one product of chunks that the decays' cotangent takes.
    """
    _, k, v, _ = (width(a, s) for a in level)
    return s.C * (6 * k + 4 * v + 2 * s.C) + 10 * k * v


# Our kernels.


def in_sequence(level: str, s: Sizes) -> Cost:
    """Returns the cost of one pass over the chunks, the state on the chip."""
    return Cost(moved(level, s), forward_flops(level, s))


def in_sequence_backward(level: str, s: Sizes) -> Cost:
    """Returns the cost of a pass for bfloat16 states before each chunk, and one for cotangents."""
    read, written = moved(level[1:3] + level, s), moved(level[:3], s)
    return Cost(read + written + 2 * 2 * state(level, s), backward_flops(level, s))


def heads_first(level: str, s: Sizes) -> Cost:
    """Returns the cost of the same forward pass with all arrays transposed around it."""
    return total(in_sequence(level, s), Cost(2 * moved(level, s), 0))


def heads_first_backward(level: str, s: Sizes) -> Cost:
    """Returns the cost of the same backward pass with all arrays transposed around it."""
    arrays = level + level[:3]
    return total(in_sequence_backward(level, s), Cost(2 * moved(arrays, s), 0))


def two_kernels(level: str, s: Sizes) -> Cost:
    """Returns the cost of a pass for bfloat16 states before each chunk, and one for outputs."""
    _, k, v, _ = level
    return Cost(moved(k + v + level, s) + 2 * 2 * state(level, s), forward_flops(level, s))


def four_kernels(level: str, s: Sizes) -> Cost:
    """Returns the cost of two passes for states and their cotangents, one for dv, one for the rest.

    A is computed twice, and the decays' cotangent takes two products of chunks.
    """
    q, k, v, o = level
    read, written = moved(k + v + q + o + k + q + o + level, s), moved(level[:3], s)
    return Cost(
        read + written + 5 * 2 * state(level, s),
        backward_flops(level, s) + 2 * s.C * (width(k, s) + s.C),
    )


def side_by_side(level: str, s: Sizes) -> Cost:
    """Returns the cost of three passes: sums of each chunk, states before each, outputs."""
    _, k, v, _ = level
    return Cost(moved(k + v + level, s) + 4 * 4 * state(level, s), forward_flops(level, s))


def side_by_side_backward(level: str, s: Sizes) -> Cost:
    """Returns the cost of the same for states and for their cotangents, then all cotangents."""
    read, written = moved(2 * level, s), moved(level[:3], s)
    return Cost(read + written + 8 * 4 * state(level, s), backward_flops(level, s))


# flash-linear-attention's chunk_simple_gla, which has chunks of 64. Its chunk_fwd_h, with states in
# bfloat16, and chunk_fwd_o are `two_kernels`.


def peer_backward(level: str, s: Sizes) -> Cost:
    """Returns the cost of chunk_fwd_h and chunk_bwd_dh in float32, chunk_bwd_dqkwg, chunk_bwd_dv.

    A is computed twice; the cotangent of the decays is a difference of sums, without a product.
    """
    q, k, v, o = level
    _, dk, dv, _ = (width(a, s) for a in level)
    read, written = moved(k + v + q + o + level + q + k + o, s), moved(level[:3], s)
    return Cost(
        read + written + 5 * 4 * state(level, s),
        s.C * (8 * dk + 4 * dv) + 10 * dk * dv,
    )


TPU: dict[str, tuple[Program, Program]] = {
    "ours on TPU": (in_sequence, in_sequence_backward),
    "ours on TPU, with transposes": (heads_first, heads_first_backward),
}
GPU: dict[str, tuple[Program, Program]] = {
    "ours on Hopper": (in_sequence, four_kernels),
    "ours on Hopper, few heads": (two_kernels, four_kernels),
    "ours in Triton": (in_sequence, side_by_side_backward),
    "ours in Triton, few heads": (side_by_side, side_by_side_backward),
    "flash-linear-attention": (two_kernels, peer_backward),
}


# Fused forms of a cascade.


def cascade(operator: str, s: Sizes, program: Program = in_sequence) -> Cost:
    """Returns the cost of the levels, one after the other."""
    return total(*(program(level, s) for level in CASCADES[operator]))


def fused(operator: str, s: Sizes) -> Cost:
    """Returns the cost of all levels in one pass; those on q and k share their A."""
    shared = sum(level[:2] == "qk" for level in CASCADES[operator][:-1]) - 1
    flops = cascade(operator, s).flops - max(shared, 0) * 2 * s.C * s.D
    return Cost(moved("qkvo", s), flops)


def cascade_backward(operator: str, s: Sizes) -> Cost:
    """Returns the cost of the first levels' outputs again, then of each level's cotangents.

    After a fused forward pass, which does not keep those outputs.
    """
    again = (in_sequence(level, s) for level in CASCADES[operator][:-1])
    return total(*again, cascade(operator, s, in_sequence_backward))


def fused_backward(operator: str, s: Sizes) -> Cost:
    """Returns the cost of one pass for all states before each chunk, one for all cotangents.

    Both compute the first levels' outputs.
    """
    levels = CASCADES[operator]
    states = sum(2 * state(level, s) for level in levels)
    flops = sum(backward_flops(level, s) for level in levels)
    flops += 2 * sum(forward_flops(level, s) for level in levels[:-1])
    flops -= 2 * sum(2 * width(level[1], s) * width(level[2], s) for level in levels[:-1])
    for_states = "qkv" if len(levels) > 1 else "kv"
    return Cost(moved(for_states + "qkvo" + "qkv", s) + 2 * states, flops)


# The tables.


def microseconds(cost: Cost, device: str, tokens: int = TOKENS) -> float:
    """Returns the time of so many tokens and heads, limited by memory or by products."""
    rate, bandwidth = DEVICES[device]
    return 1e6 * tokens * max(cost.flops / rate, cost.bytes / bandwidth)


WIDTHS = (64, 128, 256)
SIZES = [Sizes(D, D, C) for D in WIDTHS for C in (64, 128)]
COLUMNS = [f"D=E={s.D}, C={s.C}" for s in SIZES]


def first_order(field: str, programs: dict[str, tuple[Program, Program]]) -> Table:
    """Returns bytes or flops of linear attention."""
    rows = {
        name: [tuple(getattr(p("qkvo", s), field) for p in pair) for s in SIZES]
        for name, pair in programs.items()
    }
    return Table(f"Linear attention, {field} per token and head, forward / backward", COLUMNS, rows)


def cascades(field: str) -> Table:
    """Returns bytes or flops of the cascades, kernels alone."""
    forms = {
        "level by level": (cascade, cascade_backward),
        "fused": (fused, fused_backward),
    }
    rows = {
        f"{operator}, {form}": [tuple(getattr(f(operator, s), field) for f in pair) for s in SIZES]
        for operator in list(CASCADES)[1:]
        for form, pair in forms.items()
    }
    title = f"Cascades, {field} per token and head, forward / backward, kernels alone"
    return Table(title, COLUMNS, rows)


def times(programs: dict[str, tuple[Program, Program]], devices: list[str], C: int) -> Table:
    """Returns roofline times of linear attention."""
    columns = [f"{device}, D=E={D}" for device in devices for D in WIDTHS]
    rows = {
        name: [
            tuple(microseconds(p("qkvo", Sizes(D, D, C)), device) for p in pair)
            for device in devices
            for D in WIDTHS
        ]
        for name, pair in programs.items()
    }
    title = f"Linear attention, roofline microseconds for B T H = 2^20, C={C}, forward / backward"
    return Table(title, columns, rows)


def main() -> None:
    tpus, gpus = ([d for d in DEVICES if d.startswith("TPU") is tpu] for tpu in (True, False))
    by_flops = ("ours on TPU", "ours on Hopper", "flash-linear-attention")
    tables = [
        first_order("bytes", TPU | GPU),
        first_order("flops", {name: (TPU | GPU)[name] for name in by_flops}),
        times(TPU, tpus, 128),
        times(GPU, gpus, 64),
        cascades("bytes"),
        cascades("flops"),
    ]
    for table in tables:
        print(*markdown(table), sep="\n")


if __name__ == "__main__":
    main()
