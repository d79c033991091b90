"""What a function costs: FLOPs counted over its jaxpr, bytes as compiled, and the power of T.

`cost_analysis()` counts the body of a loop once, however often it runs, so that a quadratic loop
passes for a linear one. Here a scan costs its body times its length.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

# What only moves numbers counts one for each number that it makes.
MOVES = {
    "broadcast_in_dim",
    "concatenate",
    "dynamic_slice",
    "expand_dims",
    "gather",
    "iota",
    "pad",
    "random_bits",
    "random_split",
    "random_unwrap",
    "random_wrap",
    "reshape",
    "rev",
    "slice",
    "split",
    "squeeze",
    "transpose",
    "unstack",
}
# These count one for each number that goes in.
REDUCTIONS = {
    *(f"reduce_{kind}" for kind in ("sum", "prod", "max", "min", "and", "or", "xor")),
    *(f"cum{kind}" for kind in ("sum", "prod", "max", "min", "logsumexp")),
    "argmax",
    "argmin",
}
# Their cost cannot be read off the shapes; of some it would look elementwise.
REFUSED = {"cholesky", "fft", "pallas_call", "triangular_solve", "while"}


def flops(function: Callable[..., Any], *args: Any) -> float:
    """Counts what a function does, from its jaxpr alone; args may be ShapeDtypeStructs.

    A matmul is two operations a product; a reduction one for each number that goes in; a sort of n
    numbers n log2 n; a scatter one for each update; anything else one for each number that comes
    out. A scan is its body times its length, a cond its dearest branch.

    Raises:
      ValueError: the function holds a primitive that cannot be counted, as a `while` loop.
    """
    return _flops(jax.make_jaxpr(function)(*args).jaxpr)


def temp_bytes(function: Callable[..., Any], *args: Any) -> int:
    """Bytes of temporaries and outputs of the compiled function; args may be ShapeDtypeStructs."""
    memory = jax.jit(function).lower(*args).compile().memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The p of the fit costs ~ sizes^p: the slope of a line through their logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def _flops(jaxpr: Jaxpr) -> float:
    return sum(_equation(equation) for equation in jaxpr.eqns)


def _equation(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    operands = [v.aval for v in equation.invars]
    results = [v.aval for v in equation.outvars]
    bodies = list(_jaxprs(params))
    out = sum(a.size for a in results)
    if name in REFUSED:
        raise ValueError(f"{name} cannot be counted, got one of {operands}")
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * out * math.prod(operands[0].shape[axis] for axis in contracted)
    if name == "scan":
        return params["length"] * _flops(bodies[0])
    if name == "cond":
        return max(map(_flops, bodies))
    if name in ("sort", "top_k"):
        n = operands[0].shape[params.get("dimension", -1)]
        return operands[0].size * math.log2(max(n, 2))
    if name in REDUCTIONS:
        return operands[0].size
    if name == "dynamic_update_slice":
        return operands[1].size
    if name.startswith("scatter"):
        return operands[2].size
    shapes = [a.shape for a in operands]
    if len(bodies) == 1 and [v.aval.shape for v in bodies[0].invars] == shapes:
        return _flops(bodies[0])  # a call: jit, remat, custom_vjp
    elementwise = not bodies and all(_broadcasts(s, a.shape) for s in shapes for a in results)
    if name in MOVES or elementwise:
        return out
    raise ValueError(f"{name} cannot be counted, got one of {operands}")


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return shape == () or (
        len(shape) == len(to) and all(n in (1, m) for n, m in zip(shape, to, strict=True))
    )


def _jaxprs(params: dict[str, Any]) -> Iterator[Jaxpr]:
    for value in params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            if isinstance(x, ClosedJaxpr | Jaxpr):
                yield x.jaxpr if isinstance(x, ClosedJaxpr) else x
