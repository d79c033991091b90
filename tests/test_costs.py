"""The counter that holds the claims of linear cost: and no quadratic loop passes."""

import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

sys.path.append(str(Path(__file__).parents[1] / "examples/benchmarks"))
costs = importlib.import_module("costs")


def like(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def quadratic_loop(x):
    """One row of x x^T x at a time: nothing in it is larger than x."""
    return lax.map(lambda row: (x @ row) @ x, x)


X, COLUMN = like(4, 4), like(64)
COUNTS = {
    "matmul": (jnp.matmul, (like(3, 5), like(5, 7)), 2 * 3 * 5 * 7),
    "batched matmul": (jnp.matmul, (like(4, 3, 5), like(4, 5, 7)), 4 * 2 * 3 * 5 * 7),
    "grouped heads": (  # 6 of queries, 2 of keys
        lambda q, k: lax.dot_general(q, k, (((3,), (2,)), ((1,), (1,)))),
        (like(8, 2, 3, 5), like(9, 2, 5)),
        2 * 8 * 6 * 9 * 5,
    ),
    "sum": (lambda x: lax.dot(x, x).sum(), (X,), 2 * 4**3 + 4 * 4),
    "exp": (jnp.exp, (X,), 4 * 4),
    "scan": (lambda x: lax.scan(lambda c, _: (x @ c, None), x, length=10), (X,), 10 * 128),
    "fori": (lambda x: lax.fori_loop(0, 9, lambda _, c: x @ c, x), (X,), 9 * (128 + 1)),
    "sort": (lambda x: lax.sort(x, dimension=0), (like(64, 3),), 64 * 3 * 6),
    "cond": (lambda x: lax.cond(True, lambda: x @ x, lambda: x), (X,), 128),
    "remat": (lambda x: jax.checkpoint(jax.jit(lambda y: y @ y))(x), (X,), 128),
    "update": (lambda x: lax.dynamic_update_slice(x, x[:3], (5,)), (COLUMN,), 3 + 3),
    "cumsum": (lax.cumsum, (COLUMN,), 64),
}


@pytest.mark.parametrize("case", COUNTS)
def test_counts(case) -> None:
    function, args, expected = COUNTS[case]
    assert costs.flops(function, *args) == expected


def test_a_loop_that_xla_counts_once_is_counted_every_time() -> None:
    def loop(x):
        return lax.scan(lambda c, _: (x @ c, None), x, length=100)[0]

    analysis = jax.jit(loop).lower(like(16, 16)).compile().cost_analysis()
    assert analysis["flops"] < costs.flops(loop, like(16, 16)) / 50


def test_a_quadratic_loop_is_found_out() -> None:
    sizes = [2**n for n in range(9, 15)]
    assert costs.exponent(sizes, [costs.flops(quadratic_loop, like(T, 4)) for T in sizes]) > 1.99


def test_a_gradient_costs_more_than_the_function_whatever_rule_it_follows() -> None:
    def twice(x, g):
        return g @ (2 * x)

    square = jax.custom_vjp(lambda x: x @ x)
    square.defvjp(lambda x: (x @ x, x), lambda x, g: (twice(x, g),))
    forward = costs.flops(square, like(8, 8))
    assert forward == 2 * 8**3
    assert costs.flops(jax.grad(lambda x: square(x).sum()), like(8, 8)) > 2 * forward


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("while", lambda x: lax.while_loop(lambda c: c.sum() < 5, lambda c: c @ c, x)),
        ("cholesky", jnp.linalg.cholesky),
        ("conv_general_dilated", lambda x: jnp.convolve(x[0], x[1])),
        ("reduce_window", lambda x: lax.reduce_window(x, -9.0, lax.max, (2, 2), (1, 1), "SAME")),
    ],
)
def test_what_cannot_be_counted_is_refused(name, function) -> None:
    with pytest.raises(ValueError, match=f"{name}.* cannot be counted"):
        costs.flops(function, like(4, 4))


def test_bytes_are_those_of_what_lives_at_once() -> None:
    x = like(64, 4)
    pairs = costs.temp_bytes(lambda x: jnp.exp(x @ x.T) @ x, x)
    rows = costs.temp_bytes(quadratic_loop, x)
    assert rows < 64 * 64 * 4 <= pairs


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
def test_exponent_of_a_power_of_the_size(power) -> None:
    sizes = np.array([512, 1024, 4096])
    np.testing.assert_allclose(costs.exponent(sizes, 3 * sizes**power), power, atol=1e-9)
