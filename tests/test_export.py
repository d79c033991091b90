"""Functions that take and return states go through `jax.export` and back."""

import inspect

import jax
import numpy as np
import pytest
from flax import nnx
from jax import export
from operators import FOUR, operator
from test_nn import features, make

import hla_jax as hla

pytest.importorskip("flatbuffers")  # by which jax.export writes


def check_round_trip(step, *arguments):
    step = jax.jit(step)
    written = export.export(step)(*arguments).serialize()
    read = export.deserialize(written)
    results, wanted = read.call(*arguments), step(*arguments)
    assert jax.tree.structure(results) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, results, wanted)


@pytest.mark.parametrize("name", FOUR)
def test_a_step_of_an_operator(name):
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 2, 3)) for i in range(3))
    step = operator(name, "_step", normalize=True)
    check_round_trip(step, q, k, v, step(q, k, v, None)[1])


@pytest.mark.parametrize("mixer", ["hla2", "softmax", "mla", "longformer", "reformer"])
def test_a_step_of_a_layer(mixer):
    graph, variables = nnx.split(make(mixer))
    x = features(B=1, T=1)

    def step(variables, x, state):
        return nnx.merge(graph, variables)(x, state)

    def with_plain_variables(leaves, x, state):
        return step(jax.tree.unflatten(structure, leaves), x, state)

    leaves, structure = jax.tree.flatten(variables)
    check_round_trip(with_plain_variables, leaves, x, make(mixer).init_state(1))


def test_every_public_state_and_element_is_registered():
    kinds = [
        kind
        for module in (hla, hla.nn, hla.monoids, hla.models)
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if hasattr(kind, "_fields") and kind is not hla.parallel.Layout
    ]
    assert len(kinds) >= 17
    for kind in kinds:
        check_round_trip(lambda x: x, kind(*map(np.float32, range(len(kind._fields)))))
