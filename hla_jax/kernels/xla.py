"""The primitive in XLA: chunked matmuls, and a backward pass that keeps the inputs alone.

The form is chosen where the code is lowered: a loop in place for the CPU, batched products
elsewhere.
"""

from functools import partial
from typing import NamedTuple

import jax
from jax import lax

from hla_jax.kernels import _batched, _loop
from hla_jax.kernels._layout import Operands, Results


class Options(NamedTuple):
    """What is static."""

    chunk_size: int | None
    power: int
    strict: bool
    precision: lax.PrecisionLike


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def chunked(x: Operands, options: Options) -> Results:
    """Causal linear attention in O(T) time and memory, forward and backward."""
    return lax.platform_dependent(
        x,
        cpu=partial(_loop.forward, **options._asdict()),
        default=partial(_batched.forward, starts=_batched.serial_starts, **options._asdict()),
    )


def _forward(x, options):
    return chunked(x, options), x


def _backward(options, x, ct):
    d = lax.platform_dependent(
        x,
        ct,
        cpu=partial(_loop.backward, **options._asdict()),
        default=partial(_batched.backward, **options._asdict()),
    )
    return (jax.tree.map(lambda d, x: d.astype(x.dtype), d, x),)


chunked.defvjp(_forward, _backward)
