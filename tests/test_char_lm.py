"""The main example trains each mixer, and killed at any moment goes on from its last checkpoint."""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from helpers import killed_at

from hla_jax.models import TransformerLM

SCRIPT = Path(__file__).parent.parent / "examples" / "char_lm.py"
sys.path.append(str(SCRIPT.parent))
char_lm = importlib.import_module("char_lm")
STEPS, EVERY = 300, 25


def arguments(out: Path, text: Path) -> list[str]:
    options = dict(out=out, text=text, steps=STEPS, checkpoint_every=EVERY, positions=32)
    options |= dict(mixer="hla2", batch=2, length=32, layers=2, heads=2, features=16)
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def run(out: Path, text: Path, script: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *script, *arguments(out, text)],
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parent.parent)},
        stdout=subprocess.PIPE,
        text=True,
    )


def final_loss_without_a_kill(out: Path, text: Path) -> float:
    args = char_lm.parse_arguments(arguments(out, text))
    data, _ = char_lm.load_text(text)
    return float(char_lm.train(char_lm.make_model(args, args.mixer), data, args).losses[-1])


@pytest.mark.slow
def test_a_killed_run_resumes_and_ends_like_one_that_was_not(tmp_path):
    text, out = tmp_path / "text", tmp_path / "killed"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)

    killed = run(out, text, killed_at(SCRIPT, 2 * EVERY + 7))
    assert killed.returncode == -signal.SIGKILL
    resumed = run(out, text, [str(SCRIPT)])
    assert resumed.returncode == 0
    assert f"resumed from step {2 * EVERY} " in resumed.stdout
    assert "decoding, microseconds per token" in resumed.stdout

    results = json.loads((out / "results.json").read_text())
    assert results["final_loss"] == final_loss_without_a_kill(tmp_path / "whole", text)
    assert results["step_error"] < 1e-5
    bits = results["bits_per_byte"]
    assert bits["hla2"] < 0.7 * bits["unigram (counted on the training text)"]
    assert (out / "char_lm.png").stat().st_size > 10_000


def settings(mixer: str, out: Path, **more: str) -> argparse.Namespace:
    options = dict(mixer=mixer, out=out, steps=2, batch=1, length=32)
    options |= dict(layers=1, heads=2, features=16) | more
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
@pytest.mark.usefixtures("no_type_checks")
def test_mixed_precision_keeps_float32_parameters(tmp_path) -> None:
    args = settings("softmax", tmp_path, dtype="bfloat16")
    model = char_lm.make_model(args, "softmax")
    log = char_lm.train(model, DATA, args)
    assert model(DATA[None, :4].astype(np.int32))[0].dtype == "bfloat16"
    assert {p.dtype.name for p in jax.tree.leaves(split(model)[0])} == {"float32"}
    rounded = log.losses.astype("bfloat16").astype(np.float32)
    assert (log.losses != rounded).any()  # the loss itself is not of 8 bits


@pytest.mark.slow
@pytest.mark.parametrize("mixer", char_lm.MIXERS)
def test_training_moves_every_parameter_and_nothing_else(mixer, tmp_path) -> None:
    args = settings(mixer, tmp_path)
    model = char_lm.make_model(args, mixer)
    params, fixed = jax.tree.map(np.asarray, split(model))
    assert np.isfinite(char_lm.train(model, DATA, args).losses).all()
    trained, still = split(model)
    jax.tree.map(np.testing.assert_array_equal, still, fixed)
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, trained, params)))


@pytest.mark.slow
def test_compared_models_are_as_large_as_the_first() -> None:
    sizes = ["--layers=2", "--heads=2", "--features=16", "--compare"]
    args = char_lm.parse_arguments([*sizes, *sorted(char_lm.MIXERS)])
    settings = char_lm.equal_sizes(args)
    counts = {mixer: char_lm.num_parameters(own, mixer) for mixer, own in settings.items()}
    first, *rest = counts.values()
    # Half of what one more channel in each MLP would add.
    assert all(abs(count - first) <= 2 * 16 for count in rest)
    assert list(settings) == args.compare
    assert settings[args.compare[0]].mlp_features == 4 * 16
    assert len({own.mlp_features for own in settings.values()}) > 2


def test_options_go_before_the_preset() -> None:
    args = char_lm.parse_arguments(["--preset=paper", "--steps=7"])
    assert (args.steps, args.layers, args.compare) == (7, 12, None)
    assert char_lm.parse_arguments(["--compare"]).compare == char_lm.COMPARED
    assert char_lm.parse_arguments([]).layers == 3


@pytest.mark.slow
@pytest.mark.usefixtures("no_type_checks")
def test_comparison_is_written(tmp_path, capsys) -> None:
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    options = dict(text=text, out=tmp_path, steps=3, batch=2, length=32, layers=1, heads=2)
    arguments = [f"--{name}={value}" for name, value in (options | dict(features=16)).items()]
    char_lm.main([*arguments, "--compare", "softmax", "linear"])
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["training_tokens"] == 3 * 2 * 32
    assert results["hardware"]["device"]
    printed = capsys.readouterr().out
    for name in ("softmax", "linear"):
        bits = results["mixers"][name]["bits_per_byte"]
        assert 3 < bits < 9
        assert f"{bits:.3f}" in printed
    assert (tmp_path / "compare.png").stat().st_size > 10_000
