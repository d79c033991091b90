"""The one primitive, of which every operator is a cascade: causal linear attention with decay."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hla_jax._sharding import has_explicit_axes, left_to_the_compiler, vary_like
from hla_jax.kernels import _batched, _dispatch, _plain
from hla_jax.kernels._dispatch import Options
from hla_jax.kernels._layout import (
    Cascade,
    CascadeResults,
    Operands,
    Results,
    as_cascade,
)
from hla_jax.kernels._plain import affinities as affinities
from hla_jax.kernels._plain import repeat_heads as repeat_heads
from hla_jax.kernels._plain import weights as weights

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
    out_dtype: jnp.dtype | None = None,
) -> Results:
    """Returns o_t = sum_{s <= t} w(t, s) (q_t . k_s) v_s + b_t q_t P and the final state.

    With w(t, s) the product of exp(power log_decay) over s < u <= t, and b_t over u <= t. Where `w`
    is given (with `m`), the row mass z, the same sum over `w` in place of `v`, comes from the same
    pass. `strict` sums over s < t. Heads: N, the larger of Hk and Hv, states; Hk and Hv are N or K.

    The arithmetic is in P's dtype, and so are the results; o is in `out_dtype` where given.
    """
    options = Options(implementation, chunk_size, power, strict, precision, out_dtype)
    # jit takes k and v for two arrays, so it has to be told where they are one.
    return _causal_linear(Operands(q, k, v, w, log_decay, P, m), options, squares=v is k)


# So that a call outside of jit compiles once, see `hla_jax._compiled`.
@partial(jax.jit, static_argnames=("options", "squares"))
def _causal_linear(x: Operands, options: Options, *, squares: bool) -> Results:
    return _sharded(x._replace(v=x.k) if squares else x, options)


def causal_cascade(
    q: Float[Array, "*B T H D"],
    k: Float[Array, "*B T K D"],
    v: Float[Array, "*B T K E"],
    w: Float[Array, "*B T K"] | None,
    log_decay: Float[Array, "*B T K"] | None,
    S: Float[Array, "*B K D D"] | None,
    P: Float[Array, "*B K D E"] | None,
    m: Float[Array, "*B K D"] | None,
    F: Float[Array, "*B H D E"],
    f: Float[Array, "*B H D"] | None,
    *,
    power: int,
    implementation: str | None = None,
    chunk_size: int | None = None,
    precision: lax.PrecisionLike = None,
    out_dtype: jnp.dtype | None = None,
) -> CascadeResults:
    """Two levels of `causal_linear`, in one kernel where there is one for the device.

    U = LA(Q, K, K; S) where S is given, else K
    [R, r] = LA(Q, K, [V, w]; P, m) where P is given, else [V, w]
    O, z = LA_power(Q, U, [R, r]; F, f)
    """
    options = Options(implementation, chunk_size, power, False, precision, out_dtype)
    return _causal_cascade(Cascade(q, k, v, w, log_decay, S, P, m, F, f), options)


@partial(jax.jit, static_argnames="options")
def _causal_cascade(x: Cascade, options: Options) -> CascadeResults:
    if x.q.shape[x.token_axis] and not has_explicit_axes(x) and _dispatch.serves(x, options):
        return _dispatch.fused(_varying(x), options, _stages)
    return _stages(x, options)


def _stages(x: Cascade, options: Options) -> CascadeResults:
    """The definition of a cascade: one level after the other."""
    first, S, P, m = options._replace(power=1, out_dtype=None), None, None, None
    u, r, r_mass = x.k, x.v, x.w
    if x.S is not None:
        u, _, S, _ = _sharded(Operands(x.q, x.k, x.k, None, x.log_decay, x.S, None), first)
    if x.P is not None:
        r, r_mass, P, m = _sharded(Operands(*x[:5], x.P, x.m), first)
    o, z, F, f = _sharded(Operands(x.q, u, r, r_mass, x.log_decay, x.F, x.f), options)
    return CascadeResults(o, z, S, P, m, F, f)


def _sharded(x: Operands, options: Options) -> Results:
    """The primitive, also on explicit mesh axes: there the compiler is left to shard the inside."""
    return left_to_the_compiler(partial(_linear, options=options), x, lambda: _specs(x))


def _linear(x: Operands, options: Options) -> Results:
    x = _varying(x)
    T = x.q.shape[x.token_axis]
    if T == 0:
        z = None if x.m is None else jnp.zeros(x.q.shape[:-1], x.P.dtype)
        o = jnp.zeros(x.q.shape[:-1] + x.v.shape[-1:], options.out_dtype or x.P.dtype)
        return Results(o, z, x.P, x.m)
    match options.implementation:
        case None if T == 1 and not _dispatch.serves(as_cascade(x), options):
            y = _plain.serial(x, **options.mathematical())
        case None | "xla" | "pallas":
            y = _dispatch.linear(x, options)
        case "associative":
            starts = _batched.associative_starts
            y = _batched.forward(x, starts=starts, **options.of_kernels())
        case "serial":
            y = _plain.serial(x, **options.mathematical())
        case _:  # "quadratic"
            y = _plain.quadratic(x, **options.mathematical())
    return y._replace(o=y.o.astype(options.out_dtype or x.P.dtype))


def _varying(x):
    """Returns operands that vary alike over the axes of a `shard_map`."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return x
    squares = x.v is x.k  # by which a stage of squares is told
    x = vary_like(x, x)
    return x._replace(v=x.k) if squares else x


def _specs(x: Operands) -> Results:
    """Returns how the results lie on explicit mesh axes: outputs as q does."""
    *rows, heads, _ = jax.typeof(x.q).sharding.spec
    # States lie as the operand does that has a head for each of them.
    like = next(a for a in (x.k, x.v, x.q) if a.shape[-2] == x.P.shape[-3])
    o, states = (*rows, heads), (*rows[:-1], jax.typeof(like).sharding.spec[-2])
    spec = jax.sharding.PartitionSpec
    z, m = (None, None) if x.m is None else (spec(*o), spec(*states))
    return Results._make((spec(*o), z, spec(*states), m))
