"""Attention that linear attention is compared with."""

from hla_jax.attention.softmax import softmax_attention

__all__ = ["softmax_attention"]
