"""Time and memory of attention, forward and backward, as sequences grow.

    python examples/scaling.py --preset cpu

Causal attention alone, in float32, with as many rows as keep the number of tokens the same. Every
method runs at every length in a process of its own. One that would not fit into memory, by what its
compiled program needs, or into the time limit, by its slope so far, is left out with what it would
need.

Source: the figure of Transformers are RNNs (Katharopoulos et al. 2020, arXiv 2006.16236), section
4.1, shows the same for softmax, Reformer and linear attention.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from tqdm import tqdm
from training import command, hardware

import hla_jax as hla

matplotlib.use("Agg")
from matplotlib import pyplot as plt

SLACK = 2  # a CPU may hold nearly twice what a compiled program plans
FIT = 3  # how many of the longest lengths slopes are fitted to

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def lsh(rounds: int) -> Attention:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Reformer's, whose queries are its keys."""
        options = dict(num_buckets=64, chunk_size=32, num_rounds=rounds)
        return hla.attention.lsh_attention(q, v, key=jax.random.key(0), **options)

    return attend


METHODS: dict[str, Attention] = {
    "softmax": hla.attention.softmax_attention,
    "flash": lambda q, k, v: hla.attention.flash_attention(q, k, v)[0],
    "lsh-1": lsh(1),
    "lsh-4": lsh(4),
    "lsh-8": lsh(8),
    "linear": lambda q, k, v: hla.linear_attention(q, k, v)[0],
    "hla2": lambda q, k, v: hla.hla2(q, k, v, scale=1 / q.shape[-1])[0],
    "ahla": lambda q, k, v: hla.ahla(q, k, v, scale=1 / q.shape[-1])[0],
    "hla3": lambda q, k, v: hla.hla3(q, k, v, scale=1 / q.shape[-1])[0],
}


class Preset(NamedTuple):
    lengths: tuple[int, ...]
    tokens: int  # of all rows together; a longer row is alone
    heads: int
    width: int
    calls: int  # timed, after one that is not
    seconds: float  # the most that a process may take for its calls


PRESETS = {
    "cpu": Preset(
        tuple(2**n for n in range(9, 14)), tokens=2**12, heads=8, width=32, calls=3, seconds=40
    ),
    "paper": Preset(
        tuple(2**n for n in range(9, 17)), tokens=2**16, heads=8, width=32, calls=10, seconds=300
    ),
}


# One method at one length, in a process of its own


def measure(method: str, T: int, preset: Preset) -> dict[str, Any]:
    """Compiles, and if it fits runs, outputs and gradients; all figures are per row."""
    rows = max(1, preset.tokens // T)

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return METHODS[method](q, k, v).sum()

    shape = jax.ShapeDtypeStruct((rows, T, preset.heads, preset.width), jnp.float32)
    both = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))
    compiled = both.lower(shape, shape, shape).compile()
    plan: Any = compiled.memory_analysis()
    need = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    result: dict[str, Any] = {"rows": rows, "planned_bytes": need / rows}
    if SLACK * need > (free := free_bytes()):
        return result | {"left_out": f"needs {gigabytes(need)}, {gigabytes(free)} are free"}
    before = held_bytes()
    keys = jax.random.split(jax.random.key(0), 3)
    inputs = jax.block_until_ready([jax.random.normal(key, shape.shape) for key in keys])
    forget_peak()
    jax.block_until_ready(compiled(*inputs))
    result["peak_bytes"] = (peak_bytes() - before) / rows
    times = []
    for _ in range(preset.calls):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*inputs))
        times.append(time.perf_counter() - start)
    return result | {"seconds": statistics.median(times) / rows}


def gigabytes(n: float) -> str:
    return f"{n / 1e9:.1f} GB"


def free_bytes() -> float:
    if stats := jax.devices()[0].memory_stats():
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return 1024 * status("/proc/meminfo", "MemAvailable")


def held_bytes() -> float:
    """What is held now; nothing on a GPU, where the program alone is."""
    if jax.devices()[0].memory_stats():
        return 0
    return 1024 * status("/proc/self/status", "VmRSS")


def forget_peak() -> None:
    """Makes the peak start anew, for compiling takes memory too, but not that of a GPU."""
    if not jax.devices()[0].memory_stats():
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> float:
    """The most memory that was held since."""
    if stats := jax.devices()[0].memory_stats():
        return stats["peak_bytes_in_use"]
    return 1024 * status("/proc/self/status", "VmHWM")


def status(path: str, name: str) -> int:
    """A number from the tables of Linux."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise SystemExit(f"{path} has no {name}: memory is measured on Linux and on GPUs")


def in_a_process(method: str, T: int, preset: str, limit: float) -> dict[str, Any]:
    """Measures in another process, which is given up when it takes much longer than it may."""
    command = [sys.executable, __file__, "--preset", preset, "--one", method, str(T)]
    try:
        done = subprocess.run(
            command,
            env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            capture_output=True,
            text=True,
            timeout=120 + 2 * limit,  # with starting and compiling
        )
    except subprocess.TimeoutExpired:
        return {"left_out": f"given up after {120 + 2 * limit:.0f} s"}
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"left_out": f"failed with status {done.returncode}: {reason}"}
    return json.loads(done.stdout.splitlines()[-1])


# All of them


def measure_all(methods: list[str], preset: Preset, name: str) -> list[dict[str, Any]]:
    results = []
    bar = tqdm(total=len(methods) * len(preset.lengths), unit="measurement")
    for method in methods:
        done: list[dict[str, Any]] = []
        for T in preset.lengths:
            bar.set_postfix_str(f"{method}, {T} tokens")
            row = {"method": method, "tokens": T}
            seconds = predicted_seconds(done, T) * max(1, preset.tokens // T) * (preset.calls + 1)
            if seconds > preset.seconds:
                row["left_out"] = f"would take {seconds:.0f} s, the limit is {preset.seconds:.0f} s"
            else:
                row |= in_a_process(method, T, name, preset.seconds)
            done.append(row)
            bar.update()
        results += done
    bar.close()
    return results


def predicted_seconds(done: list[dict[str, Any]], T: int) -> float:
    """For a row of T tokens, from the last two lengths measured; 0 where there are none."""
    measured = [row for row in done if "seconds" in row][-2:]
    if len(measured) < 2:
        return 0.0
    p = slope([row["tokens"] for row in measured], [row["seconds"] for row in measured])
    return measured[-1]["seconds"] * (T / measured[-1]["tokens"]) ** p


def slope(sizes: list[int], costs: list[float]) -> float:
    """The p of the fit cost ~ size^p."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def slopes(results: list[dict[str, Any]], cost: str) -> dict[str, float]:
    """Of each method measured twice at least, over its longest lengths."""
    fitted = {}
    for method in METHODS:
        rows = [r for r in results if r["method"] == method and cost in r][-FIT:]
        if len(rows) > 1:
            fitted[method] = slope([r["tokens"] for r in rows], [r[cost] for r in rows])
    return fitted


COSTS = {"seconds": "seconds a row", "peak_bytes": "bytes a row, inputs included"}


def draw(path: Path, results: list[dict[str, Any]], title: str) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for panel, (cost, label) in zip(axes, COSTS.items(), strict=True):
        for method, p in slopes(results, cost).items():
            rows = [r for r in results if r["method"] == method and cost in r]
            x, y = [r["tokens"] for r in rows], [r[cost] for r in rows]
            panel.loglog(x, y, "o-", ms=4, label=f"{method}, T^{p:.2f}")
        panel.set_xscale("log", base=2)
        panel.set(xlabel="T, tokens of a row", ylabel=label)
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.suptitle(f"{title}\nslopes are fitted to the {FIT} longest lengths")
    figure.savefig(path, dpi=110)


def report(results: list[dict[str, Any]], title: str) -> None:
    print(f"\n{title}\nforward and backward, a row: milliseconds, and MB at the peak")
    lengths = sorted({r["tokens"] for r in results})
    print(f"{'':10}" + "".join(f"{T:>18}" for T in lengths) + f"{'slopes':>14}")
    fitted = [slopes(results, cost) for cost in COSTS]
    for method in dict.fromkeys(r["method"] for r in results):
        cells = []
        for r in (r for r in results if r["method"] == method):
            time_ = f"{1000 * r['seconds']:.1f}" if "seconds" in r else "-"
            memory = f"{r['peak_bytes'] / 1e6:.1f}" if "peak_bytes" in r else "-"
            cells.append(f"{time_} {memory:>7}")
        powers = " ".join(f"{f[method]:.2f}" if method in f else "-" for f in fitted)
        print(f"{method:10}" + "".join(f"{cell:>18}" for cell in cells) + f"{powers:>14}")
    for r in results:
        if "left_out" in r:
            print(f"{r['method']} at {r['tokens']} tokens is left out: {r['left_out']}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", default="cpu", choices=PRESETS)
    add("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    add("--lengths", type=int, nargs="+", help="tokens of a row (default: the preset's)")
    add("--out", type=Path, help="folder of the results (default runs/scaling-PRESET)")
    add("--one", nargs=2, help=argparse.SUPPRESS)  # how this script calls itself
    args = parser.parse_args(arguments)
    preset = PRESETS[args.preset]
    if args.one:
        method, T = args.one
        print(json.dumps(measure(method, int(T), preset)))
        return
    preset = preset._replace(lengths=tuple(sorted(args.lengths or preset.lengths)))
    out = args.out or Path("runs") / f"scaling-{args.preset}"
    out.mkdir(parents=True, exist_ok=True)

    start = time.perf_counter()
    results = measure_all(args.methods, preset, args.preset)
    where = hardware()  # not before: it would take hold of a GPU
    written = {
        "command": command(),
        "preset": args.preset,
        "data": "random numbers",
        "hardware": where,
        "settings": preset._asdict(),
        "seconds": time.perf_counter() - start,
        "slopes": {cost: slopes(results, cost) for cost in COSTS},
        "measurements": results,
    }
    (out / "results.json").write_text(json.dumps(written, indent=2))
    names = ("method", "tokens", "rows", "seconds", "planned_bytes", "peak_bytes", "left_out")
    with (out / "scaling.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, names)
        table.writeheader()
        table.writerows(results)
    title = f"preset {args.preset}, {where['device']}, {where['date']}"
    draw(out / "scaling.png", results, title)
    report(results, title)
    print(f"curves in {out / 'scaling.png'}, numbers in {out / 'results.json'} and scaling.csv")


if __name__ == "__main__":
    main()
