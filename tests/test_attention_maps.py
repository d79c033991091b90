"""The maps that the example draws are of what the layers compute."""

import importlib
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from helpers import rms_error

sys.path.append(str(Path(__file__).parents[1] / "examples"))
attention_maps, char_lm = map(importlib.import_module, ("attention_maps", "char_lm"))

SIZES = ["--layers=2", "--heads=2", "--features=16"]
TEXT = b"a list of lists"


def last_layer(mixer: str):
    model = char_lm.make_model(char_lm.parse_arguments(SIZES), mixer)
    return attention_maps.last_layer(model, TEXT)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    "mixer",
    [
        "softmax",
        "linear",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("hla2", "ahla", "hla3")),
    ],
)
def test_weights_times_values_are_the_layers_output(mixer) -> None:
    layer, x = last_layer(mixer)
    w = attention_maps.weights(mixer, layer, x)
    o = jnp.einsum("bhts,bshe->bthe", w, layer.value(x))
    o = o if layer.output_norm is None else layer.output_norm(o)
    assert rms_error(layer.out(o), layer(x)[0]) < 1e-5


@pytest.mark.usefixtures("no_type_checks")
def test_followed_state_ends_as_that_of_the_whole_text() -> None:
    layer, x = last_layer("linear")
    norms = attention_maps.state_norms(layer, x)
    _, state = layer(x)
    assert norms.shape == (len(TEXT), 2)
    assert rms_error(norms[-1], jnp.linalg.norm(state.memory.kv[0], axis=(-2, -1))) < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("no_type_checks")
def test_script_draws_a_picture(tmp_path) -> None:
    attention_maps.main(["--steps=2", "--positions=8", f"--out={tmp_path}"])
    assert (tmp_path / "attention_maps.png").stat().st_size > 10_000
