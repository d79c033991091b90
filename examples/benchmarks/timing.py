"""Times calls side by side, and asks the compiler what memory a function takes."""

import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

Call = Callable[[], object]
Clock = Callable[[], float]


def medians(calls: Mapping[str, Call], *, clock: Clock, seconds: float) -> dict[str, float]:
    """Returns the median time of each call in seconds.

    The calls take turns, so that whatever else the machine does falls on all of them alike. Each is
    made for about `seconds` in all, at least three times and at most thirty.
    """
    for call in calls.values():
        _timed(call, clock)  # compiles
    turns = {name: int(seconds / _timed(call, clock)) for name, call in calls.items()}
    turns = {name: max(3, min(30, n)) for name, n in turns.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(max(turns.values())):
        for name, call in calls.items():
            if turn < turns[name]:
                times[name].append(_timed(call, clock))
        _progress(f"turn {turn + 1} of {max(turns.values())}")
    _progress("")
    return {name: statistics.median(t) for name, t in times.items()}


def _timed(call: Call, clock: Clock) -> float:
    time.sleep(0.002)  # the threads of the call before stop waiting for more work
    start = clock()
    jax.block_until_ready(call())
    return clock() - start


def _progress(text: str) -> None:
    print(f"\r  {text:20}\r", end="", file=sys.stderr, flush=True)


def page_faults(call: Call, calls: int = 3) -> float:
    """Returns the page faults of one call."""
    jax.block_until_ready(call())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(calls):
        jax.block_until_ready(call())
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / calls


def peak_bytes(function: Callable[..., Any], *args: Any) -> int:
    """Returns the bytes of a compiled function's arguments, results and temporaries."""
    memory: Any = jax.jit(function).lower(*args).compile().memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
