"""Trains a byte-level language model, measures it, and writes with it.

    python examples/char_lm.py --mixer hla2

The text is the Python documentation that comes with Python, or any `--text FILE`. The last tenth is
held out. A run killed at any moment goes on from its last checkpoint when started again.
"""

import argparse
import bz2
import gzip
import json
import math
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tqdm import tqdm

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


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--mixer", default="hla2", choices=MIXERS)
    add("--text", type=Path, help="a file to learn instead of Python's documentation")
    add("--steps", type=int, default=350)
    add("--batch", type=int, default=8, help="rows of a step")
    add("--length", type=int, default=256, help="bytes of a row")
    add("--layers", type=int, default=3)
    add("--heads", type=int, default=4)
    add("--features", type=int, default=128)
    add("--learning-rate", type=float, default=0.02, help="of Muon; Adam's is a fifth")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="folder of the results (default runs/char_lm-MIXER)")
    add("--checkpoint-dir", type=Path, help="folder of the checkpoints (default OUT/checkpoints)")
    add("--checkpoint-every", type=int, default=100, metavar="STEPS")
    add("--prompt", default="The ", help="what the generated text starts with")
    positions = [64, 512, 1024, 2048, 3072, 4096]
    add("--positions", type=int, nargs="+", default=positions, help="where decoding is timed")
    args = parser.parse_args(arguments)
    args.out = args.out or Path("runs") / f"char_lm-{args.mixer}"
    args.checkpoint_dir = (args.checkpoint_dir or args.out / "checkpoints").resolve()
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
        rngs=nnx.Rngs(args.seed),
        **options,
    )


class Training(NamedTuple):
    """All that a checkpoint holds."""

    params: dict[str, Any]
    fixed: dict[str, Any]  # what was drawn at random and is not trained: hashes, projections
    optimiser: optax.OptState
    losses: np.ndarray  # [steps], bits per byte
    step: int


def make_optimiser(args: argparse.Namespace) -> optax.GradientTransformation:
    """Muon for the matrices, Adam for embedding, gains and decays; both warm up, then fade out."""

    def schedule(peak: float) -> optax.Schedule:
        warmup = max(1, args.steps // 20)
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, args.steps, peak / 50)

    def matrices(params: Any) -> Any:
        def choose(path: Any, p: jax.Array) -> Any:
            name = jax.tree_util.keystr(path)
            if "kernel" not in name or "decay" in name:
                return None
            # Heads and their width are one axis of the matrix: the outputs', or `out`'s inputs.
            inputs = p.ndim - 1 if "'out'" in name else 1
            return optax.contrib.MuonDimensionNumbers(
                tuple(range(inputs)), tuple(range(inputs, p.ndim))
            )

        return jax.tree.map_with_path(choose, params)

    return optax.contrib.muon(
        schedule(args.learning_rate),
        weight_decay=0.05,
        adam_learning_rate=schedule(args.learning_rate / 5),
        adam_b2=0.98,
        muon_weight_dimension_numbers=matrices,
    )


def train(
    model: TransformerLM, data: np.ndarray, args: argparse.Namespace
) -> tuple[np.ndarray, float]:
    """Trains the model, from the newest checkpoint on.

    Returns the losses in bits per byte, and tokens per second, compilation left out.
    """
    graph, *states = nnx.split(model, nnx.Param, ...)
    params, fixed = map(nnx.to_pure_dict, states)
    optimiser = make_optimiser(args)
    losses = np.zeros(args.steps, np.float32)
    start = Training(params, fixed, optimiser.init(params), losses, 0)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    same_settings(args)
    with ocp.CheckpointManager(args.checkpoint_dir, options=options) as checkpoints:
        now = restore(checkpoints, start)

        @partial(jax.jit, donate_argnums=(0, 1))
        def update(params: dict[str, Any], state: optax.OptState, batch: jax.Array) -> Any:
            def loss(params: dict[str, Any]) -> jax.Array:
                logits, _ = nnx.merge(graph, params, now.fixed)(batch[:, :-1])
                return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

            value, gradient = jax.value_and_grad(loss)(params)
            change, state = optimiser.update(gradient, state, params)
            return optax.apply_updates(params, change), state, value / math.log(2)

        tokens = args.batch * args.length
        bar = tqdm(
            total=args.steps * tokens, initial=now.step * tokens, unit="tok", unit_scale=True
        )
        first, begun = now.step, None
        for step in range(first, args.steps):
            params, state, loss = update(now.params, now.optimiser, batch_at(data, step, args))
            now.losses[step] = loss
            now = now._replace(params=params, optimiser=state, step=step + 1)
            if now.step % args.checkpoint_every == 0 or now.step == args.steps:
                checkpoints.save(now.step, args=ocp.args.StandardSave(now._asdict()))
            bar.set_postfix_str(f"{now.losses[step]:.3f} bits per byte", refresh=False)
            bar.update(tokens)
            begun = begun or time.perf_counter()  # the first step compiles
        bar.close()
    nnx.update(model, now.params, now.fixed)
    seconds = time.perf_counter() - begun if begun else 0.0
    steps = args.steps - first - 1
    return now.losses, steps * tokens / seconds if steps > 0 else 0.0


def same_settings(args: argparse.Namespace) -> None:
    """Refuses to continue a run that was started with other settings."""
    names = ["mixer", "text", "steps", "batch", "length", "layers", "heads", "features"]
    names += ["learning_rate", "seed"]
    settings = {name: str(getattr(args, name)) for name in names}
    file = args.checkpoint_dir / "settings.json"
    if not file.exists():
        args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    elif (old := json.loads(file.read_text())) != settings:
        changed = ", ".join(name for name in names if old.get(name) != settings[name])
        raise SystemExit(
            f"{args.checkpoint_dir} holds a run with other settings ({changed}): "
            "remove it, or give another --checkpoint-dir"
        )


def restore(checkpoints: ocp.CheckpointManager, start: Training) -> Training:
    """Returns the newest checkpoint, or the start if there is none."""
    latest = checkpoints.latest_step()
    if latest is None:
        return start
    saved = checkpoints.restore(latest, args=ocp.args.StandardRestore(start._asdict()))
    print(f"resumed from step {latest} in {checkpoints.directory}")
    if latest == len(start.losses):
        print("this run is finished: remove that folder to train again")
    return Training(**saved)


# Writing and measuring


def write(model: TransformerLM, args: argparse.Namespace) -> str:
    """Continues the prompt."""
    prompt = np.frombuffer(args.prompt.encode(), np.uint8)[None]
    key = jax.random.key(args.seed)
    new = generate(model, prompt, max_new_tokens=300, key=key, temperature=0.7)
    return args.prompt + bytes(np.asarray(new[0], np.uint8)).decode(errors="replace")


def held_out_bits(model: TransformerLM, text: np.ndarray, args: argparse.Namespace) -> float:
    """Bits per byte of the text, cut into `batch` rows, each read on and on with its state.

    Into more, where a row would be longer than a cache holds.
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
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets), state

    state, total = model.init_state(count), 0.0
    for i in range(windows):
        part = slice(i * args.length, (i + 1) * args.length)
        shifted = slice(part.start + 1, part.stop + 1)
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


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    clock = {"start": time.perf_counter()}
    train_text, held_out = load_text(args.text)
    model = make_model(args, args.mixer)
    size = sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    print(f"{args.mixer}: {size:,} parameters, {len(train_text):,} bytes to learn")

    losses, speed = train(model, train_text, args)
    clock["training, compilation included"] = time.perf_counter()

    bits = {args.mixer: held_out_bits(model, held_out, args)}
    bits |= reference_figures(train_text, held_out)
    error = step_error(model, jnp.asarray(held_out[None, : args.length], jnp.int32))
    clock["held-out text, parallel against steps"] = time.perf_counter()

    print("\n" + write(model, args))
    clock["generating"] = time.perf_counter()

    mixers = dict.fromkeys([args.mixer, "softmax"])
    times = {mixer: decode_times(args, mixer) for mixer in mixers}
    plot(args.out / "char_lm.png", losses, bits, args.positions, times)
    clock["decoding times and plot"] = time.perf_counter()

    ends = list(clock.values())
    results = {
        "mixer": args.mixer,
        "parameters": size,
        "steps": args.steps,
        "final_loss": float(losses[-1]),
        "tokens_per_second": speed,
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


if __name__ == "__main__":
    main()
