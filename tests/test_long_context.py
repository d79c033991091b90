"""The example on long context recalls every pair, over several devices and streamed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "long_context.py"


@pytest.mark.slow
def test_all_pairs_are_recalled_at_once_and_streamed(tmp_path) -> None:
    sizes = ["--tokens=999", "--piece=300", "--devices=3", f"--out={tmp_path}"]
    subprocess.run([sys.executable, str(SCRIPT), *sizes], check=True)
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert set(results) == {"linear", "hla2", "ahla", "hla3"}
    for row in results.values():
        assert row["at_once"]["right"] == row["streamed"]["right"] == 16
        assert row["streamed"]["largest_difference"] < 1e-5
        assert row["at_once"]["planned_bytes"] > 0
