"""Draws where the tokens of a sentence look, in one trained layer of each kind of attention.

    python examples/attention_maps.py

Trains a small byte-level language model with each kind, as `char_lm.py` does, and draws the weights
of its last layer: about two minutes on two cores. The sparse patterns are laid over the queries and
keys of the softmax layer. The last panel shows how large the state of the linear layer grows. The
models' checkpoints are kept beside the picture, so that it can be drawn again without training.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import char_lm
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib import pyplot as plt

import hla_jax as hla
from hla_jax.attention import patterns
from hla_jax.models import TransformerLM

SENTENCE = "The items of a list of lists are lists."

# Of the layers that are linear in their values: their matrix from queries and keys.
WEIGHTS: dict[str, Callable[..., jax.Array]] = {
    "linear": hla.linear_attention_weights,
    "hla2": hla.hla2_weights,
    "ahla": hla.ahla_weights,
    "hla3": hla.hla3_weights,
}
PATTERNS = {
    "sliding_window(8)": patterns.sliding_window(8),
    "dilated_window(4, 3)": patterns.dilated_window(4, 3),
    "strided(6)": patterns.strided(6),
    "fixed(6)": patterns.fixed(6),
    "longformer(6, [0, 1, 2])": patterns.longformer(6, [0, 1, 2]),
    "big_bird(...)": patterns.big_bird(
        jax.random.key(0), window=4, num_random=1, global_positions=[0], block_size=4
    ),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sentence", default=SENTENCE, help="its bytes are the tokens")
    add("--head", type=int, default=1, help="whose weights are drawn")
    add("--steps", type=int, default=300, help="of training, for each of five models")
    add("--positions", type=int, default=1024, help="how long the state is followed")
    add("--out", type=Path, default=Path("runs/attention_maps"), help="folder of the results")
    return parser.parse_args(arguments)


def trained_model(mixer: str, args: argparse.Namespace) -> TransformerLM:
    options = dict(mixer=mixer, out=args.out / mixer, steps=args.steps, checkpoint_every=args.steps)
    options |= dict(batch=8, length=128, layers=2, heads=4, features=64)
    settings = char_lm.parse_arguments([f"--{k.replace('_', '-')}={v}" for k, v in options.items()])
    model = char_lm.make_model(settings, mixer)
    text, _ = char_lm.load_text(None)
    print(mixer)
    char_lm.train(model, text, settings)
    return model


def last_layer(model: TransformerLM, text: bytes) -> tuple[Any, jax.Array]:
    """Returns the last token-mixing layer, and its input [1, T, F] for that text."""
    x = model.embed(jnp.asarray(np.frombuffer(text, np.uint8), jnp.int32)[None])
    *earlier, last = model.blocks
    for block in earlier:
        x, _ = block(x)
    return last.mixer, last.mixer_norm(x)


def queries_and_keys(layer: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns what a layer's queries and keys are when they meet, [1, T, H, D] both."""
    positions = jnp.arange(x.shape[1])[None]
    q, k = layer.query_norm(layer.query(x)), layer.key_norm(layer.key(x))
    return hla.nn.rotary(q, positions), hla.nn.rotary(k, positions)


def weights(mixer: str, layer: Any, x: jax.Array) -> jax.Array:
    """Returns the weight of each token in each output, [1, H, T, T]."""
    q, k = queries_and_keys(layer, x)
    if mixer == "softmax":
        return softmax_weights(q, k)
    log_decay = -jax.nn.softplus(layer.decay(x))
    options = dict(layer.operator_options)
    del options["chunk_size"]
    return WEIGHTS[mixer](q, k, log_decay=log_decay, **options)


def softmax_weights(
    q: jax.Array, k: jax.Array, pattern: patterns.Pattern | None = None
) -> jax.Array:
    """Returns the weights [1, H, T, T], perhaps under a pattern: the outputs for unit values."""
    T, H = q.shape[1:3]
    units = jnp.broadcast_to(jnp.eye(T)[:, None], (1, T, H, T))
    if pattern is None:
        out = hla.attention.softmax_attention(q, k, units)
    else:
        out = hla.attention.sparse_attention(q, k, units, pattern)
    return jnp.moveaxis(out, 2, 1)


def state_norms(layer: hla.nn.LinearAttention, x: jax.Array) -> jax.Array:
    """Returns the norm of each head's state after each token, [T, K]."""

    def step(state: Any, x_t: jax.Array) -> tuple[Any, jax.Array]:
        _, state = layer(x_t[None, None], state)
        return state, jnp.linalg.norm(state.memory.kv[0], axis=(-2, -1))

    return jax.lax.scan(step, layer.init_state(1), x[0])[1]


def draw(
    path: Path, sentence: str, maps: dict[str, np.ndarray], norms: dict[str, jax.Array]
) -> None:
    """Draws maps [T, T], NaN where a token is not seen, and norms [positions, K] by decay."""
    figure, axes = plt.subplots(3, 4, figsize=(16, 12.4), layout="constrained")
    *panels, last = axes.flat
    for panel, (name, w) in zip(panels, maps.items(), strict=True):
        panel.imshow(w / np.nanmax(abs(w), axis=-1, keepdims=True), cmap="RdBu_r", vmin=-1, vmax=1)
        panel.set_facecolor("lightgrey")
        ticks = dict(ticks=range(len(sentence)), labels=sentence.replace(" ", "\u2423"), fontsize=6)
        panel.set_xticks(**ticks)
        panel.set_yticks(**ticks)
        panel.tick_params(length=0, pad=1)
        panel.set_title(name)
    positions = np.arange(1, len(norms["learned"]) + 1)
    for head in range(norms["learned"].shape[1]):
        last.loglog(positions, norms["learned"][:, head], f"C{head}", lw=0.8, label=f"head {head}")
        last.loglog(positions, norms["none"][:, head], f"C{head}:", lw=0.8)
    last.set(title="linear: norm of the state", xlabel="position (dotted: without the decay)")
    last.legend(fontsize="small", loc="upper left")
    figure.suptitle(
        "A row is a token and what it looks at, as parts of its largest weight: "
        "red adds, blue subtracts, grey is not seen"
    )
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    sentence, (_, held_out) = args.sentence.encode(), char_lm.load_text(None)
    T = len(sentence)
    maps: dict[str, np.ndarray] = {}
    norms: dict[str, jax.Array] = {}
    for mixer in ("softmax", *WEIGHTS):
        model = trained_model(mixer, args)
        layer, x = last_layer(model, sentence)
        w = weights(mixer, layer, x)[0, args.head]
        maps[mixer] = np.where(np.tri(T, dtype=bool), w, np.nan)
        if mixer == "softmax":
            q, k = queries_and_keys(layer, x)
        if mixer == "linear":
            follow = nnx.jit(state_norms)
            layer, x = last_layer(model, held_out[: args.positions].tobytes())
            norms["learned"] = follow(layer, x)
            layer.decay = None
            norms["none"] = follow(layer, x)
    for name, pattern in PATTERNS.items():
        w = softmax_weights(q, k, pattern)[0, args.head]
        maps[f"softmax, {name}"] = np.where(pattern.mask(T, causal=True)[0], w, np.nan)
    picture = args.out / "attention_maps.png"
    draw(picture, args.sentence, maps, norms)
    print(f"drawn in {picture}")


if __name__ == "__main__":
    main()
