"""Sparse attention patterns: which keys each query sees, as tables of blocks.

A `Pattern` is data for `sparse_attention`, which computes its blocks and nothing else. Patterns are
joined by `|`, and a new one is a few lines: a function from the length to its `Piece`s. In the
formulas t is the query's position and s the key's; where causal, `sparse_attention` adds s <= t.

A pattern is hashable, so it can be a static argument of `jax.jit`. Patterns made alike are equal,
and one of your own is equal to those with the same function `pieces`: define that once, not in
every call. A pattern made under a traced key is only equal to itself.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from hla_jax._check import check_sizes, checked_int, checked_key
from hla_jax._types import Array

__all__ = [
    "Pattern",
    "Piece",
    "big_bird",
    "dilated_window",
    "fixed",
    "global_tokens",
    "longformer",
    "random_blocks",
    "sliding_window",
    "strided",
]


class Piece(NamedTuple):
    """A family of blocks: every query of block n meets every key of block n.

    Each pair (t, s) that `sees` admits lies in exactly one block, but where causal a pair with
    s > t need not lie in any. The first axis of the tables, A, is 1, or H where heads differ.

    Attributes:
      queries: [A, N, M], positions known while tracing, each at most once for each a; -1 is none.
      keys: [A, N, L], positions; -1 is none.
      sees: (t, s) -> whether the pair is in the piece, elementwise on positions that broadcast
        against each other and whose first axis is A, or 1.
    """

    queries: Int[np.ndarray, "A N M"]
    keys: Int[Array, "A N L"]
    sees: Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Pattern:
    """Which keys each query sees; `a | b` sees what a or b sees.

    Attributes:
      pieces: (length, causal) -> the pieces whose union the pattern is. They may overlap. Where
        causal, what a token sees must not depend on the length: a decoding step asks with that of
        its cache.
      relative: whether the distance t - s alone decides. Then a packed segment, or a row padded on
        the left, sees what it would see alone.

    Example:
      >>> print(sliding_window(2).mask(4, causal=True)[0].astype(int))
      [[1 0 0 0]
       [1 1 0 0]
       [0 1 1 0]
       [0 0 1 1]]
    """

    pieces: Callable[[int, bool], tuple[Piece, ...]]
    relative: bool = False

    def __or__(self, other: "Pattern") -> "Pattern":
        if not isinstance(other, Pattern):
            return NotImplemented
        return Pattern(_Pieces(_union, (self, other)), self.relative and other.relative)

    def mask(self, length: int, *, causal: bool) -> Bool[jax.Array, "A T T"]:
        """Returns the dense mask, [A, T, T] for T = length: for tests and pictures."""
        t, s = jnp.arange(length)[None, :, None], jnp.arange(length)[None, None, :]
        return self.sees(t, s, length, causal=causal)

    def sees(self, t: Any, s: Any, length: int, *, causal: bool) -> Any:
        """Tells which pairs are seen in a row of so many tokens, as `Piece.sees` does."""
        pairs = (piece.sees(t, s) for piece in self.pieces(length, causal))
        none = jnp.zeros(jnp.broadcast_shapes(t.shape, s.shape), bool)
        seen = functools.reduce(jnp.logical_or, pairs, none)
        return seen & (s <= t) if causal else seen


@dataclass(frozen=True)
class _Pieces:
    """What a `Pattern` asks for its pieces: unlike closures and partials, equal if made alike."""

    function: Callable[..., tuple[Piece, ...]]
    arguments: tuple[Any, ...]

    def __call__(self, length: int, causal: bool) -> tuple[Piece, ...]:
        return self.function(*self.arguments, length, causal)


def _union(a: Pattern, b: Pattern, length: int, causal: bool) -> tuple[Piece, ...]:
    return a.pieces(length, causal) + b.pieces(length, causal)


def sliding_window(window: int) -> Pattern:
    """The nearest tokens: |t - s| < window.

    Where causal, these are the last `window` tokens, t included; otherwise 2 window - 1 tokens.
    Cost: O(T window) time and memory.

    Source: Longformer (Beltagy et al. 2020, arXiv 2004.05150), section 3.1. Its w counts the
    tokens of both sides together, about 2 window.

    Args:
      window: at least 1; larger than T is the same as T.

    Raises:
      ValueError: window is not an int of at least 1.

    Example:
      >>> print(sliding_window(3).mask(8, causal=True)[0, 6].nonzero()[0])
      [4 5 6]
    """
    return dilated_window(window, 1)


def dilated_window(window: int, dilation: int) -> Pattern:
    """A window with gaps: |t - s| < window dilation and (t - s) % dilation == 0.

    It reaches `dilation` times as far as a sliding window for the same cost, O(T window) time and
    memory.

    Source: Longformer (Beltagy et al. 2020, arXiv 2004.05150), section 3.1.

    Args:
      window: tokens seen to the left, t included; at least 1.
      dilation: distance between them, at least 1.

    Raises:
      ValueError: window or dilation is not an int of at least 1.

    Example:
      >>> print(dilated_window(3, 2).mask(8, causal=True)[0, 6].nonzero()[0])
      [2 4 6]
    """
    check_sizes(window=window, dilation=dilation)
    return Pattern(_Pieces(_dilated_window, (window, dilation)), relative=True)


def _dilated_window(window: int, dilation: int, length: int, causal: bool) -> tuple[Piece, ...]:
    # The tokens of one residue class, t = step i + residue, see a plain window of i.
    step = _at_most(dilation, length)
    count = -(-length // step)
    reach = _at_most(window, count)
    # Small enough to waste little, large enough for matmuls.
    block = _at_most(min(max(reach, 16), 128), count)
    residues = np.arange(step)[:, None, None]
    starts = np.arange(0, count, block)[:, None]

    def table(first: int, end: int) -> Int[np.ndarray, "1 N M"]:
        positions = (starts + np.arange(first, end)) * step + residues
        return _table(positions.reshape(-1, end - first), length)

    return (
        Piece(
            table(0, block),
            table(1 - reach, block if causal else block + reach - 1),
            lambda t, s: (abs(t - s) < reach * step) & ((t - s) % step == 0),
        ),
    )


def global_tokens(positions: Sequence[int]) -> Pattern:
    """A few tokens that every token sees and that see every token.

    Cost: O(T G) time and memory for G positions.

    Source: Longformer (Beltagy et al. 2020, arXiv 2004.05150), section 3.1.

    Args:
      positions: ints of at least 0; those of at least T are ignored.

    Raises:
      ValueError: positions is not a sequence, or one of them not an int of at least 0.

    Example:
      >>> print(global_tokens([1]).mask(4, causal=False)[0].astype(int))
      [[0 1 0 0]
       [1 1 1 1]
       [0 1 0 0]
       [0 1 0 0]]
    """
    positions = checked_positions("positions", positions)
    return Pattern(_Pieces(_global_tokens, (positions,)), relative=not positions)


def _global_tokens(positions: tuple[int, ...], length: int, causal: bool) -> tuple[Piece, ...]:
    every, few, is_global = _global_among(positions, length)
    rows = Piece(few[None, None], every[None, None], lambda t, s: is_global(t))
    return *_global_keys(positions, length, causal), rows


def global_keys(positions: tuple[int, ...]) -> Pattern:
    """A few tokens that every token sees: half of `global_tokens`."""
    return Pattern(_Pieces(_global_keys, (positions,)), relative=not positions)


def _global_keys(positions: tuple[int, ...], length: int, causal: bool) -> tuple[Piece, ...]:
    every, few, is_global = _global_among(positions, length)
    return (Piece(every[None, None], few[None, None], lambda t, s: is_global(s)),)


def _global_among(positions: tuple[int, ...], length: int) -> tuple[Any, Any, Callable[[Any], Any]]:
    """All positions of a row, the global ones, and whether a position is one of them."""
    every = np.arange(length, dtype=np.int32)
    few = every[np.isin(every, positions)]
    return every, few, lambda t: (t[..., None] == few.reshape(*[1] * t.ndim, -1)).any(-1)


def strided(stride: int) -> Pattern:
    """The nearest tokens, and every stride-th token: |t - s| < stride or (t - s) % stride == 0.

    Cost: O(T (stride + T / stride)) time and memory; O(T sqrt(T)) for a stride near sqrt(T).

    Source: Sparse Transformers (Child et al. 2019, arXiv 1904.10509), section 4.3, where one head
    (or each in turn) has one half; here a head has both.

    Args:
      stride: at least 1.

    Raises:
      ValueError: stride is not an int of at least 1.

    Example:
      >>> print(strided(3).mask(8, causal=True)[0, 7].nonzero()[0])
      [1 4 5 6 7]
    """
    check_sizes(stride=stride)
    return sliding_window(stride) | Pattern(_Pieces(_strided, (stride,)), relative=True)


def _strided(stride: int, length: int, causal: bool) -> tuple[Piece, ...]:
    step = _at_most(stride, length)
    classes = _blocks(length, step).swapaxes(1, 2)
    return (Piece(classes, classes, lambda t, s: (t - s) % step == 0),)


def fixed(stride: int, summary: int = 1) -> Pattern:
    """One's own block, and the last tokens of every block.

    floor(t / stride) == floor(s / stride), or s % stride >= stride - summary.

    Cost: O(T (stride + summary T / stride)) time and memory; O(T sqrt(T)) for a stride near
    sqrt(T).

    Source: Sparse Transformers (Child et al. 2019, arXiv 1904.10509), section 4.3, where the
    parameters are called l and c, and one head (or each in turn) has one half; here a head has
    both.

    Args:
      stride: size of a block, at least 1.
      summary: how many tokens at the end of a block all later tokens see (all tokens, where not
        causal), from 1 to stride.

    Raises:
      ValueError: stride or summary is not an int in its range.

    Example:
      >>> print(fixed(3).mask(8, causal=True)[0, 7].nonzero()[0])
      [2 5 6 7]
    """
    check_sizes(stride=stride)
    checked_int("summary", summary, 1, stride)
    return Pattern(_Pieces(_fixed, (stride, summary)))


def _fixed(stride: int, summary: int, length: int, causal: bool) -> tuple[Piece, ...]:
    size = _at_most(stride, length)
    blocks, every = _blocks(length, size), np.arange(length, dtype=np.int32)

    def is_summary(s: Any) -> Any:
        return s % size >= size - summary

    return (
        Piece(blocks, blocks, lambda t, s: t // size == s // size),
        Piece(every[None, None], every[is_summary(every)][None, None], lambda t, s: is_summary(s)),
    )


def random_blocks(
    key: jax.Array, *, num_blocks: int, block_size: int, num_heads: int = 1
) -> Pattern:
    """Each block of queries sees some blocks of keys, drawn once under the caller's key.

    The same key gives the same blocks, traced or not. Where causal, a block draws from those up to
    its own, and the draw does not depend on T: a longer sequence keeps the blocks of a shorter one.
    Otherwise it draws from all ceil(T / block_size).

    Cost: O(T num_blocks block_size) time and memory.

    Source: Big Bird (Zaheer et al. 2020, arXiv 2007.14062), section 2 and appendix D.

    Args:
      key: a JAX random key, traced or not.
      num_blocks: distinct blocks of keys that a block of queries sees (all, if there are fewer).
      block_size: tokens in a block, of queries or keys.
      num_heads: 1 if heads share the blocks, or q's number of heads H if each has its own.

    Raises:
      ValueError: a number is not an int of at least 1, or key is no random key.

    Example:
      >>> import jax
      >>> pattern = random_blocks(jax.random.key(0), num_blocks=1, block_size=2)
      >>> print(pattern.mask(8, causal=True)[0, ::2, ::2].sum(-1))
      [1 1 1 1]
    """
    check_sizes(num_blocks=num_blocks, block_size=block_size, num_heads=num_heads)
    kept = _hashable(checked_key("key", key))
    return Pattern(_Pieces(_random_blocks, (kept, num_blocks, block_size, num_heads)))


def _random_blocks(
    key: "_Key | _Array",
    num_blocks: int,
    block_size: int,
    num_heads: int,
    length: int,
    causal: bool,
) -> tuple[Piece, ...]:
    size = _at_most(block_size, length)
    total = -(-length // size)
    blocks = draw_blocks(key.array, total, min(num_blocks, total), num_heads, causal=causal)
    return _pieces_of(blocks, size, length)


def draw_blocks(
    key: jax.Array, total: int, num_blocks: int, num_heads: int, *, causal: bool
) -> Int[jax.Array, "A N R"]:
    """Draws the R blocks of keys that each of N = total blocks of queries sees; -1 is none."""

    def choose(row: jax.Array) -> jax.Array:
        n = row + 1 if causal else total
        return _distinct(jax.random.fold_in(key, row), n, (num_heads, num_blocks))

    return jax.vmap(choose, out_axes=1)(jnp.arange(total, dtype=jnp.int32))


def drawn_blocks(blocks: Int[jax.Array, "A N R"], block_size: int) -> Pattern:
    """`random_blocks` of a causal draw made before; tokens past its N blocks see none."""
    return Pattern(_Pieces(_drawn_blocks, (_Array(blocks), block_size)))


def _drawn_blocks(
    blocks: "_Array", block_size: int, length: int, causal: bool
) -> tuple[Piece, ...]:
    size = _at_most(block_size, length)
    total = -(-length // size)
    drawn = blocks.array[:, :total, -max(total, 1) :]  # before the last ones there are none
    rows = [(0, 0), (0, total - drawn.shape[1]), (0, 0)]
    return _pieces_of(jnp.pad(drawn, rows, constant_values=-1), size, length)


def _pieces_of(chosen: Int[jax.Array, "A N R"], size: int, length: int) -> tuple[Piece, ...]:
    """The pieces of blocks of queries that see the chosen blocks of keys."""
    A, N, R = chosen.shape
    queries = _blocks(length, size)
    keys = chosen[..., None] * size + np.arange(size, dtype=np.int32)[None, None, None]
    keys = jnp.where((chosen[..., None] >= 0) & (keys < length), keys, -1)

    def sees(t: Any, s: Any) -> Any:
        heads = np.arange(A).reshape(-1, *[1] * (t.ndim - 1))
        return (chosen[heads, t // size] == (s // size)[..., None]).any(-1)

    queries = np.broadcast_to(queries, (A, *queries.shape[1:]))
    return (Piece(queries, keys.reshape(A, N, R * size), sees),)


@dataclass(frozen=True)
class _Key:
    """A random key whose value is known."""

    words: tuple[int, ...]
    kind: str

    @property
    def array(self) -> jax.Array:
        return jax.random.wrap_key_data(jnp.array(self.words, jnp.uint32), impl=self.kind)


@dataclass(frozen=True, eq=False)
class _Array:
    """An array that may be traced, and so is only equal to itself."""

    array: jax.Array


def _hashable(key: jax.Array) -> _Key | _Array:
    if isinstance(key, jax.core.Tracer):
        return _Array(key)
    with jax.ensure_compile_time_eval():
        words = np.asarray(jax.random.key_data(key)).tolist()
        return _Key(tuple(words), str(jax.random.key_impl(key)))


def longformer(window: int, global_positions: Sequence[int] = (), dilation: int = 1) -> Pattern:
    """Longformer's pattern: a (dilated) window and global tokens.

    Cost: O(T (window + G)) time and memory for G global positions.

    Source: Longformer (Beltagy et al. 2020, arXiv 2004.05150), section 3.1.

    Args:
      window: as in `dilated_window`.
      global_positions: as in `global_tokens`.
      dilation: as in `dilated_window`.

    Raises:
      ValueError: as in those.

    Example:
      >>> print(longformer(2, [0]).mask(8, causal=True)[0, 6].nonzero()[0])
      [0 5 6]
    """
    return dilated_window(window, dilation) | global_tokens(global_positions)


def big_bird(
    key: jax.Array,
    *,
    window: int,
    num_random: int,
    global_positions: Sequence[int],
    block_size: int,
    num_heads: int = 1,
) -> Pattern:
    """Big Bird's pattern: a window, global tokens and random blocks.

    Cost: O(T (window + G + num_random block_size)) time and memory for G global positions.

    Source: Big Bird (Zaheer et al. 2020, arXiv 2007.14062), section 2.

    Args:
      key: a JAX random key, as in `random_blocks`.
      window: as in `sliding_window`; counted in tokens, not in blocks.
      num_random: `num_blocks` of `random_blocks`.
      global_positions: as in `global_tokens`.
      block_size: as in `random_blocks`.
      num_heads: as in `random_blocks`.

    Raises:
      ValueError: as in those.

    Example:
      >>> import jax
      >>> pattern = big_bird(
      ...     jax.random.key(0), window=2, num_random=1, global_positions=[0], block_size=2
      ... )
      >>> print(pattern.mask(4, causal=False)[0, 0])
      [ True  True  True  True]
    """
    random = random_blocks(key, num_blocks=num_random, block_size=block_size, num_heads=num_heads)
    return sliding_window(window) | global_tokens(global_positions) | random


def checked_positions(name: str, positions: Any) -> tuple[int, ...]:
    """Returns a sequence of positions, sorted and each once, if it is one."""
    if not isinstance(positions, Sequence | np.ndarray):
        raise ValueError(f"{name} must be a sequence of integers, got {positions!r}")
    return tuple(sorted({checked_int(name, position, 0) for position in positions}))


def _table(positions: Int[np.ndarray, "N M"], length: int) -> Int[np.ndarray, "1 N M"]:
    inside = (positions >= 0) & (positions < length)
    return np.where(inside, positions, -1).astype(np.int32)[None]


def _blocks(length: int, size: int) -> Int[np.ndarray, "1 N M"]:
    """Consecutive blocks, the last one filled up with -1."""
    count = -(-length // size)
    return _table(np.arange(count * size).reshape(count, size), length)


def _at_most(size: int, length: int) -> int:
    """A size as large as the sequence says the same as any larger one; never 0."""
    return min(size, max(length, 1))


def _distinct(
    key: jax.Array, n: int | Int[jax.Array, ""], shape: tuple[int, int]
) -> Int[jax.Array, "heads count"]:
    """Draws distinct numbers below n for each head; -1 takes the place of those beyond n.

    Floyd's method: for each j of the last `count` numbers below n in turn, a draw from 0..j, or j
    itself if that was drawn before.
    """
    count = shape[1]
    tops = n - count + jnp.arange(count, dtype=jnp.int32)
    draws = jax.random.randint(key, shape, 0, jnp.maximum(tops, 0)[None] + 1, jnp.int32)
    chosen = jnp.full(shape, -1, jnp.int32)
    for i in range(count):
        taken = (chosen == draws[:, i, None]).any(-1)
        pick = jnp.where(taken, tops[i], draws[:, i])
        chosen = chosen.at[:, i].set(jnp.where(tops[i] < 0, -1, pick))
    return chosen
