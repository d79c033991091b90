"""The operators by their definitions, in float64: what every implementation is compared with.

Two independent forms, which test_ops.py compares with each other: `weights` sums over all tuples of
tokens, in numpy, for short sequences; `recurrence` goes token by token, and JAX differentiates it.
Both take the operators by their names in `MEMBERS`. `softmax_attention` is what the variants of
attention compute, each with its own visible keys.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MEMBERS = {  # what the state of each operator holds
    "linear": ("kv",),
    "hla2": ("kk", "f"),
    "hla2_ridge": ("kk", "f", "c"),
    "hla2_unmasked": ("kk", "c"),
    "hla2_unmasked_ridge": ("kk", "c"),
    "ahla": ("kv", "e"),
    "hla3": ("kk", "kv", "f"),
    "hla3_unmasked": ("kk", "qq", "kv"),
    "hla3_published": ("kk", "qq", "kv", "f"),
}
RIDGE = 0.7  # of the two operators with a ridge
MASS = {"kv": "k", "f": "fz", "c": "cz", "e": "ez"}  # a member -> the same one for v = 1
SHARED = {"kk", "kv", "k"}  # one per kv head; the others, which q enters, one per query head


def state_shapes(name, *, heads, kv_heads, d, e, normalize):
    """The shapes of a state's members for one sequence, by name."""
    widths = {"kk": d, "qq": d} | dict.fromkeys(MASS, e)
    shapes = {m: (kv_heads if m in SHARED else heads, d, widths[m]) for m in MEMBERS[name]}
    masses = {MASS[m]: shapes[m][:2] for m in shapes if m in MASS and normalize}
    return shapes | masses


def restarts(mask, segment_ids):
    """True where an unmasked token's segment differs from that of the last unmasked token; [T]."""
    out, last = np.zeros(len(mask), bool), None
    for t in np.flatnonzero(mask):
        out[t] = last is not None and segment_ids[t] != last
        last = segment_ids[t]
    return out


def segment_labels(mask, segment_ids):
    """The number of each token's segment, and -1 at masked tokens; [B, T]."""
    rows = zip(mask, segment_ids, strict=True)
    return np.array([np.where(row[0], restarts(*row).cumsum(), -1) for row in rows])


def same_segment(mask, segment_ids):
    """Whether two tokens are unmasked and of one segment; [B, T, T]."""
    labels = segment_labels(mask, segment_ids)
    return (labels[:, :, None] == labels[:, None, :]) & mask[:, None, :]


class SoftmaxAttention(NamedTuple):
    """Outputs, log-sum-exp, and gradients, which are None where no cotangent was given."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray | None = None
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None


def softmax_attention(q, k, v, visible, *, scale=None, bias=0.0, d_out=None, d_lse=None):
    """Softmax attention in the library's layout, one query at a time.

    visible broadcasts to [*B, T, S], or to [*B, H, T, S] if it has q's number of axes; bias to the
    latter. d_out and d_lse are the cotangents of the outputs and of their log-sum-exp.
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    (*B, T, H, D), (S, K, E) = q.shape, v.shape[-3:]
    scale = D**-0.5 if scale is None else scale
    visible = visible if np.ndim(visible) == q.ndim else np.expand_dims(visible, -3)
    visible, bias = (np.broadcast_to(x, (*B, H, T, S)) for x in (visible, bias))
    out, lse = np.zeros((*B, T, H, E)), np.full((*B, T, H), -np.inf)
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    has_gradients = d_out is not None
    d_out, d_lse = (0.0 if d is None else np.asarray(d).astype(np.float64) for d in (d_out, d_lse))
    d_out, d_lse = np.broadcast_to(d_out, out.shape), np.broadcast_to(d_lse, lse.shape)
    for *b, t, h in np.ndindex(*q.shape[:-1]):
        query, seen = (*b, t, h), np.flatnonzero(visible[*b, h, t])
        if len(seen):
            keys = *b, seen, h // (H // K)
            logits = scale * k[keys] @ q[query] + bias[*b, h, t, seen]
            lse[query] = logits.max() + np.log(np.exp(logits - logits.max()).sum())
            p = np.exp(logits - lse[query])
            out[query] = p @ v[keys]
            dp = v[keys] @ d_out[query]
            d_logits = scale * p * (dp - p @ dp + d_lse[query])
            dq[query] = d_logits @ k[keys]
            dk[keys] += np.outer(d_logits, q[query])
            dv[keys] += np.outer(p, d_out[query])
    return SoftmaxAttention(out, lse, *([dq, dk, dv] if has_gradients else []))


def weights(name, q, k, a):
    """Weights [T, T] of one head, summed over tuples of tokens; q, k [T, D], decays a [T]."""
    n = len(q)
    w = np.tri(n)
    for t, i in np.argwhere(w):
        w[t, i] = np.prod(a[i + 1 : t + 1])
    x = q @ k.T
    i, u, j = np.indices((n, n, n))
    largest = np.maximum(np.maximum(i, u), j)
    keep = {
        "hla2": np.tri(n).T,  # [i, j]: i <= j
        "hla3": (i <= u) & (j <= u),
        "hla3_published": sum(1 * (index == largest) for index in (i, u, j)) >= 2,
    }
    if name == "linear":
        return w * x
    if name.startswith("hla2"):
        allowed = np.ones((n, n)) if "unmasked" in name else keep["hla2"]
        ridge = RIDGE * w * (q @ q.T) if name.endswith("ridge") else 0.0
        return np.einsum("ti,tj,ti,ji,ij->tj", w, w, x, x, allowed) + ridge
    if name == "ahla":
        return np.einsum("ti,ij,ti,ij->tj", w, w, x, x)
    allowed = keep.get(name, np.ones((n, n, n)))
    return np.einsum("ti,tu,tj,ti,ui,uj,iuj->tj", w, w, w, x, x, x, 1.0 * allowed, optimize=True)


def token(name, s, q, k, v, a):
    """One token of one head: state (a dict) -> (state, output)."""
    new = {}
    if "kk" in s:
        new["kk"] = a * s["kk"] + jnp.outer(k, k)
    if "qq" in s:
        new["qq"] = a * s["qq"] + jnp.outer(q, q)
    if "kv" in s:
        new["kv"] = a * s["kv"] + jnp.outer(k, v)
    if "c" in s:
        new["c"] = a * s["c"] + jnp.outer(q, v)
    if name == "linear":
        out = q @ new["kv"]
    elif name in ("hla2", "hla2_ridge"):
        new["f"] = a**2 * s["f"] + jnp.outer(q @ new["kk"], v)
        out = q @ new["f"]
    elif name.startswith("hla2_unmasked"):
        out = (q @ new["kk"]) @ new["c"]
    elif name == "ahla":
        new["e"] = a * s["e"] + jnp.outer(k, q @ new["kv"])
        out = q @ new["e"]
    elif name == "hla3":
        new["f"] = a**3 * s["f"] + jnp.outer(q @ new["kk"], q @ new["kv"])
        out = q @ new["f"]
    elif name == "hla3_unmasked":
        out = ((q @ new["kk"]) @ new["qq"]) @ new["kv"]
    else:  # two of the three indices are this token, or all three are
        kk, qq, kv = a * s["kk"], a * s["qq"], a * s["kv"]
        new["f"] = a**3 * s["f"] + (
            jnp.outer(q @ kk, (q @ k) * v)
            + jnp.outer(k, (k @ qq @ k) * v)
            + jnp.outer(k, (k @ q) * (q @ kv))
            + jnp.outer(k, (k @ q) * (q @ k) * v)
        )
        out = q @ new["f"]
    if name.endswith("ridge"):
        out = out + RIDGE * (q @ new["c"])
    return new, out


def one_head(name, q, k, v, log_decay, keep, restart, state):
    """All tokens of one head: q, k [T, D], v [T, E], the rest [T] -> (outputs, final state)."""

    def body(s, x):
        q, k, v, log_decay, keep, restart = x
        new, out = token(name, s, q, k, v, jnp.where(restart, 0.0, jnp.exp(log_decay)))
        return jax.tree.map(partial(jnp.where, keep), new, s), jnp.where(keep, out, 0.0)

    q, k, v = (jnp.where(keep[:, None], x, 0.0) for x in (q, k, v))
    log_decay = jnp.where(keep, log_decay, 0.0)
    final, out = jax.lax.scan(body, state, (q, k, v, log_decay, keep, restart))
    return out, final


@partial(jax.jit, static_argnames=("name", "normalize"))
def all_heads(name, q, k, v, log_decay, keep, restart, state, *, normalize, eps):
    """A normalised operator carries its masses as one more column of v, equal to 1."""
    if normalize:
        v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], -1)
        masses = {m: state[MASS[m]][..., None] for m in MEMBERS[name] if m in MASS}
        state = {m: state[m] for m in MEMBERS[name]}
        state |= {m: jnp.concatenate([state[m], mass], -1) for m, mass in masses.items()}
    over_heads = jax.vmap(partial(one_head, name), (1, 1, 1, 1, None, None, 0), (1, 0))
    out, final = jax.vmap(over_heads)(q, k, v, log_decay, keep, restart, state)
    if normalize:
        out = out[..., :-1] / (out[..., -1:] + eps)
        masses = {MASS[m]: final[m][..., -1] for m in masses}
        final = masses | {m: x[..., :-1] if m in MASS else x for m, x in final.items()}
    return out, final


def recurrence(
    name, q, k, v, log_decay=0.0, state=None, *,
    mask=None, segment_ids=None, normalize=False, eps=1e-12
):  # fmt: skip
    """The operator `name` in the library's layout, with one axis B; state is a dict.

    Sequences are padded to a common length, so that few programs are compiled.
    """
    (b, t, heads, d), kv_heads, e = q.shape, k.shape[2], v.shape[-1]
    mask = np.ones((b, t), bool) if mask is None else mask
    segment_ids = np.zeros((b, t), int) if segment_ids is None else segment_ids
    restart = np.array([restarts(*row) for row in zip(mask, segment_ids, strict=True)])
    shapes = state_shapes(name, heads=heads, kv_heads=kv_heads, d=d, e=e, normalize=normalize)
    state = state or {m: jnp.zeros((b, *shape)) for m, shape in shapes.items()}

    def tokens(x):
        return jnp.pad(x, [(0, 0), (0, (66 if t <= 66 else 500) - t)] + [(0, 0)] * (x.ndim - 2))

    group = heads // kv_heads
    out, final = all_heads(
        name,
        tokens(q),
        tokens(jnp.repeat(k, group, 2)),
        tokens(jnp.repeat(v, group, 2)),
        tokens(jnp.repeat(jnp.broadcast_to(log_decay, k.shape[:-1]), group, 2)),
        tokens(mask),
        tokens(restart),
        {m: jnp.repeat(x, group, 1) if m in SHARED else x for m, x in state.items()},
        normalize=normalize,
        eps=eps,
    )
    return out[:, :t], {m: x[:, ::group] if m in SHARED else x for m, x in final.items()}
