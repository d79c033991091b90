"""The main example: killed at any moment it goes on from its last checkpoint, to the same end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "examples" / "char_lm.py"
STEPS, EVERY = 300, 25


def start(out: Path, text: Path) -> subprocess.Popen:
    options = dict(out=out, text=text, steps=STEPS, checkpoint_every=EVERY, positions=32)
    options |= dict(mixer="hla2", batch=2, length=32, layers=1, heads=2, features=16)
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parent.parent)},
        stdout=subprocess.PIPE,
        text=True,
    )


def saved_steps(out: Path) -> list[int]:
    return sorted(int(p.name) for p in (out / "checkpoints").glob("*") if p.name.isdigit())


def test_a_killed_run_resumes_and_ends_like_one_that_was_not(tmp_path):
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    killed, whole = tmp_path / "killed", tmp_path / "whole"

    run, other = start(killed, text), start(whole, text)
    while not saved_steps(killed) and run.poll() is None:
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    at_kill = saved_steps(killed)[-1]
    assert at_kill < STEPS

    resumed = start(killed, text)
    output, _ = resumed.communicate(timeout=200)
    other.communicate(timeout=200)
    assert resumed.returncode == other.returncode == 0
    assert f"resumed from step {at_kill} " in output

    results, uninterrupted = (
        json.loads((out / "results.json").read_text()) for out in (killed, whole)
    )
    assert results["final_loss"] == uninterrupted["final_loss"]
    assert results["bits_per_byte"] == uninterrupted["bits_per_byte"]
    assert results["bits_per_byte"]["hla2"] < 0.8 * min(
        bits for name, bits in results["bits_per_byte"].items() if "unigram" in name
    )
    assert results["step_error"] < 1e-5
    assert (killed / "char_lm.png").stat().st_size > 10_000
    assert "decoding, microseconds per token" in output
