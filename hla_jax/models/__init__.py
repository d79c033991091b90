"""Ready models, and generation from them."""

from hla_jax.models.generate import generate, sample
from hla_jax.models.transformer import TransformerLM

__all__ = ["TransformerLM", "generate", "sample"]
