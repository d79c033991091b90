"""Flax NNX layers with one call, `y, state = layer(x, state=None, mask=None, segment_ids=None)`."""

from hla_jax.nn.latent import MLA, LatentCache
from hla_jax.nn.linformer import Linformer
from hla_jax.nn.mixer import Mixer, MixerState
from hla_jax.nn.multihead import MultiHead, MultiHeadOptions, mean_pool_kv_heads
from hla_jax.nn.performer import Performer
from hla_jax.nn.recurrent import AHLA, HLA2, HLA3, LinearAttention, Recurrent, RecurrentOptions
from hla_jax.nn.reformer import LSHCache, Reformer
from hla_jax.nn.rotary import rotary
from hla_jax.nn.softmax import (
    Cached,
    CachedOptions,
    FlashAttention,
    KVCache,
    SoftmaxAttention,
)
from hla_jax.nn.sparse import (
    BigBird,
    Longformer,
    LongformerCache,
    SlidingWindowAttention,
    Sparse,
    SparseAttention,
)

__all__ = [
    "AHLA",
    "HLA2",
    "HLA3",
    "MLA",
    "BigBird",
    "Cached",
    "CachedOptions",
    "FlashAttention",
    "KVCache",
    "LSHCache",
    "LatentCache",
    "LinearAttention",
    "Linformer",
    "Longformer",
    "LongformerCache",
    "Mixer",
    "MixerState",
    "MultiHead",
    "MultiHeadOptions",
    "Performer",
    "Recurrent",
    "RecurrentOptions",
    "Reformer",
    "SlidingWindowAttention",
    "SoftmaxAttention",
    "Sparse",
    "SparseAttention",
    "mean_pool_kv_heads",
    "rotary",
]
