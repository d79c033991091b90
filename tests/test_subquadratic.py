"""Costs against the length of the sequence: each variant's FLOPs and memory grow as it claims."""

import math

import jax
import jax.numpy as jnp
import pytest
from costs import exponent, flops, temp_bytes

import hla_jax as hla
from hla_jax.attention import patterns

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


def flash(q, k, v):
    return hla.attention.flash_attention(q, k, v)[0]


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
    "flash": (flash, None, 1),  # how often its loops turn is not in the jaxpr
    "softmax": (hla.attention.softmax_attention, 2, 2),
}


def costs(count, system, sizes):
    """What `count` counts in a system's outputs and gradients at each length."""

    def run(q, k, v):
        return jax.value_and_grad(lambda *x: SYSTEMS[system][0](*x).sum(), (0, 1, 2))(q, k, v)

    return [count(run, *[jax.ShapeDtypeStruct((T, H, D), jnp.float32)] * 3) for T in sizes]


@pytest.mark.parametrize("system", [s for s in SYSTEMS if SYSTEMS[s][1] is not None])
def test_flops_grow_as_claimed(system) -> None:
    sizes = [2**n for n in range(9, 15)]
    assert abs(exponent(sizes, costs(flops, system, sizes)) - SYSTEMS[system][1]) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_memory_grows_no_faster_than_claimed(system) -> None:
    sizes = [2**n for n in (10, 12, 14)]
    power = exponent(sizes, costs(temp_bytes, system, sizes))
    assert power < SYSTEMS[system][2] + 0.1
    assert (power > 1.5) == (system == "softmax")
