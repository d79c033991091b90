"""Recalls pairs over a million tokens: the row divided over devices, and streamed through a state.

    python examples/long_context.py

Pairs of a key and a value stand among tokens that say nothing, the first one at the very beginning;
the last tokens ask for all keys. Queries, keys and values are set by hand, so that every operator
knows the answers, and one wrong state between two devices would show. The row is read at once by 8
devices (of a CPU, unless there are others), each with an eighth of it, and then once more in
pieces, one after the other, by one device that holds a piece and the state.
"""

import argparse
import ctypes
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from scaling import forget_peak, held_bytes, peak_bytes
from tqdm import tqdm
from training import command, hardware

import hla_jax as hla

OPERATORS = {
    "linear": partial(hla.linear_attention, feature_map=None, normalize=False),
    "hla2": hla.hla2,
    "ahla": hla.ahla,
    "hla3": hla.hla3,
}
PAIRS = 16  # as many as the widths of keys and of values


def row(tokens: int, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns q, k and v, [1, tokens, 1, PAIRS], and the places of the answers, [PAIRS]."""
    random = np.random.default_rng(seed)
    q, k, v = (np.zeros((1, tokens, 1, PAIRS), np.float32) for _ in range(3))
    # One pair within each of as many parts of the row, the first one at its beginning.
    part = (tokens - PAIRS) // PAIRS
    told = part * np.arange(PAIRS) + random.integers(part, size=PAIRS) * (np.arange(PAIRS) > 0)
    keys, values = random.permutation(PAIRS), random.permutation(PAIRS)
    q[0, told, 0, keys] = k[0, told, 0, keys] = v[0, told, 0, values] = 1
    asked = random.permutation(PAIRS)
    q[0, tokens - PAIRS + np.arange(PAIRS), 0, keys[asked]] = 1
    return [q, k, v], values[asked]


def answers(out: jax.Array) -> np.ndarray:
    return np.asarray(out)[0, -PAIRS:, 0].argmax(-1)


def whole(name: str, tokens: list[np.ndarray], devices: int) -> tuple[jax.Array, dict[str, Any]]:
    """Reads the row at once; returns the outputs, and what it took, bytes per device."""
    mesh = jax.make_mesh((devices,), ("tokens",), devices=jax.devices()[:devices])
    op = hla.parallel.sharded(OPERATORS[name], mesh, sequence="tokens")
    sharding = NamedSharding(mesh, PartitionSpec(None, "tokens"))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in tokens]
    compiled = jax.jit(lambda *x: op(*x)[0]).lower(*shapes).compile()
    plan: Any = compiled.memory_analysis()
    planned = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    ctypes.CDLL(None).malloc_trim(0)  # what earlier operators have freed shall not count as held
    before = held_bytes()
    placed = jax.block_until_ready(jax.device_put(tokens, sharding))
    forget_peak()
    start = time.perf_counter()
    out = jax.block_until_ready(compiled(*placed))
    return out, {
        "seconds": time.perf_counter() - start,
        "planned_bytes": planned,
        "peak_bytes": (peak_bytes() - before) / devices,
    }


def streamed(
    name: str, tokens: list[np.ndarray], piece: int
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Reads the row piece by piece, with what the last one left behind."""
    read = jax.jit(OPERATORS[name])
    pieces = range(0, tokens[0].shape[1], piece)
    _, state = jax.eval_shape(read, *(x[:, :piece] for x in tokens))
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    read(*(x[:, :piece] for x in tokens), initial_state=state)  # compiles
    outs, start = [], time.perf_counter()
    for i in tqdm(pieces, name, unit="piece"):
        out, state = read(*(x[:, i : i + piece] for x in tokens), initial_state=state)
        outs.append(np.asarray(out))
    held = sum(x.nbytes for x in jax.tree.leaves(state))
    return outs, {"seconds": time.perf_counter() - start, "state_bytes": held}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--operators", nargs="+", default=list(OPERATORS), choices=OPERATORS)
    add("--tokens", type=int, default=2**20)
    add("--piece", type=int, default=2**13, help="tokens of a piece when streamed")
    add("--devices", type=int, default=8)
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/long_context"), help="folder of the results")
    args = parser.parse_args(arguments)
    if args.tokens < 3 * PAIRS or args.tokens % args.devices:
        parser.error(f"--tokens must be a multiple of --devices, and at least {3 * PAIRS}")
    jax.config.update("jax_num_cpu_devices", args.devices)
    if jax.device_count() < args.devices:
        parser.error(f"--devices: there are {jax.device_count()}")

    begin = time.perf_counter()
    tokens, wanted = row(args.tokens, args.seed)
    print(f"{args.tokens:,} tokens, {PAIRS} pairs, {args.devices} devices")
    print(f"{'':8}{'right':>7}{'planned':>10}{'measured':>10}{'seconds':>9}   streamed:", end="")
    print(f"{'right':>7}{'state':>9}{'seconds':>9}{'differs by':>12}")
    results = {}
    for name in args.operators:
        out, at_once = whole(name, tokens, args.devices)
        pieces, in_turn = streamed(name, tokens, args.piece)
        same = np.concatenate(pieces, axis=1)
        at_once["right"] = int((answers(out) == wanted).sum())
        in_turn["right"] = int((answers(same) == wanted).sum())
        in_turn["largest_difference"] = float(np.abs(np.asarray(out) - same).max())
        results[name] = {"at_once": at_once, "streamed": in_turn}
        memory = (at_once[key] / 1e6 for key in ("planned_bytes", "peak_bytes"))
        print(
            f"{name:8}{at_once['right']:4}/{PAIRS}" + "".join(f"{x:7.1f} MB" for x in memory),
            end="",
        )
        print(f"{at_once['seconds']:9.2f}{in_turn['right']:15}/{PAIRS}", end="")
        print(f"{in_turn['state_bytes'] / 1e3:6.1f} kB{in_turn['seconds']:9.2f}", end="")
        print(f"{in_turn['largest_difference']:12.1e}")
    settings = {k: getattr(args, k) for k in ("tokens", "piece", "devices", "seed")}
    written = {"command": command(), "data": "set by hand", "hardware": hardware()} | settings
    written |= {"seconds": time.perf_counter() - begin, "results": results}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(written, indent=2))
    print(f"planned and measured are per device; numbers in {args.out / 'results.json'}")


if __name__ == "__main__":
    main()
