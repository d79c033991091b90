"""Ready models, and generation from them."""

from hla_jax.models import logistics
from hla_jax.models.ctc import beam_decode, ctc_loss, error_rate, greedy_decode
from hla_jax.models.generate import generate, sample
from hla_jax.models.image import ImageModel
from hla_jax.models.speech import CTCEncoder, log_mel, read_wav
from hla_jax.models.transformer import TransformerLM

__all__ = [
    "CTCEncoder",
    "ImageModel",
    "TransformerLM",
    "beam_decode",
    "ctc_loss",
    "error_rate",
    "generate",
    "greedy_decode",
    "log_mel",
    "logistics",
    "read_wav",
    "sample",
]
