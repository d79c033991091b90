"""Wrong input is refused by name; right input works under every transformation of JAX."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import rms_error
from operators import (
    FOUR,
    IMPLEMENTATIONS,
    apply,
    as_dict,
    as_state,
    make_inputs,
    make_mask,
    make_segments,
    operator,
    worst_error,
)

import hla_jax as hla


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


RIGHT = {"q": zeros(2, 6, 4, 3), "k": zeros(2, 6, 2, 3), "v": zeros(2, 6, 2, 5)}
MISTAKES = [  # the argument that the error names, what is passed
    ("q", {"q": zeros(6, 3)}),
    ("q", {"q": zeros(2, 6, 4, 3, dtype=int)}),
    ("k", {"k": zeros(2, 6, 2, 3, dtype=bool)}),
    ("v", {"v": zeros(2, 6, 2, 5, dtype=complex)}),
    ("k", {"k": zeros(2, 6, 2, 4)}),
    ("k", {"k": zeros(3, 6, 2, 3)}),
    ("k", {"k": zeros(2, 6, 3, 3), "v": zeros(2, 6, 3, 5)}),
    ("k", {"k": zeros(2, 7, 2, 3), "v": zeros(2, 7, 2, 5)}),
    ("v", {"v": zeros(2, 7, 2, 5)}),
    ("v", {"v": zeros(2, 6, 1, 5)}),
    ("v", {"v": zeros(6, 2, 5)}),
    ("log_decay", {"log_decay": zeros(5)}),
    ("log_decay", {"log_decay": zeros(2, 6, 4)}),
    ("log_decay", {"log_decay": zeros(1, 2, 6, 2)}),
    ("mask", {"mask": zeros(2, 6)}),
    ("mask", {"mask": zeros(2, 5, dtype=bool)}),
    ("segment_ids", {"segment_ids": zeros(2, 6)}),
    ("segment_ids", {"segment_ids": zeros(2, 7, dtype=int)}),
    ("initial_state", {"initial_state": zeros(2, 2, 3, 5)}),
    ("initial_state", {"initial_state": (zeros(2, 2, 3, 5), None)}),
    ("chunk_size", {"chunk_size": 0}),
    ("chunk_size", {"chunk_size": 2.5}),
    ("implementation", {"implementation": "fastest"}),
    ("implementation", {"implementation": "pallas"}),
    ("log_decay", {"log_decay": 0.9}),
    ("log_decay", {"log_decay": np.nan}),
    ("log_decay", {"log_decay": [-1.0, -1.0, -1.0]}),
    ("mask", {"mask": "all"}),
    ("normalize", {"normalize": "yes"}),
    ("scale", {"scale": [1.0, 2.0]}),
    ("scale", {"scale": 1j}),
    ("eps", {"eps": [1.0, 2.0]}),
    ("q", {"q": zeros(2, 6, 4, 3, dtype=jnp.float8_e4m3fn)}),
    ("k", {"k": zeros(2, 6, 2, 3, dtype=np.int8)}),
    ("q", {"q": zeros(2, 6, 0, 3)}),
    ("k", {"k": zeros(2, 6, 0, 3), "v": zeros(2, 6, 0, 5)}),
    ("q", {"q": zeros(2, 6, 4, 0), "k": zeros(2, 6, 2, 0)}),
    ("v", {"v": zeros(2, 6, 2, 0)}),
    ("log_decay", {"log_decay": False}),
    ("log_decay", {"log_decay": 1}),
    ("log_decay", {"log_decay": [1, 0]}),
    ("log_decay", {"log_decay": -1j}),
    ("scale", {"scale": True}),
    ("eps", {"eps": np.bool_(False)}),
    ("feature_map", {"feature_map": (np.exp,) * 3}),
    ("feature_map", {"feature_map": "exp"}),
    ("feature_map", {"feature_map": lambda x: x.astype(int)}),
]


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize(("argument", "wrong"), MISTAKES)
def test_a_mistake_is_named(no_type_checks, name, argument, wrong):
    arrays = {k: x for k, x in wrong.items() if isinstance(x, np.ndarray)}
    options = {k: x for k, x in wrong.items() if k not in arrays}
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        jax.eval_shape(operator(name, **options), **RIGHT | arrays)


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("normalize", [False, True])
def test_a_state_of_other_widths_operators_or_options_is_refused(no_type_checks, name, normalize):
    fn = operator(name, normalize=normalize)
    other = operator("ahla" if name == "hla2" else "hla2")
    for wrong in (
        jax.eval_shape(fn, *(x[..., :2] for x in RIGHT.values()))[1],  # widths
        jax.eval_shape(fn, *(x[:1] for x in RIGHT.values()))[1],  # batch
        jax.eval_shape(other, **RIGHT)[1],  # operator
        jax.eval_shape(partial(fn, normalize=not normalize), **RIGHT)[1],  # masses
    ):
        wrong = jax.tree.map(lambda x: zeros(*x.shape), wrong)
        with pytest.raises(ValueError, match=r"\binitial_state\b"):
            jax.eval_shape(partial(fn, initial_state=wrong), **RIGHT)


@pytest.mark.parametrize(
    ("argument", "fn"),
    [
        ("variant", partial(hla.hla3, variant="strict")),
        ("log_decay", partial(hla.linear_attention, causal=False, log_decay=-0.1)),
        ("mask", partial(hla.linear_attention, causal=False, mask=zeros(2, 5, dtype=bool))),
    ],
)
def test_a_mistaken_option_of_one_operator_is_named(no_type_checks, argument, fn):
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        jax.eval_shape(fn, **RIGHT)


def test_segments_need_as_many_queries_as_keys(no_type_checks):
    inputs = RIGHT | {"q": zeros(2, 5, 4, 3), "segment_ids": zeros(2, 6, dtype=int)}
    with pytest.raises(ValueError, match=r"\bsegment_ids\b"):
        jax.eval_shape(partial(hla.linear_attention, causal=False), **inputs)


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("q", {"q": zeros(2, 1, 4, 3)}),
        ("k", {"k": zeros(2, 2, 4)}),
        ("v", {"v": zeros(2, 3, 5)}),
        ("log_decay", {"log_decay": zeros(2, 6, 2)}),
        ("mask", {"mask": zeros(2, 6, dtype=bool)}),
    ],
)
def test_a_mistake_in_a_step_is_named(no_type_checks, name, argument, wrong):
    _, state = operator(name)(**RIGHT)
    token = {n: x[:, 0] for n, x in RIGHT.items()} | wrong
    with pytest.raises(ValueError, match=rf"\b{argument}(_t)?\b"):
        operator(name, "_step")(token.pop("q"), token.pop("k"), token.pop("v"), state, **token)


def arguments(name, t, dtype=np.float32, **shape):
    """Every array argument at once: differentiable ones, the others."""
    inputs = make_inputs(name, t, decay="token", initial=True, **shape)
    others = {"mask": make_mask("interior", t), "segment_ids": make_segments(t)}
    return jax.tree.map(dtype, inputs), others


def total(name, inputs, others, **options):
    out, state = apply(name, inputs, **others, **options)
    return sum(jnp.sum(jnp.sin(x)) for x in (out, *state.values()))


ARGUMENTS = ("q", "k", "v", "log_decay", "state", "mask", "segment_ids")


def gradient(inputs, others):
    return jax.grad(lambda x, y: total("hla2", x, y, chunk_size=4))(inputs, others)


gradient_of_one = jax.jit(gradient)  # compiled once for all arguments


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_gradients_map_over_any_argument(x64, argument):
    inputs, others = arguments("hla2", 9, dtype=np.float64)
    axes = {n: 0 if n == argument else None for n in ARGUMENTS}
    versions = {**inputs, **others}[argument]
    versions = jax.tree.map(lambda x: np.stack([x, np.roll(x, 1, axis=1)]), versions)

    def changed(version):
        group = inputs if argument in inputs else others
        changed = group | {argument: version}
        return (changed, others) if group is inputs else (inputs, changed)

    in_axes = ({n: axes[n] for n in inputs}, {n: axes[n] for n in others})
    actual = jax.jit(jax.vmap(gradient, in_axes))(*changed(versions))
    rows = [jax.tree.map(lambda x, i=i: x[i], versions) for i in range(2)]
    expected = [gradient_of_one(*changed(row)) for row in rows]
    assert worst_error(actual, jax.tree.map(lambda *x: np.stack(x), *expected)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_works_without_jit(name, implementation):
    for t in (0, 3):
        inputs, others = arguments(name, t)
        fn = partial(apply, name, inputs, **others, implementation=implementation, chunk_size=2)
        with jax.disable_jit():
            actual = fn()
        assert worst_error(actual, jax.jit(fn)()) < 1e-6


@pytest.mark.parametrize(
    "name", ["linear", "hla3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("hla2", "ahla"))]
)
def test_layers_scan_and_rematerialise(name):
    x = np.random.default_rng(0).normal(size=(5, 2, 3)).astype(np.float32)
    layers = np.random.default_rng(1).normal(size=(3, 3, 3)).astype(np.float32)

    def layer(x, w):
        return x + operator(name, chunk_size=2)(jnp.tanh(x), jnp.tanh(x @ w), x)[0], None

    def scanned(layers):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, layers)[0])

    def unrolled(layers):
        y = x
        for w in layers:
            y, _ = layer(y, w)
        return jnp.sum(y)

    assert rms_error(jax.jit(jax.grad(scanned))(layers), jax.jit(jax.grad(unrolled))(layers)) < 1e-5


@pytest.mark.parametrize("name", FOUR)
def test_steps_compile_once_and_may_donate_their_state(name):
    q, k, v = (x[:, 0] for x in RIGHT.values())
    traces = []

    @partial(jax.jit, donate_argnums=0)
    def step(state):
        traces.append(1)
        return operator(name, "_step", normalize=True)(q, k, v, state, log_decay=-0.1)[1]

    _, first = operator(name, normalize=True)(**jax.tree.map(jnp.asarray, RIGHT))
    last = step(step(step(first)))
    assert len(traces) == 1
    assert all(x.is_deleted() for x in as_dict(first).values())
    assert not any(x.is_deleted() for x in as_dict(last).values())


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_outputs_have_the_dtype_of_v_and_states_float32(name, dtype):
    q, k, v = (jnp.asarray(x, dtype) for x in RIGHT.values())
    fn = operator(name, normalize=True)
    for wide in (True, False):
        out, state = jax.eval_shape(fn, jnp.float32(q) if wide else q, k, v)
        assert out.dtype == dtype
        assert {x.dtype for x in state if x is not None} == {jnp.dtype("float32")}
    given = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), state)
    out, state = jax.eval_shape(partial(fn, initial_state=given), q, k, v)
    assert {x.dtype for x in state if x is not None} == {jnp.dtype(dtype)}
    row, state = jax.eval_shape(
        operator(name, "_step", normalize=True), q[:, 0], k[:, 0], v[:, 0], given
    )
    assert row.dtype == dtype
    assert {x.dtype for x in state if x is not None} == {jnp.dtype(dtype)}
    assert jax.eval_shape(operator(name, "_weights"), q, k).dtype == jnp.float32


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("wide", ["q", "k", "v", None])
def test_one_float64_input_makes_the_state_float64(x64, name, wide):
    inputs = {n: x.astype(np.float64 if n == wide else np.float32) for n, x in RIGHT.items()}
    for log_decay in (None, -0.1, np.full(2, -0.1)):
        for implementation in IMPLEMENTATIONS:
            fn = operator(name, log_decay=log_decay, implementation=implementation)
            out, state = jax.eval_shape(fn, **inputs)
            assert out.dtype == inputs["v"].dtype
            assert {x.dtype for x in state if x is not None} == {
                np.dtype("float64" if wide else "float32")
            }


@pytest.mark.parametrize("name", FOUR)
def test_float32_steps_stay_float32_with_x64_on(name):
    inputs = jax.tree.map(np.float32, make_inputs(name, 4))
    results = []
    for x64 in (False, True):
        with jax.enable_x64(x64):
            out, state = operator(name, log_decay=-0.1)(**inputs)
            token = [inputs[n][:, 0] for n in "qkv"]
            for _ in range(2):
                row, state = operator(name, "_step", log_decay=-0.1)(*token, state)
            results.append((out, row, as_dict(state)))
    assert {x.dtype for x in jax.tree.leaves(results)} == {np.dtype("float32")}
    assert worst_error(*results) < 1e-6


@pytest.mark.parametrize("name", FOUR)
def test_leading_axes_are_independent_rows(name):
    inputs, others = arguments(name, 5, batch=(2,))
    fn = jax.jit(partial(apply, name))
    expected = jax.tree.map(lambda x: x[1], fn(inputs, **others))
    none = fn(jax.tree.map(lambda x: x[1], inputs), **jax.tree.map(lambda x: x[1], others))
    assert worst_error(none, expected) < 1e-6
    inputs, others = jax.tree.map(lambda x: x[:, None], (inputs, others))
    two = fn(inputs, **others)
    assert worst_error(jax.tree.map(lambda x: x[1, 0], two), expected) < 1e-6


@pytest.mark.parametrize("shape", [(), (2,), (1, 2), (5, 1), (2, 1, 1), (2, 5, 2)])
def test_a_decay_is_anything_that_broadcasts(shape):
    inputs, _ = arguments("hla2", 5)
    log_decay = np.linspace(-1, -0.1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    fn = jax.jit(partial(apply, "hla2"))
    full = np.broadcast_to(log_decay, (2, 5, 2))
    actual, expected = fn(inputs | {"log_decay": log_decay}), fn(inputs | {"log_decay": full})
    assert worst_error(actual, expected) < 1e-7


def test_a_state_may_be_carried_in_a_narrow_type():
    inputs = jax.tree.map(np.float32, make_inputs("linear", 4))
    state = as_state("linear", {"kv": jnp.zeros((2, 2, 3, 5), jnp.bfloat16)})
    out, _ = operator("linear", initial_state=state)(**inputs)
    assert rms_error(out, operator("linear")(**inputs)[0]) < 1e-2


def test_the_form_is_chosen_where_the_code_is_lowered():
    x = jax.ShapeDtypeStruct((1, 130, 2, 4), jnp.float32)
    gradient = jax.jit(jax.grad(lambda *x: hla.hla2(*x)[0].sum())).trace(x, x, x)
    loops = {
        platform: gradient.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.while")
        for platform in ("cpu", "tpu", "cuda")
    }
    # In place a CPU walks over all chunks; for an unknown GPU, loops scan the chunks' states alone;
    # a TPU has kernels.
    assert loops["cpu"] > loops["cuda"] > loops["tpu"] == 0


@pytest.mark.parametrize("name", FOUR)
def test_a_step_names_what_is_wrong_with_its_own_arguments(no_type_checks, name):
    q, k, v = (x[:, 0] for x in RIGHT.values())
    step = operator(name, "_step")
    with pytest.raises(ValueError, match=r"\bk_t\b"):
        step(q, k[..., :2], v, None)
    with pytest.raises(ValueError, match=r"\bq_t\b"):
        step(q[0, 0], k, v, None)
    with pytest.raises(TypeError, match="segment_ids"):
        step(q, k, v, None, segment_ids=np.zeros((2, 1), int))


@pytest.mark.parametrize("name", FOUR)
def test_whole_numbers_are_numbers(name):
    def run(number, array):
        decays = [number(-1), array([-1, 0], np.int8), jnp.asarray(array([-2, 0]))]
        fn = jax.jit(operator(name), static_argnames=("scale", "eps"))
        return [
            fn(**make_inputs(name, 3), log_decay=d, scale=number(2), eps=number(1)) for d in decays
        ]

    whole = run(int, np.array)
    floats = run(float, lambda x, *_: np.array(x, np.float32))
    jax.tree.map(np.testing.assert_array_equal, whole, floats)


def test_a_ridge_may_be_a_whole_number():
    fn = jax.jit(hla.hla2, static_argnames="ridge")
    x = make_inputs("hla2", 3)
    jax.tree.map(np.testing.assert_array_equal, fn(**x, ridge=1), fn(**x, ridge=1.0))
    with pytest.raises(ValueError, match="ridge must be real"):
        jax.eval_shape(partial(hla.hla2, ridge=True), **RIGHT)


SWAPPED = {n: x.swapaxes(-3, -2) for n, x in RIGHT.items()}
LIKE_HEADS = SWAPPED | {"k": SWAPPED["q"], "v": SWAPPED["q"]}
ALL = {
    "hla2": hla.hla2,
    "linear": hla.linear_attention,
    "softmax": hla.attention.softmax_attention,
    "flash": hla.attention.flash_attention,
    "not causal": partial(hla.attention.flash_attention, causal=False),
}


@pytest.mark.parametrize("name", ALL)
def test_heads_before_tokens_are_recognised(no_type_checks, name):
    hint = r"tokens come before heads, \[\*B, T, H, D\]"
    inputs = SWAPPED if name != "not causal" else {n: x[:, :, :5] for n, x in SWAPPED.items()}
    if name != "not causal":
        with pytest.raises(ValueError, match=hint):
            jax.eval_shape(ALL[name], **inputs)
    for argument, array in (("mask", np.ones((2, 6), bool)), ("segment_ids", np.ones((2, 6), int))):
        with pytest.raises(ValueError, match=rf"{argument} must .*{hint}"):
            jax.eval_shape(ALL[name], **LIKE_HEADS, **{argument: array})
    for wrong in (RIGHT | {"k": zeros(2, 7, 2, 3)}, RIGHT | {"v": zeros(2, 6, 1, 5)}):
        with pytest.raises(ValueError, match=r"^(?!.*tokens come before heads)"):
            jax.eval_shape(ALL[name], **wrong)


@pytest.mark.parametrize("name", FOUR)
def test_a_step_speaks_of_its_own_arguments(no_type_checks, name):
    _, state = jax.eval_shape(operator(name), **RIGHT)
    state = jax.tree.map(lambda x: zeros(*x.shape), state)
    q, k, v = (x[:, 0] for x in RIGHT.values())
    step = operator(name, "_step")
    wide = (np.pad(x, [(0, 0), (0, 0), (0, 1)]) for x in (q, k))
    with pytest.raises(ValueError, match=r"^state\.k.*q_t \(2, 4, 4\)"):
        step(*wide, v, state)
    with pytest.raises(ValueError, match=r"^state must be None or of type \w+, got array"):
        step(q, k, v, zeros(3))
    with pytest.raises(ValueError, match=r"log_decay must broadcast to \[\*B, K\] = \(2, 2\)"):
        step(q, k, v, state, log_decay=zeros(2, 3))
    with pytest.raises(ValueError, match=r"mask must be bool of shape \(2,\)"):
        step(q, k, v, state, mask=zeros(2, 1, dtype=bool))


@pytest.mark.parametrize("name", FOUR)
def test_options_that_do_not_exist_are_type_errors(no_type_checks, name):
    with pytest.raises(TypeError, match=r"initial_state.* take feature_map, log_decay"):
        operator(name, "_weights")(RIGHT["q"], RIGHT["k"], initial_state=None)
    with pytest.raises(TypeError, match="windw"):
        operator(name)(**RIGHT, windw=3)


def test_padding_may_hold_any_decay():
    mask = np.arange(6) < 4
    given = {"log_decay": np.where(mask[:, None], -0.1, 7.0), "mask": np.stack([mask, mask])}
    out, _ = hla.hla2(*RIGHT.values(), **given)
    assert np.isfinite(out).all()


def test_weights_of_padding_are_zero_whatever_eps():
    x = np.ones((1, 5, 2, 3), np.float32)
    mask = np.array([[False, True, True, False, True]])
    for name in FOUR:
        w = operator(name, "_weights", normalize=True)(x, x, mask=mask, eps=0.0)
        assert (w[..., ~mask[0], :] == 0).all()
        assert (w[..., ~mask[0]] == 0).all()
