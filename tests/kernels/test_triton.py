"""The Triton kernels, interpreted, against dense sums in float64, and what they compile from."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import rms_error

from hla_jax.kernels import triton
from hla_jax.kernels._layout import (
    Cascade,
    CascadeResults,
    Operands,
    Results,
    as_cascade,
    as_cascade_results,
    as_operands,
    as_results,
)

pytestmark = pytest.mark.slow

OPTIONS = {"chunk_size": None, "precision": "highest", "interpret": True}
POWERS = {"ahla": 1, "hla2": 2, "hla3": 3}


def dense(x, *, power, strict=False):
    """The primitive by its definition, every head of its own."""
    T, H, N = x.q.shape[1], x.q.shape[2], x.P.shape[1]

    def every(a, axis, n):
        return jnp.repeat(a, n // a.shape[axis], axis)

    log_decay = jnp.zeros((len(x.q), T, 1)) if x.log_decay is None else power * x.log_decay
    t, u, s = np.ogrid[:T, :T, :T]
    # Summed over the tokens between, as resets are infinite.
    between = ((s < u) & (u <= t)).transpose(0, 2, 1)[None, ..., None]
    D = jnp.exp(jnp.where(between, log_decay[:, None, None], 0).sum(3))  # [B, t, s, K]
    b = jnp.exp(jnp.cumsum(log_decay, 1))
    e, rho = every(D[:, -1], 2, N), every(b[:, -1], 1, N)
    D, b = every(D, 3, H) * np.tri(T, k=-1 if strict else 0)[..., None], every(b, 2, H)
    k, v = every(x.k, 2, N), every(x.v, 2, N)
    A = jnp.einsum("bthd,bshd,btsh->bhts", x.q, every(k, 2, H), D)
    q = x.q * b[..., None]
    o = jnp.einsum("bhts,bshe->bthe", A, every(v, 2, H))
    o += jnp.einsum("bthd,bhde->bthe", q, every(x.P, 1, H))
    P = rho[..., None, None] * x.P + jnp.einsum("bsh,bshd,bshe->bhde", e, k, v)
    if x.w is None:
        return Results(o, None, P, None)
    w = every(x.w, 2, N)
    z = jnp.einsum("bhts,bsh->bth", A, every(w, 2, H))
    z += jnp.einsum("bthd,bhd->bth", q, every(x.m, 1, H))
    return Results(o, z, P, rho[..., None] * x.m + jnp.einsum("bsh,bshd,bsh->bhd", e, k, w))


def dense_cascade(x, *, power):
    """Two levels, one after the other."""
    u, r, z, S, P, m = x.k, x.v, x.w, None, None, None
    if x.S is not None:
        u, _, S, _ = dense(Operands(x.q, x.k, x.k, None, x.log_decay, x.S, None), power=1)
    if x.P is not None:
        first = Operands(x.q, x.k, x.v, x.w, x.log_decay, x.P, x.m)
        r, z, P, m = dense(first, power=1)
    o, z, F, f = dense(Operands(x.q, u, r, z, x.log_decay, x.F, x.f), power=power)
    return CascadeResults(o, z, S, P, m, F, f)


def operands(T, heads, *, D=16, E=24, mass=True, decay="mild", B=2):
    """Random operands for so many heads of q, k, v and log_decay."""
    rng = np.random.default_rng(0)
    H, Hk, Hv, K = heads
    N = max(Hk, Hv)
    log_decay = {
        "none": None,
        "mild": -rng.uniform(0, 0.3, (B, T, K)),
        "strong": rng.choice([-60.0, -6.0, -0.01], (B, T, K)),
        "resets": rng.choice([-np.inf, -1e9, -110, 0, 0, -0.1, -0.1], (B, T, K)),
    }[decay]
    shapes = [(T, H, D), (T, Hk, D), (T, Hv, E), (T, Hv), None, (N, D, E), (N, D)]
    x = [s if s is None else rng.normal(size=(B, *s)) / np.sqrt(s[-1]) for s in shapes]
    x = Operands._make(x)._replace(log_decay=log_decay)
    return in_type(np.float32, x if mass else x._replace(w=None, m=None))


def with_tokens(dtype, x):
    return x._replace(**{name: getattr(x, name).astype(dtype) for name in "qkv"})


def in_type(dtype, tree):
    return jax.tree.map(lambda a: np.asarray(a, dtype), tree)


def exact(function, x, *ct):
    """The function's results in float64, and its operands' cotangents."""
    with jax.enable_x64(True):
        y, pullback = jax.vjp(jax.jit(function), *in_type(np.float64, (x,)))
        return in_type(np.float64, (y, *(pullback(in_type(np.float64, c))[0] for c in ct)))


def assert_close(actual, expected, tolerance=1e-6):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    errors = jax.tree.map(rms_error, actual, expected)
    assert max(jax.tree.leaves(errors)) < tolerance, errors


forward = partial(triton.forward, out_dtype=jnp.dtype(jnp.float32))


def backward(x: Operands, ct: Results, **options) -> Operands:
    d = triton.backward(as_cascade(x), as_cascade_results(ct), **options)
    return as_operands(d)


SHARED, STATES = (4, 2, 2, 2), (4, 4, 2, 2)  # query heads share a state, or have one each


@pytest.mark.parametrize(
    ("T", "heads", "power", "strict", "mass", "decay", "widths", "chunk_size"),
    [
        (1, (4, 2, 4, 2), 1, True, True, "mild", (16, 16), 64),
        (63, SHARED, 2, False, True, "strong", (16, 40), 64),
        (65, STATES, 3, False, True, "resets", (33, 16), 64),
        (200, (2, 2, 2, 2), 1, False, False, "none", (12, 20), 64),
        (200, STATES, 2, True, True, "mild", (16, 16), 64),
        (50, SHARED, 1, False, False, "resets", (40, 48), 16),
    ],
)
@pytest.mark.parametrize("pass_", ["in sequence", "side by side", "backward"])
def test_primitive(monkeypatch, pass_, T, heads, power, strict, mass, decay, widths, chunk_size):
    D, E = widths
    x = operands(T, heads, D=D, E=E, mass=mass, decay=decay)
    rule = {"power": power, "strict": strict}
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(partial(dense, **rule), x)
    ct = in_type(np.float32, jax.tree.map(lambda y: rng.normal(size=y.shape), shapes))
    expected, gradients = exact(partial(dense, **rule), x, ct)
    options = OPTIONS | rule | {"chunk_size": chunk_size}
    if pass_ == "backward":
        d = jax.jit(partial(backward, **options))(x, ct)
        assert_close(d, gradients)
        if decay == "resets":
            assert not np.asarray(d.log_decay)[x.log_decay < -104].any()
        return
    monkeypatch.setattr(triton, "_side_by_side", lambda *_: pass_ == "side by side")
    y = jax.jit(partial(forward, **options))(as_cascade(x))
    assert_close(as_results(y), expected)


def cascade(name, T, H=4, K=2, **options):
    """Random operands of a second-order operator with H query heads and K heads of k and v."""
    second, first = operands(T, (H, H, K, K), **options), operands(T, (H, K, K, K), **options)
    S = None if name == "ahla" else operands(T, (H, K, K, K), **options | {"E": 16}).P
    P, m = (None, None) if name == "hla2" else (first.P, first.m)
    return Cascade(*first[:5], S, P, m, second.P, second.m)


@pytest.mark.parametrize("name", POWERS)
@pytest.mark.parametrize(("T", "mass", "decay"), [(65, True, "mild"), (33, False, "resets")])
def test_cascade(name, T, mass, decay):
    x, power = cascade(name, T, mass=mass, decay=decay), POWERS[name]
    run = partial(forward, power=power, strict=False, **OPTIONS)
    expected, *_ = exact(partial(dense_cascade, power=power), x)
    assert_close(jax.jit(run)(x), expected)


@pytest.mark.parametrize("name", POWERS)
@pytest.mark.parametrize(("mass", "decay"), [(True, "mild"), (False, "none")])
def test_step_of_a_cascade(name, mass, decay):
    x, power = cascade(name, 1, H=6, mass=mass, decay=decay), POWERS[name]
    run = partial(triton.step, power=power, precision=None, interpret=True)
    expected, *_ = exact(partial(dense_cascade, power=power), x)
    assert_close(jax.jit(run)(x), expected)


@pytest.mark.parametrize("heads", [SHARED, STATES, (4, 2, 4, 2), (4, 1, 1, 1)])
def test_step_of_the_primitive(heads):
    x = as_cascade(operands(1, heads, D=12, E=300, decay="resets"))
    run = partial(triton.step, power=3, precision=None, interpret=True)
    expected, *_ = exact(partial(dense_cascade, power=3), x)
    assert_close(jax.jit(run)(x), expected)


def test_step_puts_new_states_in_the_place_of_old_ones():
    x = cascade("hla3", 1, E=16)
    kernel = jax.make_jaxpr(partial(triton.step, power=3, precision=None))(x)
    [call] = [eqn for eqn in kernel.eqns if eqn.primitive.name == "pallas_call"]
    pairs = dict(call.params["input_output_aliases"])
    assert len(pairs) == 5
    shapes = [a.aval.shape for a in call.invars], [a.aval.shape for a in call.outvars]
    assert all(shapes[0][i] == shapes[1][o] for i, o in pairs.items())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_tokens(dtype):
    """As exact as products of what the tokens are rounded to, with bfloat16 states or float32."""
    x = with_tokens(dtype, operands(40, SHARED))
    expected, *_ = exact(partial(dense, power=1), x)
    run = partial(forward, power=1, strict=False, **OPTIONS | {"precision": None})
    y = jax.jit(run)(as_cascade(x))
    assert {a.dtype for a in jax.tree.leaves(y)} == {jnp.dtype(jnp.float32)}
    y = as_results(y)
    assert_close(y, expected, 5e-3 if dtype == jnp.bfloat16 else 1e-6)
    y = jax.jit(partial(run, precision="highest"))(as_cascade(x))
    assert_close(as_results(y), expected)


def test_few_heads_of_many_chunks_and_wide_states_go_side_by_side():
    def side_by_side(T, H, D):
        x = jax.ShapeDtypeStruct((1, T, H, D), jnp.bfloat16)
        x = Operands(x, x, x, None, None, jax.ShapeDtypeStruct((1, H, D, D), jnp.float32), None)
        return triton._side_by_side(as_cascade(x), triton._sizes(x, None, None, False))

    assert side_by_side(4096, 8, 64)
    assert not side_by_side(256, 8, 64)
    assert not side_by_side(4096, 128, 64)
    assert side_by_side(4096, 128, 256)


def test_what_is_not_supported():
    def reason(x, **options):
        defaults = {"chunk_size": None, "power": 1, "strict": False, "precision": None}
        return triton.unsupported(x, **defaults | options)

    x = as_cascade(operands(20, SHARED))
    assert reason(x) is None
    assert reason(cascade("hla3", 1)) is None
    assert "48" in reason(x, chunk_size=48)
    assert "TF32_TF32_F32" in reason(x, precision="TF32_TF32_F32")
    assert "300 is over 256" in reason(as_cascade(operands(1, (1, 1, 1, 1), D=300, B=1)))
    assert "float16" in reason(x._replace(F=x.F.astype(np.float16)))
    for name in POWERS:
        assert "registers" in reason(cascade(name, 20))
        x = with_tokens(jnp.bfloat16, cascade(name, 20))
        assert (reason(x) is None) == (name != "hla3")
    assert "level by level" in reason(with_tokens(jnp.bfloat16, cascade("hla2", 1000, B=1)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_lowers_without_a_compiler(dtype):
    device = jax.sharding.AbstractDevice("NVIDIA A100-SXM4-40GB", 108, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    x = with_tokens(dtype, operands(1000, STATES, D=33))
    ct = jax.eval_shape(partial(dense, power=2), x)
    token = with_tokens(dtype, cascade("hla3", 1))
    options = {"power": 2, "precision": None}
    passes = options | {"chunk_size": None, "strict": False}

    def every(x, ct, token):
        d = backward(x, ct, **passes)
        return forward(as_cascade(x), **passes), d, triton.step(token, **options)

    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(every).trace(x, ct, token).lower(lowering_platforms=("cuda",))
    for name in ("output", "summary", "sweep", "backward", "step"):
        assert f"hla_{name}" in lowered.as_text()
