"""Attention that linear attention is compared with, under the conventions of this library."""

from hla_jax.attention import patterns
from hla_jax.attention.flash import flash_attention
from hla_jax.attention.linformer import linformer_attention, linformer_projection
from hla_jax.attention.lsh import lsh_attention, lsh_buckets, lsh_decode
from hla_jax.attention.softmax import softmax_attention
from hla_jax.attention.sparse import sparse_attention

__all__ = [
    "flash_attention",
    "linformer_attention",
    "linformer_projection",
    "lsh_attention",
    "lsh_buckets",
    "lsh_decode",
    "patterns",
    "softmax_attention",
    "sparse_attention",
]
