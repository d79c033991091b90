"""Rotary positions are exact wherever they are, against rational arithmetic."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normals, rms_error

from hla_jax.nn import rotary

D = 64
PLACES = [0, 1, 2**17, 2**20, 2**24, 2**24 + 1, 2**31 - 1, -1, -5, -(2**31)]
TOLERANCE = {np.float32: 5e-7, np.float64: 1e-15}

# A turn in radians, and bases and widths whose frequencies are fractions, so need no rounding.
TURN = 2 * Fraction("3.14159265358979323846264338327950288419716939937510582097494459")
ROOTS = {(2.0**32, 64): 2, (10_000.0, 8): 10}


def rotated(x, position, root):
    """Each pair of channels turned by its exact angle, in float64; the i-th turns by root^-i."""
    angles = [float(position * Fraction(1, root**i) % TURN) for i in range(len(x) // 2)]
    cos, sin = (np.array([g(a) for a in angles]) for g in (math.cos, math.sin))
    a, b = np.split(np.asarray(x, np.float64), 2)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos])


def run(x, positions, **options):
    turn = jax.jit(lambda x, p: rotary(x[:, None], p, **options)[:, 0])
    with jax.enable_x64(x.dtype == np.float64):
        return np.asarray(turn(x, np.array(positions, np.int32)))


@pytest.mark.parametrize(("base", "width"), ROOTS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_angles_are_right_at_any_position(dtype, base, width):
    (x,) = normals((len(PLACES), width), dtype=dtype)
    root = ROOTS[base, width]
    expected = [rotated(row, p, root) for row, p in zip(x, PLACES, strict=True)]
    for y, row in zip(run(x, PLACES, base=base), expected, strict=True):
        assert rms_error(y, row) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("distance", [0, 1, 3, 1000])
def test_products_depend_on_the_difference_of_positions_only(dtype, distance):
    keys = [p for p in PLACES if p + distance < 2**31]
    q, k = (np.broadcast_to(x, (len(keys), D)) for x in normals((D,), (D,), dtype=dtype))
    q, k = run(q, [p + distance for p in keys]), run(k, keys)
    products = np.einsum("td,td->t", q.astype(np.float64), k)
    size = np.linalg.norm(q[0]) * np.linalg.norm(k[0])
    assert np.abs(products - products[0]).max() < TOLERANCE[dtype] * size


def test_neighbours_differ_at_the_end_of_float32():
    (x,) = normals((D,), dtype=np.float64)
    y = run(np.stack([x, x]), [2**24, 2**24 + 1])
    assert rms_error(y[0], y[1]) > 0.1


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint32, np.int64])
def test_positions_may_be_of_any_integers(kind):
    x = np.ones((3, D))
    places = np.array([0, 5, 100], kind)
    with jax.enable_x64(True):
        y = rotary(x[:, None], places)[:, 0]
    np.testing.assert_array_equal(y, run(x, [0, 5, 100]))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_rounded_once(dtype):
    (x,) = normals((2, D))
    x = x.astype(dtype)
    expected = run(x.astype(np.float32), [3, 70_000])
    np.testing.assert_array_equal(run(x, [3, 70_000]), expected.astype(dtype))


def test_nothing_is_promoted_silently():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert rotary(jnp.ones((2, 3, 4, 5), jnp.bfloat16), jnp.ones((2, 3), int)).shape[-1] == 5


def test_rows_may_share_positions(no_type_checks):
    (x,) = normals((2, 3, 4, D))
    expected = rotary(x, np.array([[7, 8, 9]] * 2))
    for shared in (np.array([7, 8, 9]), np.array([[7, 8, 9]])):
        np.testing.assert_array_equal(rotary(x, shared), expected)


def test_wrong_arguments_are_named(no_type_checks):
    x = jnp.ones((3, 1, 4))
    with pytest.raises(ValueError, match="positions must be integer, got float32"):
        rotary(x, jnp.ones(3))
    for shape in ((), (1,), (2,), (2, 3)):
        with pytest.raises(ValueError, match=r"positions must be \[\*B, T\] = \(3,\) or \[T\]"):
            rotary(x, jnp.zeros(shape, int))
    with pytest.raises(ValueError, match="x must be floating"):
        rotary(x.astype(int), jnp.arange(3))
    with pytest.raises(ValueError, match=r"x must be \[\*B, T, H, D\], got \(3, 4\)"):
        rotary(x[:, 0], jnp.arange(3))
    for base in (0, -1.0, math.inf, math.nan, 1e-80, 10**400):
        with pytest.raises(ValueError, match="base must be"):
            rotary(x, jnp.arange(3), base=base)
