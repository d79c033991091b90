"""The memory tasks ask for what can be known, and what is compared is as equal as it says."""

import importlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

sys.path.append(str(Path(__file__).parents[1] / "examples"))
recall = importlib.import_module("recall")

TINY = recall.PRESETS["cpu"]._replace(
    sizes=dict(recall=(2, 3), induction=(3, 4), copying=(2, 3)),
    vocabulary=recall.FIRST + 16,
    features=16,
    steps=2,
    rows=8,
    held_out=16,
    seeds=1,
)


def expected(task: str, tokens: list[int]) -> list[int]:
    """What a row asks for, in order, found by searching the row itself."""
    if task == "recall":
        pairs = len(tokens) // 3
        return [tokens[tokens.index(key) + 1] for key in tokens[2 * pairs :]]
    if task == "induction":
        return [tokens[tokens.index(recall.MARKER) + 1]]
    return tokens[: tokens.index(recall.MARKER)]


@pytest.mark.parametrize("task", recall.TASKS)
def test_rows_ask_for_what_they_hold(task) -> None:
    tokens, targets = recall.batch(task, (3, 5), (4, 8), 32, 8, recall.FIRST + 40)
    lengths = set()
    for row, wanted in zip(tokens, targets, strict=True):
        real = row[row != recall.PADDING].tolist()
        asked = wanted != recall.UNSCORED
        assert wanted[asked].tolist() == expected(task, real)
        assert np.flatnonzero(asked)[-1] == len(real) - 1
        lengths.add(len(real))
    assert len(lengths) == 2
    same, _ = recall.batch(task, (3, 5), (4, 8), 32, 8, recall.FIRST + 40)
    other, _ = recall.batch(task, (3, 6), (4, 8), 32, 8, recall.FIRST + 40)
    np.testing.assert_array_equal(same, tokens)
    assert (other != tokens).any()


def sizes(operator: str, comparison: str) -> tuple[int, int]:
    run = recall.Run("recall", comparison, operator, True, False, 0)
    model = recall.make_model(run, recall.PRESETS["cpu"], 8)
    params = sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return params, sum(x.size for x in jax.tree.leaves(model.init_state(1)[0].memory))


@pytest.mark.usefixtures("no_type_checks")
def test_equal_state_and_equal_parameters_are_equal() -> None:
    compared = [sizes(name, "equal state") for name in recall.OPERATORS if name != "softmax"]
    params, states = map(np.array, zip(*compared, strict=True))
    assert np.ptp(params) < 0.01 * params.min()
    assert np.ptp(states) < 0.04 * states.min()
    assert abs(sizes("softmax", "equal width")[0] - params.min()) < 0.01 * params.min()
    assert sizes("linear", "equal width")[1] == states.min() / 2


def result(operator: str, seed: int, accuracy: float) -> dict:
    comparison = "equal width" if operator == "softmax" else "equal state"
    run = recall.Run("recall", comparison, operator, True, False, seed)
    numbers = dict(parameters=1, state=1, final_loss=0.0, milliseconds_per_step=1.0)
    numbers |= dict(accuracy={"2": accuracy}, mean_accuracy=accuracy)
    return run._asdict() | numbers | {"variant": run.variant}


def test_an_operator_earns_its_cost_if_it_gains_more_than_seeds_differ() -> None:
    accuracies = dict(linear=(0.5, 0.6), hla2=(0.62, 0.64), ahla=(0.75, 0.8), softmax=(1, 1))
    results = [result(name, i, a) for name, both in accuracies.items() for i, a in enumerate(both)]
    rows = {row["variant"]: row for row in recall.summary(results, "recall")}
    assert not rows["hla2, decay"]["earns_its_cost"]
    assert rows["ahla, decay"]["earns_its_cost"]
    assert "earns_its_cost" not in rows["softmax"]


@pytest.mark.usefixtures("no_type_checks")
def test_a_run_learns_and_is_taken_up_when_it_is_finished(tmp_path) -> None:
    run = recall.Run("recall", "equal state", "hla2", True, False, 0)
    preset = TINY._replace(steps=60, rows=32)
    result = recall.train(run, preset, tmp_path)
    assert list(result["accuracy"]) == ["2", "3", "6"]
    assert result["final_loss"] < 0.9 * np.log(preset.vocabulary)
    assert recall.train(run, preset, tmp_path) == result


@pytest.mark.slow
@pytest.mark.usefixtures("no_type_checks")
def test_script_compares_operators(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(recall.PRESETS, "cpu", TINY)
    chosen = ["--operators", "hla2", "softmax", "--tasks", "recall", "induction"]
    recall.main([f"--out={tmp_path}", *chosen])
    results = json.loads((tmp_path / "results.json").read_text())
    names = [(row["task"], row["comparison"], row["variant"]) for row in results["runs"]]
    assert len(set(names)) == len(names) == 5 + 1 + 2
    assert (tmp_path / "recall.png").stat().st_size > 30_000
    assert "earn" in capsys.readouterr().out
