"""Writes docs/kernels_compiled.md: what the compilers make of each kernel.

make test-kernels  # once, for the environment
.venv-kernels/bin/python examples/benchmarks/compile_table.py
"""

import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))  # where the next two are, hence their place

from kernels.cases import CASES, Case, compiled  # noqa: E402
from kernels.targets import TARGETS, Compiled, Kernel, ptxas  # noqa: E402

TEXT = """# Kernels as compiled

Written on {today} by `examples/benchmarks/compile_table.py`, with
{versions}.

None of this was run: it is what compilers say of the code they made, on a CPU. `make test-kernels`
compiles the same cases and fails where a kernel is missing, spills a register, does not fit into
its chip's memory, or needs more device memory than its formula allows.

All cases have 8 heads of q, 4 of k and v, a decay per token and row mass; D = E. T = 1 is one
decoding step. "Besides" is the device memory in use besides operands and results; on a TPU, short
sequences pass from kernel to kernel in VMEM, which is not counted there. Where several kernels have
one name, the largest numbers stand."""
MIB, KIB = 2**20, 2**10


def main() -> None:
    """Compiles all cases, one after the other."""
    lines = [TEXT.format(today=date.today(), versions=", ".join(versions()))]
    for (module, target), cases in groupby(CASES, lambda case: (case.module, case.target)):
        own = ["VMEM KiB"] if on_tpu(target) else ["registers", "spilled bytes", "shared KiB"]
        header = ["operator", "direction", "dtype", "D", "T", "B", "kernel", *own, "besides MiB"]
        lines += [f"\n## `{module}` on {TARGETS[target].kind}\n", row(header)]
        lines += [row(["---"] * len(header))]
        for case in cases:
            print(case, flush=True)
            lines += rows(case, compiled(case))
    (ROOT / "docs" / "kernels_compiled.md").write_text("\n".join(lines) + "\n")


def versions() -> Iterator[str]:
    """Yields the names and versions of the compilers."""
    for package in ("jax", "libtpu", "jax-cuda13-plugin"):
        yield f"{package} {version(package)}"
    answer = subprocess.run([ptxas(), "--version"], capture_output=True, text=True, check=True)
    yield f"ptxas {answer.stdout.split('release ')[1].split(',')[0]}"


def rows(case: Case, made: Compiled) -> Iterator[str]:
    """Yields a row for each name of a kernel; what they share is in the first."""
    sizes = [case.operator, case.direction, case.dtype, case.width, case.T, case.B]
    besides = f"{made.temporary / MIB:.1f}"
    for name in sorted(case.kernels):
        cells = [numbers(kernel, case.target) for kernel in made.kernels if kernel.name == name]
        yield row([*sizes, f"`{name}`", *map(max, zip(*cells, strict=True)), besides])
        sizes, besides = [""] * len(sizes), ""


def numbers(kernel: Kernel, target: str) -> list[int]:
    """Returns what a kernel takes."""
    if on_tpu(target):
        return [kernel.vmem // KIB]
    return [kernel.registers, kernel.spills, kernel.shared // KIB]


def on_tpu(target: str) -> bool:
    """Tells a TPU from a GPU."""
    return TARGETS[target].platform == "tpu"


def row(cells: list) -> str:
    """Returns a line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
