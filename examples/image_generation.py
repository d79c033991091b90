"""Learns to draw images value by value, and measures how many a second each attention draws.

    python examples/image_generation.py --data mnist

Trains a model with each kind of attention, and reports bits per dimension of held-out images, a
picture of samples and one of completions. Then it measures images per second at the sizes of
"Transformers are RNNs" (Katharopoulos et al. 2020, arXiv 2006.16236), section 4.2: MNIST with 8
layers, CIFAR-10 with 16, both with 8 heads and 256 features. Speed does not depend on what a model
has learned, so those models are new ones. `--preset cpu` trains small models on images averaged
down to 14 x 14 or 8 x 8, `--preset paper` the paper's. A run killed at any moment goes on from its
last checkpoint when started again.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import image_data
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import training
from flax import nnx
from tqdm import tqdm

from hla_jax.models import ImageModel, logistics

matplotlib.use("Agg")
from matplotlib import pyplot as plt

MIXERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "lsh": dict(mixer="reformer", num_buckets=64, chunk_size=32),
    "linear": {},
    "ahla": {},
    "hla2": {},
    "hla3": {},
}


class Size(NamedTuple):
    side: int  # images are averaged down to side x side
    layers: int
    heads: int
    features: int
    batch: int
    steps: int
    held_out: int  # images that are measured
    optimiser: Callable[[int], optax.GradientTransformation]  # for so many steps


SMALL = Size(14, 2, 4, 64, 16, 500, 480, partial(training.muon, 0.02))
# 250 epochs of MNIST, and as many steps for CIFAR-10.
PAPER = Size(28, 8, 8, 256, 10, 1_500_000, 10_000, partial(training.radam, 1e-4, clip=0.1))
SIZES = {
    ("cpu", "mnist"): SMALL,
    ("cpu", "cifar10"): SMALL._replace(side=8),
    ("paper", "mnist"): PAPER,
    ("paper", "cifar10"): PAPER._replace(side=32, layers=16, batch=4),
}
# Each method is timed with the next batch size as long as that is much faster.
BATCHES = {"cpu": (1, 4, 16, 64), "paper": (1, 16, 64, 256, 1024, 4096)}
LONGEST = 300  # seconds that a batch may take
START = 256  # the token before the first value


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", default="mnist", choices=image_data.SHAPES)
    add("--path", type=Path, help="a file of images, or the folder that MNIST or CIFAR-10 is in")
    add("--section", choices=["train", "throughput"], help="one of both parts alone")
    add("--preset", default="cpu", choices=["cpu", "paper"])
    add(
        "--mixers",
        nargs="+",
        default=list(MIXERS),
        choices=MIXERS,
        metavar="MIXER",
        help=", ".join(MIXERS),
    )
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="folder of the results (default runs/image_generation-DATA)")
    args = parser.parse_args(arguments)
    args.out = args.out or Path("runs") / f"image_generation-{args.data}"
    return args


def make_model(size: Size, args: argparse.Namespace, mixer: str) -> ImageModel:
    return ImageModel(
        (size.side, size.side, image_data.SHAPES[args.data][2]),
        num_layers=size.layers,
        num_heads=size.heads,
        features=size.features,
        rngs=nnx.Rngs(args.seed),
        **{"mixer": mixer} | MIXERS[mixer],
    )


def shrink(images: np.ndarray, side: int) -> np.ndarray:
    """Averages images down to side x side."""
    n, height, width, channels = images.shape
    blocks = images.reshape(n, side, height // side, side, width // side, channels)
    return blocks.mean(axis=(2, 4)).round().astype(np.uint8)


# Training


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Trains a model with each mixer, draws with it, and returns what was measured."""
    size = SIZES[args.preset, args.data]
    learn, held_out, source = image_data.load(args.data, args.path)
    learn, held_out = (shrink(images, size.side) for images in (learn, held_out[: size.held_out]))
    numbers = {k: v for k, v in size._asdict().items() if k != "optimiser"}
    data = {"images": source, "learned": len(learn), "held_out": len(held_out)}
    results = {}
    for mixer in args.mixers:
        print(f"\n{mixer}: {len(learn):,} images of {size.side} x {size.side}, {source}")
        model = make_model(size, args, mixer)
        out = args.out / mixer

        def batch_at(step: int) -> np.ndarray:
            random = np.random.default_rng((args.seed, step))
            return learn[random.integers(len(learn), size=size.batch)]

        log = training.fit(
            model,
            lambda model, images, key: model.bits_per_dim(images).mean(),
            batch_at,
            optimiser=size.optimiser(size.steps),
            steps=size.steps,
            out=out,
            settings={"preset": args.preset, "mixer": mixer} | numbers | data,
            checkpoint_every=max(1, size.steps // 100),
            seed=args.seed,
        )
        results[mixer] = {
            "bits_per_dim": held_out_bits(model, held_out, size.batch),
            "parameters": sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param))),
            "images_per_second": size.batch / log.seconds_per_step,
            "seconds": float(log.seconds.sum()),
        }
        draw(out / "images.png", mixer, model, held_out[:8], jax.random.key(args.seed))
        print(f"{results[mixer]['bits_per_dim']:.3f} bits per dimension; {out / 'images.png'}")
    return {"size": numbers, "data": data, "mixers": results}


def held_out_bits(model: ImageModel, images: np.ndarray, batch: int) -> float:
    bits = nnx.jit(lambda model, images: model.bits_per_dim(images))
    parts = [images[i : i + batch] for i in range(0, len(images), batch)]
    return float(np.concatenate([bits(model, part) for part in tqdm(parts, "held out")]).mean())


def draw(path: Path, mixer: str, model: ImageModel, images: np.ndarray, key: jax.Array) -> None:
    """Draws samples, and what the model makes of the upper halves of images."""
    rows, columns, (height, width, channels) = 8, 4, model.shape
    samples = np.asarray(model.sample(key, rows * rows)).reshape(rows, rows, *model.shape)
    given = images.copy()
    given[:, height // 2 :] = 128
    completed = model.complete(np.repeat(images, columns, axis=0), height // 2, key)
    completed = np.asarray(completed).reshape(len(images), columns, *model.shape)
    table = np.concatenate([given[:, None], completed, images[:, None]], axis=1)
    figure, axes = plt.subplots(1, 2, figsize=(11, 6), layout="constrained")
    titles = f"{mixer}: samples", "upper half given, completions, original"
    for panel, grid, title in zip(axes, (samples, table), titles, strict=True):
        framed = np.pad(grid, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)), constant_values=64)
        r, c = grid.shape[:2]
        picture = framed.transpose(0, 2, 1, 3, 4).reshape(
            r * (height + 2), c * (width + 2), channels
        )
        panel.imshow(np.broadcast_to(picture, (*picture.shape[:2], 3)))
        panel.set_axis_off()
        panel.set_title(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# Throughput


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Measures how many images each method draws in a second, at the paper's sizes."""
    size, batches = SIZES["paper", args.data], BATCHES[args.preset]
    softmax = make_model(size, args, "softmax")
    row = size.side * softmax.shape[2]
    # The last row's prefixes are the longest, and need the most memory.
    print("\nsoftmax recomputed: one value of the last row, as if all took so long")
    search = partial(recompute, softmax, seed=args.seed, count=1, rows=[size.side - 1])
    base = fastest(try_batches(lambda batch: size.side * search(batch)[1], batches))
    count = row if args.data == "mnist" or args.preset == "paper" else 1
    seconds = base["batch"] / base["images_per_second"] * count / row
    print(
        f"now {count} of the {row} values of each row: {seconds:.0f} seconds at most, and compiling"
    )
    _, seconds = recompute(softmax, base["batch"], args.seed, count, range(size.side))
    base["images_per_second"] = base["batch"] / seconds
    if count < row:
        base["measured"] = f"{count} of the {row} values of each row, times {row // count}"
    methods = {"softmax recomputed": base}
    for mixer in args.mixers:
        name = {"softmax": "softmax with cache", "lsh": "lsh with cache"}.get(mixer, mixer)
        print(name)
        model = make_model(size, args, mixer)
        measure = partial(seconds_to_sample, model)
        methods[name] = fastest(try_batches(measure, batches, LONGEST))
    for method in methods.values():
        method["ratio"] = method["images_per_second"] / base["images_per_second"]
    print(f"\n{'':<20}{'images/s':>12}{'ratio':>10}{'batch':>7}  measured")
    for name, x in methods.items():
        speeds = f"{x['images_per_second']:12.4g}{x['ratio']:10.1f}{x['batch']:7}"
        print(f"{name:<20}{speeds}  {x['measured']}")
    sizes = {name: getattr(size, name) for name in ("side", "layers", "heads", "features")}
    return {"size": sizes, "methods": methods}


def try_batches(
    seconds: Callable[[int], float], batches: tuple[int, ...], longest: float = math.inf
) -> dict[int, float]:
    """Images per second by batch size, until one is not a tenth faster or not enough memory.

    Or until the next would take longer than `longest` seconds, if it were as fast as the last.
    """
    tried: dict[int, float] = {}
    for batch in batches:
        if tried and batch / tried[max(tried)] > longest:
            break
        try:
            speed = batch / seconds(batch)
        except jax.errors.JaxRuntimeError as error:
            if not tried or "RESOURCE_EXHAUSTED" not in str(error):
                raise
            break
        print(f"  batch {batch}: {speed:.4g} images per second", flush=True)
        fast = 1.1 * max(tried.values(), default=0.0)
        tried[batch] = speed
        if speed < fast:
            break
    return tried


def fastest(tried: dict[int, float]) -> dict[str, Any]:
    batch = max(tried, key=tried.__getitem__)
    speed = tried[batch]
    return {"images_per_second": speed, "batch": batch, "measured": "whole images", "tried": tried}


def seconds_to_sample(model: ImageModel, batch: int) -> float:
    """How long a batch takes in one compiled scan, compilation left out."""
    graph, variables = nnx.split(model)
    draw = jax.jit(lambda variables, key: nnx.merge(graph, variables).sample(key, batch))
    key = jax.random.key(0)
    compiled = draw.lower(variables, key).compile()
    start = time.perf_counter()
    jax.block_until_ready(compiled(variables, key))
    return time.perf_counter() - start


def recompute(
    model: ImageModel, batch: int, seed: int, count: int, rows: Sequence[int]
) -> tuple[jax.Array, float]:
    """Draws images as `model.sample` does, but remembers nothing: each value costs a whole prefix.

    Prefixes are padded to whole rows of the image, for each length is compiled. Of each of `rows`,
    the first `count` values alone are drawn, and its time is taken in proportion: all steps within
    a row cost the same.

    Returns the tokens after the start, [batch, N], and the seconds that all of `rows` take.
    """
    graph, variables = nnx.split(model)
    N, row = model.num_tokens, model.num_tokens // model.shape[0]
    keys = jax.random.split(jax.random.key(seed), N)
    tokens, seconds = jnp.full((batch, N + 1), START, jnp.int32), 0.0
    for i in tqdm(rows, f"softmax recomputed, batch {batch}", unit="row"):
        first = i * row
        draw = partial(draw_again, graph, variables, keys=keys, length=first + row)
        draw(tokens, first, first).block_until_ready()  # compiles, and draws nothing
        start = time.perf_counter()
        tokens = draw(tokens, first, first + count).block_until_ready()
        seconds += (time.perf_counter() - start) * row / count
    return tokens[:, 1:], seconds


@partial(jax.jit, static_argnames=("graph", "length"))
def draw_again(
    graph: nnx.GraphDef[ImageModel],
    variables: Any,
    tokens: jax.Array,
    first: int,
    end: int,
    *,
    keys: jax.Array,
    length: int,
) -> jax.Array:
    """Draws the values first .. end - 1, reading the first `length` tokens for each of them."""
    model = nnx.merge(graph, variables)

    def step(t: jax.Array, tokens: jax.Array) -> jax.Array:
        parameters, _ = model(tokens[:, :length])
        return tokens.at[:, t + 1].set(logistics.sample(parameters[:, t], keys[t]))

    return jax.lax.fori_loop(first, end, step, tokens)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    about = {"command": training.command(), "preset": args.preset, "data": args.data}
    about |= {"seed": args.seed, "hardware": training.hardware()}
    for section, measure in {"train": train, "throughput": throughput}.items():
        if args.section in (None, section):
            start = time.perf_counter()
            results = about | {section: measure(args)}
            results["seconds"] = time.perf_counter() - start
            file = args.out / f"{section}.json"
            file.write_text(json.dumps(results, indent=2))
            print(f"numbers in {file}")


if __name__ == "__main__":
    main()
