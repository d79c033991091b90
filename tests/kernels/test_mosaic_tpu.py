"""The TPU kernels, interpreted on this machine, against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from operators import (
    FOUR,
    all_pairs,
    apply,
    check_against_naive,
    make_inputs,
    make_mask,
    make_segments,
    thinned,
    with_gradients,
    worst_error,
)

from hla_jax.kernels import _plain, mosaic_tpu
from hla_jax.kernels._layout import (
    Operands,
    as_cascade,
    as_cascade_results,
    as_operands,
    as_results,
)

CASES = all_pairs(
    # of q, k, v, decay: one state per query head, shared states, and states that share k or v
    heads=((2, 2, 2, 2), (4, 2, 2, 2), (4, 4, 2, 2), (4, 2, 4, 2), (9, 1, 1, 1), (9, 9, 1, 1)),
    t=(1, 15, 33, 48),
    widths=((3, 5), (16, 16)),
    chunk=(16, None),
    power=(1, 3),
    strict=(False, True),
    mass=(False, True),
    decay=(None, "mild", "strong", "resets"),
)


def operands(case, seed=0):
    """Float64 operands of the primitive."""
    rng = np.random.default_rng(seed)
    t, (h, hk, hv, kv), (d, e) = case["t"], case["heads"], case["widths"]
    states = max(hk, hv)

    def normal(*shape):
        return rng.normal(size=(2, *shape)) / np.sqrt(shape[-1])

    log_decay = {
        None: None,
        "mild": -rng.exponential(0.2, (2, t, kv)),
        "strong": -rng.exponential(30.0, (2, t, kv)),
        "resets": rng.choice([-np.inf, -1e9, 0.0, -0.1], (2, t, kv)),
    }[case["decay"]]
    w, m = (rng.uniform(size=(2, t, hv)), normal(states, d)) if case["mass"] else (None, None)
    q, k, v, P = normal(t, h, d), normal(t, hk, d), normal(t, hv, e), normal(states, d, e)
    return Operands(q, k, v, w, log_decay, P, m)


def definition(x, ct, **rule):
    """The token by token recurrence in float64, and its gradients by differentiation."""
    recurrence = partial(_plain.serial, precision=None, **rule)
    with jax.enable_x64(True):
        ct = jax.tree.map(lambda y: ct.normal(size=y.shape), jax.eval_shape(recurrence, x))
        return ct, jax.jit(partial(with_gradients, recurrence))(x, ct)


def kernels(x, ct, *, chunk=None, precision=None, **rule):
    """What the kernels make of the same: results, and cotangents of the operands."""
    options = rule | {"chunk_size": chunk, "precision": precision}
    y = mosaic_tpu.forward(as_cascade(x), out_dtype=jnp.float32, **options)
    d = mosaic_tpu.backward(as_cascade(x), as_cascade_results(ct), **options)
    return as_results(y), as_operands(d)


def as_float32(tree):
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tree)


@pytest.mark.parametrize("case", thinned(CASES), ids=lambda case: "-".join(map(str, case.values())))
def test_the_primitive_and_its_cotangents_are_the_recurrence(case):
    x, rule = operands(case), {"power": case["power"], "strict": case["strict"]}
    ct, expected = definition(x, np.random.default_rng(1), **rule)
    with pltpu.force_tpu_interpret_mode(True):
        actual = jax.jit(partial(kernels, chunk=case["chunk"], **rule))(*as_float32((x, ct)))
    assert worst_error(actual, expected) < 2e-6


@pytest.mark.parametrize("name", FOUR)
def test_an_operator_is_its_definition(name):
    inputs = make_inputs(name, 37, decay="token", initial=True, normalize=True)
    with pltpu.force_tpu_interpret_mode(True):
        check_against_naive(
            name,
            inputs,
            tolerance=2e-6,
            grad_tolerance=1e-5,
            dtype=np.float32,
            mask=make_mask("interior", 37),
            segment_ids=make_segments(37),
            normalize=True,
            chunk_size=16,
            implementation="pallas",
        )


@pytest.mark.parametrize("name", FOUR)
def test_bfloat16_is_within_the_rounding_of_products(name):
    inputs = make_inputs(name, 40, d=16, e=16, decay="token", normalize=True)
    inputs = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), inputs)
    exact = jax.tree.map(lambda a: np.asarray(a, np.float64), inputs)
    with jax.enable_x64(True):
        expected = jax.tree.map(np.asarray, apply(name, exact, normalize=True))
    with pltpu.force_tpu_interpret_mode(True):
        actual = apply(name, inputs, normalize=True, implementation="pallas")
    assert actual[0].dtype == jnp.bfloat16
    # Half an ulp of bfloat16 is 2^-9; a cascade rounds two or three times.
    assert worst_error(actual, expected) < 2**-7


GUARDED = {
    "heads": (4, 2, 2, 2), "t": 33, "widths": (3, 5), "power": 1, "strict": False, "mass": True,
    "decay": "mild",
}  # fmt: skip


def test_nothing_is_read_outside_of_arrays_or_before_it_is_written():
    x = operands(GUARDED)
    ct, expected = definition(x, np.random.default_rng(1), power=1, strict=False)
    guards = pltpu.InterpretParams(out_of_bounds_reads="raise", uninitialized_memory="nan")
    run = partial(kernels, chunk=16, power=1, strict=False)
    with pltpu.force_tpu_interpret_mode(guards):
        actual = jax.jit(run)(*as_float32((x, ct)))
    pltpu.reset_tpu_interpret_mode_state()
    assert worst_error(actual, expected) < 2e-6


def races_found(run, *args, capfd) -> bool:
    """Whether two cores race: jax 0.10 prints it, later ones raise."""
    guards = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    try:
        with pltpu.force_tpu_interpret_mode(guards):
            jax.block_until_ready(jax.jit(run)(*args))
    except jax.errors.JaxRuntimeError as error:
        return "race" in str(error).lower()
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    return "RACE DETECTED" in "".join(capfd.readouterr())


def test_two_cores_do_not_race(capfd):
    x = operands(GUARDED)
    ct, _ = definition(x, np.random.default_rng(1), power=1, strict=False)
    run = partial(kernels, chunk=16, power=1, strict=False)
    assert not races_found(run, *as_float32((x, ct)), capfd=capfd)


def test_a_planted_race_is_found(capfd):
    def both_write(x, out):
        out[...] = x[...] + pl.program_id(0)

    def run(x):
        whole = pl.BlockSpec(x.shape, lambda i: (0, 0))
        return pl.pallas_call(
            both_write,
            out_shape=jax.typeof(x),
            grid=(2,),
            in_specs=[whole],
            out_specs=whole,
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        )(x)

    assert races_found(run, jnp.zeros((8, 128)), capfd=capfd)
