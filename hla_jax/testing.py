"""Checks to run on your own monoids, operators and layers.

Each draws its random choices from a fixed seed, and raises AssertionError saying what differs,
where and by how much. All but `check_causal` compute in float64, whatever the inputs' dtype and
whether or not 64-bit types are enabled. Two results agree if RMS(difference) / RMS(expected) is at
most eps^(2/3), with the eps of their dtype: 4e-11 in float64, 2e-5 where float32 is forced inside.
Each call compiles what it is given, also if it was given before.
"""

from collections.abc import Callable
from functools import partial, reduce
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hla_jax import scan
from hla_jax.scan import Monoid, Tokens


def check_monoid(m: Monoid, tokens: Tokens, *, reference: Callable[..., Any] | None = None) -> None:
    """Checks a monoid: identity, associativity, summaries and, given a reference, its outputs.

    The laws hold for many a wrong operator: only a reference can tell that the right sums are kept.

    Args:
      m: the monoid.
      tokens: as in `hla_jax.scan.serial`, at least 3; with decays that differ, where there are any.
      reference: reference(*tokens) -> what `m.read` gives along the sequence, by definition.

    Raises:
      AssertionError: a law is broken, or `m.summarise` or an output is wrong.
      ValueError: there are fewer than 3 tokens.

    Example:
      >>> import jax.numpy as jnp
      >>> from types import SimpleNamespace
      >>> from hla_jax.testing import check_monoid
      >>> def running(combine):
      ...     return SimpleNamespace(
      ...         identity=jnp.zeros_like, lift=lambda x: x, combine=combine, read=lambda s, x: s
      ...     )
      >>> x = jnp.array([1.0, 2.0, 3.0, 4.0])
      >>> check_monoid(running(lambda a, b: a + b), (x,), reference=jnp.cumsum)
      >>> check_monoid(running(lambda a, b: a + b / 2), (x,))  # doctest: +ELLIPSIS
      Traceback (most recent call last):
        ...
      AssertionError: combine(identity, element) of token 3: ...
    """
    with jax.enable_x64(True):
        tokens = _double(tuple(tokens))
        length = _length(tokens, 0, at_least=3)
        lift, combine = jax.jit(m.lift), jax.jit(m.combine)
        elements = [lift(*_cut(tokens, t)) for t in range(length)]
        prefixes = list(accumulate(elements, combine))

        one = m.identity(jax.eval_shape(lambda: elements[0]))
        for name, x in (f"token {length - 1}", elements[-1]), ("all tokens", prefixes[-1]):
            _compare(m.identity(x), one, f"identity like the element of {name}")
            _compare(combine(one, x), x, f"combine(identity, element) of {name}")
            _compare(combine(x, one), x, f"combine(element, identity) of {name}")

        rng = np.random.default_rng(0)
        windows = [sorted(rng.choice(length - 2, 2)) for _ in range(6)]
        for start, last in [(0, 0), *windows, (0, length - 3)]:
            window = slice(start, last + 3)
            expected = reduce(combine, elements[window])
            brackets, x = _bracket(combine, elements[window], range(length)[window], rng)
            _compare(x, expected, f"tokens combined as {brackets}, against left to right")
            if hasattr(m, "summarise"):
                x = m.summarise(*_cut(tokens, window))
                _compare(x, expected, f"summarise of tokens {window.start} to {window.stop - 1}")

        if reference is not None:
            prefixes = jax.tree.map(lambda *x: jnp.stack(x), *prefixes)
            out = jax.vmap(m.read)(prefixes, *tokens)
            _compare(out, reference(*tokens), "outputs")


def check_scan_equals_serial(m: Monoid, tokens: Tokens) -> None:
    """Checks that every engine of `hla_jax.scan` gives what `serial` gives.

    Compares outputs, the final element and the gradients of both, from an initial element and in
    chunks that do not divide the sequence.

    Args:
      m: the monoid.
      tokens: as in `hla_jax.scan.serial`, at least 3; a few are enough.

    Raises:
      AssertionError: an engine disagrees with `serial`.
      ValueError: there are fewer than 3 tokens.

    Example:
      >>> import jax.numpy as jnp
      >>> from hla_jax import monoids
      >>> from hla_jax.testing import check_scan_equals_serial
      >>> x = jnp.array([[1.0], [-2.0], [3.0], [0.5]])
      >>> check_scan_equals_serial(monoids.Linear(), (x, x, x, jnp.array([0.0, -1.0, -2.0, 0.0])))
    """
    with jax.enable_x64(True):
        tokens = _double(tuple(tokens))
        length = _length(tokens, 0, at_least=3)
        chunk_size = 3 if length % 2 == 0 and length % 3 else 2
        _, initial = scan.serial(m, tokens)

        def run(engine: Any) -> _Result:
            def both(tokens: Any, initial: Any) -> Any:
                out, final = engine(m, tokens, initial=initial)
                return {"outputs": out, "final": final}

            return jax.jit(_with_gradients(both))(tokens, initial)

        expected = run(scan.serial)
        _compare(run(scan.associative), expected, "associative")
        _compare(run(partial(scan.chunked, chunk_size=chunk_size)), expected, "chunked")


def check_causal(fn: Callable[..., Any], inputs: tuple[Any, ...], *, axis: int) -> None:
    """Checks that what comes later changes no earlier output and gets no gradient from it.

    Args:
      fn: fn(*inputs) -> out; called in the inputs' dtypes.
      inputs: arrays (or pytrees of them), all with the tokens along `axis`; at least 2. Later
        tokens are replaced by others of the same array, four times as large where floating.
      axis: the axis of the tokens, in inputs and outputs.

    Raises:
      AssertionError: an output depends on a later input by more than rounding, or a gradient that
        should be exactly 0 is not.
      ValueError: axes of tokens differ in length, or hold fewer than 2 tokens.

    Example:
      >>> import jax.numpy as jnp
      >>> from hla_jax.testing import check_causal
      >>> x = jnp.arange(1.0, 5.0)
      >>> check_causal(jnp.cumsum, (x,), axis=0)
      >>> check_causal(lambda x: x / x.max(), (x,), axis=0)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
        ...
      AssertionError: outputs of tokens before 1, after a change of the others: ...
    """
    # NumPy's arrays, for each length of a slice of JAX's would be compiled on its own.
    inputs = jax.tree.map(np.asarray, tuple(inputs))
    length = _length(inputs, axis, at_least=2)
    forward = jax.jit(fn)
    expected = jax.device_get(forward(*inputs))
    if _length(expected, axis) != length:
        raise ValueError(f"fn must give {length} outputs along axis {axis}, as many as inputs")

    @jax.jit
    def gradients(cut: Any, inputs: Any) -> Any:
        def before(*inputs: Any) -> Any:
            early = jnp.arange(length) < cut
            return jax.tree.map(lambda x: jnp.where(_along(early, x, axis), x, 0), fn(*inputs))

        return _with_gradients(before)(*inputs).gradient

    rng = np.random.default_rng(0)
    for cut in np.unique(np.linspace(1, length - 1, 8).astype(int)):
        first, later = slice(cut), slice(cut, None)

        def changed(x: Any, first: slice = first, count: int = length - cut) -> Any:
            others = np.take(x, rng.integers(length, size=count), axis)
            others = 4 * others if _inexact(x) else others
            return np.concatenate([_cut(x, first, axis), others], axis)

        out = jax.device_get(forward(*jax.tree.map(changed, inputs)))
        what = f"outputs of tokens before {cut}, after a change of the others"
        _compare(_cut(out, first, axis), _cut(expected, first, axis), what)
        grads = _cut(jax.device_get(gradients(cut, inputs)), later, axis)
        what = f"gradient of outputs before token {cut}, to inputs from there on"
        _compare(grads, jax.tree.map(np.zeros_like, grads), what, floor=0.0)


def check_resume(fn: Callable[..., Any], inputs: tuple[Any, ...], *, axis: int) -> None:
    """Checks that a sequence may be cut anywhere, the state being handed from piece to piece.

    Compares outputs, final state, and the gradients of both with respect to inputs and state; from
    no state and from one that is not zero.

    Args:
      fn: fn(*inputs, state) -> (out, state), where a state of None means the beginning.
      inputs: arrays (or pytrees of them), all with the tokens along `axis`; at least 3 tokens.
      axis: the axis of the tokens, in inputs and outputs.

    Raises:
      AssertionError: the pieces give something else than one pass.
      ValueError: axes of tokens differ in length, or hold fewer than 3 tokens.

    Example:
      >>> import jax.numpy as jnp
      >>> from hla_jax.testing import check_resume
      >>> def cumsum(x, state):
      ...     out = jnp.cumsum(x) + (0 if state is None else state)
      ...     return out, out[-1]
      >>> x = jnp.array([1.0, 2.0, 3.0, 4.0])
      >>> check_resume(cumsum, (x,), axis=0)
      >>> def forgetful(x, state):
      ...     return jnp.cumsum(x), x.sum()
      >>> check_resume(forgetful, (x,), axis=0)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
        ...
      AssertionError: cut at [1, 3] and resumed, from no state: value.outputs: ...
    """
    with jax.enable_x64(True):
        inputs = _double(tuple(inputs))
        length = _length(inputs, axis, at_least=3)

        def in_pieces(cuts: tuple[int, ...]) -> Callable[..., Any]:
            def run(inputs: Any, state: Any) -> Any:
                outputs = []
                for start, stop in pairwise((0, *cuts, length)):
                    out, state = fn(*_cut(inputs, slice(start, stop), axis), state)
                    outputs.append(out)
                out = jax.tree.map(lambda *x: jnp.concatenate(x, axis), *outputs)
                return {"outputs": out, "state": state}

            return jax.jit(_with_gradients(run))

        one_pass = in_pieces(())
        cases = (
            ("no state", None, (1, length - 1)),
            ("a state", fn(*inputs, None)[1], (1, length // 2 + 1)),
        )
        for start, state, cuts in cases:
            what = f"cut at {list(cuts)} and resumed, from {start}"
            _compare(in_pieces(cuts)(inputs, state), one_pass(inputs, state), what)


def check_grads(
    fn: Callable[..., Any],
    inputs: tuple[Any, ...],
    *,
    reference: Callable[..., Any] | None = None,
) -> None:
    """Checks reverse-mode gradients: those of a random sum of the outputs.

    Args:
      fn: fn(*inputs) -> out, a pytree. Finite differences need one that stays in float64.
      inputs: arrays (or pytrees of them); the floating ones are differentiated.
      reference: a function of the same inputs and outputs that JAX differentiates right; None
        compares with central differences, along random directions, to a relative 1e-6.

    Raises:
      AssertionError: a gradient is wrong (or an output is not the reference's).
      ValueError: finite differences are asked for, and an output is not float64.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from hla_jax.testing import check_grads
      >>> @jax.custom_vjp
      ... def square(x):
      ...     return x**2
      >>> square.defvjp(lambda x: (x**2, x), lambda x, g: (x * g,))
      >>> check_grads(jnp.square, (jnp.arange(3.0),))
      >>> check_grads(square, (jnp.arange(3.0),))  # doctest: +ELLIPSIS
      Traceback (most recent call last):
        ...
      AssertionError: gradient of input 0, along 4 directions: ...
    """
    with jax.enable_x64(True):
        inputs = _double(tuple(inputs))
        actual = jax.jit(_with_gradients(fn))(*inputs)
        if reference is not None:
            expected = jax.jit(_with_gradients(reference))(*inputs)
            _compare(actual, expected, "fn against reference")
            return

        dtypes = {str(x.dtype) for x in jax.tree.leaves(actual.value) if _inexact(x)}
        if dtypes != {"float64"}:
            raise ValueError(f"fn must compute in float64, or have a reference, got {dtypes}")
        total = jax.jit(lambda *inputs: _random_sum(fn(*inputs)))
        rng = np.random.default_rng(0)
        step, floor = 1e-5, 1e-9 * (1 + abs(float(total(*inputs))))
        leaves = jax.tree.leaves_with_path(inputs)
        gradients = jax.tree.leaves(actual.gradient)
        for n, ((path, x), gradient) in enumerate(zip(leaves, gradients, strict=True)):
            if not _inexact(x):
                continue

            def shifted(by: Any, n: int = n) -> Any:
                moved = [y + by if i == n else y for i, (_, y) in enumerate(leaves)]
                return total(*jax.tree.unflatten(jax.tree.structure(inputs), moved))

            directions = rng.choice([-1.0, 1.0], (4, *x.shape))
            slopes = [(shifted(step * d) - shifted(-step * d)) / (2 * step) for d in directions]
            along = jnp.stack([jnp.sum(gradient * d) for d in directions])
            what = f"gradient of input {_name(path)}, along 4 directions"
            _compare(along, jnp.stack(slopes), what, tolerance=1e-6, floor=floor)


def _compare(
    actual: Any, expected: Any, what: str, *, tolerance: float | None = None, floor: float = 1e-14
) -> None:
    """Raises AssertionError unless two pytrees agree; an RMS error of `floor` is always allowed."""
    structures: list[Any] = [jax.tree.structure(x) for x in (expected, actual)]
    if structures[0] != structures[1]:
        raise AssertionError(f"{what}: expected {structures[0]}, got {structures[1]}")
    leaves = jax.tree.leaves_with_path(expected)
    for (path, want), got in zip(leaves, jax.tree.leaves(actual), strict=True):
        name = f"{what}: {_name(path)}" if path else what
        want, got = np.asarray(want), np.asarray(got)
        if want.shape != got.shape:
            raise AssertionError(f"{name}: expected the shape {want.shape}, got {got.shape}")
        eps = max(float(jnp.finfo(x.dtype).eps) if _inexact(x) else 0.0 for x in (want, got))
        allowed = eps ** (2 / 3) if tolerance is None else tolerance
        want, got = (x.astype(np.result_type(x, np.float64)) for x in (want, got))
        with np.errstate(invalid="ignore"):  # an infinity may be expected, a NaN may not
            error = np.where(got == want, 0.0, np.abs(got - want))
        size = _rms(want[np.isfinite(want)])
        if not _rms(error) <= max(allowed * size, floor):
            worst = np.argmax(np.where(np.isnan(error), np.inf, error))
            index = tuple(map(int, np.unravel_index(worst, error.shape)))
            raise AssertionError(
                f"{name}: RMS(error) / RMS(expected) is {_rms(error):.2g} / {size:.2g}, allowed are"
                f" {allowed:.0e}; at {index}, expected {want[index]}, got {got[index]}"
            )


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(np.abs(x))))) if x.size else 0.0


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _double(tree: Any) -> Any:
    def cast(x: Any) -> Any:
        x = jnp.asarray(x)
        return x.astype(jnp.result_type(x, jnp.float64)) if _inexact(x) else x

    return jax.tree.map(cast, tree)


class _Result(NamedTuple):
    value: Any
    gradient: Any


def _with_gradients(fn: Callable[..., Any]) -> Callable[..., _Result]:
    """What fn gives, and the gradients of a random sum of it; zeros for inputs not floating."""

    def total(inputs: tuple[Any, ...]) -> Any:
        value = fn(*inputs)
        return _random_sum(value), value

    def both(*inputs: Any) -> _Result:
        gradient, value = jax.grad(total, has_aux=True, allow_int=True)(inputs)
        zero = partial(jnp.zeros, dtype=jnp.float32)
        gradient = jax.tree.map(lambda x, g: g if _inexact(x) else zero(x.shape), inputs, gradient)
        return _Result(value, gradient)

    return both


def _random_sum(tree: Any) -> Any:
    """The sum of all floating leaves, with random weights so that no part of a gradient cancels."""
    rng = np.random.default_rng(0)
    leaves = [x for x in jax.tree.leaves(tree) if _inexact(x)]
    terms = (jnp.sum(x * rng.normal(size=x.shape).astype(x.dtype)).real for x in leaves)
    return sum(terms, jnp.zeros(()))


def _bracket(combine: Any, elements: list[Any], names: Any, rng: Any) -> tuple[str, Any]:
    """Combines neighbours in random order, but not left to right: (the brackets, the result)."""
    parts = [(str(name), x) for name, x in zip(names, elements, strict=True)]
    n = int(rng.integers(1, len(parts) - 1))
    while True:
        (left, a), (right, b) = parts[n : n + 2]
        parts[n : n + 2] = [(f"({left} {right})", combine(a, b))]
        if len(parts) == 1:
            return parts[0]
        n = int(rng.integers(len(parts) - 1))


def _length(tree: Any, axis: int, *, at_least: int = 0) -> int:
    lengths = {jnp.shape(x)[axis] for x in jax.tree.leaves(tree)}
    if len(lengths) != 1 or min(lengths) < at_least:
        raise ValueError(f"axis {axis} must have one length, at least {at_least}, got {lengths}")
    return lengths.pop()


def _cut(tree: Any, index: int | slice, axis: int = 0) -> Any:
    return jax.tree.map(lambda x: x[(slice(None),) * (axis % x.ndim) + (index,)], tree)


def _along(x: Any, like: Any, axis: int) -> Any:
    """An array [T], shaped to broadcast along an axis of another."""
    return x.reshape([-1 if i == axis % like.ndim else 1 for i in range(like.ndim)])
