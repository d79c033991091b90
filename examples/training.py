"""The loop that trains the models of the examples, and their optimisers.

A run writes into one folder: `log.csv` (step, loss, seconds, a row a step), `evaluations.csv`,
`settings.json`, and `checkpoints/`. Killed at any moment and started again, it goes on from its
last checkpoint as if nothing had happened: a step's batch and random numbers depend on the seed and
on the number of the step alone.

So does a run of several processes, on another mesh and as another number of processes too. They
share the folder, and the first one writes the tables.
"""

import csv
import datetime
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental.multihost_utils import sync_global_devices
from tqdm import tqdm

Rows = list[dict[str, float]]


class Log(NamedTuple):
    """What a run, with those that it continued, has measured."""

    losses: np.ndarray  # [steps]
    seconds: np.ndarray  # [steps], evaluations and checkpoints left out
    evaluations: Rows  # what `evaluate` returned, and after which "step"

    @property
    def seconds_per_step(self) -> float:
        """The median, for the first step compiles."""
        return float(np.median(self.seconds))


def fit(
    model: nnx.Module,
    loss: Callable[[Any, Any, jax.Array], jax.Array],
    batches: Callable[[int], Any],
    *,
    optimiser: optax.GradientTransformation,
    steps: int,
    out: Path,
    settings: dict[str, Any],
    evaluate: Callable[[Any], dict[str, float]] | None = None,
    evaluate_every: int = 500,
    checkpoint_every: int = 100,
    seed: int = 0,
) -> Log:
    """Trains a model in place, from the newest checkpoint on.

    Args:
      model: its `nnx.Param` are trained; all else that it holds is kept, and saved with them. One
        made with dtype=jnp.bfloat16 trains in mixed precision: its parameters are float32. They may
        lie on a mesh, and stay as they lie.
      loss: of (model, batch, key), a scalar; the key is for random parts of the loss.
      batches: makes the batch of a step, counted from 0, the same one whenever it is asked. Of
        several processes, each makes it: global arrays, or all of it in NumPy.
      optimiser: one of those below, or any.
      steps: how many there are, those before a kill included.
      out: the folder of the run.
      settings: what must be the same for a run to be continued; steps and seed are added.
      evaluate: measures the model every `evaluate_every` steps, and after the last.
      evaluate_every: a number of steps.
      checkpoint_every: a number of steps; there is one after the last step too.
      seed: of the keys.

    Raises:
      SystemExit: the folder holds a run with other settings.
    """
    same_settings(out, settings | {"steps": steps, "seed": seed})
    graph, *states = nnx.split(model, nnx.Param, ...)
    params, fixed = map(nnx.to_pure_dict, states)
    state = initial_state(optimiser, params)
    places = shardings(params), shardings(state), None

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=places)
    def update(params: Any, state: Any, fixed: Any, batch: Any, step: int) -> Any:
        def value(params: Any) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(seed), step)
            return loss(nnx.merge(graph, params, fixed), batch, key)

        result, gradient = jax.value_and_grad(value)(params)
        change, state = optimiser.update(gradient, state, params)
        return optax.apply_updates(params, change), state, result

    # Orbax writes a checkpoint into a temporary folder, and one rename completes it (a last file
    # does, where renames are not atomic): a half-written one is never found. Nor does training go
    # on while it is written, for then a kill could cost more than an interval.
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, cleanup_tmp_directories=True, enable_async_checkpointing=False
    )
    with ocp.CheckpointManager(out.resolve() / "checkpoints", options=options) as checkpoints:
        first, (params, fixed, state) = restore(checkpoints, params, fixed, state)
        log, evaluations = Table(out / "log.csv", first), Table(out / "evaluations.csv", first)
        if len(log.rows) != first:
            raise SystemExit(f"{log.path} lacks steps of the checkpoint: remove {out}")
        if first == steps and is_first():
            print(f"this run is finished: remove {out} to train again")
        quiet = first == steps or not is_first()
        bar = tqdm(total=steps, initial=first, unit="step", disable=quiet)
        batch = batches(first) if first < steps else None
        for done in range(first + 1, steps + 1):
            start = time.perf_counter()
            params, state, result = update(params, state, fixed, batch, done - 1)
            if done < steps:
                batch = batches(done)  # while the device computes
            now = {"loss": float(result)}
            log.add({"step": done} | now | {"seconds": time.perf_counter() - start})
            if evaluate and (done % evaluate_every == 0 or done == steps):
                evaluations.add({"step": done} | evaluate(nnx.merge(graph, params, fixed)))
            if done % checkpoint_every == 0 or done == steps:
                tree = {"params": params, "fixed": fixed, "optimiser": state}
                checkpoints.save(done, args=ocp.args.StandardSave(tree))
            bar.set_postfix_str(f"loss {now['loss']:.3f}", refresh=False)
            bar.update()
        bar.close()
    nnx.update(model, params, fixed)
    losses, seconds = (np.array([row[name] for row in log.rows]) for name in ("loss", "seconds"))
    return Log(losses.astype(np.float32), seconds, evaluations.rows)


def same_settings(out: Path, settings: dict[str, Any]) -> None:
    """Refuses to continue a run that was started with other settings."""
    settings = json.loads(json.dumps(settings, default=str))
    file = out / "settings.json"
    old = json.loads(file.read_text()) if file.exists() else settings
    if old != settings:
        names = sorted(old | settings)
        changed = ", ".join(name for name in names if old.get(name) != settings.get(name))
        raise SystemExit(
            f"{out} holds a run with other settings ({changed}): remove it, or give another folder"
        )
    sync_global_devices("all have read the settings")
    if is_first():
        out.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        new.write_text(json.dumps(settings, indent=2))
        new.replace(file)  # at once: a kill leaves no half of it


def is_first() -> bool:
    """Whether this process writes and prints for all."""
    return jax.process_index() == 0


def shardings(tree: Any) -> Any:
    """How arrays lie; None, which leaves it to the compiler, for those that nobody has placed."""
    return jax.tree.map(lambda x: x.sharding if x.committed else None, tree)


def initial_state(optimiser: optax.GradientTransformation, params: Any) -> Any:
    """The optimiser's state: what belongs to a parameter lies as it does, all else everywhere."""

    def is_masked(x: Any) -> bool:  # there is none: Muon's, for parameters that are Adam's
        return isinstance(x, optax.MaskedNode)

    places = optax.tree_utils.tree_map_params(
        optimiser,
        lambda x, sharding: x if is_masked(x) else sharding,
        jax.eval_shape(optimiser.init, params),
        shardings(params),
        transform_non_params=lambda _: None,
        is_leaf=is_masked,
    )
    return jax.jit(optimiser.init, out_shardings=places)(params)


def restore(
    checkpoints: ocp.CheckpointManager, params: Any, fixed: Any, state: Any
) -> tuple[int, tuple[Any, Any, Any]]:
    """Returns step, parameters, fixed and optimiser's state: as saved, if they are.

    They are placed as those given, wherever they were when they were saved.
    """
    step = checkpoints.latest_step()
    if step is None:
        return 0, (params, fixed, state)
    tree = {"params": params, "fixed": fixed, "optimiser": state}
    tree = checkpoints.restore(step, args=ocp.args.StandardRestore(tree))
    if is_first():
        print(f"resumed from step {step} in {checkpoints.directory}")
    return step, (tree["params"], tree["fixed"], tree["optimiser"])


class Table:
    """A CSV file that grows row by row: what is in it survives a kill.

    Every process has its rows, the first one writes them.
    """

    def __init__(self, path: Path, last: int):
        """Opens it, and cuts off the steps after the last, for those will be done again."""
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]  # a power cut may tear the last
        rows = [
            {name: float(value) if name != "step" else int(value) for name, value in row.items()}
            for row in csv.DictReader(whole)
        ]
        self.path, self.rows = path, [row for row in rows if row["step"] <= last]
        sync_global_devices(f"all have read {path.name}")
        if lines and is_first():
            kept = len(self.rows) + 1 if self.rows else 0  # and the header
            os.truncate(path, sum(map(len, whole[:kept])))

    def add(self, row: dict[str, float]) -> None:
        self.rows.append(row)
        if not is_first():
            return
        with self.path.open("a") as file:
            if len(self.rows) == 1:
                print(*row, sep=",", file=file)
            print(*row.values(), sep=",", file=file)


def cosine(peak: float, steps: int) -> optax.Schedule:
    """Rises in a twentieth of the steps, and falls to a fiftieth of its peak."""
    return optax.warmup_cosine_decay_schedule(0.0, peak, max(1, steps // 20), steps, peak / 50)


def adam(peak: float, steps: int, *, clip: float = 1.0) -> optax.GradientTransformation:
    """Adam with the cosine schedule, and gradients clipped to this norm."""
    return optax.chain(optax.clip_by_global_norm(clip), optax.adam(cosine(peak, steps), b2=0.98))


def radam(
    peak: float, steps: int, *, drop_at: float = 1.0, clip: float = 1.0
) -> optax.GradientTransformation:
    """RAdam, which needs no warmup; after `drop_at` of the steps with a tenth of the rate.

    Source: On the Variance of the Adaptive Learning Rate and Beyond (Liu et al. 2020, arXiv
    1908.03265).
    """
    schedule = optax.piecewise_constant_schedule(peak, {round(drop_at * steps): 0.1})
    return optax.chain(optax.clip_by_global_norm(clip), optax.radam(schedule))


def muon(peak: float, steps: int) -> optax.GradientTransformation:
    """Muon for matrices, Adam with a fifth of the rate for all else; the cosine schedule.

    It clips nothing, for the size of Muon's steps does not depend on that of the gradients. Blocks
    that `scan=True` has stacked are updated as if they were not.
    """

    def matrices(params: Any) -> Any:
        # The axes of stacked blocks: what the MLP's matrix has beyond two. (Not what a norm's scale
        # has beyond one: Optax asks again where only matrices are left.)
        stacked = [
            (path[:-2], p.ndim - 2)
            for path, p in jax.tree.leaves_with_path(params)
            if jax.tree_util.keystr(path).endswith("['up']['kernel']")
        ]

        def choose(path: Any, p: jax.Array) -> Any:
            name = jax.tree_util.keystr(path)
            if "kernel" not in name or "decay" in name:
                return None
            first = sum(axes for block, axes in stacked if path[: len(block)] == block)
            # Heads and their width are one axis of the matrix: the outputs', or `out`'s inputs.
            outputs = p.ndim - 1 if "'out'" in name else first + 1
            return optax.contrib.MuonDimensionNumbers(
                tuple(range(first, outputs)), tuple(range(outputs, p.ndim))
            )

        return jax.tree.map_with_path(choose, params)

    return optax.contrib.muon(
        cosine(peak, steps),
        weight_decay=0.05,
        adam_learning_rate=cosine(peak / 5, steps),
        adam_b2=0.98,
        muon_weight_dimension_numbers=matrices,
    )


def running_mean(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and the mean loss of the 25th part of all steps that ends there: for a plot."""
    window = max(1, len(losses) // 25)
    mean = np.convolve(losses, np.ones(window) / window, "valid")
    return np.arange(window, len(losses) + 1), mean


def command() -> str:
    """How this program was called."""
    return shlex.join(["python", *sys.argv])


def hardware() -> dict[str, Any]:
    """What results were measured on, and when."""
    device = jax.devices()[0]
    name = device.device_kind
    if device.platform == "cpu":
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        affinity = getattr(os, "sched_getaffinity", None)  # Linux only
        cores = len(affinity(0)) if affinity else os.cpu_count()
        name = f"{names[0] if names else platform.machine()}, {cores} core{'s' * (cores != 1)}"
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"device": name, "devices": jax.device_count(), "jax": jax.__version__, "date": date}
