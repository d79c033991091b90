"""Kernels compile for the machines they are for, into what their cost notes promise."""

import jax
import pytest
from kernels.cases import CASES, Case, allowed_bytes, compiled, lowered, operands
from kernels.targets import TARGETS

from hla_jax.kernels._mosaic_tpu_blocks import VMEM_BUDGET

SHARED_MEMORY = 227 * 1024  # what a block can have on a Hopper card
ONE_SIZE = [case for case in CASES if case[4:7] == ("bfloat16", 128, 2048)]


@pytest.mark.kernels
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles_into_its_kernels_within_its_memory(case: Case) -> None:
    on_tpu = TARGETS[case.target].platform == "tpu"
    if not on_tpu and jax.__version_info__ < (0, 11):
        pytest.skip("what registers hold is tuned with a later compiler")
    made = compiled(case)
    assert {kernel.name for kernel in made.kernels} == case.kernels
    assert made.temporary <= allowed_bytes(case)
    if case.T == 1:
        assert made.in_place == len(jax.tree.leaves(operands(case)[5:]))  # states
    for kernel in made.kernels:
        if on_tpu:
            assert 0 < kernel.vmem <= VMEM_BUDGET
        else:
            assert kernel.spills == 0
            assert kernel.shared <= SHARED_MEMORY
        if case.module == "mosaic_gpu":  # products by warpgroups, of tiles that travel by TMA
            assert "wgmma.mma_async" in kernel.code
            assert "cp.async.bulk.tensor" in kernel.code


@pytest.mark.parametrize("case", ONE_SIZE, ids=str)
def test_lowers_where_there_is_no_compiler(case: Case) -> None:
    module = lowered(case).as_text()
    assert all(name in module for name in case.kernels)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_a_case_that_the_kernels_take(case: Case) -> None:
    assert case.backend.unsupported(operands(case), **case.options) is None
