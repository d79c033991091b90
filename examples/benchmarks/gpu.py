"""Checks every kernel on the card that is here, then times it beside others; prints Markdown.

    python examples/benchmarks/gpu.py > gpu.md            about a quarter of an hour
    python examples/benchmarks/gpu.py --minutes 5         what fits into five minutes
    python examples/benchmarks/gpu.py --tiny              does it run? TPU kernels, interpreted

Others take part if they can be imported: jax-linear-attention, and flash-linear-attention with
PyTorch, whose first call tunes its kernels for some minutes. FlashAttention is cuDNN's.

Compilation runs on all cores; the timed calls take turns. What does not run is said, and left out.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from itertools import product
from typing import Any, NamedTuple

# PyTorch needs the rest of the card's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

import jax
import jax.numpy as jnp
import numpy as np
import roofline
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from report import Table, markdown
from timing import medians

import hla_jax as hla

Operator = Callable[..., Any]
OPERATORS: dict[str, Operator] = {
    "linear attention": partial(hla.linear_attention, feature_map=None, normalize=False),
    "HLA2": hla.hla2,
    "AHLA": hla.ahla,
    "HLA3": hla.hla3,
}
PASSES = ("forward", "with backward")
TINY_OPERATORS = ("linear attention", "AHLA")
CHUNK_SIZE = 64  # which the count of useful operations assumes


class Program(NamedTuple):
    """A call on the device, and what waits for its end."""

    call: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready


class Source(NamedTuple):
    """A function to be compiled, and its arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def compiled(sources: Mapping[str, Source]) -> dict[str, Program | Exception]:
    """Compiles all side by side; returns the error of what does not compile in its place."""
    found: dict[str, Program | Exception] = {}
    with ThreadPoolExecutor() as pool:
        compiling = {}
        for name, (function, arguments) in sources.items():
            try:
                compiling[name] = pool.submit(jax.jit(function).lower(*arguments).compile)
            except Exception as error:
                found[name] = error
        for name, future in compiling.items():
            try:
                found[name] = Program(partial(future.result(), *sources[name].arguments))
            except Exception as error:
                found[name] = error
    return found


def working(programs: Mapping[str, Program | Exception]) -> dict[str, Program]:
    """Returns those that compile and run, and says what the others lack."""
    found = {}
    for name, program in programs.items():
        try:
            if isinstance(program, Exception):
                raise program
            program.wait(program.call())
            found[name] = program
        except Exception as error:
            say(f"{name}: left out, {reason(error)}")
    return found


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# Numbers.


class Case(NamedTuple):
    """What a check runs on."""

    shape: tuple[int, int, int, int, int, int]  # B, T, query heads, kv heads, D, E
    dtype: str
    options: dict[str, Any]

    @property
    def limits(self) -> list[float]:
        """The largest RMS(error) / RMS(reference) of outputs, final state and gradients.

        That is a few roundings of what is multiplied, to bfloat16 or TF32. The two parts of the
        gradient of a quotient cancel, which leaves more of them.
        """
        limit = {"bfloat16": 2e-2}.get(self.dtype, 5e-3)
        if self.options.get("precision") == lax.Precision.HIGHEST:
            limit = 2e-5
        return [limit, limit, 3 * limit if self.options.get("normalize") else limit]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={x}" for name, x in self.options.items())
        return f"{self.dtype} {self.shape} {options}"


EXACT = lax.Precision.HIGHEST
CASES = [  # few heads with many chunks, many heads, widths that need padding, one token too many
    Case((1, 1000, 4, 4, 64, 64), "bfloat16", {}),
    Case((1, 1000, 4, 2, 128, 128), "bfloat16", {"normalize": True}),
    Case((4, 200, 64, 64, 64, 64), "bfloat16", {"normalize": True}),
    Case((4, 129, 64, 16, 128, 64), "bfloat16", {}),
    Case((1, 65, 4, 4, 256, 256), "bfloat16", {}),
    Case((2, 333, 6, 2, 80, 48), "float16", {"normalize": True}),
    Case((2, 333, 6, 2, 64, 64), "float32", {}),
    Case((2, 333, 6, 2, 64, 128), "float32", {"normalize": True, "precision": EXACT}),
]
TINY_CASES = [
    Case((1, 40, 2, 1, 16, 8), "float32", {"normalize": True, "precision": EXACT, "chunk_size": 16})
]


def check(
    case: Case, operators: Mapping[str, Operator], rng: np.random.Generator
) -> tuple[dict[str, list[float]], bool]:
    """Compares "pallas" with dense weights in float64: outputs, final state, and all gradients.

    Returns the errors of each operator that has a kernel, and whether all are as they should be.
    """
    inputs = {name: draw(operator, case, rng) for name, operator in operators.items()}
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), inputs)

    def sources(implementation, arguments):
        options = case.options | {"implementation": implementation}
        return {
            name: Source(with_gradients(partial(operator, **options)), arguments[name])
            for name, operator in operators.items()
        }

    programs = compiled(sources("pallas", inputs))
    with jax.enable_x64(True):
        references = working(compiled(sources("quadratic", exact)))
    rows, good = {}, True
    for name in operators:
        label, program = f"{name}, {case}", programs[name]
        if isinstance(program, ValueError):
            say(f"{label}: left out, {reason(program)}")
            continue
        try:
            if isinstance(program, Exception):
                raise program
            poison()
            (out, state), gradients = jax.block_until_ready(program.call())
            with jax.enable_x64(True):
                expected = references[name].call()
        except Exception as error:
            say(f"{label}: FAILS, {reason(error)}")
            good = False
            continue
        parts = zip((out, state, gradients), (*expected[0], expected[1]), strict=True)
        rows[label] = [worst_error(*part) for part in parts]
        if any(e > limit for e, limit in zip(rows[label], case.limits, strict=True)):
            say(f"{label}: WRONG, the limits are {case.limits}")
            good = False
    return rows, good


def draw(operator: Operator, case: Case, rng: np.random.Generator) -> tuple[Any, Any]:
    """Returns random inputs (q, k, v, log_decay, initial_state) and cotangents of the results."""
    B, T, H, K, D, E = case.shape
    normalize = case.options.get("normalize", False)

    def normal(shape, dtype, positive=False):
        x = rng.standard_normal(shape)
        return jnp.asarray(np.abs(x) if positive else x, dtype)

    q = normal((B, T, H, D), case.dtype, positive=normalize)
    k = normal((B, T, K, D), case.dtype, positive=normalize)
    v = normal((B, T, K, E), case.dtype)
    log_decay = -rng.uniform(0, 0.5, (B, T, K))
    log_decay[rng.random((B, T, K)) < 0.01] = -np.inf
    log_decay = jnp.asarray(log_decay, jnp.float32)
    run = partial(operator, log_decay=log_decay, normalize=normalize)
    out, state = jax.eval_shape(run, q, k, v)
    cotangents = jax.tree.map(lambda x: normal(x.shape, x.dtype), (out, state))
    state = jax.tree.map(lambda x: normal(x.shape, x.dtype, positive=normalize), state)
    return (q, k, v, log_decay, state), cotangents


def with_gradients(operator: Operator) -> Callable[..., Any]:
    """Returns a function of inputs and cotangents that gives results and gradients."""

    def run(inputs, cotangents):
        def results(q, k, v, log_decay, state):
            return operator(q, k, v, log_decay=log_decay, initial_state=state)

        y, pullback = jax.vjp(results, *inputs)
        return y, pullback(cotangents)

    return run


def poison() -> None:
    """Leaves NaN in the memory that is allocated next, so that what is not written shows."""
    size = 2**28 if jax.default_backend() == "gpu" else 2**20
    jax.block_until_ready(jnp.full(size, jnp.nan))


def worst_error(actual: Any, expected: Any) -> float:
    """Returns the largest RMS(error) / RMS(reference) of the arrays."""

    def error(x, y):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        e = np.sqrt(np.mean((x - y) ** 2) / np.mean(y**2))
        return e if np.isfinite(e) else np.inf

    return float(max(jax.tree.leaves(jax.tree.map(error, actual, expected))))


# Speed.


class Shape(NamedTuple):
    """What is timed: B sequences of T tokens, H heads of widths D = E, in bfloat16."""

    B: int
    T: int
    H: int
    D: int

    def __str__(self) -> str:
        return f"B={self.B}, T={self.T}, H={self.H}, D=E={self.D}"


SHAPES = [
    Shape(B, T, 16, D)
    for B, T in ((4, 8192), (1, 2048), (16, 2048), (1, 65536), (16, 16384), (4, 65536))
    for D in (64, 128)
]
TINY_SHAPES = [Shape(1, 20, 1, 16)]


def arrays(shape: Shape, rng: np.random.Generator) -> tuple[jax.Array, ...]:
    """Returns q, k, v, log_decay and the outputs' cotangent."""
    heads = shape[:3]
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), 5)
    q, k, v, do = (
        jax.random.normal(key, (*heads, shape.D), jnp.bfloat16) / shape.D**0.5 for key in keys[:4]
    )
    log_decay = -jax.random.uniform(keys[4], heads, maxval=0.1)
    return q, k, v, log_decay, do


def ours(name: str) -> dict[str, Operator]:
    """Returns an operator's forms: its kernels, a cascade by hand, and XLA."""
    operator = OPERATORS[name]
    la = partial(OPERATORS["linear attention"], implementation="pallas")

    def by_hand(q, k, v, *, log_decay):
        a = log_decay
        match name:
            case "HLA2":
                return la(q, la(q, k, k, log_decay=a)[0], v, log_decay=2 * a)
            case "AHLA":
                return la(q, k, la(q, k, v, log_decay=a)[0], log_decay=a)
            case "HLA3":
                u, r = la(q, k, k, log_decay=a)[0], la(q, k, v, log_decay=a)[0]
                return la(q, u, r, log_decay=3 * a)

    forms = {"pallas": partial(operator, implementation="pallas")}
    if name != "linear attention":
        forms["pallas, linear attention after linear attention"] = by_hand
    return forms | {"xla": partial(operator, implementation="xla")}


def peers_in_jax() -> dict[str, Operator]:
    """Returns what else computes linear attention with decay, on JAX's arrays."""
    if missing("jla", "jax-linear-attention"):
        return {}
    from jla.ops import linear_attention

    def simple_gla(q, k, v, *, log_decay):
        return linear_attention("simple_gla", q, k, v, g=log_decay, scale=1.0, impl="mosaic_gpu")

    return {"jax-linear-attention, simple_gla": simple_gla}


def peers_in_torch() -> dict[str, Operator]:
    """Returns the same on PyTorch's tensors."""
    if missing("torch", "PyTorch") or missing("fla", "flash-linear-attention"):
        return {}
    from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

    return {
        "flash-linear-attention, chunk_simple_gla": partial(chunk_simple_gla, scale=1.0),
        "flash-linear-attention, fused_recurrent": partial(fused_recurrent_simple_gla, scale=1.0),
    }


def softmax(q, k, v, *, log_decay):
    """Softmax attention, which knows no decay, in cuDNN."""
    return (jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn"),)


def missing(module: str, name: str) -> bool:
    """Returns whether a module is not installed, and says so."""
    if importlib.util.find_spec(module) is not None:
        return False
    say(f"{name}: left out, not installed")
    return True


def jax_programs(operators: Mapping[str, Operator], given: tuple[jax.Array, ...]):
    """Returns the programs of forward, and of forward and backward, as "name, pass"."""

    def forward(operator):
        return lambda q, k, v, log_decay, do: operator(q, k, v, log_decay=log_decay)[0]

    def both(operator):
        def run(q, k, v, log_decay, do):
            o, pullback = jax.vjp(
                lambda q, k, v, a: operator(q, k, v, log_decay=a)[0], q, k, v, log_decay
            )
            return o, pullback(do)

        return run

    sources = {
        f"{name}, {label}": Source(passes(operator), given)
        for name, operator in operators.items()
        for label, passes in zip(PASSES, (forward, both), strict=True)
    }
    return compiled(sources)


def torch_programs(operators: Mapping[str, Operator], given: tuple[jax.Array, ...]):
    """Returns the same for operators on PyTorch's tensors, which share the arrays' memory."""
    if not operators:
        return {}
    import torch

    q, k, v, g, do = (torch.from_dlpack(x) for x in jax.block_until_ready(given))
    leaves = [x.detach().requires_grad_() for x in (q, k, v, g)]

    def forward(operator):
        with torch.no_grad():
            return operator(q, k, v, g)[0]

    def both(operator):
        o = operator(*leaves)[0]
        return o, torch.autograd.grad(o, leaves, do)

    def wait(_):
        torch.cuda.synchronize()

    return {
        f"{name}, {label}": Program(partial(run, operator), wait)
        for name, operator in operators.items()
        for label, run in zip(PASSES, (forward, both), strict=True)
    }


def timed(programs: Mapping[str, Program | Exception], seconds: float) -> dict[str, float]:
    """Returns the median milliseconds of each program that runs."""
    calls, counts = {}, {}
    for name, program in working(programs).items():
        start = time.perf_counter()
        program.wait(program.call())
        # As many calls in a row as hide what the host does between them.
        counts[name] = max(1, min(50, int(0.01 / (time.perf_counter() - start))))
        calls[name] = partial(repeated, program, counts[name])
    times = medians(calls, clock=time.perf_counter, seconds=seconds) if calls else {}
    return {name: 1000 * t / counts[name] for name, t in times.items()}


def repeated(program: Program, count: int) -> None:
    for _ in range(count):
        results = program.call()
    program.wait(results)


def agreement(shape: Shape, rng: np.random.Generator) -> Table:
    """Compares the peers' outputs with dense weights in float64: do they compute the same?"""
    given = arrays(shape, rng)
    with jax.enable_x64(True):
        q, k, v, log_decay, _ = (np.asarray(x, np.float64) for x in given)
        dense = partial(OPERATORS["linear attention"], implementation="quadratic")
        expected, _ = jax.jit(dense)(q, k, v, log_decay=log_decay)
    programs = jax_programs(peers_in_jax(), given) | torch_programs(peers_in_torch(), given)
    rows = {}
    for name, program in working(programs).items():
        if name.endswith(PASSES[0]):
            program.wait(o := program.call())
            rows[name] = [worst_error(jnp.from_dlpack(o), expected)]
    return Table("RMS(error) / RMS(float64 reference) of others", ["outputs"], rows)


def speed(name: str, shape: Shape, ceilings: tuple[float, float], seconds: float) -> Table:
    """Times an operator's forms, and for linear attention the peers and softmax attention."""
    given = arrays(shape, np.random.default_rng())
    operators = ours(name)
    programs = {}
    if name == "linear attention":
        operators |= peers_in_jax() | {"softmax attention, cuDNN": softmax}
        programs = torch_programs(peers_in_torch(), given)
    ms = timed(jax_programs(operators, given) | programs, seconds)
    limits = [1000 * t * shape.B * shape.T * shape.H for t in ideal(name, shape, ceilings)]
    names = dict.fromkeys(label.rsplit(", ", 1)[0] for label in ms)
    rows = {}
    for row in names:
        pair = [ms.get(f"{row}, {label}", np.nan) for label in PASSES]
        shares = (100 * limit / t for limit, t in zip(limits, pair, strict=True))
        rows[row] = [tuple(pair), tuple(shares)]
    columns = ["ms", "% of the roofline"]
    return Table(f"{name}, {shape}: {PASSES[0]} / {PASSES[1]}", columns, rows)


def ideal(name: str, shape: Shape, ceilings: tuple[float, float]) -> tuple[float, float]:
    """Returns the least time of a token and head: each array moved once, useful operations."""
    rate, bandwidth = ceilings
    s = roofline.Sizes(shape.D, shape.D, CHUNK_SIZE)
    forward = max(8 * s.D / bandwidth, roofline.fused(name, s).flops / rate)
    backward = max(14 * s.D / bandwidth, roofline.cascade_backward(name, s).flops / rate)
    return forward, forward + backward


def measured_ceilings(tiny: bool) -> tuple[float, float]:
    """Returns FLOP/s of a bfloat16 product and bytes/s of a copy."""
    n, size = (64, 2**12) if tiny else (8192, 2**29)
    x = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    y = jnp.ones(size, jnp.float32)
    programs = compiled(
        {"product": Source(jnp.matmul, (x, x)), "copy": Source(lambda y: y + 1, (y,))}
    )
    ms = timed(programs, 0.02 if tiny else 1)
    return 2e3 * n**3 / ms["product"], 8e3 * size / ms["copy"]


def versions() -> str:
    """Returns the versions of everything that takes part."""
    names = ("hla-jax", "jax", "jax-linear-attention", "flash-linear-attention", "torch", "triton")
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    return ", ".join(f"{name} {installed[name]}" for name in names if name in installed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU interpreted")
    parser.add_argument("--minutes", type=float, default=14, help="start nothing new after so many")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    rng = np.random.default_rng()
    interpreted = args.tiny and jax.default_backend() == "cpu"
    with pltpu.force_tpu_interpret_mode() if interpreted else contextlib.nullcontext():
        print(f"{date.today()}, {jax.devices()[0].device_kind}, {versions()}\n", flush=True)
        operators = {n: f for n, f in OPERATORS.items() if n in TINY_OPERATORS or not args.tiny}
        checks = [check(case, operators, rng) for case in (TINY_CASES if args.tiny else CASES)]
        errors = {name: row for rows, _ in checks for name, row in rows.items()}
        columns = ["outputs", "final state", "gradients"]
        table = Table("RMS(error) / RMS(float64 reference) of `pallas`", columns, errors)
        print(*markdown(table), sep="\n", flush=True)
        shape = TINY_SHAPES[0] if args.tiny else Shape(2, 512, 4, 64)
        print(*markdown(agreement(shape, rng)), sep="\n", flush=True)
        rate, bandwidth = measured_ceilings(args.tiny)
        print(
            f"A bfloat16 matrix product runs at {rate / 1e12:.3g} TFLOP/s, "
            f"a copy at {bandwidth / 1e12:.3g} TB/s.\n",
            flush=True,
        )
        for shape, name in product(TINY_SHAPES if args.tiny else SHAPES, operators):
            if time.monotonic() > end:
                say(f"{name}, {shape}: left out, no time")
                continue
            table = speed(name, shape, (rate, bandwidth), 0.02 if args.tiny else 0.3)
            print(*markdown(table), sep="\n", flush=True)
    if not all(good for _, good in checks):
        sys.exit("some kernels fail, see above")


if __name__ == "__main__":
    main()
