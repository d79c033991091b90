"""Text from a language model: one parallel pass over the prompt, then one step a token."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int, Integer, Num

from hla_jax import _compiled
from hla_jax._check import checked, checked_int, checked_key, is_known, real
from hla_jax._types import Array, Mask, result_type
from hla_jax.models._values import check_range
from hla_jax.models.transformer import TransformerLM

# One number, or one for each row.
PerRow: TypeAlias = float | np.number[Any] | Num[Array, ""] | Num[Array, "*B"]


def generate(
    model: TransformerLM,
    prompt: Integer[Array, "B T"],
    *,
    max_new_tokens: int,
    key: jax.Array | None = None,
    temperature: PerRow = 1.0,
    top_k: int | None = None,
    top_p: PerRow | None = None,
    stop_token: int | None = None,
    prompt_mask: Mask | None = None,
) -> Int[jax.Array, "B max_new_tokens"]:
    """Continues each row of the prompt.

    The prompt is padded to a power of two of at least 16 tokens, and the padding masked out, so
    that prompts of many lengths share one compilation.

    Source: for top_p, The Curious Case of Neural Text Degeneration (Holtzman et al. 2019, arXiv
    1904.09751), section 3.1; for top_k, Hierarchical Neural Story Generation (Fan et al. 2018,
    arXiv 1805.04833).

    Args:
      model: the language model.
      prompt: [B, T] with T >= 1, integers in 0..V-1 (any where masked).
      max_new_tokens: how many tokens to add, at least 1.
      key: of the random choices; temperature=0, in all rows, needs none.
      temperature: what logits are divided by, at least 0, a number or [B]; 0 takes the most likely
        token.
      top_k: chooses among the k most likely tokens alone.
      top_p: chooses among the fewest most likely tokens whose probabilities reach p, in (0, 1], a
        number or [B].
      stop_token: in 0..V-1; once a row has chosen it, the rest of the row is filled with it.
      prompt_mask: [B, T], False at padding, for prompts of several lengths: padding may be
        anywhere, but each row needs a real token.

    Returns:
      The new tokens [B, max_new_tokens], int32.

    Raises:
      ValueError: an argument has a wrong shape, dtype or value, or a row's prompt, without padding,
        and new tokens are more than a KV cache holds. Inside jit, values of tokens, temperature and
        top_p are not known and not checked, and padding counts if prompt_mask is not known.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from hla_jax.models import TransformerLM
      >>> model = TransformerLM(256, num_layers=1, num_heads=2, features=16, rngs=nnx.Rngs(0))
      >>> prompt = jnp.array([[72, 105]])
      >>> print(generate(model, prompt, max_new_tokens=5, temperature=0).shape)
      (1, 5)
    """
    given, prompt = prompt, checked("prompt", prompt, None, jnp.integer)
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt must be [B, T] with T >= 1, got {prompt.shape}")
    (B, T), V = prompt.shape, model.embed.num_embeddings
    real_tokens = np.ones((B, T), bool) if prompt_mask is None else prompt_mask
    mask = checked("prompt_mask", real_tokens, (B, T), jnp.bool_)
    longest = T
    if is_known(real_tokens):
        lengths = np.asarray(real_tokens).sum(1)
        longest = lengths.max(initial=0)
        if not lengths.all():
            raise ValueError(
                "prompt_mask must have a real token in each row, but a row is all padding"
            )
    check_range("prompt", given, 0, V - 1, real_tokens, which=" where unmasked")
    max_new_tokens = checked_int("max_new_tokens", max_new_tokens, 1)
    top_k, top_p = _checked_choice(top_k, top_p, (B,), V)
    temperatures = _per_row("temperature", temperature, (B,))
    if key is None and not (is_known(temperature) and not np.any(temperature)):
        raise ValueError(f"key must be given unless temperature=0, got temperature={temperature}")
    if stop_token is not None:
        stop_token = checked_int("stop_token", stop_token, 0, V - 1)
    # The last new token is chosen, but not read.
    if model.max_length is not None and longest + max_new_tokens - 1 > model.max_length:
        raise ValueError(
            f"prompt and max_new_tokens are {longest} + {max_new_tokens} tokens, more than the "
            f"model's max_length={model.max_length} can follow"
        )
    bucket = max(16, 1 << (T - 1).bit_length())
    left = ((0, 0), (bucket - T, 0))
    graph, params = nnx.split(model)
    return _compiled.call(
        _generate,
        params,
        jnp.pad(prompt.astype(result_type(prompt.dtype, jnp.int32)), left),
        jnp.pad(mask, left),
        jax.random.key(0) if key is None else checked_key("key", key),
        temperatures,
        top_p,
        graph=graph,
        max_new_tokens=max_new_tokens,
        top_k=top_k,
        stop_token=stop_token,
    )


def sample(
    logits: Float[Array, "*B V"],
    key: jax.Array,
    *,
    temperature: PerRow = 1.0,
    top_k: int | None = None,
    top_p: PerRow | None = None,
) -> Int[jax.Array, "*B"]:
    """Chooses a token from each row of logits.

    Args:
      logits: [*B, V] with V >= 1; -inf where a token cannot be chosen.
      key: of the random choices.
      temperature: what logits are divided by, at least 0, a number or [*B], one for each row; 0
        takes the most likely token.
      top_k: chooses among the k most likely tokens alone.
      top_p: chooses among the fewest most likely tokens whose probabilities reach p, in (0, 1], a
        number or [*B].

    Returns:
      The tokens [*B], int32.

    Raises:
      ValueError: an argument has a wrong shape, dtype or value. Inside jit, values of temperature
        and top_p are not known and not checked.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> print(sample(jnp.array([0.0, 2.0, 1.0]), jax.random.key(0), top_k=1))
      1
    """
    key, logits = checked_key("key", key), checked("logits", logits, None, jnp.floating)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be [*B, V] with V >= 1, got {logits.shape}")
    *batch, V = logits.shape
    top_k, top_p = _checked_choice(top_k, top_p, tuple(batch), V)
    dtype = result_type(logits.dtype, jnp.float32)
    logits = logits.astype(dtype)
    temperature = _per_row("temperature", temperature, tuple(batch)).astype(dtype)
    # The largest is exactly 0 before the division, which may overflow for the others. The limits
    # keep 1 / temperature a normal number, for compilers multiply by it.
    largest = logits.max(-1, keepdims=True)
    scaled = jnp.where(logits == largest, 0, logits - largest)
    tiny = jnp.finfo(dtype).tiny
    scaled /= jnp.clip(temperature, tiny, 1 / tiny)[..., None]
    order = jnp.argsort(logits, axis=-1, descending=True)
    rank = jnp.argsort(order, axis=-1)
    if top_k is not None:
        scaled = jnp.where(rank < top_k, scaled, -jnp.inf)
    if top_p is not None:
        top_p = top_p.astype(dtype)[..., None]
        p = jax.nn.softmax(jnp.take_along_axis(scaled, order, axis=-1))
        # Sums are rounded, but a p of 1 keeps all.
        kept = ((jnp.cumsum(p, axis=-1) - p < top_p) | (top_p == 1)).at[..., 0].set(True)
        scaled = jnp.where(jnp.take_along_axis(kept, rank, axis=-1), scaled, -jnp.inf)
    choice = jax.random.categorical(key, scaled)
    return jnp.where(temperature > 0, choice, jnp.argmax(logits, axis=-1)).astype(jnp.int32)


def _checked_choice(
    top_k: int | None, top_p: PerRow | None, batch: tuple[int, ...], V: int
) -> tuple[int | None, Float[jax.Array, "*B"] | None]:
    """Returns top_k, and top_p for each row, if they are in their ranges."""
    return (
        None if top_k is None else checked_int("top_k", top_k, 1, V),
        None if top_p is None else _per_row("top_p", top_p, batch),
    )


_RANGES: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "temperature": ("at least 0", lambda x: x >= 0),
    "top_p": ("in (0, 1]", lambda x: (x > 0) & (x <= 1)),
}


def _per_row(name: str, x: PerRow, batch: tuple[int, ...]) -> Float[jax.Array, "*B"]:
    """Returns a number for each row, from one or from as many, known ones in their range."""
    numbers = real(name, x)
    if numbers.shape not in ((), batch):
        raise ValueError(f"{name} must be a number or of shape {batch}, got shape {numbers.shape}")
    wanted, fits = _RANGES[name]
    if is_known(x) and not fits(np.asarray(x)).all():
        raise ValueError(f"{name} must be {wanted}, got {x}")
    return jnp.broadcast_to(numbers.astype(result_type(float)), batch)


@partial(jax.jit, static_argnames=("graph", "max_new_tokens", "top_k", "stop_token"))
def _generate(
    params: Any,
    prompt: Int[jax.Array, "B T"],
    mask: Bool[jax.Array, "B T"],
    key: jax.Array,
    temperature: Float[jax.Array, " B"],
    top_p: Float[jax.Array, " B"] | None,
    *,
    graph: nnx.GraphDef[TransformerLM],
    max_new_tokens: int,
    top_k: int | None,
    stop_token: int | None,
) -> Int[jax.Array, "B max_new_tokens"]:
    model = nnx.merge(graph, params)
    choose = partial(sample, temperature=temperature, top_k=top_k, top_p=top_p)
    keys = jax.random.split(key, max_new_tokens)

    x, state = model.features(prompt, mask=mask)
    last = jnp.max(jnp.where(mask, jnp.arange(mask.shape[1]), 0), axis=1)
    x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
    first = choose(model.logits(x), keys[0])
    if max_new_tokens == 1:  # a scan of no steps cannot run without jit
        return first[:, None]

    def step(
        carry: tuple[Any, jax.Array], key: jax.Array
    ) -> tuple[tuple[Any, jax.Array], jax.Array]:
        state, token = carry
        logits, state = model(token[:, None], state)
        new = choose(logits[:, 0], key)
        if stop_token is not None:
            new = jnp.where(token == stop_token, stop_token, new)
        return (state, new), new

    _, rest = jax.lax.scan(step, (state, first), keys[1:])
    return jnp.concatenate([first[:, None], rest.T], axis=1)
