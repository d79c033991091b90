"""The example on scaling measures what it says, and leaves out what would not fit."""

import importlib
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "examples"))
scaling = importlib.import_module("scaling")

TINY = scaling.PRESETS["cpu"]._replace(tokens=256, calls=1)
POWERS = {"softmax": 2.0, "linear": 1.0}


def fake(method: str, T: int, preset: str, limit: float) -> dict:
    cost = 0.5 * (T / 512) ** POWERS[method]
    return {"rows": 1, "seconds": cost, "planned_bytes": 1000 * cost, "peak_bytes": 900 * cost}


@pytest.mark.usefixtures("no_type_checks")
def test_one_measurement_runs_or_says_what_it_would_need(monkeypatch) -> None:
    result = scaling.measure("linear", 64, TINY)
    assert result["rows"] == 4
    assert result["seconds"] > 0
    bytes_held = 7 * 4 * 64 * TINY.heads * TINY.width  # q, k, v, their gradients, the outputs
    assert result["planned_bytes"] > bytes_held / 2
    monkeypatch.setattr(scaling, "free_bytes", lambda: 1000.0)
    result = scaling.measure("linear", 64, TINY)
    assert "0.0 GB are free" in result["left_out"]
    assert "seconds" not in result


def test_a_method_too_slow_is_left_out_and_slopes_are_fitted(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(scaling, "in_a_process", fake)
    scaling.main(["--methods", "softmax", "linear", f"--out={tmp_path}"])
    written = json.loads((tmp_path / "results.json").read_text())
    left_out = [(r["method"], r["tokens"]) for r in written["measurements"] if "left_out" in r]
    assert left_out == [("softmax", 2048), ("softmax", 4096), ("softmax", 8192)]
    for fitted in written["slopes"].values():
        assert fitted == pytest.approx(POWERS)
    assert len((tmp_path / "scaling.csv").read_text().splitlines()) == 11
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    assert "softmax at 2048 tokens is left out: would take" in capsys.readouterr().out


@pytest.mark.slow
def test_script_measures_each_method_in_a_process(tmp_path, monkeypatch) -> None:
    patient = scaling.PRESETS["cpu"]._replace(seconds=1e6)  # however busy the machine
    monkeypatch.setitem(scaling.PRESETS, "cpu", patient)
    scaling.main(["--lengths", "64", "128", f"--out={tmp_path}"])
    written = json.loads((tmp_path / "results.json").read_text())
    assert [r for r in written["measurements"] if "left_out" in r] == []
    assert set(written["slopes"]["seconds"]) == set(scaling.METHODS)
