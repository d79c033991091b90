"""The algebra: laws, definitions, gradients and dtypes of every monoid."""

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
from helpers import rms_error
from hypothesis import given, settings
from hypothesis import strategies as st

from hla_jax import monoids, scan
from hla_jax.testing import check_monoid

MONOIDS = {  # name -> monoid, its name in naive.py
    "linear": (monoids.Linear(), "linear"),
    "hla2": (monoids.HLA2(), "hla2"),
    "hla2 unmasked": (monoids.HLA2(masked=False), "hla2_unmasked"),
    "hla2 paper": (monoids.HLA2Paper(), "hla2"),
    "ahla": (monoids.AHLA(), "ahla"),
    "hla3": (monoids.HLA3(), "hla3"),
    "hla3 unmasked": (monoids.HLA3("unmasked"), "hla3_unmasked"),
    "hla3 published": (monoids.HLA3("published"), "hla3_published"),
}
SUMMARISING = [name for name, (m, _) in MONOIDS.items() if hasattr(m, "summarise")]
D, E = 2, 3


def make_tokens(log_decay, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    t = len(log_decay)
    q, k, v = (rng.normal(size=(t, width)).astype(dtype) for width in (D, D, E))
    return q, k, v, np.asarray(log_decay, dtype)


def definition(name):
    """The outputs, by sums over all tuples of tokens."""

    def outputs(q, k, v, log_decay):
        return naive.weights(name, *(np.asarray(x) for x in (q, k, np.exp(log_decay)))) @ v

    return outputs


@pytest.mark.parametrize("name", MONOIDS)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    decays=st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), min_size=6, max_size=6),
    seed=st.integers(0, 1000),
)
def test_every_bracketing_gives_the_definition(name, decays, seed):
    m, reference = MONOIDS[name]
    with np.errstate(divide="ignore"):
        log_decay = np.log(decays)
    check_monoid(m, make_tokens(log_decay, seed), reference=definition(reference))


@pytest.mark.parametrize("name", SUMMARISING)
def test_the_summary_of_no_tokens_is_the_identity(name):
    m, _ = MONOIDS[name]
    empty = m.summarise(*make_tokens([]))
    jax.tree.map(np.testing.assert_array_equal, empty, m.identity(empty))


@pytest.mark.parametrize("name", SUMMARISING)
def test_summaries_are_exact_where_strong_and_weak_decays_mix(name):
    m, _ = MONOIDS[name]
    tokens = make_tokens(
        [0, -1e9, -1e-3, -20, -1e-4, -np.inf, -1e-3, -30, -0.5, 0], dtype=np.float32
    )
    summary = jax.jit(m.summarise)(*tokens)
    with jax.enable_x64(True):
        _, exact = scan.serial(m, tuple(x.astype(np.float64) for x in tokens))
    for member, want in zip(summary, exact, strict=True):
        assert rms_error(member, want) < 1e-6


@pytest.mark.parametrize("name", SUMMARISING)
def test_a_reset_gives_gradients_without_nan_and_none_to_what_it_forgets(name, x64):
    m, _ = MONOIDS[name]
    tokens = make_tokens([-0.1, -0.2, -np.inf, -0.3, -1e9, -0.4])

    def kept(tokens):  # all members but AHLA's R, which has no decay
        members = m.summarise(*tokens)._replace(**({"R": 0.0} if "ahla" in name else {}))
        return sum(jnp.sum(jnp.sin(x)) for x in members)

    *dqkv, dlog_decay = jax.jit(jax.grad(kept))(tokens)
    for grad in dqkv:
        np.testing.assert_array_equal(grad[:4], 0)
        assert np.isfinite(grad).all()
    assert (dqkv[1][4:] != 0).all()
    np.testing.assert_array_equal(dlog_decay[:5], 0)
    assert dlog_decay[5] != 0


MEMBERS = {"S": "kk", "N": "qq", "P": "kv", "C": "c", "E": "e", "F": "f"}


@pytest.mark.parametrize("name", [name for name in MONOIDS if name != "hla2 paper"])
def test_gradients_of_an_initial_element_are_those_of_the_recurrence(name, x64):
    """S and N are not symmetric here: q S and S q would differ."""
    m, reference = MONOIDS[name]
    tokens = make_tokens([-0.1, -0.7, -0.2])
    rng = np.random.default_rng(1)
    like = m.lift(*(x[0] for x in tokens))
    initial = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), like)
    members = [ours for ours, theirs in MEMBERS.items() if theirs in naive.MEMBERS[reference]]

    def by_scan(parts):
        out, _ = scan.associative(m, tokens, initial=initial._replace(**parts))
        return jnp.sum(jnp.sin(out))

    def by_recurrence(parts):
        state, total = {MEMBERS[member]: x for member, x in parts.items()}, 0.0
        for q, k, v, log_decay in zip(*tokens, strict=True):
            state, out = naive.token(reference, state, q, k, v, np.exp(log_decay))
            total += jnp.sum(jnp.sin(out))
        return total

    parts = {member: getattr(initial, member) for member in members}
    got, want = (jax.jit(jax.grad(f))(parts) for f in (by_scan, by_recurrence))
    for member in members:
        assert rms_error(got[member], want[member]) < 1e-12


def test_the_papers_masses_are_its_sums_for_values_of_one(x64):
    m = monoids.HLA2Paper()
    q, k, v, log_decay = make_tokens([-0.1, -0.7, -0.2])
    _, element = scan.serial(m, (q, k, np.ones_like(v), log_decay))
    assert rms_error(element.m, element.C[:, 0]) < 1e-15
    assert rms_error(element.h, element.G[:, 0]) < 1e-15
    assert (element.h != 0).all()


@pytest.mark.parametrize(
    ("dtype", "wide"), [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]
)
def test_elements_are_float32_or_wider_and_outputs_have_the_dtype_of_v(dtype, wide, x64):
    tokens = [jnp.asarray(x, dtype) for x in make_tokens([-0.5])]
    token = [x[0] for x in tokens]
    for m, _ in MONOIDS.values():
        element = jax.eval_shape(m.lift, *token)
        combined = jax.eval_shape(m.combine, element, element)
        assert {str(x.dtype) for x in (*element, *combined)} == {wide}
        assert jax.eval_shape(m.read, element, *token).dtype == dtype
        if hasattr(m, "summarise"):
            assert {str(x.dtype) for x in jax.eval_shape(m.summarise, *tokens)} == {wide}


@pytest.mark.usefixtures("no_type_checks")
def test_an_unknown_variant_is_refused():
    with pytest.raises(ValueError, match=r"variant must be .*, got 'causal'"):
        monoids.HLA3("causal")
