"""Every operator, implementation and option against the definitions in naive.py."""

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
from helpers import rms_error
from operators import (
    FOUR,
    FUNCTIONS,
    IMPLEMENTATIONS,
    all_pairs,
    apply,
    as_dict,
    as_state,
    check_against_naive,
    make_inputs,
    make_mask,
    make_segments,
    operator,
    thinned,
    worst_error,
)

import hla_jax as hla


def show(row):
    return "-".join(str(x) for x in row.values())


def weighted(weights, v):
    group = weights.shape[1] // v.shape[2]
    return np.einsum("bhts,bshe->bthe", weights, np.repeat(v, group, 2))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("normalize", [False, True])
def test_the_two_definitions_agree(x64, name, normalize):
    t, heads = 9, (4, 2)
    inputs = make_inputs(name, t, heads=heads, decay="resets", normalize=normalize)
    mask, ids = make_mask("interior", t), make_segments(t, length=3)
    out, _ = naive.recurrence(name, **inputs, mask=mask, segment_ids=ids, normalize=normalize)
    for row in range(2):
        a = np.exp(inputs["log_decay"][row])
        a[naive.restarts(mask[row], ids[row])] = 0
        kept = mask[row]
        for h in range(heads[0]):
            q, k, v = (inputs[n][row, kept, h // (2 if n in "kv" else 1)] for n in "qkv")
            w = naive.weights(name, q, k, a[kept, h // 2])
            expected = w @ v / (w.sum(-1, keepdims=True) + 1e-12 if normalize else 1)
            assert rms_error(out[row, kept, h], expected) < 1e-14
            assert not out[row, ~kept, h].any()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_definition_resumes_from_its_state(x64, name):
    inputs = make_inputs(name, 9, decay="token")

    def cut(where):
        return {key: x[:, where] for key, x in inputs.items()}

    out, final = naive.recurrence(name, **inputs)
    _, state = naive.recurrence(name, **cut(slice(4)))
    rest, last = naive.recurrence(name, **cut(slice(4, 9)), state=state)
    assert rms_error(rest, out[:, 4:]) < 1e-14
    assert worst_error(last, final) < 1e-14


CASES = all_pairs(
    name=list(FUNCTIONS),
    implementation=IMPLEMENTATIONS,
    t=(63, 65),
    decay=("none", "constant", "token", "strong", "resets"),
    mask=("none", "left", "right", "interior"),
    segments=(False, True),
    initial=(False, True),
    normalize=(False, True),
    heads=((4, 4), (4, 2), (4, 1)),
    chunk_size=(None, 1, 16, 23, 100),
)


@pytest.mark.parametrize("case", thinned(CASES), ids=show)
def test_matches_the_definition(case):
    name, t, normalize = case["name"], case["t"], case["normalize"]
    shape = {"heads": case["heads"], "initial": case["initial"], "normalize": normalize}
    check_against_naive(
        name,
        make_inputs(name, t, decay=case["decay"], **shape),
        tolerance=1e-11,
        grad_tolerance=1e-10,
        mask=make_mask(case["mask"], t),
        segment_ids=make_segments(t) if case["segments"] else None,
        normalize=normalize,
        implementation=case["implementation"],
        chunk_size=case["chunk_size"],
    )


SHORT = all_pairs(
    name=list(FUNCTIONS),
    implementation=IMPLEMENTATIONS,
    t=(0, 1, 2),
    initial=(False, True),
    normalize=(False, True),
    chunk_size=(None, 1, 16),
)


@pytest.mark.parametrize("case", thinned(SHORT), ids=show)
def test_short_sequences_match_the_definition(case):
    name, normalize = case["name"], case["normalize"]
    check_against_naive(
        name,
        make_inputs(name, case["t"], decay="token", initial=case["initial"], normalize=normalize),
        tolerance=1e-11,
        normalize=normalize,
        implementation=case["implementation"],
        chunk_size=case["chunk_size"],
    )


@pytest.mark.compiled
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("implementation", ["xla", "associative"])
def test_float32_loses_nothing_but_rounding(name, implementation):
    inputs = make_inputs(name, 65, decay="strong", initial=True)
    check_against_naive(
        name,
        inputs,
        tolerance=1e-6,
        grad_tolerance=2e-6,
        dtype=np.float32,
        implementation=implementation,
    )


@pytest.mark.parametrize("name", [*FOUR, "hla2_unmasked_ridge", "hla3_published"])
def test_bfloat16_rounds_inputs_and_outputs_alone(name):
    inputs = make_inputs(name, 65, decay="token")
    check_against_naive(name, inputs, tolerance=3e-3, dtype=jnp.bfloat16, chunk_size=16)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("linear", "xla"), ("hla2", "associative"), ("ahla", "serial"), ("hla3", "xla")],
)
def test_long_sequences_match_the_definition(name, implementation):
    inputs = make_inputs(name, 500, decay="constant", normalize=True)
    check_against_naive(
        name,
        inputs,
        tolerance=2e-6,
        dtype=np.float32,
        normalize=True,
        implementation=implementation,
    )


@pytest.mark.parametrize("name", FOUR)
def test_width_of_keys_may_exceed_that_of_values(name):
    check_against_naive(name, make_inputs(name, 20, d=4, e=1), tolerance=1e-11, chunk_size=8)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("normalize", [False, True])
def test_prefill_then_steps_give_the_rows_of_one_pass(x64, name, normalize):
    t, prefill = 9, 5
    inputs = make_inputs(name, t, decay="token", normalize=normalize)
    mask = make_mask("interior", t)
    out, final = apply(name, inputs, mask=mask, normalize=normalize, chunk_size=4)
    _, state = apply(name, {n: x[:, :prefill] for n, x in inputs.items()}, mask=mask[:, :prefill],
                     normalize=normalize)  # fmt: skip
    state = as_state(name, state)
    step = jax.jit(operator(name, "_step", normalize=normalize))
    for i in range(prefill, t):
        q, k, v, log_decay = (inputs[n][:, i] for n in ("q", "k", "v", "log_decay"))
        row, state = step(q, k, v, state, log_decay=log_decay, mask=mask[:, i])
        assert rms_error(row, out[:, i]) < 1e-12
    assert worst_error(as_dict(state), final) < 1e-12


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("normalize", [False, True])
def test_weights_times_values_are_the_outputs(x64, name, normalize):
    t = 13
    inputs = make_inputs(name, t, decay="resets", normalize=normalize)
    options = {"mask": make_mask("interior", t), "segment_ids": make_segments(t)}
    options["normalize"] = normalize
    out, _ = naive.recurrence(name, **inputs, **options)
    v = inputs.pop("v")
    w = operator(name, "_weights", **options)(**inputs)
    assert w.shape == (2, 4, t, t)
    assert rms_error(weighted(w, v), out) < 1e-12
    assert not np.triu(w, 1).any()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_state_holds_what_the_algebra_says_and_no_more(name, normalize, implementation):
    q, k, v = (jnp.zeros((7, 3, *s), jnp.bfloat16) for s in ((8, 5), (2, 5), (2, 6)))
    fn = operator(name, normalize=normalize, implementation=implementation)
    state = as_dict(jax.eval_shape(fn, q, k, v)[1])
    sizes = {"heads": 8, "kv_heads": 2, "d": 5, "e": 6, "normalize": normalize}
    expected = {m: (7, *shape) for m, shape in naive.state_shapes(name, **sizes).items()}
    assert {m: x.shape for m, x in state.items()} == expected
    assert {x.dtype for x in state.values()} == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("implementation", ["associative", "serial"])
def test_forward_mode_matches_the_definition(x64, name, implementation):
    inputs = make_inputs(name, 13, decay="token", initial=True)
    tangents = make_inputs(name, 13, decay="token", initial=True, seed=1)
    options = {"implementation": implementation, "chunk_size": 4}
    _, actual = jax.jvp(lambda x: apply(name, x, **options), (inputs,), (tangents,))
    _, expected = jax.jvp(lambda x: naive.recurrence(name, **x), (inputs,), (tangents,))
    assert worst_error(actual, expected) < 1e-12


@pytest.mark.parametrize("name", FOUR)
def test_scale_multiplies_every_affinity_after_the_feature_map(x64, name):
    inputs = make_inputs(name, 13)
    maps = (lambda x: x**2 + 1, jnp.abs)
    mapped = inputs | {"q": 0.3 * maps[0](inputs["q"]), "k": maps[1](inputs["k"])}
    expected = naive.recurrence(name, **mapped, normalize=True)
    options = {"feature_map": maps, "scale": 0.3, "normalize": True}
    actual = apply(name, inputs, **options)
    assert worst_error(actual, expected) < 1e-12
    w = operator(name, "_weights", **options)(inputs["q"], inputs["k"])
    assert rms_error(weighted(w, inputs["v"]), expected[0]) < 1e-12
    state = as_state(name, apply(name, {n: x[:, :12] for n, x in inputs.items()}, **options)[1])
    last, _ = operator(name, "_step", **options)(*(inputs[n][:, 12] for n in "qkv"), state)
    assert rms_error(last, expected[0][:, 12]) < 1e-12


def test_a_feature_map_may_change_the_width(x64):
    inputs = make_inputs("hla2", 13)

    def wide(x):
        return jnp.concatenate([x, x**2], -1)

    mapped = inputs | {"q": wide(inputs["q"]), "k": wide(inputs["k"])}
    actual = apply("hla2", inputs, feature_map=wide)
    expected = naive.recurrence("hla2", **mapped)
    assert worst_error(actual, expected) < 1e-12


@pytest.mark.parametrize("name", FOUR)
def test_eps_is_added_to_the_denominator(x64, name):
    inputs = make_inputs(name, 13, normalize=True)
    out, _ = apply(name, inputs, normalize=True, eps=2.0)
    expected, _ = naive.recurrence(name, **inputs, normalize=True, eps=2.0)
    assert rms_error(out, expected) < 1e-12


def test_linear_attention_is_normalised_with_elu_plus_one_by_default(x64):
    inputs = make_inputs("linear", 13)

    def positive(x):
        return np.where(x > 0, x + 1, np.exp(x))

    mapped = inputs | {"q": positive(inputs["q"]), "k": positive(inputs["k"])}
    actual, state = hla.linear_attention(**inputs)
    expected = naive.recurrence("linear", **mapped, normalize=True)
    actual = actual, as_dict(state)
    assert worst_error(actual, expected) < 1e-12


def full_attention(inputs, allowed, normalize):
    """Non-causal linear attention of every query with the allowed [B, T, S] keys, and the sums."""
    q, k, v = inputs["q"], *(jnp.repeat(inputs[n], 2, axis=2) for n in "kv")
    w = jnp.where(allowed[:, None], jnp.einsum("bthd,bshd->bhts", q, k), 0)
    out, mass = jnp.einsum("bhts,bshe->bthe", w, v), jnp.einsum("bhts->bth", w)[..., None]
    if "state" in inputs:
        out += jnp.einsum("bthd,bhde->bthe", q, jnp.repeat(inputs["state"]["kv"], 2, 1))
        if normalize:
            m = jnp.repeat(inputs["state"]["k"], 2, 1)
            mass += jnp.einsum("bthd,bhd->bth", q, m)[..., None]
    return out / (mass + 1e-12) if normalize else out


@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
@pytest.mark.parametrize("normalize", [False, True])
def test_non_causal_attention_sees_every_unmasked_key(x64, implementation, normalize):
    inputs = make_inputs("linear", 12, normalize=normalize, initial=True)
    inputs["q"] = make_inputs("linear", 5, normalize=normalize, seed=1)["q"]
    mask = make_mask("interior", 12)
    options = {"causal": False, "normalize": normalize, "implementation": implementation}

    def fn(x):
        return apply("linear", x, mask=mask, **options)

    poisoned = inputs | {n: np.where(mask[..., None, None], inputs[n], np.nan) for n in "kv"}
    (out, state), pullback = jax.vjp(fn, poisoned)
    expected, expected_pullback = jax.vjp(
        lambda x: full_attention(x, np.broadcast_to(mask[:, None], (2, 5, 12)), normalize), inputs
    )
    assert rms_error(out, expected) < 1e-12
    grads = pullback((out, jax.tree.map(jnp.zeros_like, state)))
    assert worst_error(grads, expected_pullback(expected)) < 1e-12
    masked_k = inputs["k"] * mask[..., None, None]
    kv = inputs["state"]["kv"] + np.einsum("bskd,bske->bkde", masked_k, inputs["v"])
    assert rms_error(state["kv"], kv) < 1e-12


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_non_causal_segments_see_themselves(x64, implementation):
    inputs, ids = make_inputs("linear", 20, normalize=True), np.sort(make_segments(20))
    mask = make_mask("interior", 20)
    options = {"causal": False, "normalize": True, "mask": mask, "segment_ids": ids}
    out, _ = apply("linear", inputs, implementation=implementation, **options)
    expected = full_attention(inputs, (ids[:, :, None] == ids[:, None]) & mask[:, None], True)
    assert rms_error(out[mask], expected[mask]) < 1e-12
    w = operator("linear", "_weights", **options)(inputs["q"], inputs["k"])
    assert rms_error(weighted(w, inputs["v"])[mask], expected[mask]) < 1e-12


@pytest.mark.parametrize("name", FOUR)
def test_pallas_is_refused_by_name(name):
    with pytest.raises(ValueError, match=r"implementation.*pallas"):
        apply(name, make_inputs(name, 4), implementation="pallas")


@pytest.mark.parametrize("name", FOUR)
def test_the_default_is_as_good_as_the_others(name):
    inputs = make_inputs(name, 65, decay="token", initial=True)
    check_against_naive(name, inputs, tolerance=1e-6, grad_tolerance=2e-6, dtype=np.float32)


def test_masked_tokens_and_resets_get_exactly_no_gradient(x64):
    inputs, mask = make_inputs("hla3", 20, decay="token"), make_mask("interior", 20)
    ids = make_segments(20)

    def loss(x):
        out, state = apply("hla3", x, mask=mask, segment_ids=ids)
        return jnp.sum(out) + sum(jnp.sum(member) for member in state.values())

    grads = jax.jit(jax.grad(loss))(inputs)
    assert not any(np.asarray(g)[~mask].any() for g in grads.values())
    restart = np.array([naive.restarts(*row) for row in zip(mask, ids, strict=True)])
    assert restart.any()
    assert not np.asarray(grads["log_decay"])[restart].any()


def test_a_chunk_may_be_longer_than_the_sequence_and_any_size(x64):
    inputs = make_inputs("hla2", 13, decay="token")
    one = apply("hla2", inputs, implementation="xla")
    for chunk_size in (2, 13, 14, 64):
        many = apply("hla2", inputs, implementation="xla", chunk_size=chunk_size)
        assert worst_error(many, one) < 1e-13
