"""The main example trains each mixer, and killed at any moment goes on from its last checkpoint."""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from hla_jax.models import TransformerLM

SCRIPT = Path(__file__).parent.parent / "examples" / "char_lm.py"
sys.path.append(str(SCRIPT.parent))
char_lm = importlib.import_module("char_lm")
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
    args = char_lm.parse_arguments(arguments(out, text))
    data, _ = char_lm.load_text(text)
    losses, _ = char_lm.train(char_lm.make_model(args, args.mixer), data, args)
    return float(losses[-1])


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


def settings(mixer: str, out: Path) -> argparse.Namespace:
    options = dict(mixer=mixer, out=out, steps=2, batch=1, length=32)
    options |= dict(layers=1, heads=2, features=16)
    return char_lm.parse_arguments([f"--{name}={value}" for name, value in options.items()])


def split(model: TransformerLM) -> tuple[dict, dict]:
    """The parameters, and all else that a model holds."""
    return tuple(map(nnx.to_pure_dict, nnx.split(model, nnx.Param, ...)[1:]))


DATA = np.arange(1000, dtype=np.uint8)


@pytest.mark.usefixtures("no_type_checks")
def test_a_restored_model_is_the_trained_one_with_its_hashes(tmp_path) -> None:
    args = settings("reformer", tmp_path)
    model = char_lm.make_model(args, "reformer")
    char_lm.train(model, DATA, args)

    other = char_lm.make_model(argparse.Namespace(**vars(args) | {"seed": 1}), "reformer")
    char_lm.train(other, DATA, args)
    assert jax.tree.leaves(split(model)[1])
    jax.tree.map(np.testing.assert_array_equal, split(other), split(model))


@pytest.mark.slow
@pytest.mark.parametrize("mixer", char_lm.MIXERS)
def test_training_moves_every_parameter_and_nothing_else(mixer, tmp_path) -> None:
    args = settings(mixer, tmp_path)
    model = char_lm.make_model(args, mixer)
    params, fixed = jax.tree.map(np.asarray, split(model))
    losses, _ = char_lm.train(model, DATA, args)
    assert np.isfinite(losses).all()
    trained, still = split(model)
    jax.tree.map(np.testing.assert_array_equal, still, fixed)
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, trained, params)))
