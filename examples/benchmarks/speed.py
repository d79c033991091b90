"""Measures speed and memory, ours and others', and prints tables in Markdown.

    python examples/benchmarks/speed.py                       everything; about a quarter of an hour
    python examples/benchmarks/speed.py --quick               short sequences: does it run?
    python examples/benchmarks/speed.py --section decode --json out.json

Other people's programs take part if they can be imported, here or from `--native`, a directory with
fast-transformers compiled for this CPU:

    pip install torch setuptools wheel ninja
    pip install --no-build-isolation pytorch-fast-transformers
    CFLAGS="-O3 -march=native" pip install --no-build-isolation --no-deps --no-cache-dir \
        --no-binary :all: --target DIR pytorch-fast-transformers

Each section runs in a process of its own for each setting: pinned to one core and in CPU time, or
on all cores and in wall time; with malloc as it comes, with huge pages, or told to keep its pages
(`report.MALLOC` has the environment variables). What is compared takes turns in one process.
"""

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context

from report import CLOCKS, MALLOC, Setting, Table, markdown

# Section -> the settings it runs in.
SECTIONS = {
    "linear": list(product(CLOCKS, MALLOC)),
    "orders": list(product(["one core"], MALLOC)),
    "normalised": list(product(["one core"], MALLOC)),
    "length": list(product(["one core"], MALLOC)),
    "memory": [("one core", "as it comes")],
    "decode": [("one core", "as it comes")],
}


def measure(section: str, setting: Setting) -> list[Table]:
    """Runs one section in this process, which has not imported jax yet."""
    if setting.cores == "one core":
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import sections  # not earlier: jax counts the cores when it is imported

    return getattr(sections, section)(setting)


def measure_apart(section: str, setting: Setting) -> list[Table]:
    """Runs one section in a new process, for malloc reads its tunables only at the start."""
    os.environ["GLIBC_TUNABLES"] = MALLOC[setting.malloc]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
        return apart.submit(measure, section, setting).result()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short, and malloc as it comes")
    parser.add_argument(
        "--section", choices=SECTIONS, action="append", help="only this (repeatable)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the tables there too, as data")
    parser.add_argument("--native", metavar="DIR", help="fast-transformers compiled for this CPU")
    args = parser.parse_args()

    tables = []
    for section in args.section or SECTIONS:
        for cores, malloc in SECTIONS[section]:
            if args.quick and malloc != "as it comes":
                continue
            setting = Setting(cores, malloc, args.quick, args.native)
            print(f"{section}: {setting}", file=sys.stderr, flush=True)
            for table in measure_apart(section, setting):
                print(*markdown(table), sep="\n", flush=True)
                tables.append(table._asdict())
    if args.json:
        with open(args.json, "w") as file:
            json.dump(tables, file, indent=1)


if __name__ == "__main__":
    main()
