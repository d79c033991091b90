"""Several processes train what one does; killed, they go on from the last whole checkpoint."""

import csv
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from helpers import killed_at, processes

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_distributed.py"
STEPS, EVERY = 30, 5
SIZES = f"--features 16 --layers 2 --heads 2 --length 32 --batch 4 --steps {STEPS}"
SIZES += f" --mixer hla2 softmax --checkpoint-every {EVERY}"

pytestmark = pytest.mark.slow


def run(
    out: Path,
    mesh: tuple[int, int, int],
    count: int = 1,
    scripts: dict[int, list[str]] | None = None,
):
    """Starts training, on a mesh (data, model, sequence) of the devices of `count` processes.

    Some of them may run another script than the example.
    """
    data, model, sequence = mesh
    options = f"{SIZES} --data {data} --model {model} --sequence {sequence} --out {out}"
    options += f" --cpu-devices {data * model * sequence // count}"

    def command(address: str, i: int) -> list[str]:
        of_many = f" --coordinator {address} --processes {count} --process {i}"
        script = (scripts or {}).get(i, [str(EXAMPLE)])
        return [*script, *(options + of_many * (count > 1)).split()]

    return processes(count, command)


def finish(out: Path, mesh: tuple[int, int, int], count: int = 1) -> str:
    """Trains to the end; returns what the first process printed."""
    with run(out, mesh, count) as started:
        outputs = [process.communicate() for process in started]
    for process, (_, err) in zip(started, outputs, strict=True):
        assert process.returncode == 0, err[-4000:]
    return outputs[0][0]


def kill(out: Path, victim: int, script: list[str]) -> None:
    """Trains with two processes, one of which kills itself; the other ends by itself."""
    with run(out, (2, 1, 2), 2, {victim: script}) as started:
        errors = [process.communicate()[1] for process in started]
        codes = [process.returncode for process in started]
    assert codes[victim] == -signal.SIGKILL, errors[victim][-4000:]
    assert codes[1 - victim] != 0


def losses(out: Path) -> np.ndarray:
    with (out / "log.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    return np.array([float(row["loss"]) for row in rows])


def last_saved(out: Path) -> int:
    return max(int(p.name) for p in (out / "checkpoints").iterdir() if p.name.isdigit())


def resumed_from(printed: str) -> int:
    return int(re.search(r"resumed from step (\d+) ", printed)[1])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> np.ndarray:
    """The losses of one device, never interrupted."""
    out = tmp_path_factory.mktemp("whole")
    finish(out, (1, 1, 1))
    return losses(out)


def test_processes_have_the_losses_of_one_device(tmp_path, whole) -> None:
    printed = finish(tmp_path, (2, 1, 2), 2)
    assert "2 processes" in printed
    np.testing.assert_allclose(losses(tmp_path), whole, rtol=1e-5)
    assert len(whole) == STEPS
    assert whole[-1] < 0.9 * whole[0]


def test_killed_and_continued_on_another_mesh_it_loses_one_interval_at_most(
    tmp_path, whole
) -> None:
    kill(tmp_path, 1, killed_at(EXAMPLE, 2 * EVERY + 3))
    saved, done = last_saved(tmp_path), len(losses(tmp_path))
    assert saved == 2 * EVERY
    assert saved <= done <= saved + 3
    assert resumed_from(finish(tmp_path, (1, 2, 2))) == saved
    np.testing.assert_allclose(losses(tmp_path), whole, rtol=1e-5)


def test_a_half_written_checkpoint_is_never_loaded(tmp_path, whole) -> None:
    kill(tmp_path, 0, killed_at(EXAMPLE, 3 * EVERY, half_written=True))
    assert list((tmp_path / "checkpoints").glob(f"{3 * EVERY}.*tmp*"))
    assert resumed_from(finish(tmp_path, (2, 2, 1), 2)) == 2 * EVERY
    np.testing.assert_allclose(losses(tmp_path), whole, rtol=1e-5)
