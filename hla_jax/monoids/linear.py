"""First-order causal linear attention."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from hla_jax._export import exported
from hla_jax.monoids._common import (
    Key,
    Keys,
    LogDecay,
    LogDecays,
    Matrix,
    Scalar,
    Value,
    Values,
    neutral,
    to_end,
    widen,
)


@exported
class LinearElement(NamedTuple):
    """A segment of first-order linear attention.

    Attributes:
      rho: [], the product of the segment's decays.
      P: [D, E], the decayed sum of k^T v.
    """

    rho: Scalar
    P: Matrix


@dataclass(frozen=True)
class Linear:
    """Linear attention: o_t = sum over s <= t of w(t, s) (q_t . k_s) v_s.

    With w(t, s) = a_{s+1} ... a_t:

        P_AB = rho_B P_A + P_B

    Source: Transformers are RNNs (Katharopoulos et al. 2020, arXiv 2006.16236), section 3.3; with
    decay, Retentive Network (Sun et al. 2023, arXiv 2307.08621).

    Example:
      >>> import jax.numpy as jnp
      >>> from hla_jax import monoids, scan
      >>> ones = jnp.ones((3, 1))
      >>> halves = jnp.log(jnp.full(3, 0.5))
      >>> out, final = scan.serial(monoids.Linear(), (ones, ones, ones, halves))
      >>> out.ravel().tolist()
      [1.0, 1.5, 1.75]
    """

    identity = neutral

    def lift(self, q: Key, k: Key, v: Value, log_decay: LogDecay) -> LinearElement:
        """The element of one token."""
        q, k, v, log_decay = widen(q, k, v, log_decay)
        return LinearElement(jnp.exp(log_decay), jnp.outer(k, v))

    def combine(self, a: LinearElement, b: LinearElement) -> LinearElement:
        """The element of a, then b."""
        return LinearElement(a.rho * b.rho, b.rho * a.P + b.P)

    def read(self, x: LinearElement, q: Key, k: Key, v: Value, log_decay: LogDecay) -> Value:
        """The output q P, [E]."""
        return (q @ x.P).astype(v.dtype)

    def summarise(self, q: Keys, k: Keys, v: Values, log_decay: LogDecays) -> LinearElement:
        """The element of c tokens."""
        q, k, v, log_decay = widen(q, k, v, log_decay)
        e = to_end(log_decay)[:, None]
        return LinearElement(jnp.exp(log_decay.sum()), (e * k).T @ v)
