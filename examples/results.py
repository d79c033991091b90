"""Fills docs/results.md with tables of what the other examples have written.

    python examples/results.py --collect runs
    python examples/results.py

The first copies results from a folder of runs into docs/results, numbers and pictures; both then
write anew each part of the page between <!-- NAME --> and <!-- end -->: how docs/results/NAME.json
was measured, and its numbers as a table.
"""

import argparse
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
FOLDER = PAGE.with_suffix("")
BLOCK = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

# Where each of docs/results is from, in a folder of runs.
SOURCES = {
    "copy_task.json": "copy_task/results.json",
    "copy_task.png": "copy_task/copy_task.png",
    "scaling.json": "scaling-cpu/results.json",
    "scaling.png": "scaling-cpu/scaling.png",
    "recall.json": "recall-cpu/results.json",
    "recall.png": "recall-cpu/recall.png",
    "long_context.json": "long_context/results.json",
    "text.json": "char_lm-compare/results.json",
    "text.png": "char_lm-compare/compare.png",
    "speech.json": "speech_ctc/results.json",
    "speech.png": "speech_ctc/speech_ctc.png",
    "speech_synthetic.json": "speech_ctc-synthetic/results.json",
    "mnist_train.json": "image_generation-mnist/train.json",
    "mnist_throughput.json": "image_generation-mnist/throughput.json",
    "mnist_linear.png": "image_generation-mnist/linear/images.png",
    "mnist_hla2.png": "image_generation-mnist/hla2/images.png",
    "cifar10_train.json": "image_generation-cifar10/train.json",
    "cifar10_throughput.json": "image_generation-cifar10/throughput.json",
    "cifar10_linear.png": "image_generation-cifar10/linear/images.png",
}

Result = dict[str, Any]
Cells = list[list[str]]

# What the first paper has, by the names of these tables: bits per dimension, and images a second
# (Katharopoulos et al. 2020, arXiv 2006.16236v3, tables 1, 2 and 4); phoneme error rate in % and
# seconds an epoch (table 3).
PAPER = {
    "mnist": {
        "softmax": ("0.621", "0.45"),
        "softmax with cache": ("0.621", "7.56"),
        "lsh": ("0.745", "0.68"),
        "linear": ("0.644", "142.8"),
    },
    "cifar10": {
        "softmax": ("3.47", "0.004"),
        "softmax with cache": ("3.47", "0.32"),
        "lsh": ("3.39", "0.015"),
        "linear": ("3.40", "17.85"),
    },
    "speech": {
        "bilstm": ("10.94", "1047"),
        "softmax": ("5.12", "2711"),
        "lsh-4": ("9.33", "2250"),
        "linear": ("8.08", "824"),
    },
}
NOTHING = ("", "")


def copy_task(result: Result) -> Cells:
    head = ["", "loss, nats", "accuracy at full length", "ms a step", "parameters"]
    return [head] + [
        [
            name,
            f"{row['loss']:.4f}",
            f"{row['accuracy']:.1%}",
            f"{row['milliseconds_per_step']:.1f}",
            f"{row['parameters']:,}",
        ]
        for name, row in result["results"].items()
    ]


def scaling(result: Result) -> Cells:
    rows = result["measurements"]
    lengths = sorted({r["tokens"] for r in rows})
    table = [["ms / MB a row", *(f"T={T}" for T in lengths), "time ~", "memory ~"]]
    for method in dict.fromkeys(r["method"] for r in rows):
        cells = [
            f"{short(1000 * r['seconds'])} / {short(r['peak_bytes'] / 1e6)}"
            if "seconds" in r
            else "-"
            for r in rows
            if r["method"] == method
        ]
        slopes = [f"T^{result['slopes'][cost][method]:.2f}" for cost in ("seconds", "peak_bytes")]
        table.append([method, *cells, *slopes])
    return table


def image_quality(result: Result) -> Cells:
    data, paper = result["train"]["data"], PAPER[result["data"]]
    table = [["", "bits per dimension", "parameters", "images a second, learning", "paper's bits"]]
    table[0][1] += f", {data['held_out']} images held out"
    for name, row in result["train"]["mixers"].items():
        numbers = [f"{row['bits_per_dim']:.3f}", f"{row['parameters']:,}"]
        table.append(
            [name, *numbers, f"{row['images_per_second']:.0f}", paper.get(name, NOTHING)[0]]
        )
    return table


def image_speed(result: Result) -> Cells:
    paper = PAPER[result["data"]]
    slowest = float(paper["softmax"][1])
    table = [
        ["", "images a second", "times softmax", "best batch", "measured", "paper: times softmax"]
    ]
    for name, row in result["throughput"]["methods"].items():
        theirs = paper.get(name.removesuffix(" recomputed"), NOTHING)[1]
        ratio = f"{float(theirs) / slowest:,.4g}" if theirs else ""
        numbers = [f"{row['images_per_second']:.4g}", f"{row['ratio']:,.4g}", str(row["batch"])]
        table.append([name, *numbers, row["measured"], ratio])
    return table


def speech(result: Result) -> Cells:
    table = [["", "phoneme error rate", "with a beam of 8", "seconds an epoch", "parameters"]]
    table[0] += ["paper: error rate, seconds"]
    for name, row in result["results"].items():
        rates = [f"{row[key]:.1%}" for key in ("error_rate", "error_rate_with_beam")]
        rate, seconds = PAPER["speech"].get(name, NOTHING)
        theirs = f"{rate} %, {seconds}" if rate else ""
        size = f"{row['parameters']:,}"
        table.append([name, *rates, f"{row['seconds_per_epoch']:.2f}", size, theirs])
    return table


def recall(result: Result) -> Cells:
    table = [["task", "variant", "accuracy", "differs by seed", "numbers of state"]]
    table[0] += ["ms a step", "over linear", "earns its cost"]
    for task, rows in result["summary"].items():
        for row in rows:
            cells = [task, row["variant"], f"{row['mean_accuracy']:.1%}", f"{row['spread']:.1%}"]
            cells += [f"{row['state']:,}", f"{row['milliseconds_per_step']:.1f}"]
            gain = f"{100 * row['gain']:+.1f} points" if "gain" in row else ""
            verdict = {True: "yes", False: "no", None: ""}[row.get("earns_its_cost")]
            table.append([*cells, gain, verdict])
    return table


def text(result: Result) -> Cells:
    length = result["length"]
    table = [["bits per byte, held out", f"rows of {length}", "read on and on", "parameters"]]
    table[0] += ["tokens a second, learning"]
    for name, row in result["mixers"].items():
        numbers = [f"{row[key]:.3f}" for key in ("bits_per_byte", "bits_per_byte_read_on")]
        numbers += [f"{row['parameters']:,}", f"{row['tokens_per_second']:,.0f}"]
        table.append([name, *numbers])
    return table + [[name, "", f"{b:.3f}", "", ""] for name, b in result["references"].items()]


def long_context(result: Result) -> Cells:
    table = [["", "right", "planned MB a device", "measured", "seconds"]]
    table[0] += ["streamed: right", "kB of state", "seconds", "largest difference"]
    for name, row in result["results"].items():
        once, turn = row["at_once"], row["streamed"]
        memory = [f"{once[key] / 1e6:.1f}" for key in ("planned_bytes", "peak_bytes")]
        cells = [name, f"{once['right']} of 16", *memory, f"{once['seconds']:.2f}"]
        cells += [f"{turn['right']} of 16", f"{turn['state_bytes'] / 1e3:.1f}"]
        table.append([*cells, f"{turn['seconds']:.2f}", f"{turn['largest_difference']:.1e}"])
    return table


TABLES: dict[str, Callable[[Result], Cells]] = {
    "copy_task": copy_task,
    "scaling": scaling,
    "mnist_train": image_quality,
    "mnist_throughput": image_speed,
    "cifar10_train": image_quality,
    "cifar10_throughput": image_speed,
    "speech": speech,
    "speech_synthetic": speech,
    "recall": recall,
    "text": text,
    "long_context": long_context,
}


def measured(result: Result) -> str:
    """How the numbers came about."""
    where = result["hardware"]
    settings = [f"{name} {result[name]}" for name in ("preset", "seed") if name in result]
    return (
        f"`{result['command']}`  \n{', '.join(settings)}; {where['device']}, jax {where['jax']}; "
        f"{where['date']}; {result['seconds'] / 60:.1f} minutes"
    )


def short(x: float) -> str:
    """Three digits, or all before the point."""
    return f"{x:.3g}" if x < 1000 else f"{x:,.0f}"


def markdown(cells: Cells) -> str:
    head, *rows = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([head, "|---" * len(cells[0]) + "|", *rows])


def fill(page: str, folder: Path = FOLDER) -> str:
    """The page with its tables made from the files of the folder."""

    def block(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        result = json.loads((folder / f"{name}.json").read_text())
        return f"{begin}{measured(result)}\n\n{markdown(TABLES[name](result))}\n{end}"

    return BLOCK.sub(block, page)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--collect", type=Path, metavar="RUNS", help="a folder of runs")
    args = parser.parse_args(arguments)
    if args.collect:
        found = {n: args.collect / s for n, s in SOURCES.items() if (args.collect / s).exists()}
        print(f"{len(found)} of {len(SOURCES)} files are in {args.collect}")
        for name, source in found.items():
            shutil.copy(source, FOLDER / name)
    PAGE.write_text(fill(PAGE.read_text()))


if __name__ == "__main__":
    main()
