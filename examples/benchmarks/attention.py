"""Each variant of attention beside softmax: how its costs grow with T, and its times on a CPU.

    python examples/benchmarks/attention.py                    everything; a quarter of an hour
    python examples/benchmarks/attention.py --lengths 512      short sequences: does it run?
    python examples/benchmarks/attention.py --section costs    the exponents alone

Everything is causal but Linformer, which has no such form. B=1, H=8, D=E=64, float32.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from costs import exponent, flops, temp_bytes
from report import Table, markdown
from timing import medians

import hla_jax as hla
from hla_jax.attention import patterns

H, D = 8, 64
KEY = jax.random.key(0)

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def sparse(pattern: Callable[[int], patterns.Pattern]) -> Attention:
    """Attention by a pattern that may depend on T."""
    return lambda q, k, v: hla.attention.sparse_attention(q, k, v, pattern(q.shape[1]))


def root(T: int) -> int:
    """A power of two near sqrt(T), the stride for which strided patterns cost least."""
    return 2 ** math.ceil(math.log2(T) / 2)


def grouped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return hla.attention.softmax_attention(q, k[:, :, :2], v[:, :, :2])


def flash(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool = True) -> jax.Array:
    return hla.attention.flash_attention(q, k, v, causal=causal)[0]


def linformer(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    e = hla.attention.linformer_projection(KEY, 128, k.shape[1])
    return hla.attention.linformer_attention(q, k, v, e)


def performer(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    favor = hla.feature_maps.favor_plus(KEY, D, 128)

    def features(x: jax.Array) -> jax.Array:
        return favor(x * D ** (-1 / 4))

    return hla.linear_attention(q, k, v, feature_map=features, implementation="xla")[0]


def linear(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return hla.linear_attention(q, k, v, implementation="xla")[0]


def hla2(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return hla.hla2(q, k, v, scale=1 / D, implementation="xla")[0]


def lsh(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return hla.attention.lsh_attention(q, v, key=KEY, num_buckets=64, num_rounds=2, chunk_size=64)


VARIANTS: dict[str, Attention] = {
    "softmax": hla.attention.softmax_attention,
    "softmax, 2 kv heads": grouped,
    "flash": flash,
    "strided, sqrt(T)": sparse(lambda T: patterns.strided(root(T))),
    "fixed, sqrt(T)": sparse(lambda T: patterns.fixed(root(T))),
    "sliding window, 128": sparse(lambda T: patterns.sliding_window(128)),
    "dilated window, 128 by 4": sparse(lambda T: patterns.dilated_window(128, 4)),
    "longformer, 128 and 2 global": sparse(lambda T: patterns.longformer(128, (0, 1))),
    "big_bird, 64, 2 global, 2 random of 32": sparse(
        lambda T: patterns.big_bird(
            KEY, window=64, num_random=2, global_positions=(0, 1), block_size=32, num_heads=H
        )
    ),
    "linformer, 128": linformer,
    "performer, 128": performer,
    "lsh, 64 buckets, 2 rounds": lsh,
    "linear": linear,
    "hla2": hla2,
}


def with_gradients(f: Attention) -> Callable[..., Any]:
    return jax.value_and_grad(lambda *inputs: f(*inputs).sum(), argnums=(0, 1, 2))


def exponents() -> Table:
    """The p in cost ~ T^p, of outputs and gradients."""
    lengths = [2**n for n in range(9, 15)]

    def fitted(name: str, count: Callable[..., float], f: Attention) -> float:
        costs = []
        for T in lengths:
            print(f"\r  {name}, T = {T:<20}\r", end="", file=sys.stderr, flush=True)
            inputs = [jax.ShapeDtypeStruct((1, T, H, D), jnp.float32)] * 3
            costs.append(count(with_gradients(f), *inputs))
        return exponent(lengths, costs)

    # How often flash's loops turn is written in the program only where it is not causal.
    counted = VARIANTS | {"flash": lambda *inputs: flash(*inputs, causal=False)}
    rows = {
        name: (fitted(name, flops, counted[name]), fitted(name, temp_bytes, f))
        for name, f in VARIANTS.items()
    }
    title = f"p in cost ~ T^p, forward with backward, T from {lengths[0]} to {lengths[-1]}"
    return Table(title, ["operations", "memory"], rows)


def times(lengths: list[int], seconds: float) -> list[Table]:
    """Forward, and forward with backward: softmax's milliseconds, and multiples of them."""
    milliseconds: list[tuple[float, ...]] = []
    ratios: dict[str, list[tuple[float, ...]]] = {name: [] for name in VARIANTS}
    for T in lengths:
        random = np.random.default_rng(0)
        inputs = [jnp.asarray(x, jnp.float32) for x in random.normal(size=(3, 1, T, H, D))]
        columns = []
        for wrap in (lambda f: f, with_gradients):
            calls = {name: partial(jax.jit(wrap(f)), *inputs) for name, f in VARIANTS.items()}
            columns.append(medians(calls, clock=time.perf_counter, seconds=seconds))
        milliseconds.append(tuple(1000 * column["softmax"] for column in columns))
        for name in VARIANTS:
            ratios[name].append(tuple(column[name] / column["softmax"] for column in columns))
    heads = [f"T={T}" for T in lengths]
    return [
        Table("Milliseconds, forward / with backward", heads, {"softmax": milliseconds}),
        Table("Time as multiples of softmax's, forward / with backward", heads, ratios),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--section", choices=["costs", "times"], help="only this")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--seconds", type=float, default=3.0, help="spent on each measurement")
    args = parser.parse_args()
    tables = [exponents()] if args.section != "times" else []
    if args.section != "costs":
        tables += times(args.lengths, args.seconds)
    for table in tables:
        print(*markdown(table), sep="\n")


if __name__ == "__main__":
    main()
