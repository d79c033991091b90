"""The examples' loop: killed at any moment it goes on as if nothing had happened."""

import csv
import importlib
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import measured_apart

from hla_jax.models import TransformerLM

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))
training = importlib.import_module("training")

# A run of its own process: a linear model learns a line, with noise from the loss's key.
SCRIPT = """
import os, signal, sys
from pathlib import Path
import jax, numpy as np
from flax import nnx
import training

out, killed_at = Path(sys.argv[1]), int(sys.argv[2])

model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

def loss(model, batch, key):
    noise = 0.1 * jax.random.normal(key, (8, 1))
    return ((model(batch) - batch.sum(1, keepdims=True) + noise) ** 2).mean()

def batches(step):
    if step == killed_at:
        os.kill(os.getpid(), signal.SIGKILL)
    return np.random.default_rng(step).normal(size=(8, 3)).astype(np.float32)

training.fit(
    model, loss, batches, optimiser=training.adam(0.1, 400), steps=400, out=out, settings={},
    evaluate=lambda model: {"bias": float(model.bias[0])}, evaluate_every=30, checkpoint_every=20,
)
"""


def run(out: Path, killed_at: int = -1) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "examples"), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(out), str(killed_at)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def columns(file: Path, *names: str) -> list[tuple[str, ...]]:
    with file.open() as lines:
        return [tuple(row[name] for name in names) for row in csv.DictReader(lines)]


@pytest.mark.slow
def test_a_killed_run_is_the_one_that_was_not_bit_for_bit(tmp_path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    assert run(killed, killed_at=57).returncode == -signal.SIGKILL
    assert len(columns(killed / "log.csv", "step")) == 56  # a batch is made during the step before
    resumed = run(killed)
    assert resumed.returncode == 0
    assert "resumed from step 40 " in resumed.stdout
    assert run(whole).returncode == 0
    for file, names in (("log.csv", ("step", "loss")), ("evaluations.csv", ("step", "bias"))):
        assert columns(killed / file, *names) == columns(whole / file, *names)
    assert len(columns(whole / "log.csv", "step")) == 400
    assert [step for (step,) in columns(whole / "evaluations.csv", "step")][-2:] == ["390", "400"]


def fit(out: Path, stop_before: int = 99, **changes):
    """Six steps of a model with a fixed part; the batches end early if asked to."""

    class Model(nnx.Module):
        def __init__(self):
            self.w, self.fixed = nnx.Param(jnp.zeros(2)), nnx.Variable(jnp.ones(2))

    def batches(step: int) -> np.ndarray:
        if step == stop_before:
            raise KeyboardInterrupt
        return np.full(2, step, np.float32)

    def loss(model, batch, key):
        return ((model.w * model.fixed - batch - jax.random.normal(key, (2,))) ** 2).sum()

    model = Model()
    options = dict(optimiser=training.adam(0.1, 6), steps=6, out=out, settings={"size": 2})
    options |= dict(evaluate=lambda m: {"w": float(m.w.sum())}, evaluate_every=4)
    return model, training.fit(model, loss, batches, **options | dict(checkpoint_every=2) | changes)


def test_interrupted_and_continued(tmp_path) -> None:
    whole, log = fit(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "stopped", stop_before=5)  # in the fifth step; after the fourth it was kept
    again, continued = fit(tmp_path / "stopped")
    np.testing.assert_array_equal(continued.losses, log.losses)
    assert continued.evaluations == log.evaluations
    assert [row["step"] for row in log.evaluations] == [4, 6]
    np.testing.assert_array_equal(again.w, whole.w)
    np.testing.assert_array_equal(again.fixed, jnp.ones(2))
    assert (whole.w[...] != 0).all()

    model, finished = fit(tmp_path / "whole")  # trains no more, and still has all there was
    np.testing.assert_array_equal(finished.losses, log.losses)
    np.testing.assert_array_equal(finished.seconds, log.seconds)
    np.testing.assert_array_equal(model.w, whole.w)


def test_other_settings_are_refused_by_name(tmp_path) -> None:
    fit(tmp_path, steps=2)
    with pytest.raises(SystemExit, match=r"other settings \(size, steps\)"):
        fit(tmp_path, settings={"size": 3})
    (tmp_path / "log.csv").unlink()
    with pytest.raises(SystemExit, match=r"log\.csv lacks steps"):
        fit(tmp_path, steps=2)


@pytest.mark.parametrize("make", [training.adam, training.radam, training.muon])
def test_optimisers_minimise(make) -> None:
    target = jax.random.normal(jax.random.key(0), (4, 4))
    params = {"kernel": jnp.zeros((4, 4)), "gain": jnp.zeros(4)}
    optimiser = make(0.1, 150)

    def loss(params):
        distance = ((params["kernel"] - target) ** 2).sum()
        return distance + ((params["gain"] - target[0]) ** 2).sum()

    @jax.jit
    def step(params, state):
        change, state = optimiser.update(jax.grad(loss)(params), state, params)
        return jax.tree.map(jnp.add, params, change), state

    state, first = optimiser.init(params), loss(params)
    for _ in range(150):
        params, state = step(params, state)
    assert loss(params) < 0.05 * first


@pytest.mark.usefixtures("no_type_checks")
def test_muon_updates_stacked_blocks_as_it_does_single_ones() -> None:
    def shapes(scan: bool) -> dict:
        def make() -> TransformerLM:
            sizes = dict(num_layers=2, num_heads=2, features=8, tied=False)
            return TransformerLM(5, scan=scan, rngs=nnx.Rngs(0), **sizes)

        return nnx.to_pure_dict(nnx.state(nnx.eval_shape(make), nnx.Param))

    def stacked(tree: dict) -> dict:
        blocks = jax.tree.map(lambda *x: np.stack(x), *tree["blocks"].values())
        return tree | {"blocks": {0: blocks}}

    optimiser = training.muon(0.1, 10)
    update = jax.jit(optimiser.update)

    def change(params: dict, gradient: dict) -> dict:  # the second one, for at first the rate is 0
        _, state = update(gradient, optimiser.init(params), params)
        return update(gradient, state, params)[0]

    random = np.random.default_rng(0)
    params, gradient = (
        jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), shapes(scan=False))
        for _ in range(2)
    )
    assert jax.tree.map(jnp.shape, stacked(params)) == jax.tree.map(jnp.shape, shapes(scan=True))
    want, got = change(params, gradient), change(stacked(params), stacked(gradient))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), got, stacked(want))
    assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(want))


@pytest.mark.parametrize("make", [training.adam, training.radam])
def test_gradients_are_clipped(make) -> None:
    """Two steps: the second is small beside the first, and stays so only if that one is cut."""
    optimiser, params = make(1.0, 100), jnp.zeros(2)

    def second(gradient: float) -> jax.Array:
        state = optimiser.init(params)
        for g in (gradient, 0.5):
            change, state = optimiser.update(jnp.array([g, 0.0]), state, params)
        return change

    np.testing.assert_allclose(second(1e6), second(1.0), rtol=1e-6)


def test_hardware_is_told() -> None:
    told = json.loads(json.dumps(training.hardware()))
    assert told["jax"] == jax.__version__
    assert told["devices"] >= 1
    assert len(told["device"]) > 5


def test_running_mean_ends_at_the_last_step() -> None:
    steps, mean = training.running_mean(np.arange(100.0))
    assert len(steps) == len(mean) == 97
    assert (steps[0], steps[-1], mean[-1]) == (4, 100, np.mean([96, 97, 98, 99]))


MESHES = [(8, 1, 1), (2, 2, 2), (1, 2, 4)]  # data, model, seq


@pytest.fixture(scope="module")
def on_meshes() -> dict[str, dict]:
    return measured_apart(__file__)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_on_a_mesh_every_loss_is_that_of_one_device(on_meshes, mesh) -> None:
    one = on_meshes["(1, 1, 1)"]["losses"]
    np.testing.assert_allclose(on_meshes[str(mesh)]["losses"], one, rtol=0, atol=1e-10)
    assert one[-1] < 0.95 * one[0]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_stay_where_they_lie_and_their_moments_lie_beside_them(on_meshes, mesh) -> None:
    before, after = on_meshes[str(mesh)]["before"], on_meshes[str(mesh)]["after"]
    assert after == before
    params, (count, *moments, scheduled) = before
    assert moments == 2 * params
    assert any("'data'" in place or "'seq'" in place for place in params)
    assert count == scheduled == f"{list(mesh)} ()"  # on every device


def train_on(shape: tuple[int, int, int]) -> dict:
    """Losses, and how all lies, before training and in the checkpoint after it."""
    import tempfile

    import optax
    import orbax.checkpoint as ocp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from hla_jax.models import TransformerLM
    from hla_jax.parallel import Layout

    devices = jax.devices()[: np.prod(shape)]
    mesh = jax.make_mesh(shape, ("data", "model", "seq"), (AxisType.Auto,) * 3, devices=devices)
    divided = dict(batch="data", heads="model", sequence="seq", parameters=("data", "seq"))
    options = dict(layout=Layout(mesh, **divided), num_layers=2, num_heads=2, features=16)
    options |= dict(scan=True, remat=True, dtype=jnp.float64, param_dtype=jnp.float64)
    model = nnx.jit(lambda: TransformerLM(16, mixer="hla2", rngs=nnx.Rngs(0), **options))()

    def batches(step: int) -> jax.Array:
        rows = (np.random.default_rng(step).integers(16, size=(8, 1)) + np.arange(33)) % 16
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        return jax.make_array_from_callback(rows.shape, sharding, lambda part: rows[part])

    def loss(model, rows, key):
        logits, _ = model(rows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

    def places(tree, sharding) -> list[str]:
        found = map(sharding, jax.tree.leaves(tree))
        return [f"{list(s.mesh.shape.values())} {tuple(s.spec)}" for s in found]

    optimiser = training.adam(0.1, 6)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    before = params, training.initial_state(optimiser, params)
    before = [places(tree, lambda x: x.sharding) for tree in before]
    with tempfile.TemporaryDirectory() as folder:
        run = dict(optimiser=optimiser, steps=6, out=Path(folder), settings={})
        training.fit(model, loss, batches, **run)
        losses = [float(loss) for (loss,) in columns(Path(folder) / "log.csv", "loss")]
        kept = ocp.StandardCheckpointer().metadata(Path(folder) / "checkpoints/6/default")
    after = (kept.item_metadata.tree[name] for name in ("params", "optimiser"))
    after = [places(tree, lambda x: x.sharding.to_jax_sharding()) for tree in after]
    return {"losses": losses, "before": before, "after": after}


if __name__ == "__main__":
    print(json.dumps({str(shape): train_on(shape) for shape in [(1, 1, 1), *MESHES]}))
