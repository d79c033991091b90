"""One sequence over many devices: what each needs of those that hold the tokens before its own.

A causal linear attention adds to its state, so the state before a device's tokens is the sum of
what the tokens of earlier devices add, decayed on the way. That is all that is exchanged, a state
for each stage of a cascade: its size does not depend on the length. Everything here runs inside a
`shard_map`, and autodiff transposes it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hla_jax import _decay, kernels
from hla_jax._sharding import vary_like

Tree = TypeVar("Tree")

# Up to so many devices, all elements are gathered in one exchange: n - 1 of them reach each device.
# Beyond, a scan brings 1 + ceil(log2 n), one after the other.
FEW = 4


class Element(NamedTuple):
    """What the tokens of some devices do to a state: it decays, and P and m are added."""

    log_decay: jax.Array | None  # [*B, N], finite
    P: jax.Array  # [*B, N, D, E]
    m: jax.Array | None  # [*B, N, D]


def combine(a: Element, b: Element) -> Element:
    """The element of a's tokens followed by b's."""
    if a.log_decay is None or b.log_decay is None:
        return jax.tree.map(jnp.add, a, b)
    decay = jnp.exp(b.log_decay)
    P = decay[..., None, None] * a.P + b.P
    m = None if a.m is None or b.m is None else decay[..., None] * a.m + b.m
    return Element(a.log_decay + b.log_decay, P, m)


def state_before(k, v, w, log_decay, P, m, *, power: int, precision, axis_name: str):
    """Returns P and m before this device's tokens, of those before the whole sequence.

    The shapes are those of `kernels.causal_linear`.
    """
    own = _element(k, v, w, log_decay, P, m, power=power, precision=precision)
    start = Element(jax.tree.map(jnp.zeros_like, own.log_decay), P, m)
    own, start = vary_like((own, start), (own, start))
    before = _gathered if lax.axis_size(axis_name) <= FEW else _scanned
    element = before(own, start, axis_name)
    return element.P, element.m


def last(tree: Tree, axis_name: str) -> Tree:
    """Returns the last device's arrays, on every device."""
    here = lax.axis_index(axis_name) == lax.axis_size(axis_name) - 1
    return _as_one(lambda x: lax.psum(jnp.where(here, x, 0), axis_name), tree)


def id_before(segment_ids, mask, axis_name: str):
    """Returns the id of earlier devices' last unmasked token, [*B], and whether there is one."""
    real = jnp.ones(segment_ids.shape, bool) if mask is None else mask
    here = real.shape[-1] - 1 - jnp.argmax(real[..., ::-1], axis=-1)
    own = jnp.take_along_axis(segment_ids, here[..., None], axis=-1)[..., 0]
    both = jnp.stack([own, real.any(-1).astype(own.dtype)], axis=-1)
    ids, exist = jnp.moveaxis(lax.all_gather(both, axis_name), -1, 0)  # [n, *B]
    device = jnp.arange(len(ids)).reshape(-1, *(1,) * own.ndim)
    exist = (exist != 0) & (device < lax.axis_index(axis_name))
    latest = jnp.argmax(jnp.where(exist, device + 1, 0), axis=0, keepdims=True)
    return jnp.take_along_axis(ids, latest, axis=0)[0], exist.any(0)


def _element(k, v, w, log_decay, P, m, *, power: int, precision) -> Element:
    """What this device's tokens do to a state."""
    tokens, N = P.ndim - 3, P.shape[-3]
    k, v = k.astype(P.dtype), v.astype(P.dtype)
    total = None
    if log_decay is not None:
        log_decay = power * _decay.floor(log_decay.astype(P.dtype))
        # Sums over the tokens after each one: differences of sums from the start would cancel.
        down_to = lax.cumsum(log_decay, axis=tokens, reverse=True)
        all_, later = jnp.split(down_to, [1], axis=tokens)
        kept = jnp.exp(jnp.concatenate([later, jnp.zeros_like(all_)], axis=tokens))
        k = k * _each(kept, k.shape[-2])[..., None]
        total = _each(all_.squeeze(tokens), N)

    def add(y: str, values: jax.Array) -> jax.Array:
        """The sums over tokens of k and values, whose heads are [K], or [K, r] where not shared."""
        K = min(k.shape[-2], values.shape[tokens + 1])
        a, x = (_grouped(array, tokens, K) for array in (k, values))
        left, right = ("gr" if array.shape[tokens + 1] > K else "g" for array in (k, values))
        out = max(left, right, key=len)
        sums = jnp.einsum(f"...t{left}d,...t{right}{y}->...{out}d{y}", a, x, precision=precision)
        return sums.reshape(*P.shape[:tokens], N, *sums.shape[sums.ndim - 1 - len(y) :])

    return Element(total, add("e", v), None if m is None else add("", w))


def _grouped(x, tokens: int, K: int):
    """Returns x with its heads as two axes [K, r] where there are more than K."""
    heads = x.shape[tokens + 1]
    if heads == K:
        return x
    return x.reshape(*x.shape[: tokens + 1], K, heads // K, *x.shape[tokens + 2 :])


def _each(x, heads: int):
    """Gives what each kv head has to all heads that share it."""
    return kernels.repeat_heads(x[..., None], heads // x.shape[-1])[..., 0]


def _as_one(exchange: Callable[[jax.Array], jax.Array], tree: Tree) -> Tree:
    """Exchanges [*B, N], [*B, N, D] and [*B, N, D, E] side by side in one array.

    One collective instead of up to three. Batch and heads stay axes, for the compiler may divide
    them over other axes of the mesh.
    """
    leaves, structure = jax.tree.flatten(tree)
    axes = max(x.ndim for x in leaves) - 2
    sizes = [math.prod(x.shape[axes:]) for x in leaves]
    flat = [x.reshape(*x.shape[:axes], n) for x, n in zip(leaves, sizes, strict=True)]
    exchanged = exchange(jnp.concatenate(flat, axis=-1))
    parts = jnp.split(exchanged, np.cumsum(sizes)[:-1], axis=-1)
    shaped = [y.reshape(*y.shape[:-1], *x.shape[axes:]) for x, y in zip(leaves, parts, strict=True)]
    return jax.tree.unflatten(structure, shaped)


def _gathered(own: Element, start: Element, axis_name: str) -> Element:
    """Combines start and the elements of all devices before this one, by one exchange."""
    elements = _as_one(lambda x: lax.all_gather(x, axis_name), own)
    device = lax.axis_index(axis_name)
    before = start
    for i in range(lax.axis_size(axis_name) - 1):
        after = combine(before, jax.tree.map(lambda x, i=i: x[i], elements))
        before = jax.tree.map(lambda a, b, i=i: jnp.where(i < device, a, b), after, before)
    return before


def _scanned(own: Element, start: Element, axis_name: str) -> Element:
    """Does so by a scan: after the step of 2^j, an element is that of 2^(j + 1) devices."""
    n, device = lax.axis_size(axis_name), lax.axis_index(axis_name)

    def from_left(element: Element, distance: int) -> Element:
        """Zeros, which change nothing, where there is no such device."""
        pairs = [(i, i + distance) for i in range(n - distance)]
        return _as_one(lambda x: lax.ppermute(x, axis_name, pairs), element)

    shifted = from_left(own, 1)
    element = jax.tree.map(lambda a, b: jnp.where(device == 0, a, b), start, shifted)
    distance = 1
    while distance < n:
        element = combine(from_left(element, distance), element)
        distance *= 2
    return element
