"""Linear-time attention in JAX: first-order, and higher-order linear attention (HLA).

Every operator is a pure function `(tokens, state) -> (outputs, state)`: training calls it with the
whole sequence, inference with one token, and both give the same values.
"""

from hla_jax import attention, feature_maps, models, monoids, nn, ops, parallel, scan, testing
from hla_jax.ops import (
    AHLAState,
    HLA2State,
    HLA3State,
    LinearState,
    ahla,
    ahla_step,
    ahla_weights,
    hla2,
    hla2_step,
    hla2_weights,
    hla3,
    hla3_step,
    hla3_weights,
    linear_attention,
    linear_attention_step,
    linear_attention_weights,
)

__all__ = [
    "AHLAState",
    "HLA2State",
    "HLA3State",
    "LinearState",
    "ahla",
    "ahla_step",
    "ahla_weights",
    "attention",
    "feature_maps",
    "hla2",
    "hla2_step",
    "hla2_weights",
    "hla3",
    "hla3_step",
    "hla3_weights",
    "linear_attention",
    "linear_attention_step",
    "linear_attention_weights",
    "models",
    "monoids",
    "nn",
    "ops",
    "parallel",
    "scan",
    "testing",
]
