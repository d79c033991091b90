"""The one primitive, of which every operator is a cascade: causal linear attention with decay."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hla_jax.kernels import _batched, _plain
from hla_jax.kernels._layout import Operands, Results, vary_like
from hla_jax.kernels._plain import affinities as affinities
from hla_jax.kernels._plain import repeat_heads as repeat_heads
from hla_jax.kernels._plain import weights as weights
from hla_jax.kernels.xla import Options, chunked

IMPLEMENTATIONS = ("xla", "associative", "serial", "quadratic", "pallas")


def causal_linear(
    q: Float[Array, "*B T H D"],
    k: Float[Array, "*B T Hk D"],
    v: Float[Array, "*B T Hv E"],
    w: Float[Array, "*B T Hv"] | None,
    log_decay: Float[Array, "*B T K"] | None,
    P: Float[Array, "*B N D E"],
    m: Float[Array, "*B N D"] | None,
    *,
    power: int = 1,
    strict: bool = False,
    implementation: str | None = None,
    chunk_size: int | None = None,
    precision: lax.PrecisionLike = None,
) -> Results:
    """Returns o_t = sum_{s <= t} w(t, s) (q_t . k_s) v_s + b_t q_t P and the final state.

    With w(t, s) the product of exp(power log_decay) over s < u <= t, and b_t over u <= t. Where `w`
    is given (with `m`), the row mass z, the same sum over `w` in place of `v`, comes from the same
    pass. `strict` sums over s < t. Heads: N, the larger of Hk and Hv, states; Hk and Hv are N or K.

    The arithmetic is in P's dtype, and so are the results.
    """
    run = partial(
        _run,
        implementation=implementation,
        chunk_size=chunk_size,
        power=power,
        strict=strict,
        precision=precision,
    )
    x = Operands(q, k, v, w, log_decay, P, m)
    specs = _explicit_specs(x)
    if specs is None:
        return run(x)
    with jax.sharding.use_abstract_mesh(jax.typeof(q).sharding.mesh):
        return jax.sharding.auto_axes(run, out_sharding=specs)(x)


def _run(x: Operands, *, implementation, chunk_size, **options) -> Results:
    if jax.sharding.get_abstract_mesh().manual_axes:  # inside shard_map
        squares = x.v is x.k
        x = vary_like(x, x)
        x = x._replace(v=x.k) if squares else x
    if implementation == "pallas":
        raise ValueError(
            'implementation="pallas" has no kernel yet, "xla" computes the same numbers'
        )
    T = x.q.shape[x.token_axis]
    if T == 0:
        z = None if x.m is None else jnp.zeros(x.q.shape[:-1], x.P.dtype)
        return Results(jnp.zeros(x.q.shape[:-1] + x.v.shape[-1:], x.P.dtype), z, x.P, x.m)
    match implementation:
        case None if T == 1:
            return _plain.serial(x, **options)
        case None | "xla":
            return chunked(x, Options(chunk_size=chunk_size, **options))
        case "associative":
            starts = _batched.associative_starts
            return _batched.forward(x, starts=starts, chunk_size=chunk_size, **options)
        case "serial":
            return _plain.serial(x, **options)
        case "quadratic":
            return _plain.quadratic(x, **options)
        case _:
            raise ValueError(
                f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}"
            )


def _explicit_specs(x: Operands) -> Results | None:
    """Returns the results' shardings where the operands' types carry some (explicit mesh axes).

    There the compiler is left to shard the inside, as it is for all other axes; outputs lie as q
    does.
    """
    if all(axis is None for a in jax.tree.leaves(x) for axis in jax.typeof(a).sharding.spec):
        return None
    *rows, heads, _ = jax.typeof(x.q).sharding.spec
    # States lie as the operand does that has a head for each of them.
    like = next(a for a in (x.k, x.v, x.q) if a.shape[-2] == x.P.shape[-3])
    o, states = (*rows, heads), (*rows[:-1], jax.typeof(like).sharding.spec[-2])
    spec = jax.sharding.PartitionSpec
    z, m = (None, None) if x.m is None else (spec(*o), spec(*states))
    return Results._make((spec(*o), z, spec(*states), m))
