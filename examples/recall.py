"""Which operator remembers best: associative recall, induction heads and copying, all synthetic.

    python examples/recall.py --preset cpu

Every model has two layers and the same number of parameters. Two comparisons: "equal state", where
the width of queries and keys is chosen so that all layers but softmax's carry about as many numbers
from token to token, and "equal width", where it is the same for all. Every layer sees the token
before beside each token. Recall is learned by every operator with and without decay and
normalising; the other tasks with decay, not normalised. A run killed at any moment goes on from its
last checkpoint when started again.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from training import adam, command, fit, hardware

import hla_jax as hla

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PADDING, MARKER, FIRST = 0, 1, 2  # tokens; those from FIRST on are symbols
UNSCORED = -1  # the target of a token that asks for nothing
HELD_OUT = 2**31  # a step that no training reaches

Row = tuple[np.ndarray, np.ndarray]


# Tasks: a row of tokens, and what each token should predict


def recall(random: np.random.Generator, size: int, vocabulary: int) -> Row:
    """Keys with their values, then all the keys again: each asks for its value.

    Source: Zoology (Arora et al. 2023, arXiv 2312.04927), section 3.
    """
    half = (vocabulary - FIRST) // 2
    keys = FIRST + random.choice(half, size, replace=False)
    values = FIRST + half + random.integers(half, size=size)
    order = random.permutation(size)
    tokens = np.concatenate([np.stack([keys, values], axis=1).ravel(), keys[order]])
    return tokens, np.concatenate([np.full(2 * size, UNSCORED), values[order]])


def induction(random: np.random.Generator, size: int, vocabulary: int) -> Row:
    """Random symbols with a marker among them; the marker again asks for what followed it."""
    tokens = random.integers(FIRST, vocabulary, size=size + 1)
    place = random.integers(size - 1)
    tokens[[place, size]] = MARKER
    return tokens, np.append(np.full(size, UNSCORED), tokens[place + 1])


def copying(random: np.random.Generator, size: int, vocabulary: int) -> Row:
    """Random symbols, a marker, and the same symbols again."""
    symbols = random.integers(FIRST, vocabulary, size=size)
    tokens = np.concatenate([symbols, [MARKER], symbols[:-1]])
    return tokens, np.concatenate([np.full(size, UNSCORED), symbols])


TASKS: dict[str, Callable[[np.random.Generator, int, int], Row]] = {
    "recall": recall,
    "induction": induction,
    "copying": copying,
}
SIZES = {"recall": "pairs", "induction": "symbols", "copying": "symbols"}


def batch(
    task: str, seed: Sequence[int], sizes: Sequence[int], rows: int, longest: int, vocabulary: int
) -> Row:
    """Rows of random sizes, padded as if all had the longest one; a function of its arguments."""
    random = np.random.default_rng(seed)
    T = len(TASKS[task](random, longest, vocabulary)[0])
    tokens, targets = np.full((rows, T), PADDING), np.full((rows, T), UNSCORED)
    for i, size in enumerate(random.choice(sizes, rows)):
        row, wanted = TASKS[task](random, size, vocabulary)
        tokens[i, : len(row)], targets[i, : len(row)] = row, wanted
    return tokens.astype(np.int32), targets.astype(np.int32)


# What is compared


class Preset(NamedTuple):
    sizes: dict[str, tuple[int, ...]]  # trained on; measured at twice the largest too
    vocabulary: int
    features: int
    heads: int
    steps: int
    rows: int  # of a step
    rate: float  # Adam's, at its peak
    held_out: int  # rows measured at each size
    seeds: int


PRESETS = {
    "cpu": Preset(
        sizes=dict(recall=(4, 8, 16), induction=(8, 16, 32), copying=(4, 8, 16)),
        vocabulary=FIRST + 64,
        features=32,
        heads=2,
        steps=1000,
        rows=32,
        rate=1e-2,
        held_out=128,
        seeds=2,
    ),
    "gpu": Preset(
        sizes=dict(
            recall=(8, 16, 32, 64, 128, 256),
            induction=(32, 64, 128, 256, 512),
            copying=(16, 32, 64, 128, 256),
        ),
        vocabulary=FIRST + 8192,
        features=128,
        heads=4,
        steps=20_000,
        rows=128,
        rate=3e-3,
        held_out=128,
        seeds=3,
    ),
}

# Each operator's layer, and how wide queries and keys are, in widths of the values, at equal state.
# With values of width E it is 2 E^2 numbers a head for all but third order, which has 3% more.
OPERATORS: dict[str, tuple[type[hla.nn.Mixer], dict[str, Any], float]] = {
    "linear": (hla.nn.LinearAttention, {}, 2.0),
    "hla2": (hla.nn.HLA2, {}, 1.0),
    "hla2 unmasked": (hla.nn.HLA2, dict(masked=False), 1.0),
    "ahla": (hla.nn.AHLA, {}, 1.0),
    "hla3": (hla.nn.HLA3, {}, 0.75),
    "softmax": (hla.nn.SoftmaxAttention, {}, 1.0),
}
COLOURS = {operator: f"C{i}" for i, operator in enumerate(OPERATORS)}
COMPARISONS = ("equal state", "equal width")


class Run(NamedTuple):
    task: str
    comparison: str
    operator: str
    decay: bool
    normalize: bool
    seed: int

    @property
    def variant(self) -> str:
        """The operator with its options, in words."""
        if self.operator == "softmax":
            return self.operator
        decay = "decay" if self.decay else "no decay"
        return f"{self.operator}, {decay}{', normalised' if self.normalize else ''}"


def runs(args: argparse.Namespace) -> list[Run]:
    """Everything that is trained, in this order; softmax has no options and no fixed state."""
    flags = list(itertools.product((True, False), (False, True)))
    chosen = []
    for task, seed in itertools.product(args.tasks, range(args.seeds)):
        for operator in args.operators:
            if operator == "softmax":
                chosen.append(Run(task, "equal width", operator, False, True, seed))
                continue
            for decay, normalize in flags if task == "recall" else flags[:1]:
                chosen.append(Run(task, "equal state", operator, decay, normalize, seed))
            if task == "recall":
                chosen.append(Run(task, "equal width", operator, *flags[0], seed))
    return chosen


class Shifted(nnx.Module):
    """A layer that gets half of its channels from the token before, for rows read in one call.

    Every model has it, so that a value meets its key in one token and the layers differ by what
    they remember. Without, two layers must find out first how to look one token back.
    """

    def __init__(self, layer: hla.nn.Mixer):
        self.layer, self.causal = layer, layer.causal

    def __call__(self, x: jax.Array, *rest: Any) -> tuple[jax.Array, Any]:
        now, before = jnp.split(x, 2, axis=-1)
        before = jnp.pad(before[:, :-1], ((0, 0), (1, 0), (0, 0)))
        return self.layer(jnp.concatenate([now, before], axis=-1), *rest)

    def init_state(self, batch_size: int) -> hla.nn.MixerState:
        return self.layer.init_state(batch_size)


def make_model(run: Run, preset: Preset, max_length: int) -> hla.models.TransformerLM:
    layer, options, widths = OPERATORS[run.operator]
    F, H = preset.features, preset.heads
    D = round(widths * F / H) if run.comparison == "equal state" else F // H
    if run.operator == "softmax":
        options = options | dict(max_length=max_length)
    else:
        features = hla.feature_maps.elu_plus_one if run.normalize else None
        options = options | dict(normalize=run.normalize, feature_map=features)
        options["decay"] = "learned" if run.decay else None
    return hla.models.TransformerLM(
        preset.vocabulary,
        num_layers=2,
        num_heads=H,
        features=F,
        mixer=lambda **all_options: Shifted(layer(**all_options)),
        head_dim=D,
        value_head_dim=F // H,
        mlp_features=5 * F - H * D,  # the MLP gives what queries and keys take
        rngs=nnx.Rngs(run.seed),
        **options,
    )


# Training and measuring


def loss(model: hla.models.TransformerLM, rows: Row, key: jax.Array) -> jax.Array:
    """The mean cross-entropy of what was asked for."""
    tokens, targets = rows
    logits, _ = model(tokens)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    return jnp.mean(losses, where=targets != UNSCORED)


@nnx.jit
def accuracy(model: hla.models.TransformerLM, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """How much of what was asked for is the most likely token."""
    right = model(tokens)[0].argmax(-1) == targets
    return jnp.mean(right, where=targets != UNSCORED)


def train(run: Run, preset: Preset, out: Path) -> dict[str, Any]:
    """Trains a model, or takes up what is left of that; returns the run and what it measured."""
    trained = preset.sizes[run.task]
    measured = (*trained, 2 * trained[-1])
    V = preset.vocabulary

    def batches(step: int) -> Row:
        return batch(run.task, (run.seed, step), trained, preset.rows, trained[-1], V)

    # The same rows for all that is compared.
    held_out = {
        str(n): batch(run.task, (HELD_OUT, run.seed), (n,), preset.held_out, measured[-1], V)
        for n in measured
    }
    model = make_model(run, preset, max_length=held_out[str(trained[0])][0].shape[1])
    log = fit(
        model,
        loss,
        batches,
        optimiser=adam(preset.rate, preset.steps),
        steps=preset.steps,
        out=out / "-".join(map(str, run)).replace(" ", "_"),
        settings={k: v for k, v in preset._asdict().items() if k != "seeds"} | run._asdict(),
        evaluate=lambda model: {n: float(accuracy(model, *rows)) for n, rows in held_out.items()},
        evaluate_every=preset.steps,
        checkpoint_every=500,
        seed=run.seed,
    )
    last = {n: log.evaluations[-1][n] for n in held_out}
    return run._asdict() | {
        "variant": run.variant,
        "parameters": sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param))),
        "state": sum(x.size for x in jax.tree.leaves(model.init_state(1)[0].memory)),
        "final_loss": float(log.losses[-1]),
        "milliseconds_per_step": 1000 * log.seconds_per_step,
        "accuracy": last,
        "mean_accuracy": float(np.mean(list(last.values()))),
    }


# Saying what came out


def select(results: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [r for r in results if all(r[name] == value for name, value in wanted.items())]


def summary(results: list[dict[str, Any]], task: str) -> list[dict[str, Any]]:
    """Each operator's best variant at equal state, and whether it earns its cost.

    It does if its accuracy, the mean over sizes and seeds, is above that of linear attention by
    more than that differs between the seeds of either; one seed cannot tell.
    """

    def mean(group: list[dict[str, Any]], name: str) -> float:
        return float(np.mean([r[name] for r in group]))

    def spread(group: list[dict[str, Any]]) -> float:
        return float(np.ptp([r["mean_accuracy"] for r in group]))

    best = {}
    for operator in OPERATORS:
        comparison = "equal width" if operator == "softmax" else "equal state"
        group = select(results, task=task, operator=operator, comparison=comparison)
        variants = [select(group, variant=v) for v in dict.fromkeys(r["variant"] for r in group)]
        if variants:
            best[operator] = max(variants, key=lambda v: mean(v, "mean_accuracy"))
    rows = []
    for operator, group in best.items():
        row = {"variant": group[0]["variant"], "state": group[0]["state"]}
        row |= {name: mean(group, name) for name in ("mean_accuracy", "milliseconds_per_step")}
        row |= {"spread": spread(group), "parameters": group[0]["parameters"]}
        if "linear" in best and operator not in ("linear", "softmax"):
            row["gain"] = row["mean_accuracy"] - mean(best["linear"], "mean_accuracy")
            linear = mean(best["linear"], "milliseconds_per_step")
            row["times_linear"] = row["milliseconds_per_step"] / linear
            if len(group) > 1:
                row["earns_its_cost"] = row["gain"] > max(row["spread"], spread(best["linear"]))
        rows.append(row)
    return rows


VERDICTS = {True: "earns its cost", False: "does not earn its cost", None: "one seed: unknown"}


def report(results: list[dict[str, Any]], preset: str, where: dict[str, Any]) -> None:
    print(f"\npreset {preset}, synthetic data, {where['device']}, {where['date']}")
    for task in dict.fromkeys(r["task"] for r in results):
        print(f"\n{task}: accuracy over all numbers of {SIZES[task]}, differs by seed, state of a")
        print("layer in numbers (softmax: of the longest row), parameters, ms a step")
        for row in summary(results, task):
            numbers = f"{row['mean_accuracy']:7.1%}{row['spread']:7.1%}{row['state']:8,}"
            numbers += f"{row['parameters']:10,}{row['milliseconds_per_step']:8.1f}  "
            if "gain" in row:
                numbers += f"{row['gain']:+.1%} for {row['times_linear']:.1f} times linear's time: "
                numbers += VERDICTS[row.get("earns_its_cost")]
            print(f"  {row['variant']:34}{numbers}")
    print("\nTo earn its cost: to be above linear attention at equal state and parameters by more")
    print("than seeds differ. Of each operator the best variant is shown; all learn at one rate.")


def draw(path: Path, results: list[dict[str, Any]], preset: Preset, title: str) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(15, 8), layout="constrained")
    panels = [("recall", comparison) for comparison in COMPARISONS]
    panels += [(task, "equal state") for task in ("induction", "copying")]
    for panel, (task, comparison) in zip(axes.flat, panels, strict=False):
        draw_curves(panel, results, task, comparison)
        panel.axvline(preset.sizes[task][-1], color="grey", lw=0.8, ls=":")
        panel.set(title=f"{task}, {comparison}", xlabel=f"{SIZES[task]} (dotted: longest trained)")
    draw_variants(axes[1, 1], results)
    draw_costs(axes[1, 2], results)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def draw_curves(panel: Any, results: list[dict[str, Any]], task: str, comparison: str) -> None:
    """Accuracy against size with decay, not normalised: the mean, and all seeds as a band."""
    for operator, colour in COLOURS.items():
        plain = dict(comparison=comparison, decay=True, normalize=False)
        which = plain if operator != "softmax" else {}
        group = select(results, task=task, operator=operator, **which)
        if not group:
            continue
        sizes = [int(n) for n in group[0]["accuracy"]]
        values = np.array([list(r["accuracy"].values()) for r in group])
        label = f"{operator}, state {group[0]['state']:,}"
        panel.plot(sizes, values.mean(0), "o-", color=colour, ms=4, label=label)
        panel.fill_between(sizes, values.min(0), values.max(0), color=colour, alpha=0.15)
    panel.set_xscale("log", base=2)
    panel.set(ylabel="accuracy", ylim=(-0.02, 1.02))
    if panel.has_data():
        panel.legend(fontsize="small")


def draw_variants(panel: Any, results: list[dict[str, Any]]) -> None:
    """Recall's mean accuracy at equal state, by operator, decay and normalising."""
    group = select(results, task="recall", comparison="equal state")
    names = sorted({r["variant"] for r in group}, reverse=True)
    for i, name in enumerate(names):
        values = [r["mean_accuracy"] for r in select(group, variant=name)]
        panel.plot(values, [i] * len(values), "o", color=COLOURS[name.split(",")[0]], alpha=0.7)
    panel.set_yticks(range(len(names)), names, fontsize="x-small")
    panel.set(title="recall, equal state, variants", xlabel="mean accuracy, a point a seed")


def draw_costs(panel: Any, results: list[dict[str, Any]]) -> None:
    """Recall's mean accuracy against the time of a step: best variants."""
    for row in summary(results, "recall"):
        colour = COLOURS[row["variant"].split(",")[0]]
        x, y = row["milliseconds_per_step"], row["mean_accuracy"]
        panel.errorbar(x, y, row["spread"] / 2, fmt="o", color=colour, label=row["variant"])
    panel.set(title="recall, cost", xlabel="milliseconds a step", ylabel="mean accuracy")
    panel.set_xlim(left=0)
    if panel.has_data():
        panel.legend(fontsize="x-small")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", default="cpu", choices=PRESETS)
    add("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    add("--operators", nargs="+", default=list(OPERATORS), choices=OPERATORS)
    add("--seeds", type=int, help="how many (default: the preset's)")
    add("--steps", type=int, help="of training (default: the preset's)")
    add("--out", type=Path, help="folder of the results (default runs/recall-PRESET)")
    args = parser.parse_args(arguments)
    preset = PRESETS[args.preset]
    args.seeds = args.seeds or preset.seeds
    preset = preset._replace(steps=args.steps or preset.steps, seeds=args.seeds)
    out = args.out or Path("runs") / f"recall-{args.preset}"

    start, results, where = time.perf_counter(), [], hardware()
    plan = runs(args)
    for i, run in enumerate(plan, 1):
        print(f"{i} of {len(plan)}: {run.task}, {run.comparison}, {run.variant}, seed {run.seed}")
        results.append(train(run, preset, out))
    written = {
        "command": command(),
        "preset": args.preset,
        "data": "synthetic, drawn from the seeds",
        "hardware": where,
        "settings": preset._asdict(),
        "seconds": time.perf_counter() - start,
        "summary": {task: summary(results, task) for task in args.tasks},
        "runs": results,
    }
    (out / "results.json").write_text(json.dumps(written, indent=2))
    title = f"preset {args.preset}, synthetic data, {where['device']}, {where['date']}"
    draw(out / "recall.png", results, preset, title)
    report(results, args.preset, where)
    print(f"curves in {out / 'recall.png'}, numbers in {out / 'results.json'}")


if __name__ == "__main__":
    main()
