"""The scripts for a device run end to end on a CPU, and find kernels that are wrong."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

import hla_jax as hla

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples/benchmarks"))
gpu, roofline, tune_kernels = map(importlib.import_module, ("gpu", "roofline", "tune_kernels"))

CASE = gpu.Case((1, 20, 2, 1, 4, 3), "float32", {})


def run(script, monkeypatch, capsys, *options: str) -> str:
    monkeypatch.setattr(sys, "argv", [script.__name__, *options])
    script.main()
    return capsys.readouterr().out


def rows(text: str, name: str) -> list[list[str]]:
    """The cells of the rows of that name."""
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in cells] for [first, *cells] in lines if first.strip() == name]


@pytest.mark.slow
@pytest.mark.usefixtures("no_type_checks")
def test_gpu_script_checks_and_times_the_kernels(monkeypatch, capsys) -> None:
    text = run(gpu, monkeypatch, capsys, "--tiny", "--minutes=inf")
    [case] = gpu.TINY_CASES
    for operator in gpu.TINY_OPERATORS:
        [errors] = rows(text, f"{operator}, {case}")
        for error, limit in zip(map(float, errors), case.limits, strict=True):
            assert 0 < error < limit
    for name in ("pallas", "xla"):
        for milliseconds, _ in rows(text, name):
            assert min(map(float, milliseconds.split(" / "))) > 0
        assert len(rows(text, name)) == len(gpu.TINY_OPERATORS)
    assert len(rows(text, "pallas, linear attention after linear attention")) == 1


@pytest.mark.parametrize(("scale", "low", "high"), [(1, 1e-4, 1e-2), (1.5, 0.4, 0.6)])
def test_agreement_tells_a_peer_that_computes_something_else(scale, low, high, monkeypatch) -> None:
    def peer(q, k, v, *, log_decay):
        o, _ = hla.linear_attention(q, k, v, log_decay=log_decay, feature_map=None, normalize=False)
        return (scale * o,)

    monkeypatch.setattr(gpu, "peers_in_jax", lambda: {"peer": peer})
    rows = gpu.agreement(gpu.Shape(1, 20, 2, 4), np.random.default_rng(0)).rows
    assert low < rows["peer, forward"][0] < high


@pytest.mark.usefixtures("no_type_checks")
def test_tuning_script_names_a_chunk_size(monkeypatch, capsys) -> None:
    text = run(tune_kernels, monkeypatch, capsys, "--tiny")
    [best] = [line for line in text.splitlines() if line.startswith("CHUNK_SIZES['cpu'] = {16: ")]
    assert best.split(" = ")[1] in ("{16: 16}  # by width", "{16: 32}  # by width")


def check(kernel):
    """Checks a stand-in for a kernel: a function of linear attention's results by XLA."""

    def operator(*args, normalize=False, implementation=None, **options):
        if implementation != "pallas":
            return hla.linear_attention(*args, normalize=normalize, **options)
        return kernel(*hla.linear_attention(*args, normalize=normalize, **options))

    return gpu.check(CASE, {"op": operator}, np.random.default_rng(0))


@pytest.mark.parametrize(("scale", "good"), [(1.0, True), (1.02, False), (np.nan, False)])
def test_check_finds_wrong_numbers(scale, good, capsys) -> None:
    errors, found_good = check(lambda o, state: (scale * o, state))
    assert found_good is good
    assert list(errors) == [f"op, {CASE}"]
    assert ("WRONG" in capsys.readouterr().err) is not good


@pytest.mark.parametrize(
    ("error", "good"), [(ValueError("no kernel"), True), (RuntimeError("no code"), False)]
)
def test_check_leaves_out_what_no_kernel_serves_and_finds_what_fails(error, good, capsys) -> None:
    def kernel(o, state):
        raise error

    errors, found_good = check(kernel)
    assert not errors
    assert found_good is good
    assert str(error) in capsys.readouterr().err


def test_page_shows_what_the_roofline_script_prints(monkeypatch, capsys) -> None:
    page = (ROOT / "docs/kernels.md").read_text()
    for line in run(roofline, monkeypatch, capsys).splitlines():
        assert line in page


def test_roofline_counts() -> None:
    s = roofline.Sizes(D=8, E=4, C=2)
    # q, k, v and o in two bytes.
    assert roofline.in_sequence("qkvo", s).bytes == 2 * (8 + 8 + 4 + 4)
    # A, A V, Q P and K^T V: two operations for each of C D, C E, D E and D E.
    assert roofline.in_sequence("qkvo", s).flops == 2 * (2 * 8 + 2 * 4 + 8 * 4 + 8 * 4)
    # k and v once more; half of a [D, E] per token, written and read in two bytes.
    more = roofline.two_kernels("qkvo", s).bytes - roofline.in_sequence("qkvo", s).bytes
    assert more == 2 * (8 + 4) + 2 * 2 * 8 * 4 / 2
    # u, of D numbers in four bytes, is written and read; q is read again, and k as key and value.
    more = roofline.cascade("HLA2", s).bytes - roofline.fused("HLA2", s).bytes
    assert more == 2 * 4 * 8 + 2 * (8 + 8)
    # Backward: k and v twice, q, do, dq, dk and dv; half of a [D, E] per token, written and read.
    backward = roofline.in_sequence_backward("qkvo", s).bytes
    assert backward == 2 * (2 * (8 + 4) + 8 + 4 + (8 + 8 + 4)) + 2 * 2 * 8 * 4 / 2
    # A cascade of one level is that level.
    assert roofline.fused_backward("linear attention", s).bytes == backward
