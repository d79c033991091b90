"""The operators by the names of naive.py, their inputs, and the comparison of the two."""

from functools import partial

import jax
import naive
import numpy as np
import pytest
from helpers import rms_error

import hla_jax as hla

FUNCTIONS = {  # name -> public function, options
    "linear": ("linear_attention", {"feature_map": None, "normalize": False}),
    "hla2": ("hla2", {}),
    "hla2_ridge": ("hla2", {"ridge": naive.RIDGE}),
    "hla2_unmasked": ("hla2", {"masked": False}),
    "hla2_unmasked_ridge": ("hla2", {"masked": False, "ridge": naive.RIDGE}),
    "ahla": ("ahla", {}),
    "hla3": ("hla3", {}),
    "hla3_unmasked": ("hla3", {"variant": "unmasked"}),
    "hla3_published": ("hla3", {"variant": "published"}),
}
FOUR = ("linear", "hla2", "ahla", "hla3")
IMPLEMENTATIONS = ("xla", "associative", "serial", "quadratic")


def operator(name, form="", **options):
    """The public function behind a name; form is "", "_step" or "_weights"."""
    function, own = FUNCTIONS[name]
    return partial(getattr(hla, function + form), **own | options)


def as_state(name, members):
    """The public state made of a dict of members; None stays None."""
    if members is None:
        return None
    kind = {"linear": hla.LinearState, "hla2": hla.HLA2State, "ahla": hla.AHLAState}
    kind = kind.get(name.split("_")[0], hla.HLA3State)
    return kind(**{field: members.get(field) for field in kind._fields})


def as_dict(state):
    return {field: x for field, x in state._asdict().items() if x is not None}


def make_inputs(
    name,
    t,
    *,
    batch=(2,),
    heads=(4, 2),
    d=3,
    e=5,
    decay=None,
    initial=False,
    normalize=False,
    seed=0,
):
    """Float64 arguments that have gradients, as a dict; positive where normalised."""
    rng = np.random.default_rng(seed)
    draw = partial(rng.uniform, 0.1, 1) if normalize else partial(rng.normal, 0, 1)
    h, kv = heads
    per_token = (*batch, t, kv)
    inputs = {"q": draw((*batch, t, h, d)), "k": draw((*per_token, d)), "v": draw((*per_token, e))}
    if decay == "constant":
        inputs["log_decay"] = -rng.uniform(0, 0.5, kv)
    elif decay == "token":
        inputs["log_decay"] = -rng.uniform(0, 1, per_token)
    elif decay == "strong":
        inputs["log_decay"] = rng.choice([-20.0, -6.0, -0.01], per_token)
    elif decay == "resets":
        inputs["log_decay"] = rng.choice([-np.inf, -1e9, 0.0, 0.0, 0.0, -0.1], per_token)
    if initial:
        shapes = naive.state_shapes(name, heads=h, kv_heads=kv, d=d, e=e, normalize=normalize)
        inputs["state"] = {member: draw((*batch, *shape)) for member, shape in shapes.items()}
    return inputs


def make_mask(kind, t, batch=2):
    """A mask [batch, t] with other places in every row; "none" gives None."""
    place, row = np.arange(t), np.arange(batch)[:, None]
    return {
        "none": None,
        "left": place >= t // 3 + row,
        "right": place < t - t // 3 - row,
        "interior": np.random.default_rng(1).random((batch, t)) < 0.7,
    }[kind]


def make_segments(t, batch=2, length=7):
    """Segments of about `length` tokens, whose ids come back."""
    ids = np.random.default_rng(2).integers(0, 3, (batch, t // length + 2))
    return np.stack([np.repeat(row, length)[b : b + t] for b, row in enumerate(ids)])


def poison(inputs, mask):
    """Puts NaN wherever the mask is False."""
    if mask is None:
        return inputs

    def spoil(x):
        return np.where(mask.reshape(mask.shape + (1,) * (x.ndim - 2)), x, np.nan)

    per_token = ("q", "k", "v") + (("log_decay",) if np.ndim(inputs.get("log_decay")) > 1 else ())
    return inputs | {key: spoil(inputs[key]) for key in per_token}


def apply(name, inputs, **options):
    """The public operator on such a dict, compiled: (out, state as a dict)."""

    @jax.jit
    def run(inputs):
        state = as_state(name, inputs.get("state"))
        arguments = {n: x for n, x in inputs.items() if n != "state"}
        out, state = operator(name, initial_state=state, **options)(**arguments)
        return out, as_dict(state)

    return run(inputs)


def worst_error(actual, expected):
    return max(jax.tree.leaves(jax.tree.map(rms_error, actual, expected)))


def with_gradients(fn, inputs, cotangents):
    """fn's results and the gradients of their products with the cotangents."""
    results, pullback = jax.vjp(fn, inputs)
    return results, pullback(cotangents)[0]


def check_against_naive(
    name, inputs, *, tolerance, grad_tolerance=None, dtype=np.float64, mask=None, segment_ids=None,
    normalize=False, **options
):  # fmt: skip
    """Outputs, final state and every gradient against naive.py, as RMS(error) / RMS(reference)."""
    meaning = {"mask": mask, "segment_ids": segment_ids, "normalize": normalize}
    cast = partial(jax.tree.map, lambda x: np.asarray(x, dtype))
    inputs = cast(poison(inputs, mask))
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: np.asarray(x, np.float64), inputs)

        def fn_exact(x):
            return naive.recurrence(name, **x, **meaning)

        rng = np.random.default_rng(7)
        shapes = jax.eval_shape(fn_exact, exact)
        cotangents = cast(jax.tree.map(lambda x: rng.normal(size=x.shape), shapes))
        exact_cotangents = jax.tree.map(lambda x: np.asarray(x, np.float64), cotangents)
        expected = jax.tree.map(np.asarray, with_gradients(fn_exact, exact, exact_cotangents))
    with jax.enable_x64(dtype == np.float64):

        def fn(x):
            return apply(name, x, **meaning, **options)

        out, state = jax.eval_shape(fn, inputs)
        state_dtype = np.promote_types(dtype, np.float32)
        assert out.dtype == dtype
        assert {x.dtype for x in state.values()} <= {np.dtype(state_dtype)}
        cotangents = cotangents[0], jax.tree.map(lambda x: x.astype(state_dtype), cotangents[1])
        actual = jax.jit(partial(with_gradients, fn))(inputs, cotangents)
    errors = jax.tree.map(rms_error, actual, expected)
    assert max(jax.tree.leaves(errors[0])) < tolerance, errors
    limit = grad_tolerance or tolerance
    if max(jax.tree.leaves(errors[1])) >= limit:
        # Parts of a normalised gradient may cancel to their last digits. Nothing then computes it
        # better than a few times what it moves by when its inputs are rounded once more.
        with jax.enable_x64(True):
            eps = np.finfo(dtype).eps
            moved = jax.tree.map(lambda x: x * (1 + eps * rng.choice([-1, 0, 1], x.shape)), exact)
            _, shifted = with_gradients(fn_exact, moved, exact_cotangents)
        spread = jax.tree.map(rms_error, shifted, expected[1])
        fine = jax.tree.map(lambda error, s: error < max(limit, 4 * s), errors[1], spread)
        assert all(jax.tree.leaves(fine)), (errors[1], spread)


def all_pairs(seed=0, **factors):
    """Rows that hold every pair of values of any two factors, far fewer than the full product."""
    rng = np.random.default_rng(seed)
    names = list(factors)

    def pairs(row):
        return {(a, row[a], b, row[b]) for i, a in enumerate(names) for b in names[:i]}

    todo = {
        (a, x, b, y)
        for i, a in enumerate(names) for b in names[:i] for x in factors[a] for y in factors[b]
    }  # fmt: skip
    rows = []
    while todo:
        a, x, b, y = min(todo, key=str)

        def draw():
            return {n: values[rng.integers(len(values))] for n, values in factors.items()}

        candidates = [draw() | {a: x, b: y} for _ in range(100)]
        rows.append(max(candidates, key=lambda row: len(pairs(row) & todo)))
        todo -= pairs(rows[-1])
    return rows


def thinned(cases, every=3):
    """Every third case, the others as slow ones."""
    return [
        case if i % every == 0 else pytest.param(case, marks=pytest.mark.slow)
        for i, case in enumerate(cases)
    ]
