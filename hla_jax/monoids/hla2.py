"""Second-order higher-order linear attention, masked and unmasked, and the paper's own form."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from hla_jax._export import exported
from hla_jax.monoids._common import (
    Key,
    Keys,
    KeySum,
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
class HLA2Element(NamedTuple):
    """A segment of masked HLA2.

    Attributes:
      rho: [], the product of the segment's decays.
      S: [D, D], the decayed sum of k^T k.
      C: [D, E], the decayed sum of q^T v.
      F: [D, E], the sum of (q S)^T v, decayed twice.
    """

    rho: Scalar
    S: Square
    C: Matrix
    F: Matrix


@exported
class HLA2UnmaskedElement(NamedTuple):
    """A segment of unmasked HLA2: rho, S and C of `HLA2Element`."""

    rho: Scalar
    S: Square
    C: Matrix


@dataclass(frozen=True)
class HLA2Masked:
    """`HLA2(masked=True)`: the sum runs over i <= j <= t."""

    identity = neutral

    def lift(self, q: Key, k: Key, v: Value, log_decay: LogDecay) -> HLA2Element:
        """The element of one token."""
        q, k, v, log_decay = widen(q, k, v, log_decay)
        F = (q @ k) * jnp.outer(k, v)
        return HLA2Element(jnp.exp(log_decay), jnp.outer(k, k), jnp.outer(q, v), F)

    def combine(self, a: HLA2Element, b: HLA2Element) -> HLA2Element:
        """The element of a, then b."""
        r = b.rho
        # A row times S in every term: transposing changes no value, S being symmetric, but makes
        # the gradient with respect to a given S that of the recurrence.
        F = r**2 * a.F + b.F + r * a.S.T @ b.C
        return HLA2Element(a.rho * r, r * a.S + b.S, r * a.C + b.C, F)

    def read(self, x: HLA2Element, q: Key, k: Key, v: Value, log_decay: LogDecay) -> Value:
        """The output q F, [E]."""
        return (q @ x.F).astype(v.dtype)

    def summarise(self, q: Keys, k: Keys, v: Values, log_decay: LogDecays) -> HLA2Element:
        """The element of c tokens."""
        q, k, v, log_decay = widen(q, k, v, log_decay)
        e = to_end(log_decay)[:, None]
        qS = affinities(q, k, log_decay) @ k
        rho = jnp.exp(log_decay.sum())
        return HLA2Element(rho, (e * k).T @ k, (e * q).T @ v, (e**2 * qS).T @ v)


@dataclass(frozen=True)
class HLA2Unmasked:
    """`HLA2(masked=False)`: the sum runs over i, j <= t."""

    identity = neutral

    def lift(self, q: Key, k: Key, v: Value, log_decay: LogDecay) -> HLA2UnmaskedElement:
        """The element of one token."""
        q, k, v, log_decay = widen(q, k, v, log_decay)
        return HLA2UnmaskedElement(jnp.exp(log_decay), jnp.outer(k, k), jnp.outer(q, v))

    def combine(self, a: HLA2UnmaskedElement, b: HLA2UnmaskedElement) -> HLA2UnmaskedElement:
        """The element of a, then b."""
        r = b.rho
        return HLA2UnmaskedElement(a.rho * r, r * a.S + b.S, r * a.C + b.C)

    def read(self, x: HLA2UnmaskedElement, q: Key, k: Key, v: Value, log_decay: LogDecay) -> Value:
        """The output (q S) C, [E]."""
        return ((q @ x.S) @ x.C).astype(v.dtype)

    def summarise(self, q: Keys, k: Keys, v: Values, log_decay: LogDecays) -> HLA2UnmaskedElement:
        """The element of c tokens."""
        q, k, v, log_decay = widen(q, k, v, log_decay)
        e = to_end(log_decay)[:, None]
        return HLA2UnmaskedElement(jnp.exp(log_decay.sum()), (e * k).T @ k, (e * q).T @ v)


def HLA2(masked: bool = True) -> HLA2Masked | HLA2Unmasked:
    """HLA2: o_t = sum of w(t, i) w(t, j) (q_t . k_i)(k_i . q_j) v_j.

    A function that returns the monoid of a variant. Unmasked, S and C suffice, and they add up.
    Masked:

        F_AB = rho_B^2 F_A + F_B + rho_B S_A C_B

    Source: Higher-order Linear Attention (arXiv 2510.27258), sections 3 and 4; F = S C - G of the
    paper, a smaller state from which reading needs no subtraction.

    Args:
      masked: whether the sum runs over i <= j <= t, or over i, j <= t.

    Returns:
      The monoid.

    Example:
      >>> import jax.numpy as jnp
      >>> from hla_jax import monoids, scan
      >>> ones = jnp.ones((3, 1))
      >>> for masked in (True, False):
      ...     out, _ = scan.serial(monoids.HLA2(masked), (ones, ones, ones, jnp.zeros(3)))
      ...     print(masked, out.ravel().tolist())
      True [1.0, 3.0, 6.0]
      False [1.0, 4.0, 9.0]
    """
    return HLA2Masked() if masked else HLA2Unmasked()


@exported
class HLA2PaperElement(NamedTuple):
    """A segment of masked HLA2 in the paper's symbols.

    Attributes:
      rho: [], the product of the segment's decays.
      S: [D, D], the decayed sum of k^T k.
      C: [D, E], the decayed sum of q^T v.
      m: [D], C for v = 1.
      G: [D, E], the sum of k^T k C, C of the tokens before: what the mask removes; decayed twice.
      h: [D], G for v = 1.
    """

    rho: Scalar
    S: Square
    C: Matrix
    m: KeySum
    G: Matrix
    h: KeySum


@dataclass(frozen=True)
class HLA2Paper:
    """Masked HLA2 as its paper writes it: o_t = q_t (S C - G), the mass being q_t (S m - h).

    With h alike, m in place of C:

        G_AB = rho_B^2 G_A + G_B + rho_B S_B C_A

    Source: Higher-order Linear Attention (arXiv 2510.27258), section 4.2, with the decay of G and h
    corrected: rho_B in place of rho_B^2, as in the paper, is not associative.

    Example:
      >>> import jax.numpy as jnp
      >>> from hla_jax import monoids, scan
      >>> ones = jnp.ones((3, 1))
      >>> halves = jnp.log(jnp.full(3, 0.5))
      >>> out, final = scan.serial(monoids.HLA2Paper(), (ones, ones, ones, halves))
      >>> out.ravel().tolist()
      [1.0, 1.75, 2.1875]
      >>> final.G.item()
      0.875
    """

    identity = neutral

    def lift(self, q: Key, k: Key, v: Value, log_decay: LogDecay) -> HLA2PaperElement:
        """The element of one token."""
        q, k, v, log_decay = widen(q, k, v, log_decay)
        C = jnp.outer(q, v)
        zero = jnp.zeros_like
        return HLA2PaperElement(jnp.exp(log_decay), jnp.outer(k, k), C, q, zero(C), zero(q))

    def combine(self, a: HLA2PaperElement, b: HLA2PaperElement) -> HLA2PaperElement:
        """The element of a, then b."""
        r = b.rho
        return HLA2PaperElement(
            rho=a.rho * r,
            S=r * a.S + b.S,
            C=r * a.C + b.C,
            m=r * a.m + b.m,
            G=r**2 * a.G + b.G + r * b.S @ a.C,
            h=r**2 * a.h + b.h + r * b.S @ a.m,
        )

    def read(self, x: HLA2PaperElement, q: Key, k: Key, v: Value, log_decay: LogDecay) -> Value:
        """The output (q S) C - q G, [E]."""
        return ((q @ x.S) @ x.C - q @ x.G).astype(v.dtype)
