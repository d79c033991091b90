"""Which kernel serves which request, on which platform, and under JAX's transformations."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import rms_error
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from operators import FOUR

import hla_jax as hla

DEVICES = {
    "TPU v5e": "tpu",
    "NVIDIA H200": "gpu",
    "NVIDIA A100-SXM4-80GB": "gpu",
    "NVIDIA B200": "gpu",
}


def tokens(t=40, dtype=jnp.float32, d=64):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=(2, t, 2, d)) / 8, dtype) for _ in range(3))


def traced_for(kind):
    """What tracing is told of a device that is not here."""
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=DEVICES[kind])
    return use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device))


def kernels_in(function, *args, platform):
    """The names of the kernels in a function that is lowered for another platform."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    return set(re.findall(r"hla_(?:forward|starts|backward)", text))


def loss(q, k, v, operator="linear_attention", **options):
    return jnp.sum(getattr(hla, operator)(q, k, v, **options)[0])


def test_compiling_for_a_tpu_on_another_machine_takes_the_kernels():
    assert kernels_in(loss, *tokens(), platform="tpu") == {"hla_forward"}
    assert kernels_in(jax.grad(loss), *tokens(), platform="tpu") >= {"hla_starts", "hla_backward"}
    assert kernels_in(loss, *tokens(), platform="cpu") == set()


@pytest.mark.parametrize("operator", ["hla2", "ahla", "hla3"])
def test_a_cascade_is_one_kernel_where_the_device_is_known(operator):
    def run(q, k, v):
        return loss(q, k, v, operator)

    with traced_for("TPU v5e"):
        text = jax.jit(run).trace(*tokens()).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1


@pytest.mark.parametrize(
    ("kind", "dtype", "kernel"),
    [
        (
            "NVIDIA H200",
            jnp.bfloat16,
            "mosaic_gpu" if jax.__version_info__ >= (0, 11) else "triton",
        ),
        ("NVIDIA H200", jnp.float32, "triton"),
        ("NVIDIA A100-SXM4-80GB", jnp.bfloat16, "triton"),
        ("NVIDIA B200", jnp.bfloat16, "triton"),
    ],
)
def test_the_kind_of_gpu_chooses_between_its_kernels(kind, dtype, kernel):
    with traced_for(kind):
        text = (
            jax.jit(loss).trace(*tokens(dtype=dtype)).lower(lowering_platforms=("cuda",)).as_text()
        )
    targets = {"mosaic_gpu": "mosaic_gpu", "triton": "xla.gpu.triton"}
    assert {name for name, target in targets.items() if target in text} == {kernel}


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_cascade_that_no_kernel_takes_whole_is_taken_level_by_level(x64, kind, dtype):
    gradient = jax.grad(partial(loss, operator="hla3", implementation="pallas"), (0, 1, 2))
    platform = {"gpu": "cuda", "tpu": "tpu"}[DEVICES[kind]]
    with traced_for(kind):
        lowered = (
            jax.jit(gradient).trace(*tokens(dtype=dtype)).lower(lowering_platforms=(platform,))
        )
    assert "hla_" in lowered.as_text().replace("hla_jax", "")


@pytest.mark.parametrize("precision", [("high", "high"), jax.lax.DotAlgorithmPreset.F32_F32_F32])
def test_a_precision_that_kernels_do_not_know_is_left_to_xla(precision):
    run = partial(loss, precision=precision)
    assert kernels_in(run, *tokens(), platform="tpu") == set()
    with traced_for("TPU v5e"), pytest.raises(ValueError, match=r"pallas.*precision"):
        run(*tokens(), implementation="pallas")


@pytest.mark.parametrize("t", [1, 5])
@pytest.mark.parametrize("operator", ["linear_attention", *FOUR[1:]])
def test_interpreted_kernels_agree_with_xla(operator, t):
    run = getattr(hla, operator)
    expected = run(*tokens(t, d=4), implementation="xla")
    with pltpu.force_tpu_interpret_mode(True):
        actual = run(*tokens(t, d=4), implementation="pallas")
    errors = jax.tree.map(rms_error, actual, expected)
    assert max(jax.tree.leaves(errors)) < 1e-6


def test_on_a_cpu_kernels_are_refused_by_name(no_type_checks):
    with pytest.raises(ValueError, match=r'implementation="pallas".*force_tpu_interpret_mode'):
        hla.hla2(*tokens(), implementation="pallas")


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float64])
def test_what_no_kernel_takes_is_refused_by_name_and_left_to_xla_otherwise(x64, dtype):
    q, k, v = (x.astype(dtype) for x in tokens())
    with pltpu.force_tpu_interpret_mode(True), pytest.raises(ValueError, match="TPUs have no"):
        hla.ahla(q, k, v, implementation="pallas")
    assert kernels_in(loss, q, k, v, platform="tpu") == set()


@pytest.mark.parametrize("implementation", [None, "pallas"])
def test_a_second_derivative_is_that_of_the_form_in_xla(implementation):
    q, k, v = tokens(9, d=4)

    def twice(q, implementation):
        gradient = jax.grad(loss)(q, k, v, "hla2", implementation=implementation)
        return jnp.sum(gradient**2)

    expected = jax.grad(twice)(q, "quadratic")
    with pltpu.force_tpu_interpret_mode():
        actual = jax.grad(twice)(q, implementation)
    assert rms_error(actual, expected) < 5e-6


@pytest.mark.parametrize("implementation", [None, "pallas"])
def test_vmap_is_another_batch_axis(implementation):
    q, k, v = (x[:, None] for x in tokens(20, d=4))
    gradient = jax.grad(partial(loss, implementation=implementation), (0, 1, 2))
    run = jax.vmap(gradient, (0, 0, None))
    exact = jax.vmap(jax.grad(partial(loss, implementation="xla"), (0, 1, 2)), (0, 0, None))
    with pltpu.force_tpu_interpret_mode(True):
        actual = jax.jit(run)(q, k, v[0])
    with jax.enable_x64(True):
        expected = exact(*(np.asarray(x, np.float64) for x in (q, k, v[0])))
    assert max(jax.tree.leaves(jax.tree.map(rms_error, actual, expected))) < 2e-6


def test_a_program_for_several_platforms_is_xlas():
    exported = jax.export.export(jax.jit(loss), platforms=("cpu", "tpu"))(*tokens(9, d=4))
    assert rms_error(exported.call(*tokens(9, d=4)), loss(*tokens(9, d=4))) < 1e-6


def test_vmap_keeps_the_kernels():
    gradient = jax.vmap(jax.grad(loss))
    q, k, v = (x[:, None] for x in tokens(20))
    assert kernels_in(gradient, q, k, v, platform="tpu") >= {"hla_starts", "hla_backward"}


def test_kernels_run_inside_shard_map():
    run = partial(hla.hla2, implementation="pallas")
    mapped = jax.shard_map(lambda *x: run(*x)[0], in_specs=P("x"), out_specs=P("x"))
    with traced_for("TPU v5e"):
        assert kernels_in(mapped, *tokens(), platform="tpu") == {"hla_forward"}
