"""Flax NNX layers with one call, `y, state = layer(x, state=None, mask=None, segment_ids=None)`."""

from hla_jax.nn.mixer import Mixer, MixerOptions, MixerState
from hla_jax.nn.recurrent import AHLA, HLA2, HLA3, LinearAttention, Recurrent, RecurrentOptions
from hla_jax.nn.rotary import rotary
from hla_jax.nn.softmax import KVCache, SoftmaxAttention

__all__ = [
    "AHLA",
    "HLA2",
    "HLA3",
    "KVCache",
    "LinearAttention",
    "Mixer",
    "MixerOptions",
    "MixerState",
    "Recurrent",
    "RecurrentOptions",
    "SoftmaxAttention",
    "rotary",
]
