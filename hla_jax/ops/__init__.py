"""The operators: pure functions from tokens and a state to outputs and a state."""

from hla_jax.ops.ahla import AHLAState, ahla, ahla_step, ahla_weights
from hla_jax.ops.hla2 import HLA2State, hla2, hla2_step, hla2_weights
from hla_jax.ops.hla3 import HLA3State, hla3, hla3_step, hla3_weights
from hla_jax.ops.linear import (
    LinearState,
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
    "hla2",
    "hla2_step",
    "hla2_weights",
    "hla3",
    "hla3_step",
    "hla3_weights",
    "linear_attention",
    "linear_attention_step",
    "linear_attention_weights",
]
