"""Third-order higher-order linear attention: masked, unmasked, and as published."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Float

from hla_jax._export import exported
from hla_jax._types import Array
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
class HLA3Element(NamedTuple):
    """A segment of masked HLA3.

    Attributes:
      rho: [], the product of the segment's decays.
      S: [D, D], the decayed sum of k^T k.
      N: [D, D], the decayed sum of q^T q.
      P: [D, E], the decayed sum of k^T v.
      X: [D, E], the sum of q^T (q P), decayed twice.
      Y: [D, D], the sum of (q S)^T q, decayed twice.
      F: [D, E], the sum of (q S)^T (q P), decayed thrice.
    """

    rho: Scalar
    S: Square
    N: Square
    P: Matrix
    X: Matrix
    Y: Square
    F: Matrix


@exported
class HLA3UnmaskedElement(NamedTuple):
    """A segment of unmasked HLA3: rho, S, N and P of `HLA3Element`."""

    rho: Scalar
    S: Square
    N: Square
    P: Matrix


@exported
class HLA3PublishedElement(NamedTuple):
    """A segment of HLA3 as published.

    Attributes:
      rho: [], the product of the segment's decays.
      S: [D, D], the decayed sum of k^T k.
      N: [D, D], the decayed sum of q^T q.
      P: [D, E], the decayed sum of k^T v.
      X: [D, E], the sum of q^T q k^T v, decayed twice.
      Y: [D, D], the sum of k^T k q^T q, decayed twice.
      M: [D, D, D, E], the map M[Z] = sum of (k Z k^T) k^T v, decayed twice.
      F: [D, E], the sum of k^T k q^T q k^T v over triples, decayed thrice.
    """

    rho: Scalar
    S: Square
    N: Square
    P: Matrix
    X: Matrix
    Y: Square
    M: Float[Array, "*T D D D E"]
    F: Matrix


@dataclass(frozen=True)
class HLA3Masked:
    """`HLA3(variant="masked")`: the sum runs over i <= u, j <= u, u <= t."""

    identity = neutral

    def lift(self, q: Key, k: Key, v: Value, log_decay: LogDecay) -> HLA3Element:
        """The element of one token."""
        q, k, v, log_decay = widen(q, k, v, log_decay)
        c, qv, kv, kq = q @ k, jnp.outer(q, v), jnp.outer(k, v), jnp.outer(k, q)
        return HLA3Element(
            rho=jnp.exp(log_decay),
            S=jnp.outer(k, k),
            N=jnp.outer(q, q),
            P=kv,
            X=c * qv,
            Y=c * kq,
            F=c**2 * kv,
        )

    def combine(self, a: HLA3Element, b: HLA3Element) -> HLA3Element:
        """The element of a, then b."""
        r, ST = b.rho, a.S.T  # a row times S in every term, as in HLA2
        NP = b.N @ a.P
        return HLA3Element(
            rho=a.rho * r,
            S=r * a.S + b.S,
            N=r * a.N + b.N,
            P=r * a.P + b.P,
            X=r**2 * a.X + b.X + r * NP,
            Y=r**2 * a.Y + b.Y + r * ST @ b.N,
            F=r**3 * a.F + b.F + r**2 * ST @ NP + r * ST @ b.X + r * b.Y @ a.P,
        )

    def read(self, x: HLA3Element, q: Key, k: Key, v: Value, log_decay: LogDecay) -> Value:
        """The output q F, [E]."""
        return (q @ x.F).astype(v.dtype)

    def summarise(self, q: Keys, k: Keys, v: Values, log_decay: LogDecays) -> HLA3Element:
        """The element of c tokens."""
        q, k, v, log_decay = widen(q, k, v, log_decay)
        e, A = to_end(log_decay)[:, None], affinities(q, k, log_decay)
        qS, qP = A @ k, A @ v
        return HLA3Element(
            rho=jnp.exp(log_decay.sum()),
            S=(e * k).T @ k,
            N=(e * q).T @ q,
            P=(e * k).T @ v,
            X=(e**2 * q).T @ qP,
            Y=(e**2 * qS).T @ q,
            F=(e**3 * qS).T @ qP,
        )


@dataclass(frozen=True)
class HLA3Unmasked:
    """`HLA3(variant="unmasked")`: the sum runs over i, u, j <= t."""

    identity = neutral

    def lift(self, q: Key, k: Key, v: Value, log_decay: LogDecay) -> HLA3UnmaskedElement:
        """The element of one token."""
        q, k, v, log_decay = widen(q, k, v, log_decay)
        S, N, P = jnp.outer(k, k), jnp.outer(q, q), jnp.outer(k, v)
        return HLA3UnmaskedElement(jnp.exp(log_decay), S, N, P)

    def combine(self, a: HLA3UnmaskedElement, b: HLA3UnmaskedElement) -> HLA3UnmaskedElement:
        """The element of a, then b."""
        r = b.rho
        S, N, P = r * a.S + b.S, r * a.N + b.N, r * a.P + b.P
        return HLA3UnmaskedElement(a.rho * r, S, N, P)

    def read(self, x: HLA3UnmaskedElement, q: Key, k: Key, v: Value, log_decay: LogDecay) -> Value:
        """The output ((q S) N) P, [E]."""
        return (((q @ x.S) @ x.N) @ x.P).astype(v.dtype)

    def summarise(self, q: Keys, k: Keys, v: Values, log_decay: LogDecays) -> HLA3UnmaskedElement:
        """The element of c tokens."""
        q, k, v, log_decay = widen(q, k, v, log_decay)
        e = to_end(log_decay)[:, None]
        S, N, P = (e * k).T @ k, (e * q).T @ q, (e * k).T @ v
        return HLA3UnmaskedElement(jnp.exp(log_decay.sum()), S, N, P)


@dataclass(frozen=True)
class HLA3Published:
    """`HLA3(variant="published")`: the largest of i, u and j, all <= t, is attained at least twice.

    The element holds a map of D^3 E numbers: for small D only.
    """

    identity = neutral

    def lift(self, q: Key, k: Key, v: Value, log_decay: LogDecay) -> HLA3PublishedElement:
        """The element of one token."""
        q, k, v, log_decay = widen(q, k, v, log_decay)
        c, kk, kv = q @ k, jnp.outer(k, k), jnp.outer(k, v)
        return HLA3PublishedElement(
            rho=jnp.exp(log_decay),
            S=kk,
            N=jnp.outer(q, q),
            P=kv,
            X=c * jnp.outer(q, v),
            Y=c * jnp.outer(k, q),
            M=jnp.tensordot(kk, kv, 0),
            F=c**2 * kv,
        )

    def combine(self, a: HLA3PublishedElement, b: HLA3PublishedElement) -> HLA3PublishedElement:
        """The element of a, then b."""
        r = b.rho
        return HLA3PublishedElement(
            rho=a.rho * r,
            S=r * a.S + b.S,
            N=r * a.N + b.N,
            P=r * a.P + b.P,
            X=r**2 * a.X + b.X,
            Y=r**2 * a.Y + b.Y,
            M=r**2 * a.M + b.M,
            F=r**3 * a.F + b.F + r * (a.S.T @ b.X + jnp.tensordot(a.N, b.M) + b.Y @ a.P),
        )

    def read(self, x: HLA3PublishedElement, q: Key, k: Key, v: Value, log_decay: LogDecay) -> Value:
        """The output q F, [E]."""
        return (q @ x.F).astype(v.dtype)


def HLA3(
    variant: Literal["masked", "unmasked", "published"] = "masked",
) -> HLA3Masked | HLA3Unmasked | HLA3Published:
    """HLA3: o_t = sum of w(t, i) w(t, u) w(t, j) (q_t . k_i)(k_i . q_u)(q_u . k_j) v_j.

    A function that returns the monoid of a variant. Masked, with r = rho_B and every member D x D
    or D x E:

        F_AB = r^3 F_A + F_B + r^2 S_A N_B P_A + r S_A X_B + r Y_B P_A

    Source: Higher-order Linear Attention (arXiv 2510.27258), section 7. What Theorem 7.1 there
    takes for the masked product is another operator, the "published" variant: see docs/errata.md.

    Args:
      variant: "masked" sums over i <= u, j <= u and u <= t; "unmasked" over i, u, j <= t;
        "published" over i, u, j <= t of which the largest is attained at least twice (its element
        holds D^3 E numbers).

    Returns:
      The monoid.

    Raises:
      ValueError: variant is none of the three.

    Example:
      >>> import jax.numpy as jnp
      >>> from hla_jax import monoids, scan
      >>> q, ones = jnp.array([[1.0], [2.0]]), jnp.ones((2, 1))
      >>> for variant in ("masked", "unmasked", "published"):
      ...     out, _ = scan.serial(monoids.HLA3(variant), (q, ones, ones, jnp.zeros(2)))
      ...     print(variant, out.ravel().tolist())
      masked [1.0, 34.0]
      unmasked [1.0, 40.0]
      published [1.0, 28.0]
    """
    match variant:
        case "masked":
            return HLA3Masked()
        case "unmasked":
            return HLA3Unmasked()
        case "published":
            return HLA3Published()
    raise ValueError(f'variant must be "masked", "unmasked" or "published", got {variant!r}')
