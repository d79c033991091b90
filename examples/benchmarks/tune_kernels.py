"""Times what the kernels let one choose, on the device that is here, and prints what is best.

    python examples/benchmarks/tune_kernels.py            some minutes
    python examples/benchmarks/tune_kernels.py --tiny     does it run? TPU kernels, interpreted

Chunk sizes: forward and backward of every operator at every width. On a GPU also the two ways
through the chunks, in sequence and side by side, for few heads and many. The last lines are the
best for this device, as Python. What the library uses are constants of its modules, not measured
and the same for all devices: chunk sizes, and how many programs fill a GPU (BUSY, PROCESSORS).
"""

import argparse
import contextlib
import sys
from functools import partial

import gpu
import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from report import Table, markdown

Pair = tuple[float, float]  # milliseconds of forward, and of forward and backward
CHUNK_SIZES = (16, 32, 64, 128)
SHAPES = [gpu.Shape(4, 8192, 16, D) for D in (64, 128, 256)]
HEADS = (16, 32, 64, 128, 256)


def measure(name: str, shape: gpu.Shape, seconds: float, **options) -> Pair | None:
    """Returns the times of an operator's kernels, None where they do not serve the request."""
    operator = partial(gpu.OPERATORS[name], implementation="pallas", **options)
    given = gpu.arrays(shape, np.random.default_rng(0))
    ms = gpu.timed(gpu.jax_programs({name: operator}, given), seconds)
    forward, both = (ms.get(f"{name}, {label}") for label in gpu.PASSES)
    return None if forward is None or both is None else (forward, both)


def best_chunk_size(shape: gpu.Shape, names, sizes, seconds: float) -> int | None:
    """Prints the times of every chunk size, and returns that of the least sum with backward."""
    times = {
        size: {name: measure(name, shape, seconds, chunk_size=size) for name in names}
        for size in sizes
    }
    rows = {name: [times[size][name] or np.nan for size in sizes] for name in names}
    show(f"Milliseconds by chunk size, {shape}", list(sizes), rows)
    sums = {
        size: sum(pair[1] for pair in pairs.values())
        for size, pairs in times.items()
        if None not in pairs.values()
    }
    return min(sums, key=sums.__getitem__, default=None)


def least_programs_in_sequence(seconds: float) -> int | None:
    """Prints the times of both ways, and returns how many programs make the sequential one win."""
    from hla_jax.kernels import mosaic_gpu, triton

    defaults = mosaic_gpu.PROCESSORS, triton.BUSY

    def ways(heads: int) -> dict[str, Pair | None]:
        times = {}
        for way, limit, least in (("in sequence", min, heads), ("side by side", max, heads + 1)):
            mosaic_gpu.PROCESSORS, triton.BUSY = (limit(n, least) for n in defaults)
            jax.clear_caches()
            times[way] = measure("linear attention", gpu.Shape(1, 8192, heads, 64), seconds)
        return times

    times = {heads: ways(heads) for heads in HEADS}
    rows = {way: [times[heads][way] or np.nan for heads in HEADS] for way in times[HEADS[0]]}
    show("Milliseconds by heads, B=1, T=8192, D=E=64", [f"H={heads}" for heads in HEADS], rows)
    for heads, pairs in times.items():
        in_sequence, side_by_side = pairs.values()
        if in_sequence and side_by_side and in_sequence[0] < side_by_side[0]:
            return heads
    return None


def show(title: str, columns: list, rows: dict) -> None:
    table = Table(f"{title}: {' / '.join(gpu.PASSES)}", [str(c) for c in columns], rows)
    print(*markdown(table), sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU interpreted")
    tiny = parser.parse_args().tiny
    platform, kind = jax.default_backend(), jax.devices()[0].device_kind
    names = gpu.TINY_OPERATORS[:1] if tiny else tuple(gpu.OPERATORS)
    seconds = 0.02 if tiny else 0.3
    interpreted = tiny and platform == "cpu"
    with pltpu.force_tpu_interpret_mode() if interpreted else contextlib.nullcontext():
        best = {
            shape.D: best_chunk_size(
                shape, names, CHUNK_SIZES[:2] if tiny else CHUNK_SIZES, seconds
            )
            for shape in (gpu.TINY_SHAPES if tiny else SHAPES)
        }
    found = {D: size for D, size in best.items() if size is not None}
    if not found:
        sys.exit(f"no kernel serves {kind}")
    print(f"CHUNK_SIZES[{kind!r}] = {found}  # by width")
    if platform == "gpu":
        print(f"IN_SEQUENCE[{kind!r}] = {least_programs_in_sequence(seconds)}  # programs")


if __name__ == "__main__":
    main()
