"""Asymmetric higher-order linear attention."""

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
    Square,
    Value,
    Values,
    affinities,
    neutral,
    to_end,
    widen,
)


@exported
class AHLAElement(NamedTuple):
    """A segment of AHLA.

    Attributes:
      rho: [], the product of the segment's decays.
      R: [D, D], the sum of k^T q, not decayed.
      P: [D, E], the decayed sum of k^T v.
      E: [D, E], the decayed sum of k^T (q P).
    """

    rho: Scalar
    R: Square
    P: Matrix
    E: Matrix


@dataclass(frozen=True)
class AHLA:
    """AHLA: o_t = sum over j <= i <= t of w(t, j) (q_t . k_i)(q_i . k_j) v_j.

        E_AB = rho_B E_A + E_B + rho_B R_B P_A

    Source: Higher-order Linear Attention (arXiv 2510.27258), section 6, with R undecayed: with a
    decayed R, as in the paper, the rule is wrong wherever the right operand holds several tokens.

    Example:
      >>> import jax.numpy as jnp
      >>> from hla_jax import monoids, scan
      >>> ones = jnp.ones((3, 1))
      >>> halves = jnp.log(jnp.full(3, 0.5))
      >>> out, final = scan.serial(monoids.AHLA(), (ones, ones, ones, halves))
      >>> out.ravel().tolist()
      [1.0, 2.0, 2.75]
    """

    identity = neutral

    def lift(self, q: Key, k: Key, v: Value, log_decay: LogDecay) -> AHLAElement:
        """The element of one token."""
        q, k, v, log_decay = widen(q, k, v, log_decay)
        P = jnp.outer(k, v)
        return AHLAElement(jnp.exp(log_decay), jnp.outer(k, q), P, (q @ k) * P)

    def combine(self, a: AHLAElement, b: AHLAElement) -> AHLAElement:
        """The element of a, then b."""
        r = b.rho
        E = r * a.E + b.E + r * b.R @ a.P
        return AHLAElement(a.rho * r, a.R + b.R, r * a.P + b.P, E)

    def read(self, x: AHLAElement, q: Key, k: Key, v: Value, log_decay: LogDecay) -> Value:
        """The output q E, [E]."""
        return (q @ x.E).astype(v.dtype)

    def summarise(self, q: Keys, k: Keys, v: Values, log_decay: LogDecays) -> AHLAElement:
        """The element of c tokens."""
        q, k, v, log_decay = widen(q, k, v, log_decay)
        ek = to_end(log_decay)[:, None] * k
        return AHLAElement(
            rho=jnp.exp(log_decay.sum()),
            R=k.T @ q,
            P=ek.T @ v,
            E=ek.T @ (affinities(q, k, log_decay) @ v),
        )
