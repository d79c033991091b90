"""Costs against the length of the sequence: each variant's FLOPs and memory grow as it claims."""

import importlib
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import hla_jax as hla
from hla_jax.attention import patterns

sys.path.append(str(Path(__file__).parents[1] / "examples/benchmarks"))
costs = importlib.import_module("costs")

H, D = 2, 16
KEY = jax.random.key(0)


def sparse(make_pattern):
    """The system of a pattern that depends on the length, as the strides of about sqrt(T) do."""

    def attention(q, k, v):
        return hla.attention.sparse_attention(q, k, v, make_pattern(len(q)))

    return attention


def near_root(T):
    return 2 ** math.ceil(math.log2(T) / 2)


def linear(q, k, v, feature_map=hla.feature_maps.elu_plus_one):
    return hla.linear_attention(q, k, v, feature_map=feature_map, implementation="xla")[0]


def performer(q, k, v):
    return linear(q, k, v, hla.feature_maps.favor_plus(KEY, D, 32))


def linformer(q, k, v):
    e = jnp.ones((32, len(k))) / len(k)
    return hla.attention.linformer_attention(q, k, v, e)


def lsh(qk, _, v):
    return hla.attention.lsh_attention(qk, v, key=KEY, num_buckets=16, num_rounds=2, chunk_size=32)


# A function of q, k and v, and the powers of T as which its FLOPs and its bytes grow.
SYSTEMS = {
    "linear": (linear, 1, 1),
    "performer": (performer, 1, 1),
    "sliding window": (sparse(lambda T: patterns.sliding_window(32)), 1, 1),
    "dilated window": (sparse(lambda T: patterns.dilated_window(32, 4)), 1, 1),
    "longformer": (sparse(lambda T: patterns.longformer(32, (0, 7))), 1, 1),
    "strided": (sparse(lambda T: patterns.strided(near_root(T))), 1.5, 1.5),
    "fixed": (sparse(lambda T: patterns.fixed(near_root(T))), 1.5, 1.5),
    "big bird": (
        sparse(
            lambda T: patterns.big_bird(
                KEY, window=32, num_random=2, global_positions=(0, 7), block_size=32, num_heads=H
            )
        ),
        1,
        1,
    ),
    "linformer": (linformer, 1, 1),
    "lsh": (lsh, 1, 1),
    "softmax": (hla.attention.softmax_attention, 2, 2),
}


def exponent(system, count):
    """The power of T as which `count` grows, counted in a system's outputs and gradients."""

    def run(q, k, v):
        return jax.value_and_grad(lambda *x: SYSTEMS[system][0](*x).sum(), (0, 1, 2))(q, k, v)

    tokens = {T: jax.ShapeDtypeStruct((T, H, D), jnp.float32) for T in (2**9, 2**11, 2**14)}
    return costs.exponent(list(tokens), [count(run, x, x, x) for x in tokens.values()])


@pytest.mark.parametrize("system", SYSTEMS)
def test_flops_grow_as_claimed(system) -> None:
    assert abs(exponent(system, costs.flops) - SYSTEMS[system][1]) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_memory_grows_no_faster_than_claimed(system) -> None:
    power = exponent(system, costs.temp_bytes)
    assert power < SYSTEMS[system][2] + 0.1
    if system == "softmax":
        assert power > 1.5
