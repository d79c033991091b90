"""The checks pass what is right and refuse planted faults, saying which."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_errata import published_ahla, published_hla2, published_hla3

from hla_jax import monoids, testing


def make_tokens(t=5, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(t, width)).astype(np.float32) for width in (2, 2, 3))
    return q, k, v, np.log(np.linspace(0.3, 0.9, t), dtype=np.float32)


def linear_attention(q, k, v, log_decay):
    """Its definition, dense."""
    t = jnp.arange(len(q))
    sums = jnp.cumsum(log_decay)
    exponents = jnp.where(t[:, None] >= t, sums[:, None] - sums, -jnp.inf)
    return (jnp.exp(exponents) * (q @ k.T)) @ v


@dataclass(frozen=True)
class Faulty:
    """A monoid with some of its methods replaced."""

    right: object
    fault: dict

    def __post_init__(self):
        for name in ("identity", "lift", "combine", "read", "summarise"):
            if hasattr(self.right, name):
                method = self.fault.get(name, getattr(self.right, name))
                object.__setattr__(self, name, method)


LINEAR = monoids.Linear()


class Lifted:
    """Linear attention with another `lift`."""

    identity, combine, read = LINEAR.identity, LINEAR.combine, LINEAR.read

    def __init__(self, lift):
        self.lift = lift


NO_SUMMARY = {"summarise": lambda *tokens: LINEAR.summarise(*tokens)._replace(P=jnp.zeros((2, 3)))}

BREAKS_A_LAW = {
    "erratum 1": (monoids.HLA2Paper(), {"combine": published_hla2}, r"combined as .*: G: .*at \("),
    "erratum 3": (monoids.AHLA(), {"combine": published_ahla}, r"combined as .*: E: .*at \("),
    "erratum 5": (
        monoids.HLA3("published"),
        {"combine": published_hla3},
        r"combined as .*: F: .*at \(",
    ),
    "subtracts": (
        LINEAR,
        {"combine": lambda a, b: LINEAR.combine(a, b)._replace(P=b.rho * a.P - b.P)},
        r"combine\(identity, element\) of token 4: P",
    ),
    "identity that resets": (
        LINEAR,
        {"identity": lambda like: jax.tree.map(lambda x: jnp.zeros(x.shape), like)},
        r"combine\(identity, element\) of token 4: rho",
    ),
    "identity that adds": (
        LINEAR,
        {"identity": lambda like: jax.tree.map(lambda x: jnp.ones(x.shape), like)},
        r"combine\(identity, element\) of token 4: P",
    ),
    "wrong summary": (LINEAR, NO_SUMMARY, "summarise of tokens 0 to 2: P"),
}


@pytest.mark.parametrize("case", BREAKS_A_LAW)
def test_a_broken_law_is_refused(case):
    right, fault, message = BREAKS_A_LAW[case]
    with pytest.raises(AssertionError, match=message):
        testing.check_monoid(Faulty(right, fault), make_tokens())


# Monoids of linear attention that keep all laws, of something else.
NEEDS_A_REFERENCE = {
    "decay forgotten": lambda q, k, v, log_decay: LINEAR.lift(q, k, v, jnp.zeros_like(log_decay)),
    "decay applied twice": lambda q, k, v, log_decay: LINEAR.lift(q, k, v, 2 * log_decay),
    "sum of q instead of k": lambda q, k, v, log_decay: LINEAR.lift(k, q, v, log_decay),
}


@pytest.mark.parametrize("case", NEEDS_A_REFERENCE)
def test_only_a_reference_refuses_a_wrong_operator_that_keeps_the_laws(case):
    m, tokens = Lifted(NEEDS_A_REFERENCE[case]), make_tokens()
    testing.check_monoid(m, tokens)
    with pytest.raises(AssertionError, match=r"outputs: RMS\(error\) / RMS\(expected\) is .* got"):
        testing.check_monoid(m, tokens, reference=linear_attention)


def test_right_monoids_pass_and_64_bit_types_are_left_as_they_were():
    testing.check_monoid(LINEAR, make_tokens(), reference=linear_attention)
    assert not jax.config.jax_enable_x64
    with pytest.raises(AssertionError):
        testing.check_monoid(Faulty(LINEAR, NO_SUMMARY), make_tokens())
    assert not jax.config.jax_enable_x64


def test_engines_that_differ_are_refused():
    def twice_the_right(a, b):
        return LINEAR.combine(a, b)._replace(P=b.rho * a.P + 2 * b.P)

    with pytest.raises(AssertionError, match=r"associative: value.final.P"):
        testing.check_scan_equals_serial(
            Faulty(LINEAR, {"combine": twice_the_right}), make_tokens()
        )
    with pytest.raises(AssertionError, match=r"chunked: value.final.P"):
        testing.check_scan_equals_serial(Faulty(LINEAR, NO_SUMMARY), make_tokens())


def stabilised(q, k, v, log_decay):
    """exp features whose stabiliser is a maximum over all keys, and an epsilon added after it."""
    return linear_attention(jnp.exp(q), jnp.exp(k - k.max()) + 1e-2, v, log_decay)


def straight_through(q, k, v, log_decay):
    """Causal in its values only."""
    leak = v.mean(0)
    return linear_attention(q, k, v, log_decay) + leak - jax.lax.stop_gradient(leak)


LEAKS = {
    "stabiliser": (stabilised, "outputs of tokens before 1"),
    "next token": (lambda q, k, v, log_decay: jnp.roll(v, -1, 0), "outputs of tokens before 1"),
    "gradient": (straight_through, "gradient of outputs before token 1, .* from there on: 2"),
    "position": (lambda *x: linear_attention(*x)[::-1], "outputs of tokens before 1"),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_of_the_future_is_refused(leak):
    fn, message = LEAKS[leak]
    with pytest.raises(AssertionError, match=message):
        testing.check_causal(fn, make_tokens(), axis=0)


def test_a_causal_function_passes():
    testing.check_causal(linear_attention, make_tokens(), axis=0)


def test_causality_compiles_two_programs_however_long_the_tokens_are():
    compiled = []

    def listen(event, *_, **__):
        compiled.append(event) if "backend_compile" in event else None

    jax.monitoring.register_event_duration_secs_listener(listen)
    testing.check_causal(lambda x: jnp.cumsum(x, 0), (np.ones((37, 2), np.float32),), axis=0)
    assert len(compiled) == 2  # the outputs and the gradients


def test_causality_of_integers_and_along_other_axes():
    ids = np.array([[3, 1, 2, 0]])
    testing.check_causal(lambda ids: jnp.cumsum(ids, -1), (ids,), axis=-1)
    with pytest.raises(AssertionError, match="outputs of tokens before 1"):
        testing.check_causal(lambda ids: jnp.flip(ids, -1), (ids,), axis=-1)


def averaged(x, state):
    """A running mean: state (sum, count)."""
    total, count = (0.0, 0.0) if state is None else state
    totals, counts = total + jnp.cumsum(x), count + jnp.arange(1.0, len(x) + 1)
    return totals / counts, (totals[-1], counts[-1])


def without_count(x, state):
    out, (total, count) = averaged(x, state)
    return out, (total, count if state is None else count - state[1])


def without_gradient(x, state):
    return averaged(x, jax.lax.stop_gradient(state))


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (without_count, r"cut at \[1, 4\] and resumed, from no state: value"),
        (without_gradient, r"cut at \[1, 4\] and resumed, from no state: gradient"),
    ],
)
def test_a_state_that_forgets_is_refused(fn, message):
    with pytest.raises(AssertionError, match=message):
        testing.check_resume(fn, (np.arange(1.0, 6.0),), axis=0)


def test_a_state_that_holds_what_it_must_passes():
    testing.check_resume(averaged, (np.arange(1.0, 6.0),), axis=0)


@jax.custom_vjp
def normalised(q, k, v):
    return (q @ k.T) @ v / (q @ k.sum(0))[:, None]


def right_backward(inputs, g):
    def plain(q, k, v):
        return (q @ k.T) @ v / (q @ k.sum(0))[:, None]

    return jax.vjp(plain, *inputs)[1](g)


def constant_denominator(inputs, g):
    """dk lacks the path through the denominator."""
    q, k, v = inputs
    dq, _, dv = right_backward(inputs, g)
    return dq, (g / (q @ k.sum(0))[:, None] @ v.T).T @ q, dv


@pytest.mark.parametrize("by_reference", [False, True])
def test_a_wrong_gradient_is_refused(by_reference):
    inputs = tuple(np.random.default_rng(0).uniform(0.5, 1, (3, 4, 2)))
    plain = normalised.fun
    reference = plain if by_reference else None
    normalised.defvjp(lambda *x: (plain(*x), x), right_backward)
    testing.check_grads(lambda *x: normalised(*x), inputs, reference=reference)
    normalised.defvjp(lambda *x: (plain(*x), x), constant_denominator)
    with pytest.raises(AssertionError, match=r"gradient.*1"):
        testing.check_grads(lambda *x: normalised(*x), inputs, reference=reference)


def test_finite_differences_see_through_resets_and_integers():
    def fn(x, log_decay, n):
        return x * jnp.exp(log_decay) * n

    x, log_decay = np.ones(3), np.array([-0.5, -np.inf, 0.0])
    testing.check_grads(fn, (x, log_decay, np.array([1, 2, 3])))


def test_the_checks_refuse_what_they_cannot_check():
    with pytest.raises(ValueError, match="at least 3"):
        testing.check_monoid(LINEAR, make_tokens(2))
    with pytest.raises(ValueError, match="axis 0 must have one length"):
        testing.check_causal(jnp.add, (np.ones(3), np.ones(1)), axis=0)
    with pytest.raises(ValueError, match="as many as inputs"):
        testing.check_causal(lambda x: x[1:], (np.ones(3),), axis=0)
    with pytest.raises(ValueError, match="must compute in float64"):
        testing.check_grads(lambda x: x.astype(jnp.float32), (np.ones(3),))
