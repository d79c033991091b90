"""The mixture of logistics against differences of its distribution function, in 60 digits."""

from decimal import Decimal, localcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from hla_jax.models import logistics

# Two components: their means, then their log-scales.
CASES = {
    "ordinary": ([-0.5, 0.3], [-2.0, -3.5]),
    "narrow": ([0.0, 0.3], [-20.0, -20.0]),  # the first mean lies between 127 and 128
    "narrow, at the ends": ([-1.0, 1.0], [-20.0, -20.0]),
    "narrow, beyond the ends": ([-50.0, 50.0], [-20.0, -20.0]),
    "wide": ([-0.2, 0.5], [7.0, 7.0]),
    "narrow and wide": ([0.1, -0.3], [-20.0, 7.0]),
    "far": ([-1e4, 2e4], [0.0, 0.0]),
}
PARAMETERS = np.array([[0.7, -0.4, *means, *scales] for means, scales in CASES.values()])
PARAMETERS = PARAMETERS.astype(np.float32)
EDGES = [0, 1, 77, 128, 254, 255]


def naive(parameters, v):
    """log P(v): the logistic distribution function at v + 1/2, less that at v - 1/2."""
    logits, means, log_scales = parameters[:2], parameters[2:4], parameters[4:]
    weights = [logit.exp() for logit in logits]
    total = Decimal(0)
    for weight, mean, log_scale in zip(weights, means, log_scales, strict=True):
        low = ((2 * v - 1) / Decimal(255) - 1 - mean) / log_scale.exp()
        high = ((2 * v + 1) / Decimal(255) - 1 - mean) / log_scale.exp()
        low, high = low if v > 0 else Decimal("-inf"), high if v < 255 else Decimal("inf")
        if low > 0:  # the mirror image: near 1, 60 digits would not be enough
            low, high = -high, -low
        total += weight * (1 / (1 + (-high).exp()) - 1 / (1 + (-low).exp()))
    return (total / sum(weights)).ln()


def exactly(parameters, function):
    """function(parameters as decimals), with 60 digits."""
    with localcontext(prec=60, Emin=-(10**17), Emax=10**17):
        return function([Decimal(float(p)) for p in parameters])


def difference_quotients(parameters, v):
    h = Decimal("1e-20")

    def quotient(i):
        up, down = ([p + (j == i) * side for j, p in enumerate(parameters)] for side in (h, -h))
        return float((naive(up, v) - naive(down, v)) / (2 * h))

    return [quotient(i) for i in range(len(parameters))]


@pytest.fixture(scope="module")
def computed():
    """Log-probabilities [cases, 256], and their gradients by the parameters [cases, 256, 6]."""
    each = jax.vmap(jax.value_and_grad(logistics.log_prob), in_axes=(None, 0))
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(each, (0, None)))(PARAMETERS, jnp.arange(256)))


@pytest.mark.parametrize("case", range(len(CASES)), ids=list(CASES))
def test_log_probabilities_and_gradients_are_the_definitions(case, computed):
    log_prob, gradient = (a[case] for a in computed)
    want = exactly(PARAMETERS[case], lambda p: [float(naive(p, v)) for v in range(256)])
    np.testing.assert_allclose(log_prob, want, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(np.exp(log_prob.astype(np.float64)).sum(), 1, rtol=1e-5)
    slopes = exactly(PARAMETERS[case], lambda p: [difference_quotients(p, v) for v in EDGES])
    np.testing.assert_allclose(gradient[EDGES], slopes, rtol=1e-4, atol=1e-6)
    assert np.isfinite(gradient).all()


def test_other_values_have_no_probability(computed):
    parameters = jnp.tile(PARAMETERS[:1], (4, 1))
    got = logistics.log_prob(parameters, jnp.array([-1, 0, 255, 256]))
    assert np.isneginf(np.asarray(got)).tolist() == [True, False, False, True]


@pytest.mark.parametrize("case", ["ordinary", "wide", "narrow"])
def test_values_are_drawn_with_their_probabilities(case, computed):
    n, i = 20_000, list(CASES).index(case)
    values = logistics.sample(jnp.tile(PARAMETERS[i], (n, 1)), jax.random.key(0))
    assert values.dtype == jnp.uint8
    counts, want = np.bincount(values, minlength=256), n * np.exp(computed[0][i].astype(np.float64))
    rare = want < 5
    counts, want = (np.append(a[~rare], a[rare].sum()) for a in (counts, want))
    counts, want = counts[want > 0], want[want > 0]
    assert chisquare(counts, want * n / want.sum()).pvalue > 0.01


def test_log_probabilities_are_float32_or_float64(x64):
    values = jnp.arange(256, dtype=jnp.uint8)
    for kind, result in [("bfloat16", "float32"), ("float64", "float64")]:
        parameters = jnp.tile(jnp.asarray(PARAMETERS[0], kind), (256, 1))
        got = logistics.log_prob(parameters, values)
        assert got.dtype == result
        np.testing.assert_allclose(
            np.exp(got).sum(), 1, rtol=1e-5 if result == "float32" else 1e-13
        )


def test_no_log_scale_is_too_large():
    parameters = jnp.array([[0.0, 0.1, -1e30], [0.0, 0.1, 1e30], [0.0, 0.1, -200.0]])
    each = jnp.broadcast_to(parameters, (3, 3, 3))
    values = jnp.tile(jnp.array([[0], [100], [255]]), (1, 3))
    log_prob, back = jax.vjp(lambda p: logistics.log_prob(p, values), each)
    assert np.isfinite(log_prob).all()
    assert np.isfinite(back(jnp.ones((3, 3)))[0]).all()
    assert logistics.sample(parameters, jax.random.key(0)).shape == (3,)


def test_wrong_arguments_are_named(no_type_checks):
    parameters, key = jnp.zeros((2, 6)), jax.random.key(0)
    for message, call in {
        r"parameters must be \[\*B, 3 M\] .* got \(2, 5\)": lambda: logistics.sample(
            parameters[:, 1:], key
        ),
        r"parameters must be .* got \(2, 0\)": lambda: logistics.sample(parameters[:, :0], key),
        "parameters must be floating.* got int32": lambda: logistics.sample(
            parameters.astype(int), key
        ),
        r"values must be integer of shape \(2,\), got int32 of shape \(3,\)": (
            lambda: logistics.log_prob(parameters, jnp.arange(3))
        ),
        "values must be integer .* got float32": lambda: logistics.log_prob(
            parameters, jnp.zeros(2)
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
