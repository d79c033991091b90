"""Trains a small language model on the Python documentation that comes with Python, and writes.

    python examples/minimal.py

In plain Flax: a model, an optimiser, a step, a loop. Takes about a minute on two CPU cores.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import jax
import matplotlib
import numpy as np
import optax
from flax import nnx
from tqdm import trange

from hla_jax.models import TransformerLM, generate

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BATCH, LENGTH = 8, 128


def batch_at(step: int, text: np.ndarray) -> np.ndarray:
    """Returns random pieces of the text, [BATCH, LENGTH + 1]."""
    starts = np.random.default_rng(step).integers(len(text) - LENGTH, size=BATCH)
    return text[starts[:, None] + np.arange(LENGTH + 1)]


@nnx.jit
def train_step(model: TransformerLM, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    def loss(model: TransformerLM) -> jax.Array:
        logits, _ = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, gradient = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradient)
    return value


def train(model: TransformerLM, steps: int) -> list[float]:
    """Trains the model in place, and returns the loss of each step."""
    text = np.frombuffer("\n\n".join(topics.values()).encode(), np.uint8).astype(np.int32)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)
    losses: list[float] = []
    bar = trange(steps, unit="step")  # shows the rate and the time left
    for step in bar:
        losses.append(float(train_step(model, optimizer, batch_at(step, text))))
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    return losses


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mixer", default="hla2", help="or linear, ahla, hla3, softmax, ...")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--picture", type=Path, default=Path("minimal.png"), help="of the loss")
    args = parser.parse_args(arguments)

    sizes = dict(num_layers=2, num_heads=4, features=128)
    model = TransformerLM(256, mixer=args.mixer, **sizes, rngs=nnx.Rngs(0))
    losses = train(model, args.steps)

    figure, axes = plt.subplots(layout="constrained")
    axes.plot(losses)
    axes.set(xlabel="step", ylabel="nats per byte", title=f"Training loss, {args.mixer}")
    figure.savefig(args.picture)
    print(f"last loss {losses[-1]:.3f} nats per byte, all of them in {args.picture}\n")

    prompt, key = np.frombuffer(b"The ", np.uint8)[None], jax.random.key(0)
    new = generate(model, prompt, max_new_tokens=200, key=key, temperature=0.7)
    print("The " + bytes(np.asarray(new[0], np.uint8)).decode(errors="replace"))


if __name__ == "__main__":
    main()
