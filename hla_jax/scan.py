"""Engines that run any monoid over a sequence: `serial`, `associative` and `chunked`.

All take the same arguments and give the same numbers; they differ in what they hold and in how much
of the work is parallel:

| engine | steps one after the other | elements held | and when differentiated |
|---|---|---|---|
| serial | T | 1 | T |
| associative | log T | T | T log T |
| chunked, c tokens a chunk | (T / c) log c | T / c + c | T / c + c log c |

The inclusive prefixes that `read=False` asks for are T elements whatever the engine.

An engine is one compiled program, also where it is called outside of jit. For that a monoid is a
static argument, as of `jax.jit`: a call with the same or an equal one, with the same attributes,
compiles nothing. Those that cannot be hashed work, but each call outside of jit compiles them anew,
and so does a monoid that is made for each call and does not compare equal to the last one. Arrays
in a monoid that is a pytree are traced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from hla_jax import _compiled
from hla_jax._check import checked_int, type_name

Element: TypeAlias = Any  # a pytree of arrays
Tokens: TypeAlias = Sequence[Any]  # arrays with one leading axis T in common


@runtime_checkable
class Monoid(Protocol):
    """What engines call; and `summarise(*tokens)`, the element of a chunk, where it is there."""

    def identity(self, like: Element) -> Element:
        """The element of no tokens; `like` is an element, or one of `ShapeDtypeStruct`s."""

    def lift(self, *token: Any) -> Element:
        """The element of one token."""

    def combine(self, a: Element, b: Element) -> Element:
        """The element of segment a followed by segment b."""

    def read(self, element: Element, *token: Any) -> Any:
        """The output at the last token of the element's segment."""


def serial(
    m: Monoid,
    tokens: Tokens,
    *,
    initial: Element = None,
    reverse: bool = False,
    read: bool = True,
) -> tuple[Any, Element]:
    """Runs a monoid token by token, by `lax.scan`.

    Args:
      m: the monoid; see `hla_jax.monoids` for its methods.
      tokens: a tuple of arrays [T, ...], or pytrees of them; T may be 0.
      initial: the element of what came before; None means nothing. Its dtypes are those of all
        elements; without it, those that `m.lift` gives are.
      reverse: whether to go from the last token to the first: flip(serial(flip(tokens))).
      read: whether to return what `m.read` makes of the prefixes, or the prefixes themselves.

    Returns:
      The outputs, or with `read=False` the inclusive prefixes, with leading axis T; and the element
      of the whole sequence, `initial` included.

    Raises:
      ValueError: tokens is empty or of unequal lengths, or initial is not like an element.

    Example:
      >>> import jax.numpy as jnp
      >>> from hla_jax import monoids, scan
      >>> ones = jnp.ones((3, 1))
      >>> out, final = scan.serial(monoids.Linear(), (ones, ones, ones, jnp.zeros(3)))
      >>> out.ravel().tolist(), final.P.item()
      ([1.0, 2.0, 3.0], 3.0)
    """
    return _run(_serial, m, tokens, initial, reverse, read)


def associative(
    m: Monoid,
    tokens: Tokens,
    *,
    initial: Element = None,
    reverse: bool = False,
    read: bool = True,
) -> tuple[Any, Element]:
    """Runs a monoid over all tokens at once, by `lax.associative_scan`.

    Arguments, results and errors are those of `serial`.

    Example:
      >>> import jax.numpy as jnp
      >>> from hla_jax import monoids, scan
      >>> ones = jnp.ones((3, 1))
      >>> out, final = scan.associative(monoids.HLA2(), (ones, ones, ones, jnp.zeros(3)))
      >>> out.ravel().tolist(), final.F.item()
      ([1.0, 3.0, 6.0], 6.0)
    """
    return _run(_associative, m, tokens, initial, reverse, read)


def chunked(
    m: Monoid,
    tokens: Tokens,
    *,
    chunk_size: int = 64,
    initial: Element = None,
    reverse: bool = False,
    read: bool = True,
) -> tuple[Any, Element]:
    """Runs a monoid in two levels: over the summaries of chunks, then within each chunk in turn.

    A chunk's summary is `m.summarise` of it if the monoid has that, else comes from its lifted
    tokens. The scan within a chunk is `associative`; its elements are made again in the backward,
    so that differentiating too holds the elements of one chunk at a time.

    Args:
      m: as in `serial`.
      tokens: as in `serial`; T need not be a multiple of chunk_size.
      chunk_size: tokens in a chunk; the number of elements held is least near the root of T.
      initial: as in `serial`.
      reverse: as in `serial`.
      read: as in `serial`.

    Returns:
      What `serial` returns.

    Raises:
      ValueError: as in `serial`, or chunk_size is less than 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from hla_jax import monoids, scan
      >>> ones = jnp.ones((3, 1))
      >>> tokens = (ones, ones, ones, jnp.zeros(3))
      >>> out, final = scan.chunked(monoids.AHLA(), tokens, chunk_size=2)
      >>> out.ravel().tolist(), final.E.item()
      ([1.0, 3.0, 6.0], 6.0)
    """
    chunk_size = checked_int("chunk_size", chunk_size)
    return _run(_chunked, m, tokens, initial, reverse, read, chunk_size=chunk_size)


@dataclass(frozen=True)
class _Typed:
    """A monoid whose elements keep the dtypes of `like`, as the carry of a loop must."""

    m: Monoid
    like: Element

    def cast(self, element: Element) -> Element:
        return jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), element, self.like)

    def lift(self, *token: Any) -> Element:
        return self.cast(self.m.lift(*token))

    def combine(self, a: Element, b: Element) -> Element:
        return self.cast(self.m.combine(a, b))

    def read(self, element: Element, *token: Any) -> Any:
        return self.m.read(element, *token)

    def summarise(self, chunks: tuple[Any, ...]) -> Element:
        """The elements of chunks: all at once by `m.summarise`, or one lifted chunk at a time."""
        if hasattr(self.m, "summarise"):
            return self.cast(jax.vmap(self.m.summarise)(*chunks))

        @partial(jax.checkpoint, prevent_cse=False)
        def one(chunk: tuple[Any, ...]) -> Element:
            elements = jax.vmap(self.lift)(*chunk)
            return _at(lax.associative_scan(jax.vmap(self.combine), elements), -1)

        return lax.map(one, chunks)


Engine: TypeAlias = Callable[..., tuple[Any, Element]]


def _run(
    engine: Engine,
    m: Monoid,
    tokens: Tokens,
    initial: Element,
    reverse: bool,
    read: bool,
    **options: int,
) -> tuple[Any, Element]:
    if not isinstance(tokens, tuple | list):
        raise ValueError(f"tokens must be a tuple of arrays [T, ...], got {type_name(tokens)}")
    tokens = tuple(jax.tree.map(jnp.asarray, x) for x in tokens)
    arrays, rest = _compiled.split(m)
    return _compiled.call(
        _run_compiled,
        *(arrays, tokens, initial),
        engine=engine,
        monoid=rest,
        reverse=reverse,
        read=read,
        options=tuple(options.items()),
    )


@partial(jax.jit, static_argnames=("engine", "monoid", "reverse", "read", "options"))
def _run_compiled(
    arrays: list[Any],
    tokens: tuple[Any, ...],
    initial: Element,
    *,
    engine: Engine,
    monoid: Any,
    reverse: bool,
    read: bool,
    options: tuple[tuple[str, int], ...],
) -> tuple[Any, Element]:
    """What all engines share: checks, dtypes, direction and sequences without tokens."""
    m, engine = _compiled.join(arrays, monoid), partial(engine, **dict(options))
    length = _length(tokens)
    token = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tokens)
    element = jax.eval_shape(m.lift, *token)
    if initial is None:
        start = _like(element, m.identity(element), "m.identity(element)")
        typed = _Typed(m, element)
    else:
        start = _like(element, initial, "initial")
        typed = _Typed(m, start)
    start = typed.cast(start)
    if length == 0:  # no engine to run: a loop of no steps fails where jit is disabled
        out = jax.eval_shape(typed.read, typed.like, *token) if read else typed.like
        return jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), out), start
    if not reverse:
        return engine(typed, tokens, start, read)
    out, final = engine(typed, _flip(tokens), start, read)
    return _flip(out), final


def _serial(m: _Typed, tokens: tuple[Any, ...], start: Element, read: bool) -> tuple[Any, Element]:
    def step(prefix: Element, token: tuple[Any, ...]) -> tuple[Element, Any]:
        prefix = m.combine(prefix, m.lift(*token))
        return prefix, m.read(prefix, *token) if read else prefix

    final, out = lax.scan(step, start, tokens)
    return out, final


def _associative(
    m: _Typed, tokens: tuple[Any, ...], start: Element, read: bool
) -> tuple[Any, Element]:
    prefixes = _prefixes(m, jax.vmap(m.lift)(*tokens), start)
    return jax.vmap(m.read)(prefixes, *tokens) if read else prefixes, _at(prefixes, -1)


def _chunked(
    m: _Typed, tokens: tuple[Any, ...], start: Element, read: bool, *, chunk_size: int
) -> tuple[Any, Element]:
    length = _length(tokens)
    c = min(chunk_size, length)
    whole = length - length % c
    chunks = jax.tree.map(lambda x: x[:whole].reshape(-1, c, *x.shape[1:]), tokens)

    after = _prefixes(m, m.summarise(chunks), start)
    before = jax.tree.map(lambda s, x: jnp.concatenate([s[None], x[:-1]]), start, after)

    @partial(jax.checkpoint, prevent_cse=False)
    def within(start: Element, chunk: tuple[Any, ...]) -> tuple[Any, Element]:
        return _associative(m, chunk, start, read)

    out = lax.map(lambda x: within(*x)[0], (before, chunks))
    out, final = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), out), _at(after, -1)
    if whole < length:
        rest, final = within(final, jax.tree.map(lambda x: x[whole:], tokens))
        out = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), out, rest)
    return out, final


def _prefixes(m: _Typed, elements: Element, start: Element) -> Element:
    """The inclusive prefixes of elements [T, ...], all of them after start."""
    first = m.combine(start, _at(elements, 0))
    elements = jax.tree.map(lambda x, y: x.at[0].set(y), elements, first)
    return lax.associative_scan(jax.vmap(m.combine), elements)


def _at(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda x: x[index], tree)


def _flip(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.flip(x, 0), tree)


def _length(tokens: tuple[Any, ...]) -> int:
    shapes = [jnp.shape(x) for x in jax.tree.leaves(tokens)]
    if not shapes or not all(shapes) or len({shape[0] for shape in shapes}) > 1:
        raise ValueError(
            f"tokens must be arrays with one leading axis in common, got shapes {shapes}"
        )
    return shapes[0][0]


def _like(want: Element, got: Element, name: str) -> Element:
    """Returns got as arrays, if it has the structure and shapes of want."""
    shapes = [
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.float32), x)
        for x in (want, got)
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{name} must be an element like {want}, got {jax.tree.map(jnp.shape, got)}"
        )
    return jax.tree.map(jnp.asarray, got)
