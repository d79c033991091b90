"""The algebra: one monoid per operator, in plain `jax.numpy`.

A monoid summarises a segment of tokens by an *element* of fixed size, such that the element of two
neighbouring segments follows from their elements alone. It is any object with these methods:

| method | meaning |
|---|---|
| `lift(*token)` | the element of one token |
| `combine(a, b)` | the element of segment a followed by segment b |
| `identity(like)` | the element of no tokens; `like` is an element, or one of `ShapeDtypeStruct`s |
| `read(element, *token)` | the output at the last token of the element's segment |
| `summarise(*tokens)` | optional: the element of a chunk, by matrix products |

All are written for one head; `hla_jax.scan` runs them over sequences and `jax.vmap` over heads. A
token of ours is q [D], k [D], v [E] and log_decay [], the log of the decay a_t in [0, 1] applied to
all that came before the token; -inf is a reset. Elements are float32, or float64 if q, k or v is,
and outputs have v's dtype. A normalised operator divides by the same monoid's output for v = 1.
"""

from hla_jax.monoids.ahla import AHLA, AHLAElement
from hla_jax.monoids.hla2 import (
    HLA2,
    HLA2Element,
    HLA2Paper,
    HLA2PaperElement,
    HLA2UnmaskedElement,
)
from hla_jax.monoids.hla3 import (
    HLA3,
    HLA3Element,
    HLA3PublishedElement,
    HLA3UnmaskedElement,
)
from hla_jax.monoids.linear import Linear, LinearElement

__all__ = [
    "AHLA",
    "HLA2",
    "HLA3",
    "AHLAElement",
    "HLA2Element",
    "HLA2Paper",
    "HLA2PaperElement",
    "HLA2UnmaskedElement",
    "HLA3Element",
    "HLA3PublishedElement",
    "HLA3UnmaskedElement",
    "Linear",
    "LinearElement",
]
