"""One sequence over eight devices: the values of one device, and what the devices exchange."""

import importlib
import itertools
import json
import math
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import measured_apart
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from operators import FOUR, FUNCTIONS, operator

import hla_jax as hla

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples" / "benchmarks"))
exchange = importlib.import_module("exchange")

# Which axis of the mesh has how many devices; up to four gather, eight scan.
MESHES = {
    "scan": {"sequence": 8},
    "odd": {"sequence": 6},
    "gather": {"batch": 2, "sequence": 4},
    "all": {"batch": 2, "heads": 2, "sequence": 2},
}
CASES = [  # T, mesh, decay, mask, segments, initial, normalize
    (64, "scan", "token", "interior", True, True, True),
    (37, "gather", "strong", "none", False, False, False),
    (50, "all", "constant", "right", True, True, True),
    (65, "gather", "resets", "left", False, True, False),
    (3, "scan", None, "none", True, False, False),
    (40, "odd", None, "interior", False, True, True),
]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n != "hla2" else []) for n in FUNCTIONS]
)
def test_many_devices_compute_what_one_does(name):
    cases = CASES if name != "hla2" else CASES[2:3]
    for case, (values, gradients) in zip(cases, measured_apart(__file__, name), strict=True):
        assert values < 1e-14, case
        assert gradients < 1e-13, case


@pytest.mark.slow
def test_the_rest_of_hla2():
    for values, gradients in measured_apart(__file__, "hla2", "rest"):
        assert max(values, gradients) < 1e-13


@pytest.mark.slow
def test_all_keys_are_seen_from_every_device():
    for error in measured_apart(__file__, "not causal"):
        assert error < 1e-14


def scan_steps(devices):
    return 1 + math.ceil(math.log2(devices))


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("devices", [4, 5, 8])
@pytest.mark.parametrize("name", FOUR)
def test_state_mass_and_decay_are_exchanged_together(name, devices):
    mesh = AbstractMesh((devices,), ("s",), axis_types=(AxisType.Auto,))
    one = operator(name, normalize=True)
    x, log_decay = jnp.ones((1, 2 * devices, 4, 3)), jnp.zeros((1, 2 * devices, 4))

    def run(x, log_decay, ids):
        return one(x, x, x, log_decay=log_decay, segment_ids=ids, axis_name="s")

    many = jax.shard_map(run, mesh=mesh, in_specs=P(None, "s"), out_specs=(P(None, "s"), P()))
    text = str(jax.make_jaxpr(many)(x, log_decay, jnp.zeros((1, 2 * devices), int)))
    sent = Counter(re.findall(r"= (all_gather|ppermute|psum)\w*\[", text))
    stages = len(exchange.STAGES[name](SIZES))
    few = devices <= exchange.FEW
    assert sent == Counter(
        all_gather=1 + stages * few,  # one of ids
        ppermute=0 if few else stages * scan_steps(devices),
        psum=stages,  # of final states
    )


@pytest.mark.slow
def test_devices_exchange_a_state_a_stage_each_way_whatever_the_length():
    seen = {}
    for name, devices, passes, T, *exchanged in measured_apart(__file__, "bytes"):
        assert seen.setdefault((name, devices, passes), exchanged) == exchanged, T
    for (name, n, passes), (gathers, scatters, permutes, reductions) in seen.items():
        few, trained = n <= exchange.FEW, passes == 2
        stages = exchange.STAGES[name](SIZES)
        counts = [found[0] for found in (gathers, scatters, permutes)]
        per_stage = [few, few and trained, 0 if few else passes * scan_steps(n)]
        assert counts == [len(stages) * each for each in per_stage]
        # A gather's result holds the device's own, too; a scatter's is of one device of all.
        arrived = gathers[1] * (n - 1) / n + scatters[1] * (n - 1) + permutes[1]
        assert arrived == 2 * passes * exchange.states(name, SIZES, n)  # float32 made float64
        # The final state, which a training step does not use.
        state = 8 * sum(N * a * b for N, a, b in stages)
        assert reductions[1] == (0 if trained else state)


def test_the_page_has_the_table_that_the_formulas_give():
    table = exchange.table(exchange.MODEL, [2, 8, 64, 512])
    assert table in (ROOT / "docs" / "scaling.md").read_text()


@pytest.mark.slow
def test_a_model_on_many_devices_learns_and_decodes_as_on_one():
    for error in measured_apart(__file__, "model"):
        assert error < 1e-13


@pytest.mark.usefixtures("no_type_checks")
def test_a_wrong_argument_is_named():
    mesh = jax.make_mesh((1,), ("x",))
    tokens = [jnp.ones((2, 7, 2, 3))] * 3
    for message, axes, call in [
        ("sequence must be None or one of .* got 'y'", {"sequence": "y"}, {}),
        ("must be different axes", {"batch": "x", "sequence": "x"}, {}),
        ("k must have q's 7 tokens, got 5", {"sequence": "x"}, {"k": tokens[1][:, :5]}),
        (
            r"mask must be bool of shape \(2, 7\), got bool of shape \(7,\)",
            {"sequence": "x"},
            {"mask": jnp.ones(7, bool)},
        ),
        ("log_decay must broadcast", {"sequence": "x"}, {"log_decay": jnp.zeros(3)}),
        ("log_decay must be at most 0", {"sequence": "x"}, {"log_decay": jnp.float32(0.9)}),
        (r"q must be \[B, T, heads, width\] where batch='x'", {"batch": "x"}, {"q": tokens[0][0]}),
        ("v must have q's 7 tokens, got 4", {"sequence": "x"}, {"v": tokens[1][:, :4]}),
    ]:
        arguments = dict(zip("qkv", tokens, strict=True)) | call
        with pytest.raises(ValueError, match=message):
            hla.parallel.sharded(hla.hla2, mesh, **axes)(**arguments)


SIZES = exchange.Layer(T=0, H=4, K=2, D=3, E=5)


def measure(name, cases):
    """The largest errors of results and of gradients, over several devices against one."""
    import numpy as np
    from operators import (
        as_dict,
        as_state,
        make_inputs,
        make_mask,
        make_segments,
        with_gradients,
        worst_error,
    )

    for T, mesh, decay, mask, segments, initial, normalize in cases:
        axes = MESHES[mesh]
        options = dict(decay=decay, initial=initial, normalize=normalize)
        inputs = make_inputs(name, T, heads=(8, 4), **options)
        rest = {"mask": make_mask(mask, T)}
        rest["segment_ids"] = make_segments(T) if segments else None

        def run(op, x, rest=rest):
            state = as_state(name, x.get("state"))
            arguments = {key: value for key, value in x.items() if key != "state"}
            out, state = op(initial_state=state, **arguments, **rest)
            return out, as_dict(state)

        one = operator(name, normalize=normalize, chunk_size=16)
        count = math.prod(axes.values())
        devices = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:count])
        many = hla.parallel.sharded(one, devices, **{axis: axis for axis in axes})
        shapes = jax.eval_shape(partial(run, one), inputs)
        rng = np.random.default_rng(0)
        cotangents = jax.tree.map(lambda x, rng=rng: rng.normal(size=x.shape), shapes)
        expected, actual = (
            jax.jit(partial(with_gradients, partial(run, op)))(inputs, cotangents)
            for op in (one, many)
        )
        yield tuple(worst_error(a, e) for a, e in zip(actual, expected, strict=True))


def measure_not_causal():
    from operators import as_dict, make_inputs, make_mask, worst_error

    inputs = make_inputs("linear", 37, normalize=True)
    mesh = jax.make_mesh((8,), ("sequence",))
    for mask in ("none", "interior"):
        one = operator("linear", causal=False, normalize=True)
        many = hla.parallel.sharded(one, mesh, sequence="sequence")
        arguments = inputs | {"mask": make_mask(mask, 37)}
        (out, state), (expected, final) = many(**arguments), one(**arguments)
        yield max(worst_error(out, expected), worst_error(as_dict(state), as_dict(final)))


def measure_model():
    """Errors of the loss, of its gradients, and of a token decoded after the others."""
    from flax import nnx
    from operators import worst_error

    auto = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), ("data", "heads", "tokens"), axis_types=auto)
    layout = hla.parallel.Layout(mesh, batch="data", heads="heads", sequence="tokens")
    tokens = jax.random.randint(jax.random.key(0), (4, 37), 0, 11)
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    @nnx.jit
    def run(model, tokens):
        def loss(model):
            logits, state = model(tokens[:, :-1])
            return (logits**2).mean(), state

        (value, state), gradient = nnx.value_and_grad(loss, has_aux=True)(model)
        return value, gradient, model(tokens[:, -1:], state)[0]

    for mixer in ("linear", "hla2"):
        sizes = dict(num_layers=2, num_heads=4, num_kv_heads=2, features=8, mixer=mixer)
        kinds = dict(dtype=jnp.float64, param_dtype=jnp.float64)
        results = []
        for options in ({}, {"layout": layout}):
            model = hla.models.TransformerLM(11, rngs=nnx.Rngs(0), **sizes, **kinds, **options)
            rows = jax.device_put(tokens, place) if options else tokens
            results.append(jax.tree.leaves(run(model, rows)))
        yield worst_error(*reversed(results))


def measure_bytes():
    """How many collectives are in compiled forward and training steps, and bytes of results."""
    from operators import make_inputs

    def count(text, collective):
        found = re.findall(rf"= ([^=]*?) {collective}(?:-start)?\(", text)
        arrays = re.findall(r"([a-z]+)(\d+)\[([\d,]*)\]", " ".join(found))
        return len(found), sum(
            int(bits) // 8 * math.prod(int(n) for n in shape.split(",") if n)
            for _, bits, shape in arrays
        )

    for name, devices in itertools.product(FOUR, (2, 4, 5, 8)):
        mesh = jax.make_mesh((devices,), ("s",), devices=jax.devices()[:devices])
        one = operator(name, chunk_size=8, normalize=name == "linear")
        op = hla.parallel.sharded(one, mesh, sequence="s")

        def forward(inputs, op=op):
            return op(**inputs)

        def train(inputs, op=op):
            out, pullback = jax.vjp(lambda inputs: op(**inputs)[0], inputs)
            return out, pullback(out)

        for T, (passes, run) in itertools.product((40, 240), enumerate((forward, train), 1)):
            inputs = make_inputs(
                name, T, batch=(1,), heads=SIZES[1:3], d=SIZES.D, e=SIZES.E, decay="token"
            )
            text = jax.jit(run).lower(inputs).compile().as_text()
            assert "all-to-all" not in text
            collectives = "all-gather", "reduce-scatter", "collective-permute", "all-reduce"
            yield name, devices, passes, T, *(count(text, each) for each in collectives)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["bytes"]:
            results = measure_bytes()
        case ["model"]:
            results = measure_model()
        case ["not causal"]:
            results = measure_not_causal()
        case ["hla2"]:
            results = measure("hla2", CASES[2:3])
        case ["hla2", "rest"]:
            results = measure("hla2", CASES[:2] + CASES[3:])
        case [name]:
            results = measure(name, CASES)
    print(json.dumps(list(results)))
