r"""Trains a byte-level language model on many devices, of one process or of several.

On all devices of one host:

    python examples/train_distributed.py --mixer hla2

As two processes on one host, here with two CPU devices each (with GPUs, `CUDA_VISIBLE_DEVICES=$i`
gives each its own):

    for i in 0 1; do python examples/train_distributed.py --mixer hla2 --cpu-devices 2 \
        --coordinator localhost:1234 --processes 2 --process $i & done; wait

On several hosts, on each of them, with a folder that all see. On Cloud TPU, SLURM and Kubernetes
JAX finds out who takes part; elsewhere `--coordinator` says it, with the address of process 0:

    python examples/train_distributed.py --mixer hla2 --distributed --out /shared/run

Rows are divided over `--data` devices, heads, MLPs and vocabulary over `--model`, tokens over
`--sequence`; parameters and Adam's moments over all of them. If a process dies, the others end too.
Started again with the same command, or on another mesh and as another number of processes, all go
on from the last checkpoint, and have, but for rounding, the losses that there would have been.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from char_lm import batch_at, load_text, plt
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from training import Log, adam, command, fit, hardware, is_first, running_mean

from hla_jax.models import TransformerLM
from hla_jax.parallel import Layout

HEARTBEAT = 20  # seconds of silence after which a process is dead, and JAX ends the others


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=int, help="parts of the batch (default: as many as there are devices left)")
    add("--model", type=int, default=1, help="parts of the heads")
    add("--sequence", type=int, default=1, help="parts of each row")
    mixers = ["linear", "hla2", "ahla", "hla3", "softmax", "flash"]
    help = "one for all layers, or several, repeated over them"
    add("--mixer", nargs="+", default=["hla2"], choices=mixers, metavar="MIXER", help=help)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--features", type=int, default=128)
    help = "of the computation; parameters are float32"
    add("--dtype", default="float32", choices=["float32", "bfloat16"], help=help)
    add("--text", type=Path, help="a file to learn instead of Python's documentation")
    add("--steps", type=int, default=500)
    add("--batch", type=int, default=8, help="rows of a step, in all")
    add("--length", type=int, default=256, help="bytes of a row")
    add("--learning-rate", type=float, default=3e-3)
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/train_distributed"), help="a folder that all share")
    add("--checkpoint-every", type=int, default=100, metavar="STEPS")
    add("--cpu-devices", type=int, metavar="N", help="train on so many CPU devices a process")
    add("--coordinator", metavar="HOST:PORT", help="where process 0 is")
    add("--processes", type=int, metavar="N")
    add("--process", type=int, metavar="I", help="which this one is, from 0")
    add("--distributed", action="store_true", help="several processes, which JAX finds by itself")
    return parser.parse_args(arguments)


def make_mesh(args: argparse.Namespace) -> Mesh:
    devices = jax.device_count()
    data = args.data or max(1, devices // (args.model * args.sequence))
    shape = data, args.model, args.sequence
    if math.prod(shape) != devices:
        raise SystemExit(f"--data, --model, --sequence: {shape} is no mesh of {devices} devices")
    parts = dict(batch=data, length=args.sequence, heads=args.model, features=data * args.sequence)
    for name, count in parts.items():
        if getattr(args, name) % count:
            raise SystemExit(f"--{name} must be a multiple of {count} on the mesh {shape}")
    return jax.make_mesh(shape, ("data", "model", "seq"), axis_types=(AxisType.Auto,) * 3)


def make_model(args: argparse.Namespace, mesh: Mesh) -> TransformerLM:
    """Each device makes the part of the parameters that is its own."""
    layout = Layout(mesh, batch="data", heads="model", sequence="seq", parameters=("data", "seq"))

    @nnx.jit
    def make() -> TransformerLM:
        return TransformerLM(
            256,
            num_layers=args.layers,
            num_heads=args.heads,
            features=args.features,
            mixer=(args.mixer * args.layers)[: args.layers],
            dtype=args.dtype,
            layout=layout,
            scan=True,
            remat=True,
            rngs=nnx.Rngs(args.seed),
        )

    return make()


def train(model: TransformerLM, mesh: Mesh, args: argparse.Namespace) -> Log:
    """Trains the model, from the newest checkpoint on; the losses are in bits per byte."""
    text, _ = load_text(args.text)
    divided = NamedSharding(mesh, PartitionSpec("data", "seq"))

    def batches(step: int) -> tuple[jax.Array, jax.Array]:
        def place(rows: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(rows.shape, divided, lambda part: rows[part])

        rows = batch_at(text, step, args)  # every process has them all, and gives of them its own
        return place(rows[:, :-1]), place(rows[:, 1:])

    def loss(model: TransformerLM, batch: Any, key: jax.Array) -> jax.Array:
        tokens, targets = batch
        logits = model(tokens)[0].astype(jnp.float32)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return nats.mean() / math.log(2)

    # Not the mesh: another one may continue the run.
    names = ["mixer", "text", "batch", "length", "layers", "heads", "features", "dtype"]
    names += ["learning_rate"]
    return fit(
        model,
        loss,
        batches,
        optimiser=adam(args.learning_rate, args.steps),
        steps=args.steps,
        out=args.out,
        settings={name: getattr(args, name) for name in names},
        checkpoint_every=args.checkpoint_every,
        seed=args.seed,
    )


def plot(path: Path, losses: np.ndarray) -> None:
    figure, axes = plt.subplots(layout="constrained")
    axes.plot(*running_mean(losses))
    axes.set(xlabel="step", ylabel="bits per byte, running mean", title="Training")
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    if args.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    if args.coordinator or args.distributed:
        jax.distributed.initialize(
            args.coordinator, args.processes, args.process, heartbeat_timeout_seconds=HEARTBEAT
        )
    mesh = make_mesh(args)
    model = make_model(args, mesh)
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    results = {
        "command": command(),
        "hardware": hardware(),
        "processes": jax.process_count(),
        "mesh": dict(mesh.shape),
        "parameters": sum(p.size for p in params),
        "parameters_per_device": sum(p.addressable_shards[0].data.size for p in params),
    }
    if is_first():
        print(f"mesh {results['mesh']}, {results['processes']} processes")
        sizes = results["parameters"], results["parameters_per_device"]
        print("{:,} parameters, {:,} on each device".format(*sizes))
    log = train(model, mesh, args)
    if is_first():
        results["final_loss"] = float(log.losses[-1])
        results["tokens_per_second"] = args.batch * args.length / log.seconds_per_step
        (args.out / "results.json").write_text(json.dumps(results, indent=2))
        plot(args.out / "train_distributed.png", log.losses)
        print("{final_loss:.3f} bits per byte, {tokens_per_second:,.0f} tokens/s".format(**results))


if __name__ == "__main__":
    main()
