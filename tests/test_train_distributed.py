"""Several processes train what one does; killed, they go on from the last whole checkpoint."""

import csv
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers import processes

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_distributed.py"
STEPS, EVERY = 30, 5
SIZES = f"--features 16 --layers 2 --heads 2 --length 32 --batch 4 --steps {STEPS}"
SIZES += f" --mixer hla2 softmax --checkpoint-every {EVERY}"

pytestmark = pytest.mark.slow


def run(out: Path, mesh: tuple[int, int, int], count: int = 1):
    """Starts training, on a mesh (data, model, sequence) of the devices of `count` processes."""
    data, model, sequence = mesh
    options = f"{SIZES} --data {data} --model {model} --sequence {sequence} --out {out}"
    options += f" --cpu-devices {data * model * sequence // count}"

    def command(address: str, i: int) -> list[str]:
        of_many = f" --coordinator {address} --processes {count} --process {i}"
        return [str(EXAMPLE), *(options + of_many * (count > 1)).split()]

    return processes(count, command)


def finish(out: Path, mesh: tuple[int, int, int], count: int = 1) -> str:
    """Trains to the end; returns what the first process printed."""
    with run(out, mesh, count) as started:
        outputs = [process.communicate(timeout=120) for process in started]
    for process, (_, err) in zip(started, outputs, strict=True):
        assert process.returncode == 0, err[-4000:]
    return outputs[0][0]


def kill(out: Path, which: int, due: Callable[[], object]) -> None:
    """Kills one of two processes as soon as it is due; the other ends by itself."""
    with run(out, (2, 1, 2), 2) as started:
        victim, late = started[which], time.monotonic() + 120
        while not due():
            assert victim.poll() is None, victim.communicate()[1][-4000:]
            assert time.monotonic() < late
            time.sleep(0.001)
        victim.send_signal(signal.SIGKILL)
        for process in started:
            assert process.wait(timeout=60) != 0  # sooner than JAX would end it unasked


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
    log = tmp_path / "log.csv"
    kill(tmp_path, 1, lambda: log.exists() and log.read_text().count("\n") > 2 * EVERY + 2)
    saved, done = last_saved(tmp_path), len(losses(tmp_path))
    assert done < STEPS
    assert saved <= done <= saved + EVERY
    assert resumed_from(finish(tmp_path, (1, 2, 2))) == saved
    np.testing.assert_allclose(losses(tmp_path), whole, rtol=1e-5)


def test_a_half_written_checkpoint_is_never_loaded(tmp_path, whole) -> None:
    def half_written(interval: int) -> list[Path]:
        return list((tmp_path / "checkpoints").glob(f"{interval * EVERY}.*tmp*"))

    for interval in (3, 4, 5):
        kill(tmp_path, 0, partial(half_written, interval))
        if half_written(interval):  # else it was completed faster than the kill came
            break
    assert half_written(interval)
    assert resumed_from(finish(tmp_path, (2, 2, 1), 2)) == (interval - 1) * EVERY
    np.testing.assert_allclose(losses(tmp_path), whole, rtol=1e-5)
