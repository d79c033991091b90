"""Trains models to copy: symbols, a separator, and the same symbols again.

    python examples/copy_task.py

Transformers are RNNs (Katharopoulos et al. 2020, arXiv 2006.16236), section 4.1, asks so whether
linear attention converges like softmax, and LSH attention besides. Here the higher orders join
them. All models have the same sizes and see the same sequences; the loss is that of the copy.
`--preset paper` has the paper's sizes, for a GPU. A run killed at any moment goes on from its last
checkpoint when started again.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from training import Log, command, fit, hardware, radam, running_mean

from hla_jax.models import TransformerLM

matplotlib.use("Agg")
from matplotlib import pyplot as plt

MIXERS: dict[str, dict[str, Any]] = {
    "softmax": dict(mixer="softmax"),
    "linear": dict(mixer="linear"),
    "lsh-1": dict(mixer="reformer", num_rounds=1),
    "lsh-4": dict(mixer="reformer", num_rounds=4),
    "hla2": dict(mixer="hla2"),
    "ahla": dict(mixer="ahla"),
    "hla3-masked": dict(mixer="hla3", variant="masked"),
    "hla3-published": dict(mixer="hla3", variant="published"),
}
PRESETS = {
    "cpu": dict(length=16, batch=32, steps=3000, layers=2, heads=4, features=64)
    | dict(learning_rate=3e-3, drop_at=0.8),
    "paper": dict(length=128, batch=64, steps=10_000, layers=4, heads=8, features=256)
    | dict(learning_rate=1e-3, drop_at=0.3),
}
SYMBOLS = 10
SEPARATOR, PADDING = SYMBOLS, SYMBOLS + 1


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", default="cpu", choices=PRESETS)
    add("--mixers", nargs="+", default=list(MIXERS), choices=MIXERS, metavar="MIXER")
    add("--length", type=int, help="the largest number of symbols to copy")
    add("--batch", type=int, help="sequences of a step")
    add("--steps", type=int)
    add("--layers", type=int)
    add("--heads", type=int)
    add("--features", type=int)
    add("--learning-rate", type=float)
    add("--drop-at", type=float, help="the part of the steps after which it is a tenth")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/copy_task"), help="folder of the results")
    add("--checkpoint-every", type=int, default=500, metavar="STEPS")
    parser.set_defaults(**PRESETS[parser.parse_known_args(arguments)[0].preset])
    args = parser.parse_args(arguments)
    if args.length < 4:
        parser.error("--length must be at least 4")
    return args


def make_model(name: str, args: argparse.Namespace) -> TransformerLM:
    options = dict(MIXERS[name])
    if options["mixer"] in ("softmax", "reformer"):
        options["max_length"] = 2 * args.length
    if options["mixer"] == "reformer":
        options |= dict(num_buckets=8, chunk_size=args.length // 4)  # eight chunks a sequence
    return TransformerLM(
        SYMBOLS + 2,
        num_layers=args.layers,
        num_heads=args.heads,
        features=args.features,
        rngs=nnx.Rngs(args.seed),
        **options,
    )


def batch_at(
    step: int, args: argparse.Namespace, shortest: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Returns sequences [batch, 2 length + 1], and how many symbols each one copies, [batch]."""
    random = np.random.default_rng((args.seed, step))
    symbols = random.integers(SYMBOLS, size=(args.batch, args.length))
    counts = random.integers(shortest, args.length + 1, size=args.batch)
    n, place = counts[:, None], np.arange(2 * args.length + 1)
    source = np.where(place < n, place, place - n - 1)  # which symbol stands here
    tokens = np.take_along_axis(symbols, np.clip(source, 0, args.length - 1), axis=1)
    tokens = np.where(place == n, SEPARATOR, np.where(place > 2 * n, PADDING, tokens))
    return tokens.astype(np.int32), counts


def read(
    model: TransformerLM, batch: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns logits, the tokens to come, and which of these are of the copy."""
    tokens, counts = batch
    place = jnp.arange(tokens.shape[1] - 1)
    before, after = counts[:, None], 2 * counts[:, None]
    logits, _ = model(tokens[:, :-1], mask=place < after)
    return logits, tokens[:, 1:], (place >= before) & (place < after)


def copy_loss(
    model: TransformerLM, batch: tuple[jax.Array, jax.Array], key: jax.Array
) -> jax.Array:
    logits, targets, copied = read(model, batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.mean(losses, where=copied)


@nnx.jit
def accuracy(model: TransformerLM, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The part of the copied symbols that are the likeliest ones to the model."""
    logits, targets, copied = read(model, batch)
    return jnp.mean(jnp.argmax(logits, axis=-1) == targets, where=copied)


def train(name: str, args: argparse.Namespace) -> tuple[Log, dict[str, Any]]:
    """Returns what was logged, and a row of the results."""
    model = make_model(name, args)
    size = sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    print(f"{name}: {size:,} parameters")
    sizes = ["length", "batch", "layers", "heads", "features", "learning_rate", "drop_at"]
    log = fit(
        model,
        copy_loss,
        lambda step: batch_at(step, args),
        optimiser=radam(args.learning_rate, args.steps, drop_at=args.drop_at),
        steps=args.steps,
        out=args.out / name,
        settings={"mixer": name} | {size: getattr(args, size) for size in sizes},
        checkpoint_every=args.checkpoint_every,
        seed=args.seed,
    )
    unseen = batch_at(args.steps, args, shortest=args.length)
    return log, {
        "loss": float(running_mean(log.losses)[1][-1]),
        "accuracy": float(accuracy(model, unseen)),
        "parameters": size,
        "milliseconds_per_step": 1000 * log.seconds_per_step,
        "seconds": float(log.seconds.sum()),
    }


def plot(path: Path, logs: dict[str, Log], args: argparse.Namespace) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, log in logs.items():
        axes.semilogy(*running_mean(log.losses), lw=1.2, label=name)
    title = f"Copying up to {args.length} symbols of {SYMBOLS} kinds"
    axes.set(xlabel="step", ylabel="loss of the copy, nats, running mean", title=title)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    logs, rows = {}, {}
    for name in args.mixers:
        logs[name], rows[name] = train(name, args)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "checkpoint_every")}
    results = settings | {
        "command": command(),
        "data": f"random sequences of {SYMBOLS} symbols",
        "hardware": hardware(),
        "seconds": sum(row["seconds"] for row in rows.values()),
        "results": rows,
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=2))
    plot(args.out / "copy_task.png", logs, args)
    print(f"\n{'':16}{'loss, nats':>12}{'accuracy':>10}{'ms/step':>9}  (accuracy at full length)")
    for name, row in rows.items():
        loss, right, time = (row[k] for k in ("loss", "accuracy", "milliseconds_per_step"))
        print(f"{name:16}{loss:12.4f}{right:10.3f}{time:9.1f}")
    print(f"curves in {args.out / 'copy_task.png'}, numbers in {args.out / 'results.json'}")


if __name__ == "__main__":
    main()
