"""Text from a language model: one parallel pass over the prompt, then one step a token."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from hla_jax._check import checked, checked_int, checked_key, checked_or_none
from hla_jax._types import Array, Mask
from hla_jax.models.transformer import TransformerLM


def generate(
    model: TransformerLM,
    prompt: Int[Array, "B T"],
    *,
    max_new_tokens: int,
    key: jax.Array | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
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
      prompt: [B, T] with T >= 1, integers.
      max_new_tokens: how many tokens to add, at least 1.
      key: of the random choices; temperature=0 needs none.
      temperature: what logits are divided by, at least 0; 0 takes the most likely token.
      top_k: chooses among the k most likely tokens alone.
      top_p: chooses among the fewest most likely tokens whose probabilities reach p, in (0, 1].
      stop_token: in 0..V-1; once a row has chosen it, the rest of the row is filled with it.
      prompt_mask: [B, T], False at padding, for prompts of several lengths: padding may be
        anywhere, but each row needs a real token.

    Returns:
      The new tokens [B, max_new_tokens], int32.

    Raises:
      ValueError: an argument has a wrong shape, dtype or value, or prompt and new tokens are more
        than a KV cache holds.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from hla_jax.models import TransformerLM
      >>> model = TransformerLM(256, num_layers=1, num_heads=2, features=16, rngs=nnx.Rngs(0))
      >>> prompt = jnp.array([[72, 105]])
      >>> print(generate(model, prompt, max_new_tokens=5, temperature=0).shape)
      (1, 5)
    """
    prompt = checked("prompt", prompt, None, jnp.integer).astype(jnp.int32)
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt must be [B, T] with T >= 1, got {prompt.shape}")
    mask = checked_or_none("prompt_mask", prompt_mask, prompt.shape, jnp.bool_)
    mask = jnp.ones(prompt.shape, bool) if mask is None else mask
    if not isinstance(mask, jax.core.Tracer) and not mask.any(1).all():
        raise ValueError("prompt_mask must have a real token in each row, but a row is all padding")
    if key is None and (isinstance(temperature, jax.core.Tracer) or temperature != 0):
        raise ValueError(f"key must be given unless temperature=0, got temperature={temperature}")
    V = model.embed.num_embeddings
    known = not isinstance(prompt, jax.core.Tracer) and not isinstance(mask, jax.core.Tracer)
    if known and jnp.any(mask & ((prompt < 0) | (prompt >= V))):
        raise ValueError(f"prompt must hold tokens in 0..{V - 1}, got others")
    max_new_tokens = checked_int("max_new_tokens", max_new_tokens, 1)
    if top_k is not None:
        top_k = checked_int("top_k", top_k, 1, V)
    if stop_token is not None:
        stop_token = checked_int("stop_token", stop_token, 0, V - 1)
    T = prompt.shape[1]
    # The last new token is chosen, but not read.
    if model.max_length is not None and T + max_new_tokens - 1 > model.max_length:
        raise ValueError(
            f"prompt and max_new_tokens are {T} + {max_new_tokens} tokens, more than the model's "
            f"max_length={model.max_length} can follow"
        )
    bucket = max(16, 1 << (T - 1).bit_length())
    left = ((0, 0), (bucket - T, 0))
    graph, params = nnx.split(model)
    return _generate(
        graph,
        params,
        jnp.pad(prompt, left),
        jnp.pad(mask, left),
        jax.random.key(0) if key is None else checked_key("key", key),
        temperature,
        top_p,
        max_new_tokens=max_new_tokens,
        top_k=top_k,
        stop_token=stop_token,
    )


def sample(
    logits: Float[Array, "*B V"],
    key: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    top_k: int | None = None,
    top_p: float | jax.Array | None = None,
) -> Int[jax.Array, "*B"]:
    """Chooses a token from each row of logits.

    Args:
      logits: [*B, V].
      key: of the random choices.
      temperature: what logits are divided by, a number, at least 0; 0 takes the most likely token.
      top_k: chooses among the k most likely tokens alone.
      top_p: chooses among the fewest most likely tokens whose probabilities reach p, in (0, 1].

    Returns:
      The tokens [*B], int32.

    Raises:
      ValueError: key is not one, top_k not in 1..V, top_p not in (0, 1], or temperature negative.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> print(sample(jnp.array([0.0, 2.0, 1.0]), jax.random.key(0), top_k=1))
      1
    """
    key = checked_key("key", key)
    if top_k is not None:
        top_k = checked_int("top_k", top_k, 1, logits.shape[-1])
    if isinstance(top_p, float | int) and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    if isinstance(temperature, float | int) and not temperature >= 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    logits = logits.astype(jnp.float32)
    scaled = logits / jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny)
    scaled = jnp.where(temperature > 0, scaled, logits)
    order = jnp.argsort(scaled, axis=-1, descending=True)
    rank = jnp.argsort(order, axis=-1)
    if top_k is not None:
        scaled = jnp.where(rank < top_k, scaled, -jnp.inf)
    if top_p is not None:
        p = jax.nn.softmax(jnp.take_along_axis(scaled, order, axis=-1))
        kept = (jnp.cumsum(p, axis=-1) - p < top_p).at[..., 0].set(True)
        scaled = jnp.where(jnp.take_along_axis(kept, rank, axis=-1), scaled, -jnp.inf)
    choice = jax.random.categorical(key, scaled)
    return jnp.where(temperature > 0, choice, jnp.argmax(logits, axis=-1)).astype(jnp.int32)


@partial(jax.jit, static_argnames=("graph", "max_new_tokens", "top_k", "stop_token"))
def _generate(
    graph: nnx.GraphDef[TransformerLM],
    params: Any,
    prompt: jax.Array,
    mask: jax.Array,
    key: jax.Array,
    temperature: float | jax.Array,
    top_p: float | jax.Array | None,
    *,
    max_new_tokens: int,
    top_k: int | None,
    stop_token: int | None,
) -> jax.Array:
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
