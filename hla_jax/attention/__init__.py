"""Attention that linear attention is compared with."""

from hla_jax.attention.segments import segment_numbers
from hla_jax.attention.softmax import softmax_attention

__all__ = ["segment_numbers", "softmax_attention"]
