"""The copy task asks for a copy, and every model of it learns."""

import importlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "examples"))
copy_task = importlib.import_module("copy_task")

TINY = ["--length=8", "--batch=4", "--layers=1", "--heads=2", "--features=16"]


def test_sequences_are_symbols_separator_and_the_symbols_again() -> None:
    args = copy_task.parse_arguments([*TINY, "--batch=50"])
    tokens, counts = copy_task.batch_at(3, args)
    assert set(counts) == set(range(1, 9))
    for row, n in zip(tokens, counts, strict=True):
        np.testing.assert_array_equal(row[:n], row[n + 1 : 2 * n + 1])
        assert row[n] == copy_task.SEPARATOR
        assert (row[:n] < copy_task.SYMBOLS).all()
        assert (row[2 * n + 1 :] == copy_task.PADDING).all()
    assert set(tokens.ravel()) == set(range(copy_task.SYMBOLS + 2))


def test_the_loss_is_of_the_copy_alone() -> None:
    """A model that knows the next token of the copy, and nothing of the rest, has no loss."""
    batch = copy_task.batch_at(0, copy_task.parse_arguments(TINY))
    tokens, counts = batch

    def copier(inputs, mask):
        place = np.arange(inputs.shape[1])
        np.testing.assert_array_equal(mask, place < 2 * counts[:, None])
        right = 50.0 * jax.nn.one_hot(tokens[:, 1:], copy_task.SYMBOLS + 2)
        return np.where((place >= counts[:, None])[..., None], right, -right), None

    assert copy_task.copy_loss(copier, batch, jax.random.key(0)) < 1e-6
    _, targets, copied = copy_task.read(copier, batch)
    np.testing.assert_array_equal(copied.sum(1), counts)
    for row, which, symbols, n in zip(targets, copied, tokens, counts, strict=True):
        np.testing.assert_array_equal(row[which], symbols[:n])


@pytest.mark.slow
@pytest.mark.usefixtures("no_type_checks")
def test_results_tell_what_they_are_of(tmp_path) -> None:
    sizes = [*TINY, "--steps=2", f"--out={tmp_path}"]
    copy_task.main([*sizes, "--mixers", "linear"])
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["preset"] == "cpu"
    assert results["seed"] == 0
    assert results["hardware"]["device"]
    row = results["results"]["linear"]
    assert 1 < row["loss"] < 10
    assert 0 <= row["accuracy"] < 1
    assert (tmp_path / "copy_task.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("name", copy_task.MIXERS)
def test_every_mixer_learns(name, tmp_path) -> None:
    args = copy_task.parse_arguments([*TINY, "--length=4", "--steps=200", f"--out={tmp_path}"])
    log, _ = copy_task.train(name, args)
    assert np.isfinite(log.losses).all()
    assert log.losses[-20:].mean() < 0.9 * log.losses[:20].mean()
