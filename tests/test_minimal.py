"""The smallest example trains a model, draws its loss and writes with it."""

import importlib
import re
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "minimal.py"
sys.path.append(str(EXAMPLE.parent))


@pytest.mark.usefixtures("no_type_checks")
def test_it_learns_draws_and_writes(tmp_path, capsys, monkeypatch) -> None:
    minimal, picture = importlib.import_module("minimal"), tmp_path / "loss.png"
    monkeypatch.setattr(minimal, "LENGTH", 32)
    minimal.main(["--mixer=linear", "--steps=15", f"--picture={picture}"])
    printed = capsys.readouterr().out
    last = float(re.search(r"last loss ([\d.]+) nats", printed)[1])
    assert last < 4  # of a uniform guess it is log(256) = 5.5
    assert str(picture) in printed
    assert picture.stat().st_size > 10_000
    assert len(printed.split("\n\nThe ", 1)[1]) > 100  # 200 bytes, some of which may be no UTF-8


def test_it_fits_on_a_screen() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 80
