"""Linformer attention: softmax attention over a fixed number of mixtures of the tokens."""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float

from hla_jax._check import FLOATING, array, check_sizes, is_float
from hla_jax._types import Array, Keys, Mask, Outputs, Queries, Values, result_type
from hla_jax.attention._inputs import logit_scale, prepare

# [n, N], or [K, n, N]; N may differ between keys and values.
Projection: TypeAlias = Float[Array, "... n _"]


def linformer_attention(
    q: Queries,
    k: Keys,
    v: Values,
    e: Projection,
    f: Projection | None = None,
    *,
    causal: bool = False,
    mask: Mask | None = None,
    scale: float | None = None,
) -> Outputs:
    """Softmax attention over n mixtures of keys and values, in place of the S keys and values.

        o_t = sum_i softmax_i(scale q_t . (e k)_i) (f v)_i

    Time and memory are O((T + S) n), for a sequence of at most N tokens. With e the identity this
    is softmax attention.

    There is no causal form, as each mixture holds all tokens, later ones too.

    Source: Linformer (Wang et al. 2020, arXiv 2006.04768), section 4.

    Args:
      q: [*B, T, H, D].
      k: [*B, S, K, D]; K divides H, and query head h uses kv head h // (H // K).
      v: [*B, S, K, E].
      e: [n, N], or [K, n, N] with one for each kv head: mixes the keys. S <= N, and the first S
        columns are used.
      f: the same for the values; None is e.
      causal: only False.
      mask: [*B, S], False at padding: masked keys and values are not in the mixtures. A row without
        an unmasked one gives 0.
      scale: multiplies every product of query and key; None is D^(-1/2).

    Returns:
      Outputs [*B, T, H, E] in v's dtype.

    Raises:
      ValueError: an argument has a wrong shape or dtype, or causal is True; the message names it.

    Example:
      Two mixtures, each the mean of two tokens:

      >>> import jax.numpy as jnp
      >>> e = jnp.array([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]])
      >>> k = jnp.array([0.0, 0.0, 9.0, 9.0]).reshape(4, 1, 1)
      >>> v = jnp.array([1.0, 3.0, 5.0, 7.0]).reshape(4, 1, 1)
      >>> print(linformer_attention(jnp.array([-9.0, 0.0, 9.0]).reshape(3, 1, 1), k, v, e).ravel())
      [2. 4. 6.]
    """
    if causal:
        raise ValueError(
            "causal must be False for Linformer attention, got True: each of the keys it looks at "
            "is a mixture of all tokens, later ones too"
        )
    inputs = prepare(q, k, v, causal=False, mask=mask)
    S, K = inputs.k.shape[-3:-1]
    e = _checked("e", e, S, K)
    f = e if f is None else _checked("f", f, S, K)
    if f.shape[-2] != e.shape[-2]:
        raise ValueError(f"f must have as many rows as e, {e.shape[-2]}, got {f.shape[-2]}")
    keys, values = _mixtures(e, inputs.k), _mixtures(f, inputs.v)
    *batch, T, H, D = inputs.q.shape
    queries = inputs.q.astype(keys.dtype).reshape(*batch, T, K, H // K, D)
    logits = jnp.einsum("...tkgd,...nkd->...kgtn", queries, keys)
    weights = jax.nn.softmax(logits * jnp.asarray(logit_scale(scale, D), logits.dtype), axis=-1)
    out = jnp.einsum("...kgtn,...nke->...tkge", weights, values)
    return out.reshape(*batch, T, H, inputs.v.shape[-1]).astype(inputs.v.dtype)


def linformer_projection(
    key: jax.Array, n: int, N: int, dtype: DTypeLike = jnp.float32
) -> Float[jax.Array, "n N"]:
    """A fixed random e for `linformer_attention`: independent entries of N(0, 1 / n).

    On average e^T e is the identity, so that inner products of projected sequences, (e x) . (e y),
    are those of x and y, up to a relative error of order n^(-1/2) (Johnson and Lindenstrauss). This
    is so for projected values under given weights; it does not make the softmax of projected keys
    an estimate of softmax attention, so the other weights have to be trained with this e in place.

    Source: Linformer (Wang et al. 2020, arXiv 2006.04768), theorem 1.

    Args:
      key: of `jax.random`.
      n: how many mixtures.
      N: how long sequences may be.
      dtype: of the projection.

    Returns:
      [n, N].

    Raises:
      ValueError: n or N is not a positive int.

    Example:
      >>> import jax
      >>> e = linformer_projection(jax.random.key(0), 400, 100)
      >>> print((e**2).sum(0).mean().round(1))
      1.0
    """
    check_sizes(n=n, N=N)
    return jax.random.normal(key, (n, N), dtype) * n**-0.5


def _checked(name: str, x: Array, S: int, K: int) -> jax.Array:
    """Returns the used part of a projection, [n or K, n, S]."""
    x = array(name, x)
    if (
        not is_float(x.dtype)
        or x.ndim not in (2, 3)
        or x.shape[:-2] not in ((), (K,))
        or x.shape[-2] == 0
        or x.shape[-1] < S
    ):
        raise ValueError(
            f"{name} must be {FLOATING}, [n, N] or [K, n, N] with K = {K}, n > 0 and N >= S = {S}, "
            f"got {x.dtype} of shape {x.shape}"
        )
    return x[..., :S]


def _mixtures(e: jax.Array, x: jax.Array) -> jax.Array:
    """The product e x of each kv head: [n, S] or [K, n, S] times [*B, S, K, D] to [*B, n, K, D]."""
    dtype = result_type(e, x, jnp.float32)
    heads = "kns" if e.ndim == 3 else "ns"
    return jnp.einsum(f"{heads},...skd->...nkd", e.astype(dtype), x.astype(dtype))
