"""What the tests share."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from beartype import BeartypeConf, beartype

# The run-time type checker: an int will do where a float is asked for, as PEP 484 has it.
typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def normals(*shapes: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> list[np.ndarray]:
    """One array of normal numbers for each shape, of different numbers."""
    random = np.random.default_rng(seed)
    return [random.normal(size=shape).astype(dtype) for shape in shapes]


def attention_inputs(
    *, B=2, T=7, S=None, H=4, K=2, D=4, E=3, dtype: Any = np.float32, seed: int = 0
) -> list[np.ndarray]:
    """Random q, k and v; S = T unless given."""
    S = T if S is None else S
    return normals((B, T, H, D), (B, S, K, D), (B, S, K, E), dtype=dtype, seed=seed)


def rms_error(actual: Any, reference: Any) -> float:
    """RMS(actual - reference) / RMS(reference), in float64.

    RMS(actual - reference) where the reference is all zero; inf where either holds a NaN or an
    infinity; 0 where both are empty.
    """
    actual = np.asarray(actual).astype(np.float64)
    reference = np.asarray(reference).astype(np.float64)
    if actual.shape != reference.shape:
        raise ValueError(f"actual has shape {actual.shape}, reference {reference.shape}")
    if not (np.isfinite(actual).all() and np.isfinite(reference).all()):
        return float("inf")
    if actual.size == 0:
        return 0.0
    error = np.sqrt(np.mean(np.square(actual - reference)))
    size = np.sqrt(np.mean(np.square(reference)))
    return float(error / size) if size > 0 else float(error)


def environment_apart():
    """For a test's file as a script of its own, on the CPU and in float64."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent)])
    # XLA would abort where a device waits 40 s for another, as it may on a busy machine.
    flags = os.environ.get("XLA_FLAGS", "")
    flags += " --xla_cpu_collective_call_terminate_timeout_seconds=86400"
    kinds = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    return os.environ | kinds | {"PYTHONPATH": path, "XLA_FLAGS": flags}


def measured_apart(file, *arguments):
    """What a file prints as a script, in a process of its own, which can ask for eight devices."""
    env = environment_apart()
    env["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"
    command = [sys.executable, file, *arguments]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


# Runs an example which kills itself when it makes the batch of a step, or, where that is asked for,
# when it has written that step's checkpoint, but not given it its name yet.
KILLED = """
import importlib, os, signal, sys

sys.path.append({folder!r})
example = importlib.import_module({module!r})
make, rename = example.batch_at, os.rename

def batch_at(data, step, args):
    if step == {step} and not {half_written}:
        os.kill(os.getpid(), signal.SIGKILL)
    return make(data, step, args)

def rename_unless(old, new, **options):
    if {half_written} and os.path.basename(new) == "{step}":
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(old, new, **options)

example.batch_at, os.rename = batch_at, rename_unless
example.main(sys.argv[1:])
"""


def killed_at(example: Path, step: int, *, half_written: bool = False) -> list[str]:
    """The arguments of Python that run an example until it kills itself at a step."""
    names = dict(folder=str(example.parent), module=example.stem)
    return ["-c", KILLED.format(**names, step=step, half_written=half_written)]


@contextmanager
def processes(
    count: int, command: Callable[[str, int], list[str]]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts processes that talk over this machine's loopback, and kills what is left of them.

    The command is made from the address at which they find each other, and a process's number.
    """
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        pytest.skip("processes find each other by the machine's name, which it does not resolve")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, *command(address, i)],
            env=environment_apart(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()
