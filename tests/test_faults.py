"""Faults that users of such libraries met, each with the value that is right.

What the table of test_ops.py holds already (decay, padding, packing, lengths, states, gradients) is
not repeated; these are the values at its edges.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import rms_error
from operators import (
    FOUR,
    apply,
    as_state,
    check_against_naive,
    make_inputs,
    make_mask,
    operator,
    worst_error,
)

import hla_jax as hla

# What XLA makes of these has been wrong or has crashed in one compiler or another.
pytestmark = pytest.mark.compiled

LINEAR_TIME = ("xla", "associative", "serial")


def test_a_normalised_single_token_returns_its_value_where_features_are_tiny():
    x = jnp.full((1, 1, 1), -8, jnp.bfloat16)

    def fn(q, k):
        return hla.linear_attention(q, k, jnp.ones_like(x))[0].sum()

    out, grads = jax.value_and_grad(fn, (0, 1))(x, x)
    assert out == 1
    assert max(abs(g).max() for g in grads) < 1e-3


@pytest.mark.parametrize("name", FOUR)
def test_a_log_decay_of_zero_is_no_decay(name):
    inputs = jax.tree.map(np.float32, make_inputs(name, 33, initial=True))
    fn = jax.jit(lambda x: apply(name, x, chunk_size=16))
    with_zeros = fn(inputs | {"log_decay": np.zeros((2, 33, 2), np.float32)})
    assert worst_error(with_zeros, fn(inputs)) < 1e-6


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("implementation", [*LINEAR_TIME, "quadratic"])
def test_nothing_before_a_reset_is_seen_after_it(name, implementation):
    t, reset = 33, 20
    inputs = jax.tree.map(np.float32, make_inputs(name, t, decay="strong", initial=True))
    inputs["log_decay"][:, reset] = -np.inf

    def after(x):
        out, state = apply(name, x, implementation=implementation, chunk_size=16)
        return out[:, reset:], state

    (late, state), pullback = jax.vjp(jax.jit(after), inputs)
    (grads,) = pullback(jax.tree.map(jnp.ones_like, (late, state)))
    early = {n: grads[n][:, :reset] for n in ("q", "k", "v", "log_decay")}
    assert not any(g.any() for g in jax.tree.leaves((early, grads["state"])))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    alone = {n: inputs[n][:, reset:] for n in early}
    assert worst_error((late, state), apply(name, alone)) < 1e-6


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize(
    "pieces",
    [(1, 2, 1, 9), *(pytest.param(p, marks=pytest.mark.slow) for p in [(12, 1), (4, 4, 4, 1)])],
)
def test_a_sequence_in_pieces_gives_the_values_and_gradients_of_one_pass(x64, name, pieces):
    inputs = make_inputs(name, 13, decay="token", initial=True, normalize=True)

    def in_pieces(x):
        outs, state = [], x["state"]
        for piece in np.split(np.arange(13), np.cumsum(pieces)[:-1]):
            part = {n: x[n][:, piece] for n in ("q", "k", "v", "log_decay")}
            out, state = apply(name, part | {"state": state}, normalize=True, chunk_size=4)
            outs.append(out)
        return jnp.concatenate(outs, 1), state

    def loss(fn, x):
        out, state = fn(x)
        return sum(jnp.sum(jnp.sin(y)) for y in (out, *state.values()))

    one = jax.jit(jax.value_and_grad(lambda x: loss(lambda x: apply(name, x, normalize=True), x)))
    many = jax.jit(jax.value_and_grad(lambda x: loss(in_pieces, x)))
    assert worst_error(many(inputs), one(inputs)) < 1e-11


@pytest.mark.parametrize("name", FOUR)
def test_tiny_denominators_keep_gradients_finite_and_right(name):
    inputs = make_inputs(name, 20, normalize=True)
    inputs["k"] = inputs["k"] * 1e-6
    check_against_naive(name, inputs, tolerance=1e-6, normalize=True)


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("normalize", [False, True])
def test_a_fully_masked_sequence_gives_zero_and_keeps_the_state(name, normalize):
    inputs = make_inputs(name, 5, decay="token", initial=True, normalize=normalize)
    inputs = jax.tree.map(np.float32, inputs) | {"v": np.full((2, 5, 2, 5), np.inf, np.float32)}
    mask = np.zeros((2, 5), bool)
    fn = jax.jit(lambda x: apply(name, x, mask=mask, normalize=normalize))
    (out, state), pullback = jax.vjp(fn, inputs)
    assert not out.any()
    assert worst_error(state, inputs["state"]) == 0
    (grads,) = pullback((jnp.ones_like(out), jax.tree.map(jnp.ones_like, state)))
    assert not any(grads[n].any() for n in ("q", "k", "v", "log_decay"))
    assert worst_error(grads["state"], jax.tree.map(jnp.ones_like, state)) == 0


@pytest.mark.parametrize("name", FOUR)
def test_a_masked_step_gives_zero_and_keeps_the_state(name):
    inputs = jax.tree.map(np.float32, make_inputs(name, 1, initial=True, normalize=True))
    mask = np.array([True, False])
    token = [np.where(mask[:, None, None], inputs[n][:, 0], np.nan) for n in "qkv"]
    state = as_state(name, inputs["state"])
    out, new = operator(name, "_step", normalize=True)(*token, state, log_decay=-1.0, mask=mask)
    assert not out[1].any()
    assert out[0].all()

    def pick(row, x):
        return jax.tree.map(lambda y: y[row], x)

    assert worst_error(pick(1, new), pick(1, state)) == 0
    assert worst_error(pick(0, new), pick(0, state)) > 0.1


@pytest.mark.parametrize("name", FOUR)
def test_packed_documents_are_those_alone(name):
    bounds = (15, 31, 32, 48)  # one before, one before, on and on the edge of a chunk
    inputs = make_inputs(name, 50, decay="token")
    ids = np.broadcast_to(np.searchsorted(bounds, np.arange(50), side="right"), (2, 50))
    mask = np.ones((2, 50), bool)  # a mask of ones does not undo the segments
    check_against_naive(name, inputs, tolerance=1e-11, segment_ids=ids, mask=mask, chunk_size=16)


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("kind", ["left", "right", "interior"])
def test_padding_changes_nothing_in_bfloat16(name, kind):
    mask = make_mask(kind, 20)[:1]
    inputs = make_inputs(name, 20, batch=(1,), normalize=True)
    inputs = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), inputs)
    out, state = apply(name, inputs, mask=mask, normalize=True)
    alone = apply(name, {n: x[:, mask[0]] for n, x in inputs.items()}, normalize=True)
    assert worst_error(state, alone[1]) < 1e-6
    assert rms_error(out[:, mask[0]], alone[0]) < 2e-3
    assert not out[:, ~mask[0]].any()


@pytest.mark.parametrize("implementation", LINEAR_TIME)
def test_long_sums_of_bfloat16_do_not_stop_growing(implementation):
    ones = jnp.ones((4096, 1, 1), jnp.bfloat16)
    options = {"feature_map": None, "implementation": implementation}
    out, state = hla.linear_attention(ones, ones, ones, **options)
    assert out.dtype == jnp.bfloat16
    assert (out == 1).all()
    assert state.kv == 4096
    assert state.k == 4096


def test_sums_of_float16_do_not_overflow():
    x = jnp.full((100, 1, 1), 100, jnp.float16)
    out, state = hla.linear_attention(x, x, x, feature_map=None)
    assert (out == 100).all()
    assert state.kv == 1e6
