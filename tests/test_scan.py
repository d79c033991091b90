"""The engines, on monoids of this library and on one they have never heard of."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
from helpers import rms_error

from hla_jax import monoids, scan
from hla_jax.testing import check_scan_equals_serial

ENGINES = {
    "serial": scan.serial,
    "associative": scan.associative,
    "chunked": partial(scan.chunked, chunk_size=3),
}


def jitted(engine, m):
    return jax.jit(partial(ENGINES[engine], m), static_argnames=("reverse", "read"))


# Products of integer matrices: exact, and the order of the operands shows.
PRODUCT = SimpleNamespace(
    identity=lambda like: jnp.eye(2, dtype=like.dtype),
    lift=lambda x: x,
    combine=lambda a, b: a @ b,
    read=lambda element, x: element @ jnp.array([1, 2], x.dtype),
)


def matrices(t, seed=0):
    return np.random.default_rng(seed).integers(-2, 3, (t, 2, 2)).astype(np.int32)


def make_tokens(t, seed=0, dtype=np.float32, d=2, e=3):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(t, width)).astype(dtype) for width in (d, d, e))
    return q, k, v, -rng.uniform(0, 1, t).astype(dtype)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("t", "reverse"), [(1, False), (3, True), (4, False), (7, False), (7, True)]
)
def test_any_length_in_either_direction(engine, t, reverse):
    x, initial = matrices(t), matrices(1, seed=1)[0]
    run = jitted(engine, PRODUCT)
    out, final = run((x,), initial=initial, reverse=reverse)
    prefixes, last = run((x,), initial=initial, reverse=reverse, read=False)

    order = range(t)[::-1] if reverse else range(t)
    state, want = initial, np.zeros((t, 2, 2), int)
    for i in order:
        want[i] = state = state @ x[i]
    np.testing.assert_array_equal(prefixes, want)
    np.testing.assert_array_equal(out, want @ [1, 2])
    np.testing.assert_array_equal(final, state)
    np.testing.assert_array_equal(last, state)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("disabled", [False, True])
def test_no_tokens_leave_the_initial_element_even_where_jit_is_disabled(engine, disabled):
    m, tokens = monoids.HLA2(), make_tokens(0)
    _, initial = scan.serial(m, make_tokens(3))
    with jax.disable_jit(disabled):
        out, final = ENGINES[engine](m, tokens, initial=initial)
        prefixes, one = ENGINES[engine](m, tokens, read=False)
        summed = jax.grad(lambda s: ENGINES[engine](m, tokens, initial=s)[1].F.sum())(initial)
    assert out.shape == (0, 3)
    assert prefixes.F.shape == (0, 2, 3)
    jax.tree.map(np.testing.assert_array_equal, final, initial)
    jax.tree.map(np.testing.assert_array_equal, one, m.identity(initial))
    np.testing.assert_array_equal(summed.F, 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_run_without_jit(engine):
    x = matrices(5)
    with jax.disable_jit():
        out, _ = ENGINES[engine](PRODUCT, (x,))
    np.testing.assert_array_equal(out, scan.serial(PRODUCT, (x,))[0])


OPERATORS = {"hla2": monoids.HLA2(), "ahla": monoids.AHLA(), "hla3": monoids.HLA3()}


@pytest.mark.parametrize("name", OPERATORS)
def test_every_engine_gives_the_definition(name):
    q, k, v, log_decay = tokens = make_tokens(5)
    want = naive.weights(name, *(x.astype(np.float64) for x in (q, k, np.exp(log_decay)))) @ v
    run = jax.jit(lambda t: {n: engine(OPERATORS[name], t)[0] for n, engine in ENGINES.items()})
    for out in run(tokens).values():
        assert rms_error(out, want) < 1e-6


def test_engines_and_their_gradients_agree():
    check_scan_equals_serial(monoids.HLA2(), make_tokens(5))


def test_engines_and_their_gradients_agree_without_summaries():
    softmax = SimpleNamespace(  # of scalars x with values v: the element is a maximum and two sums
        identity=lambda like: {
            "max": jnp.full_like(like["max"], -jnp.inf),
            "sums": jnp.zeros_like(like["sums"]),
        },
        lift=lambda x, v: {"max": x, "sums": jnp.array([v, 1])},
        combine=lambda a, b: {
            "max": (top := jnp.maximum(a["max"], b["max"])),
            "sums": jnp.exp(a["max"] - top) * a["sums"] + jnp.exp(b["max"] - top) * b["sums"],
        },
        read=lambda element, x, v: element["sums"][0] / element["sums"][1],
    )
    check_scan_equals_serial(softmax, tuple(make_tokens(5)[0].T))


def test_forward_and_reverse_mode_agree_through_chunks(x64):
    tokens = make_tokens(4, dtype=np.float64)
    tangents = make_tokens(4, seed=1, dtype=np.float64)

    def loss(tokens):
        return jnp.sum(jnp.sin(ENGINES["chunked"](monoids.Linear(), tokens)[0]))

    _, slope = jax.jit(partial(jax.jvp, loss))((tokens,), (tangents,))
    grads = jax.jit(jax.grad(loss))(tokens)
    assert (
        rms_error(slope, sum(np.vdot(g, t) for g, t in zip(grads, tangents, strict=True))) < 1e-12
    )


def test_engines_map_over_heads():
    tokens = [np.stack(x) for x in zip(make_tokens(4), make_tokens(4, seed=1), strict=True)]
    run = jitted("chunked", monoids.Linear())
    out, final = jax.vmap(lambda *x: run(x))(*tokens)
    for head in range(2):
        want, last = scan.serial(monoids.Linear(), tuple(x[head] for x in tokens))
        assert rms_error(out[head], want) < 1e-6
        assert rms_error(final.P[head], last.P) < 1e-6


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("initial", "tokens"), [("float32", "float64"), ("float64", "float32"), ("float32", "bfloat16")]
)
def test_the_initial_element_fixes_the_dtypes(engine, initial, tokens, x64):
    m = monoids.Linear()
    _, start = scan.serial(m, make_tokens(2, dtype=initial))
    x = tuple(jnp.asarray(x, tokens) for x in make_tokens(4, seed=1))
    out, final = jitted(engine, m)(x, initial=start)
    assert out.dtype == tokens
    assert {str(x.dtype) for x in final} == {initial}
    want, _ = scan.serial(m, tuple(x.astype("float64") for x in x), initial=start)
    assert rms_error(out, want) < {"float64": 1e-6, "float32": 1e-6, "bfloat16": 4e-3}[tokens]


def test_chunks_hold_the_elements_of_one_chunk_at_a_time_in_the_backward_too():
    size, t = 1000, 512
    m = SimpleNamespace(
        identity=jnp.ones_like,
        lift=lambda x: jnp.full(size, x),
        combine=lambda a, b: a * b,
        read=lambda element, x: element.sum(),
    )

    def elements(engine):
        """What the gradient holds beside its arguments and results, in elements of the monoid."""
        gradient = jax.jit(jax.grad(lambda x: engine(m, (x,))[0].sum()))
        memory = gradient.lower(jnp.ones(t)).compile().memory_analysis()
        return memory.temp_size_in_bytes / (4 * size)

    assert elements(scan.associative) > t
    assert elements(partial(scan.chunked, chunk_size=16)) < t / 2


BAD_INPUT = {
    "tokens of unequal length": ({"tokens": (np.ones(3), np.ones(4))}, "tokens must"),
    "tokens without an axis": ({"tokens": (np.ones(3), np.ones(()))}, "tokens must"),
    "no arrays": ({"tokens": ()}, "tokens must"),
    "an array, not a tuple": ({"tokens": np.ones((3, 2))}, "tokens must be a tuple .* got array"),
    "chunks of nothing": ({"chunk_size": 0}, "chunk_size must be an integer at least 1, got 0"),
    "an initial element of another structure": ({"initial": (np.ones(()),)}, "initial must"),
    "an initial element of another shape": ({"initial": np.ones((2, 1))}, "initial must"),
}


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("case", BAD_INPUT)
def test_wrong_input_is_refused_by_name(case):
    change, message = BAD_INPUT[case]
    arguments = {"tokens": (matrices(3),), "initial": None, "chunk_size": 2} | change
    with pytest.raises(ValueError, match=message):
        scan.chunked(PRODUCT, **arguments)
