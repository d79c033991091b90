"""The Hopper kernels, interpreted on this machine, against float64; and what they compile into."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import rms_error
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernels import targets
from operators import all_pairs, with_gradients, worst_error

from hla_jax.kernels import _plain, mosaic_gpu
from hla_jax.kernels._layout import (
    Cascade,
    Operands,
    Results,
    as_cascade,
    as_cascade_results,
    as_operands,
    as_results,
)

pytestmark = pytest.mark.kernels  # which come with a jax that interprets them

OPTIONS = {"chunk_size": None, "power": 1, "strict": False, "precision": None}
# Half an ulp of bfloat16 is 2^-9. Operands, weights and states are rounded; the cotangent of a
# decay sums products of these, of both signs.
TOLERANCE, DECAY_TOLERANCE = 2**-8, 2**-7
# Far fewer multiprocessors than a card has: one program for each head in place of two kernels, and
# many: states in segments.
FEW, MANY = 1, 1000

interpreted = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="jax interprets Mosaic GPU kernels from 0.11 on"
)
CASES = all_pairs(
    # of q, k, v, decay: shared states, and states that share k or v
    heads=((4, 2, 2, 2), (3, 1, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1)),
    t=(33, 63, 65, 130),
    widths=((64, 64), (40, 80), (128, 64)),
    processors=(FEW, MANY, mosaic_gpu.PROCESSORS),
    power=(1, 3),
    strict=(False, True),
    mass=(False, True),
    decay=(None, "constant", "mixed", "resets"),
)
TYPICAL = {
    "heads": (4, 2, 2, 2), "t": 130, "widths": (64, 64), "power": 2, "strict": False, "mass": True,
    "decay": "mixed",
}  # fmt: skip


def normals(rng, *shape):
    return rng.normal(size=(1, *shape)) / np.sqrt(shape[-1])


def log_decays(rng, kind, t, heads):
    shape = 1, t, heads
    return {
        None: None,
        "constant": np.full(shape, -0.05),
        "mixed": rng.choice([-20.0, -6.0, -0.3, -0.01], shape),
        "resets": rng.choice([-np.inf, -1e9, 0.0, -0.1], shape, p=[0.05, 0.05, 0.4, 0.5]),
    }[kind]


def operands(case):
    """Operands of the primitive: tokens in bfloat16, all else in float32."""
    rng = np.random.default_rng(0)
    t, (h, hk, hv, kv), (d, e) = case["t"], case["heads"], case["widths"]
    tokens = (normals(rng, t, h, d), normals(rng, t, hk, d), normals(rng, t, hv, e))
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in tokens)
    log_decay, P = log_decays(rng, case["decay"], t, kv), normals(rng, max(hk, hv), d, e)
    w, m = (
        (rng.uniform(size=(1, t, hv)), normals(rng, max(hk, hv), d))
        if case["mass"]
        else (None,) * 2
    )
    return Operands(q, k, v, *as_float32((w, log_decay, P, m)))


def as_float32(tree):
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tree)


def as_float64(tree):
    return jax.tree.map(lambda a: np.asarray(a.astype(jnp.float32), np.float64), tree)


def definition(x, **rule):
    """The recurrence in float64, cotangents of its results, and what follows for the operands."""
    recurrence = partial(_plain.serial, precision=None, **rule)
    x, rng = as_float64(x), np.random.default_rng(1)
    with jax.enable_x64(True):
        ct = jax.tree.map(lambda y: rng.normal(size=y.shape), jax.eval_shape(recurrence, x))
        # A float32 copy is what the kernels get.
        ct = as_float64(as_float32(ct))
        return as_float32(ct), jax.jit(partial(with_gradients, recurrence))(x, ct)


def kernels(x, ct, **rule):
    """What the kernels make of the same: results, and cotangents of the operands."""
    options, x = OPTIONS | rule, as_cascade(x)
    y = mosaic_gpu.forward(x, out_dtype=jnp.float32, **options)
    d = mosaic_gpu.backward(x, as_cascade_results(ct), **options)
    return as_results(y), as_operands(d)


def interpret(function, *args, **guards):
    """Runs on this machine. Reading memory that was not written gives NaN."""
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(**guards)):
        return jax.jit(function)(*args)


def check(actual, expected):
    """Compares results and cotangents."""
    (y, d), (y_expected, d_expected) = actual, expected
    decays = d.log_decay, d_expected.log_decay
    d, d_expected = d._replace(log_decay=None), d_expected._replace(log_decay=None)
    assert worst_error((y, d), (y_expected, d_expected)) < TOLERANCE
    assert decays == (None, None) or rms_error(*decays) < DECAY_TOLERANCE


# A single token, with heads of their own: enough of them that one unlucky sum does not matter.
SINGLE = TYPICAL | {"heads": (16, 16, 16, 16), "t": 1, "processors": MANY}


@interpreted
@pytest.mark.parametrize(
    "case", [*CASES, SINGLE], ids=lambda case: "-".join(map(str, case.values()))
)
def test_the_primitive_and_its_cotangents_are_the_recurrence(case, monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "PROCESSORS", case["processors"])
    monkeypatch.setattr(mosaic_gpu, "MIN_SEGMENT", 1)
    x, rule = operands(case), {"power": case["power"], "strict": case["strict"]}
    ct, expected = definition(x, **rule)
    actual = interpret(partial(kernels, **rule), x, ct)
    results, d = actual
    assert all(a.dtype == jnp.float32 for a in jax.tree.leaves((results, d[3:])))
    for a, given in zip(d[:3], x[:3], strict=True):
        assert a.dtype == jnp.float32 or (a.dtype == given.dtype and a.shape[2] == x.q.shape[2])
    check(actual, expected)


@interpreted
@pytest.mark.parametrize("processors", [FEW, MANY])
def test_copies_do_not_race_with_what_reads_and_writes_them(processors, monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "PROCESSORS", processors)
    monkeypatch.setattr(mosaic_gpu, "MIN_SEGMENT", 1)
    x = operands(TYPICAL | {"t": 129, "widths": (128, 128)})
    ct, expected = definition(x, power=1, strict=False)
    check(interpret(kernels, x, ct, detect_races=True), expected)


@interpreted
def test_what_crosses_a_reset_has_no_gradient():
    x = operands(TYPICAL | {"decay": "resets"})
    ct, _ = definition(x, power=1, strict=False)
    d = interpret(kernels, x, ct)[1].log_decay
    resets = np.asarray(x.log_decay) < -100
    assert resets.any()
    assert not np.asarray(d)[resets].any()
    assert np.asarray(d)[~resets].all()


def cascade(name, *, mass, decay, t, d, e):
    """Operands of a cascade with two kv heads and four query heads."""
    rng = np.random.default_rng(0)
    q, k, v = normals(rng, t, 4, d), normals(rng, t, 2, d), normals(rng, t, 2, e)
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in (q, k, v))
    S = None if name == "ahla" else normals(rng, 2, d, d)
    P, m = (None, None) if name == "hla2" else (normals(rng, 2, d, e), normals(rng, 2, d))
    w, f = rng.uniform(size=(1, t, 2)), normals(rng, 4, d)
    rest = log_decays(rng, decay, t, 2), S, P, m if mass else None, normals(rng, 4, d, e)
    return Cascade(q, k, v, *as_float32((w if mass else None, *rest, f if mass else None)))


def in_stages(x, power):
    """A cascade by its definition, level by level."""
    level = partial(_plain.serial, strict=False, precision=None)
    u, r, r_mass, S, P, m = x.k, x.v, x.w, None, None, None
    if x.S is not None:
        u, _, S, _ = level(Operands(x.q, x.k, x.k, None, x.log_decay, x.S, None), power=1)
    if x.P is not None:
        r, r_mass, P, m = level(Operands(*x[:5], x.P, x.m), power=1)
    o, z, F, f = level(Operands(x.q, u, r, r_mass, x.log_decay, x.F, x.f), power=power)
    return o, z, S, P, m, F, f


@interpreted
@pytest.mark.parametrize(("name", "power"), [("hla2", 2), ("ahla", 1), ("hla3", 3)])
@pytest.mark.parametrize(
    "sizes",
    [
        {"mass": True, "decay": "mixed", "t": 130, "d": 64, "e": 64},
        {"mass": False, "decay": "resets", "t": 65, "d": 40, "e": 80},
        {"mass": True, "decay": None, "t": 63, "d": 64, "e": 64},
    ],
    ids=["typical", "odd", "no-decay"],
)
def test_a_cascade_in_one_kernel_is_its_stages(name, power, sizes):
    x = cascade(name, **sizes)
    with jax.enable_x64(True):
        expected = jax.jit(partial(in_stages, power=power))(as_float64(x))
    forward = partial(mosaic_gpu.forward, out_dtype=jnp.bfloat16, **OPTIONS | {"power": power})
    actual = interpret(forward, x, detect_races=True)
    assert actual.o.dtype == jnp.bfloat16
    # Two levels round, and then the outputs.
    assert worst_error(tuple(actual), expected) < 2 * TOLERANCE


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"widths": (64, 257)}, "257 is over 256"),
        ({"t": 1}, "single token"),
        ({"dtype": jnp.float32}, "none of q, k and v is bfloat16"),
        ({"precision": "highest"}, "precision highest"),
        ({"chunk_size": 32}, "chunk size of 32"),
        ({}, None),
    ],
    ids=str,
)
def test_says_what_it_does_not_serve(change, reason, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    case = {**TYPICAL, **change}
    x = operands(case)
    if "dtype" in case:
        x = jax.tree.map(lambda a: a.astype(case["dtype"]), x)
    options = OPTIONS | {name: case[name] for name in ("precision", "chunk_size") if name in case}
    said = mosaic_gpu.unsupported(as_cascade(x), **options)
    assert said is None if reason is None else reason in said


def test_an_older_jax_is_not_served(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert "older than 0.11" in mosaic_gpu.unsupported(as_cascade(operands(TYPICAL)), **OPTIONS)


@pytest.mark.kernels
@interpreted
def test_products_are_wgmma_and_copies_are_tma():
    x = operands(TYPICAL)
    ct = Results(*as_float32((np.zeros((1, 130, 4, 64)), np.zeros((1, 130, 4)), x.P, x.m)))
    made = targets.compile_for("h200", kernels, *jax.eval_shape(lambda *a: a, x, ct))
    assert {kernel.name for kernel in made.kernels} == {
        "hla_sweep", "hla_outputs", "hla_query_key_cotangents",
    }  # fmt: skip
    for kernel in made.kernels:
        assert "wgmma.mma_async" in kernel.code
        assert "cp.async.bulk.tensor" in kernel.code
        assert "mma.sync" not in kernel.code
