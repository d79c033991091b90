"""The measurements: B=1, H=8, D=E=64, float32. "Raw" means no feature map and no normaliser."""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import rivals
from jax import lax
from jax.sharding import PartitionSpec
from report import CLOCKS, Setting, Table
from timing import Call, medians, page_faults, peak_bytes

import hla_jax as hla

H, D, E = 8, 64, 64
CHUNK = 32  # which the count of useful operations assumes

Pair = tuple[float, float]  # of forward, and of forward and backward
Operator = Callable[..., Any]  # (q, k, v) -> (outputs, state)
OPERATORS: dict[str, Operator] = {
    "linear_attention": partial(hla.linear_attention, feature_map=None, normalize=False),
    "hla2": hla.hla2,
    "ahla": hla.ahla,
    "hla3": hla.hla3,
}
STEPS: dict[str, Operator] = {
    "linear_attention": partial(hla.linear_attention_step, feature_map=None, normalize=False),
    "hla2": hla.hla2_step,
    "ahla": hla.ahla_step,
    "hla3": hla.hla3_step,
}
LINEAR = OPERATORS["linear_attention"]


def linear(setting: Setting) -> list[Table]:
    """Raw linear attention beside everything else that computes it."""
    threads = len(os.sched_getaffinity(0))
    devices = max(n for n in range(1, H + 1) if H % n == 0 and n <= threads)
    jax.config.update("jax_num_cpu_devices", devices)
    ours = f"hla_jax, heads over {devices} CPU devices" if devices > 1 else "hla_jax"

    lengths = _lengths(setting, 1024, 4096, 16384)
    times: dict[str, list[Pair]] = {}
    peaks: dict[str, list[Pair]] = {}
    for T in lengths:
        arrays = _arrays(T)
        functions = {"hla_jax": _outputs(LINEAR)} | rivals.IN_JAX
        calls = {name: _calls(f, arrays) for name, f in functions.items()}
        if devices > 1:
            operator, placed = _over_all_devices(arrays)
            calls[ours] = _calls(_outputs(operator), placed)
        for name, operator in rivals.in_torch(setting.native).items():
            calls[name] = rivals.torch_cases(operator, arrays, threads)
        measured = _times(calls, setting)
        for name in calls:
            times.setdefault(name, []).append(measured[name])
        for name, f in functions.items():
            forward, both = (
                peak_bytes(_forward(f), *arrays),
                peak_bytes(_forward_backward(f), *arrays),
            )
            peaks.setdefault(name, []).append((forward / 2**20, both / 2**20))

    ratios = {
        name: [_over(time, our) for time, our in zip(row, times[ours], strict=True)]
        for name, row in times.items()
    }
    gemm = _gemm(setting)
    rate = [
        2 * T * H * (CHUNK * D + 2 * D * E) / ms / 1e6
        for T, (ms, _) in zip(lengths, times[ours], strict=True)
    ]
    columns = _columns(lengths)
    tables = [
        Table(f"Raw linear attention, ms, forward / with backward; {setting}", columns, times),
        Table(f"The same as multiples of {ours}", columns, ratios),
        Table(
            f"Useful GFLOP/s, forward; {setting}",
            columns,
            {ours: rate, "matrix product, 2048^3": [gemm] * len(lengths)},
        ),
    ]
    if (setting.cores, setting.malloc) != ("one core", "as it comes"):
        return tables  # memory is the same in every setting
    title = "Arguments, results and temporaries, MiB, forward / with backward"
    return [*tables, Table(title, columns, peaks)]


def orders(setting: Setting) -> list[Table]:
    """The higher orders beside linear attention, all raw."""
    return [_ratios(f"Raw, as multiples of linear_attention; {setting}", OPERATORS, setting)]


def normalised(setting: Setting) -> list[Table]:
    """With elu + 1 and the normaliser, beside raw."""
    operators = {"raw": LINEAR, "elu + 1, normalised": hla.linear_attention}
    return [_ratios(f"linear_attention, as multiples of raw; {setting}", operators, setting)]


def length(setting: Setting) -> list[Table]:
    """Time per token against length, and the page faults that come with it."""
    lengths = _lengths(setting, 1024, 4096, 16384, 65536)
    times: dict[str, list[Pair]] = {name: [] for name in OPERATORS}
    faults: dict[str, list[Pair]] = {name: [] for name in OPERATORS}
    for T in lengths:
        calls = {name: _calls(_outputs(f), _arrays(T)) for name, f in OPERATORS.items()}
        for name, ms in _times(calls, setting).items():
            forward, both = calls[name]
            times[name].append((1000 * ms[0] / T, 1000 * ms[1] / T))
            faults[name].append((page_faults(forward) / T, page_faults(both) / T))
    columns, passes = _columns(lengths), f"forward / with backward; {setting}"
    return [
        Table(f"Raw, microseconds a token, {passes}", columns, times),
        Table(f"Page faults a token, {passes}", columns, faults),
    ]


def memory(setting: Setting) -> list[Table]:
    """What the compiler sets aside for forward and backward."""
    lengths = _lengths(setting, 1024, 4096, 16384, 65536)
    rows = {
        name: [
            peak_bytes(_forward_backward(_outputs(f)), *_shapes(T)) / (4 * T * H * D)
            for T in lengths
        ]
        for name, f in OPERATORS.items()
    }
    title = "Arguments, results and temporaries of forward and backward, in arrays [T, H, D]"
    return [Table(title, _columns(lengths), rows)]


def decode(setting: Setting) -> list[Table]:
    """Steps scanned inside one jit, from several positions."""
    positions = _lengths(setting, 0, 1024, 16384)
    steps = 1000
    tokens = [x.swapaxes(0, 1) for x in _arrays(steps)[:3]]

    @partial(jax.jit, static_argnums=0)
    def run(name, state, *tokens):
        def step(state, token):
            o, state = STEPS[name](*token, state)
            return state, o

        return lax.scan(step, state, tokens)

    rows: dict[str, list[float]] = {name: [] for name in STEPS}
    for T in positions:
        states = {name: OPERATORS[name](*_arrays(T)[:3])[1] for name in STEPS}
        calls = {name: partial(run, name, states[name], *tokens) for name in STEPS}
        for name, seconds in _medians(calls, setting).items():
            rows[name].append(1e6 * seconds / steps)
    columns = [f"from position {T}" for T in positions]
    return [Table(f"Decoding, microseconds a token; {setting}", columns, rows)]


def _ratios(title: str, operators: dict[str, Operator], setting: Setting) -> Table:
    """Returns a table of times as multiples of those of the first operator."""
    lengths = _lengths(setting, 1024, 4096, 16384)
    first, *others = operators
    rows: dict[str, list[Pair]] = {name: [] for name in others}
    for T in lengths:
        calls = {name: _calls(_outputs(f), _arrays(T)) for name, f in operators.items()}
        times = _times(calls, setting)
        for name in others:
            rows[name].append(_over(times[name], times[first]))
    return Table(f"{title}, forward / with backward", _columns(lengths), rows)


def _lengths(setting: Setting, *lengths: int) -> list[int]:
    return [T // 8 for T in lengths[:2]] if setting.quick else list(lengths)


def _columns(lengths: list[int]) -> list[str]:
    return [f"T={T}" for T in lengths]


def _shapes(T: int) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of q, k, v and the output's cotangent."""
    return [jax.ShapeDtypeStruct((1, T, H, width), np.float32) for width in (D, D, E, E)]


def _arrays(T: int) -> list[jax.Array]:
    random = np.random.default_rng(0)
    return [jax.device_put(random.standard_normal(x.shape, x.dtype) / 8) for x in _shapes(T)]


def _outputs(operator: Operator) -> Callable[..., jax.Array]:
    return lambda q, k, v: operator(q, k, v)[0]


def _forward(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    return lambda q, k, v, do: function(q, k, v)


def _forward_backward(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    def run(q, k, v, do):
        o, pullback = jax.vjp(function, q, k, v)
        return o, pullback(do)

    return run


def _calls(function: Callable[..., jax.Array], arrays: list[jax.Array]) -> tuple[Call, Call]:
    """Returns compiled calls of forward and of forward and backward."""
    passes = _forward(function), _forward_backward(function)
    return partial(jax.jit(passes[0]), *arrays), partial(jax.jit(passes[1]), *arrays)


def _over_all_devices(arrays: list[jax.Array]) -> tuple[Callable[..., Any], list[jax.Array]]:
    """Returns linear attention over every device, and its arguments, each where it is wanted."""
    mesh = jax.make_mesh((jax.device_count(),), ("heads",))
    operator = hla.parallel.sharded(LINEAR, mesh, heads="heads")
    sharding = jax.NamedSharding(mesh, PartitionSpec(None, None, "heads"))
    return operator, jax.device_put(arrays, sharding)


def _times(calls: dict[str, tuple[Call, Call]], setting: Setting) -> dict[str, Pair]:
    """Returns the median milliseconds of both calls of each name, all interleaved."""
    flat = {f"{name}{i}": call for name, pair in calls.items() for i, call in enumerate(pair)}
    t = _medians(flat, setting)
    return {name: (1000 * t[f"{name}0"], 1000 * t[f"{name}1"]) for name in calls}


def _medians(calls: Mapping[str, Call], setting: Setting) -> dict[str, float]:
    clock = time.process_time if CLOCKS[setting.cores] == "CPU" else time.perf_counter
    return medians(calls, clock=clock, seconds=0.02 if setting.quick else 1)


def _over(times: Pair, base: Pair) -> Pair:
    return times[0] / base[0], times[1] / base[1]


def _gemm(setting: Setting) -> float:
    """Returns the GFLOP/s of a 2048 x 2048 x 2048 product."""
    x = jax.device_put(np.ones((2048, 2048), np.float32))
    seconds = _medians({"gemm": partial(jax.jit(lambda x: x @ x), x)}, setting)["gemm"]
    return 2 * 2048**3 / seconds / 1e9
