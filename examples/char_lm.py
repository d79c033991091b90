"""Trains a byte-level language model, measures it, and writes with it.

    python examples/char_lm.py --mixer hla2
    python examples/char_lm.py --compare softmax linear hla2 ahla hla3

The text is the Python documentation that comes with Python, or any `--text FILE`. The last tenth is
held out. A run killed at any moment goes on from its last checkpoint when started again.

`--compare` trains several models on the same batches, and gives each MLPs as wide as makes it have
as many parameters as the first one. `--preset paper` has the sizes of the 12-layer model in
Character-Level Language Modeling with Deeper Self-Attention (Al-Rfou et al. 2018, arXiv
1808.04444), for a GPU; options given beside it go first.
"""

import argparse
import bz2
import gzip
import json
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from training import Log, command, fit, hardware, muon, running_mean

from hla_jax.attention import patterns
from hla_jax.models import TransformerLM, generate

matplotlib.use("Agg")
from matplotlib import pyplot as plt

WINDOW = 128  # decoding steps timed at each position

# What each mixer is told, for rows of 256 bytes; those with max_length have a cache of so many.
CACHE = dict(max_length=4096)
MIXERS: dict[str, dict[str, Any]] = {
    "linear": {},
    "hla2": {},
    "ahla": {},
    "hla3": {},
    "softmax": CACHE,
    "flash": CACHE,
    "mla": CACHE | dict(kv_rank=32, rotary_dim=16),
    "sliding_window": dict(window=64),
    "strided": CACHE | dict(mixer="sparse", pattern=patterns.strided(16)),
    "fixed": CACHE | dict(mixer="sparse", pattern=patterns.fixed(16, summary=2)),
    "longformer": CACHE | dict(window=32, global_positions=(0, 1)),
    "big_bird": CACHE | dict(window=32, num_random=2, block_size=16),
    "performer": dict(num_features=64),
    "reformer": CACHE | dict(num_buckets=16, num_rounds=2, chunk_size=32),
}

COMPARED = ["softmax", "linear", "hla2", "ahla", "hla3"]
PRESETS = {
    "cpu": dict(steps=350, batch=8, length=256, layers=3, heads=4, features=128),
    "paper": dict(steps=20_000, batch=16, length=512, layers=12, heads=8, features=512),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", default="cpu", choices=PRESETS)
    add("--mixer", default="hla2", choices=MIXERS)
    help = f"compare these instead (without a name: {' '.join(COMPARED)})"
    add("--compare", nargs="*", choices=MIXERS, metavar="MIXER", help=help)
    add("--text", type=Path, help="a file to learn instead of Python's documentation")
    add("--steps", type=int)
    add("--batch", type=int, help="rows of a step")
    add("--length", type=int, help="bytes of a row")
    add("--layers", type=int)
    add("--heads", type=int)
    add("--features", type=int)
    add("--mlp-features", type=int, help="width inside the MLPs (default 4 FEATURES)")
    help = "of the computation; parameters are float32"
    add("--dtype", default="float32", choices=["float32", "bfloat16"], help=help)
    add("--learning-rate", type=float, default=0.02, help="of Muon; Adam's is a fifth")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="folder of the results (default runs/char_lm-MIXER or -compare)")
    add("--checkpoint-every", type=int, default=100, metavar="STEPS")
    add("--prompt", default="The ", help="what the generated text starts with")
    positions = [64, 512, 1024, 2048, 3072, 4096]
    add("--positions", type=int, nargs="+", default=positions, help="where decoding is timed")
    parser.set_defaults(**PRESETS[parser.parse_known_args(arguments)[0].preset])
    args = parser.parse_args(arguments)
    if args.text and not args.text.is_file():
        parser.error(f"--text: there is no file {args.text}")
    if args.text and args.text.stat().st_size < 2 * args.length:
        parser.error(f"--text: {args.text} is shorter than two rows of {args.length} bytes")
    if args.compare == []:
        args.compare = COMPARED
    name = "compare" if args.compare else args.mixer
    args.out = args.out or Path("runs") / f"char_lm-{name}"
    return args


# Data


def load_text(path: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes to learn and those held out, the last tenth."""
    if path is None:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        text = path.read_bytes()
    data = np.frombuffer(text, np.uint8)
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def batch_at(data: np.ndarray, step: int, args: argparse.Namespace) -> np.ndarray:
    """Returns a step's rows, [batch, length + 1], from seed and step alone: nothing to save."""
    random = np.random.default_rng((args.seed, step))
    starts = random.integers(len(data) - args.length, size=args.batch)
    return data[starts[:, None] + np.arange(args.length + 1)].astype(np.int32)


def reference_figures(train: np.ndarray, held_out: np.ndarray) -> dict[str, float]:
    """Bits per byte of the held-out text by simpler means."""
    frequency = np.bincount(train, minlength=256) + 1.0
    frequency /= frequency.sum()
    text, n = held_out.tobytes(), len(held_out)
    return {
        "unigram (counted on the training text)": float(-np.log2(frequency[held_out]).mean()),
        "gzip -9 (held-out text alone)": 8 * len(gzip.compress(text, 9)) / n,
        "bz2 -9 (held-out text alone)": 8 * len(bz2.compress(text, 9)) / n,
    }


# Training


def make_model(args: argparse.Namespace, mixer: str, max_length: int = 4096) -> TransformerLM:
    options = {"mixer": mixer} | MIXERS[mixer]
    if "max_length" in options:
        options["max_length"] = max_length
    return TransformerLM(
        256,
        num_layers=args.layers,
        num_heads=args.heads,
        features=args.features,
        mlp_features=args.mlp_features,
        dtype=args.dtype,
        rngs=nnx.Rngs(args.seed),
        **options,
    )


def num_parameters(args: argparse.Namespace, mixer: str) -> int:
    model = nnx.eval_shape(lambda: make_model(args, mixer))
    return sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param)))


def train(model: TransformerLM, data: np.ndarray, args: argparse.Namespace) -> Log:
    """Trains the model, from the newest checkpoint on; the losses are in bits per byte."""

    def loss(model: TransformerLM, batch: jax.Array, key: jax.Array) -> jax.Array:
        logits, _ = model(batch[:, :-1])
        logits = logits.astype(jnp.float32)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        return nats.mean() / math.log(2)

    names = ["mixer", "text", "batch", "length", "layers", "heads", "features", "mlp_features"]
    names += ["dtype", "learning_rate"]
    return fit(
        model,
        loss,
        lambda step: batch_at(data, step, args),
        optimiser=muon(args.learning_rate, args.steps),
        steps=args.steps,
        out=args.out,
        settings={name: getattr(args, name) for name in names},
        checkpoint_every=args.checkpoint_every,
        seed=args.seed,
    )


# Writing and measuring


def write(model: TransformerLM, args: argparse.Namespace) -> str:
    """Continues the prompt."""
    prompt = np.frombuffer(args.prompt.encode(), np.uint8)[None]
    key = jax.random.key(args.seed)
    new = generate(model, prompt, max_new_tokens=300, key=key, temperature=0.7)
    return args.prompt + bytes(np.asarray(new[0], np.uint8)).decode(errors="replace")


def held_out_bits(
    model: TransformerLM, text: np.ndarray, args: argparse.Namespace, *, read_on: bool = True
) -> float:
    """Bits per byte of the text, cut into `batch` rows, each read on and on with its state.

    Into more, where a row would be longer than a cache holds. Without `read_on` every `length`
    bytes begin anew, as they do in training.
    """
    longest = (model.max_length or len(text)) // args.length * args.length
    count = max(args.batch, -(-(len(text) - 1) // max(longest, 1)))
    columns = (len(text) - 1) // count
    rows = np.stack([text[i * columns : (i + 1) * columns + 1] for i in range(count)])
    windows = -(-columns // args.length)
    padded = np.pad(rows.astype(np.int32), ((0, 0), (0, windows * args.length - columns)))
    real = np.arange(windows * args.length) < columns

    @nnx.jit
    def bits(model: TransformerLM, state: Any, tokens: np.ndarray, targets: np.ndarray) -> Any:
        logits, state = model(tokens, state)
        logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets), state

    state, total = model.init_state(count), 0.0
    for i in range(windows):
        part = slice(i * args.length, (i + 1) * args.length)
        shifted = slice(part.start + 1, part.stop + 1)
        if not read_on:
            state = model.init_state(count)
        loss, state = bits(model, state, padded[:, part], padded[:, shifted])
        total += float((np.asarray(loss) * real[part]).sum())
    return total / math.log(2) / (columns * count)


@nnx.jit
def step_logits(model: TransformerLM, tokens: jax.Array) -> jax.Array:
    """The logits of [1, T] tokens, computed one step at a time."""

    def step(state: Any, token: jax.Array) -> Any:
        logits, state = model(token[None, None], state)
        return state, logits[0, 0]

    return jax.lax.scan(step, model.init_state(1), tokens[0])[1][None]


def step_error(model: TransformerLM, tokens: jax.Array) -> float:
    """RMS of the difference between parallel and step logits, over that of the logits."""
    parallel, step = nnx.jit(lambda model: model(tokens)[0])(model), step_logits(model, tokens)
    return float(jnp.sqrt(jnp.mean((parallel - step) ** 2) / jnp.mean(parallel**2)))


@partial(jax.jit, static_argnames="graph", donate_argnames="state")
def decode(graph: nnx.GraphDef[TransformerLM], params: nnx.State, state: Any) -> Any:
    """Writes WINDOW tokens from a state, greedily."""
    model = nnx.merge(graph, params)

    def step(carry: Any, _: None) -> Any:
        state, token = carry
        logits, state = model(token, state)
        return (state, jnp.argmax(logits, axis=-1).astype(jnp.int32)), None

    return jax.lax.scan(step, (state, jnp.zeros((1, 1), jnp.int32)), None, length=WINDOW)[0]


def decode_times(args: argparse.Namespace, mixer: str) -> list[float]:
    """Microseconds a token takes at each of the positions.

    A model with a cache gets one just large enough for each. What a state holds does not change
    the time, so an empty one is declared to be at the position.
    """

    def run(model: TransformerLM, position: int) -> float:
        state = tuple(
            layer._replace(position=jnp.full((1,), position, jnp.int32))
            for layer in model.init_state(1)
        )
        graph, params = nnx.split(model)
        jax.block_until_ready(state)
        start = time.perf_counter()
        jax.block_until_ready(decode(graph, params, state))
        return (time.perf_counter() - start) / WINDOW * 1e6

    times = []
    for position in args.positions:
        model = make_model(args, mixer, max_length=position + WINDOW)
        times.append(min([run(model, position) for _ in range(6)][1:]))  # the first compiles
    return times


def plot(
    path: Path,
    losses: np.ndarray,
    figures: dict[str, float],
    positions: list[int],
    times: dict[str, list[float]],
) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot(losses, lw=0.8, label="training")
    for i, (name, value) in enumerate(figures.items()):
        left.axhline(value, ls="--", color=f"C{i + 1}", label=f"held out: {name}, {value:.2f}")
    left.set(xlabel="step", ylabel="bits per byte", ylim=(0, 8), title="Loss")
    left.legend(fontsize="small")
    for name, values in times.items():
        right.plot(positions, values, "o-", label=name)
    right.set(xlabel="position", ylabel="microseconds per token", title="Decoding")
    right.set_ylim(bottom=0)
    right.legend()
    figure.savefig(path, dpi=120)


def report(results: dict[str, Any]) -> None:
    """Prints everything that was measured."""
    print(f"\n{results['mixer']}: {results['parameters']:,} parameters, {results['steps']} steps")
    for name, seconds in results["seconds"].items():
        print(f"  {name:<44}{seconds:9.1f} s")
    print(f"  {'training speed':<44}{results['tokens_per_second']:9,.0f} tokens/s")
    print(f"  {'step logits against parallel, RMS ratio':<44}{results['step_error']:9.1e}")
    print("held-out bits per byte")
    for name, bits in results["bits_per_byte"].items():
        print(f"  {name:<44}{bits:9.3f}")
    print("decoding, microseconds per token")
    print(f"  {'position':<20}" + "".join(f"{p:8}" for p in results["positions"]))
    for name, times in results["decode_microseconds"].items():
        print(f"  {name:<20}" + "".join(f"{t:8.0f}" for t in times))


def about(args: argparse.Namespace) -> dict[str, Any]:
    """What results are of."""
    names = ["preset", "steps", "batch", "length", "layers", "heads", "features", "dtype", "seed"]
    text = str(args.text) if args.text else "pydoc_data.topics"
    settings = {name: getattr(args, name) for name in names}
    return settings | {"command": command(), "text": text, "hardware": hardware()}


def run(args: argparse.Namespace) -> None:
    """Trains one model, writes with it and measures all."""
    clock = {"start": time.perf_counter()}
    train_text, held_out = load_text(args.text)
    model, size = make_model(args, args.mixer), num_parameters(args, args.mixer)
    print(f"{args.mixer}: {size:,} parameters, {len(train_text):,} bytes to learn")

    log = train(model, train_text, args)
    clock["training, compilation included"] = time.perf_counter()

    bits = {args.mixer: held_out_bits(model, held_out, args)}
    bits |= reference_figures(train_text, held_out)
    error = step_error(model, jnp.asarray(held_out[None, : args.length], jnp.int32))
    clock["held-out text, parallel against steps"] = time.perf_counter()

    print("\n" + write(model, args))
    clock["generating"] = time.perf_counter()

    mixers = dict.fromkeys([args.mixer, "softmax"])
    times = {mixer: decode_times(args, mixer) for mixer in mixers}
    plot(args.out / "char_lm.png", log.losses, bits, args.positions, times)
    clock["decoding times and plot"] = time.perf_counter()

    ends = list(clock.values())
    results = about(args) | {
        "mixer": args.mixer,
        "parameters": size,
        "final_loss": float(log.losses[-1]),
        "tokens_per_second": args.batch * args.length / log.seconds_per_step,
        "bits_per_byte": bits,
        "step_error": error,
        "positions": args.positions,
        "decode_microseconds": times,
        "seconds": {
            name: end - begin
            for name, begin, end in zip(list(clock)[1:], ends, ends[1:], strict=False)
        }
        | {"everything": ends[-1] - ends[0]},
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=2))
    report(results)
    print(f"curves in {args.out / 'char_lm.png'}, numbers in {args.out / 'results.json'}")


# Comparing


def equal_sizes(args: argparse.Namespace) -> dict[str, argparse.Namespace]:
    """Each mixer's settings: MLPs so wide that the parameters are as many as the first one's."""

    def settings(mixer: str, width: int) -> argparse.Namespace:
        changed = dict(mixer=mixer, mlp_features=width, out=args.out / mixer)
        return argparse.Namespace(**vars(args) | changed)

    width = args.mlp_features or 4 * args.features
    sizes = {m: num_parameters(settings(m, width), m) for m in args.compare}
    target, per_width = sizes[args.compare[0]], 2 * args.layers * args.features
    return {m: settings(m, width + round((target - n) / per_width)) for m, n in sizes.items()}


def compare(args: argparse.Namespace) -> None:
    """Trains each mixer, and tells their bits per byte of the held-out text."""
    train_text, held_out = load_text(args.text)
    table, curves = {}, {}
    for mixer, own in equal_sizes(args).items():
        size = num_parameters(own, mixer)
        print(f"{mixer}: {size:,} parameters, MLPs of width {own.mlp_features}")
        model = make_model(own, mixer)
        log = train(model, train_text, own)
        curves[mixer] = log.losses
        table[mixer] = {
            "bits_per_byte": held_out_bits(model, held_out, own, read_on=False),
            "bits_per_byte_read_on": held_out_bits(model, held_out, own),
            "parameters": size,
            "mlp_features": own.mlp_features,
            "final_loss": float(log.losses[-1]),
            "tokens_per_second": args.batch * args.length / log.seconds_per_step,
            "seconds": float(log.seconds.sum()),
        }
    results = about(args) | {
        "training_tokens": args.steps * args.batch * args.length,
        "seconds": sum(row["seconds"] for row in table.values()),
        "references": reference_figures(train_text, held_out),
        "mixers": table,
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=2))
    plot_comparison(args.out / "compare.png", curves, table)
    print(f"\n{results['training_tokens']:,} training tokens, held-out bits per byte: of rows as")
    print("long as in training, and read on and on")
    print(f"  {'mixer':<44}{'rows':>9}{'on and on':>11}{'parameters':>12}{'tokens/s':>10}")
    for name, row in sorted(table.items(), key=lambda item: item[1]["bits_per_byte"]):
        bits, on = row["bits_per_byte"], row["bits_per_byte_read_on"]
        size, speed = row["parameters"], row["tokens_per_second"]
        print(f"  {name:<44}{bits:9.3f}{on:11.3f}{size:12,}{speed:10,.0f}")
    for name, bits in results["references"].items():
        print(f"  {name:<44}{bits:9.3f}")
    print(f"curves in {args.out / 'compare.png'}, numbers in {args.out / 'results.json'}")


def plot_comparison(
    path: Path, curves: dict[str, np.ndarray], table: dict[str, dict[str, Any]]
) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for mixer, losses in curves.items():
        label = f"{mixer}, held out {table[mixer]['bits_per_byte']:.3f}"
        axes.plot(*running_mean(losses), lw=1, label=label)
    axes.set(xlabel="step", ylabel="bits per byte, running mean", title="Training")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    if args.compare:
        compare(args)
    else:
        run(args)


if __name__ == "__main__":
    main()
