"""The models run where JAX promotes neither dtypes nor ranks by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hla_jax.models import (
    CTCEncoder,
    ImageModel,
    TransformerLM,
    ctc_loss,
    generate,
    log_mel,
    logistics,
    sample,
)
from hla_jax.models.speech import BiLSTM

KEY = jax.random.key(0)
HEADS = dict(num_heads=2)


def sizes():
    return dict(num_layers=1, features=8, rngs=nnx.Rngs(0))


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def array(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_functions(dtype, x64):
    numbers = dict(temperature=0.5), dict(temperature=np.array([0, 1]), top_p=np.array([0.5, 1]))
    for options in numbers:
        jax.eval_shape(lambda x, o=options: sample(x, KEY, top_k=2, **o), array((2, 8), dtype))
    jax.eval_shape(lambda x: log_mel(x, 8000), array((2, 900), dtype))

    def likelihoods(parameters, log_probs, values, frames, labels, lengths):
        loss, _ = ctc_loss(log_probs, frames, labels, lengths)
        return loss.sum() + logistics.log_prob(parameters, values).sum().astype(loss.dtype)

    floats = array((2, 5, 9), dtype), array((2, 5, 4), dtype)
    for kind in ("uint8", "int64"):
        shapes = (2, 5), (2,), (2, 3), (2,)
        integers = [array(shape, kind) for shape in shapes]
        jax.eval_shape(jax.grad(likelihoods, (0, 1)), *floats, *integers)
    jax.eval_shape(lambda x: logistics.sample(x, KEY), floats[0])


@pytest.mark.parametrize("mixer", ["linear", "softmax", "bilstm"])
def test_speech(mixer):
    options = {} if mixer == "bilstm" else HEADS
    model = CTCEncoder(3, mixer=mixer, in_features=5, subsampling=2, **options, **sizes())
    jax.eval_shape(model, array((2, 9, 5), "float32"), array((2,), "uint8"))


def test_a_bilstm_of_mixed_precision():
    layer = BiLSTM(8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    y, _ = jax.eval_shape(layer, array((2, 9, 8), "float32"))
    assert y.dtype == jnp.bfloat16


@pytest.mark.parametrize("mixer", ["linear", "softmax"])
def test_images(mixer):
    model = ImageModel((2, 2, 2), mixer=mixer, **HEADS, **sizes())
    images = array((3, 2, 2, 2), "uint8")
    jax.eval_shape(model.bits_per_dim, images)
    jax.eval_shape(lambda images, key: model.complete(images, 1, key), images, KEY)
    jax.eval_shape(model, array((3, 5), "uint8"))


@pytest.mark.parametrize("mixer", ["linear", "softmax"])
def test_text(mixer):
    model = TransformerLM(8, mixer=mixer, **HEADS, **sizes())
    options = dict(max_new_tokens=3, temperature=0.5, top_k=3, top_p=0.9, stop_token=1, key=KEY)
    for kind in ("uint8", "int32"):
        jax.eval_shape(lambda prompt: generate(model, prompt, **options), array((2, 3), kind))
