"""The main example: killed at any moment it goes on from its last checkpoint, to the same end."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flax import nnx

SCRIPT = Path(__file__).parent.parent / "examples" / "char_lm.py"
STEPS, EVERY = 300, 25


def arguments(out: Path, text: Path) -> list[str]:
    options = dict(out=out, text=text, steps=STEPS, checkpoint_every=EVERY, positions=32)
    options |= dict(mixer="hla2", batch=2, length=32, layers=2, heads=2, features=16)
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def start(out: Path, text: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments(out, text)],
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parent.parent)},
        stdout=subprocess.PIPE,
        text=True,
    )


def final_loss_without_a_kill(out: Path, text: Path) -> float:
    spec = importlib.util.spec_from_file_location("char_lm", SCRIPT)
    char_lm = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(char_lm)
    args = char_lm.parse_arguments(arguments(out, text))
    graph, params = nnx.split(char_lm.make_model(args, args.mixer))
    data, _ = char_lm.load_text(text)
    trained, _ = char_lm.train(graph, nnx.to_pure_dict(params), data, args)
    return float(trained.losses[-1])


def saved_steps(out: Path) -> list[int]:
    return sorted(int(p.name) for p in (out / "checkpoints").glob("*") if p.name.isdigit())


@pytest.mark.slow
def test_a_killed_run_resumes_and_ends_like_one_that_was_not(tmp_path):
    text, out = tmp_path / "text", tmp_path / "killed"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)

    killed = start(out, text)
    while not saved_steps(out) and killed.poll() is None:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    at_kill = saved_steps(out)[-1]
    assert at_kill < STEPS

    resumed = start(out, text)
    output, _ = resumed.communicate(timeout=200)
    assert resumed.returncode == 0
    assert f"resumed from step {at_kill} " in output
    assert "decoding, microseconds per token" in output

    results = json.loads((out / "results.json").read_text())
    assert results["final_loss"] == final_loss_without_a_kill(tmp_path / "whole", text)
    assert results["step_error"] < 1e-5
    bits = results["bits_per_byte"]
    assert bits["hla2"] < 0.7 * bits["unigram (counted on the training text)"]
    assert (out / "char_lm.png").stat().st_size > 10_000
