"""Both XLA forms of the primitive, whatever the backend of this machine, against dense sums."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operators import all_pairs, with_gradients, worst_error

from hla_jax.kernels import _batched, _loop
from hla_jax.kernels._layout import Operands, Results

FORMS = {
    "loop": (_loop.forward, _loop.backward),
    "batched": (partial(_batched.forward, starts=_batched.serial_starts), _batched.backward),
}
CASES = all_pairs(
    form=list(FORMS),
    # of q, k, v, decay
    heads=((4, 4, 4, 4), (4, 2, 2, 2), (4, 4, 2, 2), (4, 2, 4, 2), (4, 4, 1, 1)),
    power=(1, 2, 3),
    strict=(False, True),
    mass=(False, True),
    decay=(False, True),
    t=(16, 21),
    chunk=(8, 1),  # of one token, blocks of chunks are full
)


def dense(x, *, power, strict):
    """The primitive by its definition, every head of its own: outputs, masses, final state."""
    t, heads, states = x["q"].shape[1], x["q"].shape[2], x["P"].shape[1]

    def every(a, axis, n):
        return jnp.repeat(a, n // a.shape[axis], axis)

    log_b = power * jnp.cumsum(x.get("log_decay", jnp.zeros((2, t, 1))), 1)
    q, log_b_q = x["q"], every(log_b, 2, heads)
    k, v, log_b = every(x["k"], 2, states), every(x["v"], 2, states), every(log_b, 2, states)
    end = jnp.exp(log_b[:, -1:] - log_b)
    a = jnp.einsum("bthd,bshd->bhts", q, every(k, 2, heads))
    a *= jnp.exp((log_b_q[:, :, None] - log_b_q[:, None]).transpose(0, 3, 1, 2))
    a *= np.tri(t, k=-1 if strict else 0)
    q = q * jnp.exp(log_b_q)[..., None]
    rho = jnp.exp(log_b[:, -1])
    o = jnp.einsum("bhts,bshe->bthe", a, every(v, 2, heads))
    o += jnp.einsum("bthd,bhde->bthe", q, every(x["P"], 1, heads))
    P = rho[..., None, None] * x["P"] + jnp.einsum("bsh,bshd,bshe->bhde", end, k, v)
    if "w" not in x:
        return Results(o, None, P, None)
    w = every(x["w"], 2, states)
    z = jnp.einsum("bhts,bsh->bth", a, every(w, 2, heads))
    z += jnp.einsum("bthd,bhd->bth", q, every(x["m"], 1, heads))
    return Results(o, z, P, rho[..., None] * x["m"] + jnp.einsum("bsh,bshd,bsh->bhd", end, k, w))


def operands(x):
    return Operands(*(x.get(name) for name in Operands._fields))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_both_forms_and_their_backward_are_the_dense_sums(x64, case):
    t, (h, hk, hv, kv), d, e = case["t"], case["heads"], 3, 5
    shapes = {"q": (t, h, d), "k": (t, hk, d), "v": (t, hv, e), "P": (max(hk, hv), d, e)}
    if case["mass"]:
        shapes |= {"w": (t, hv), "m": (max(hk, hv), d)}
    rng = np.random.default_rng(0)
    x = {name: rng.normal(size=(2, *shape)) for name, shape in shapes.items()}
    if case["decay"]:
        x["log_decay"] = -rng.uniform(0, 1, (2, t, kv))
    rule = {"power": case["power"], "strict": case["strict"]}
    forward, backward = FORMS[case["form"]]
    options = rule | {"chunk_size": case["chunk"], "precision": None}

    def actual(x, cotangents):
        x, from_operands = jax.vjp(operands, x)
        return forward(x, **options), from_operands(backward(x, cotangents, **options))[0]

    definition = partial(dense, **rule)
    cotangents = jax.tree.map(lambda y: rng.normal(size=y.shape), jax.eval_shape(definition, x))
    expected = jax.jit(partial(with_gradients, definition))(x, cotangents)
    assert worst_error(jax.jit(actual)(x, cotangents), expected) < 1e-12
