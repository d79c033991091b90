"""A language model: pre-norm Transformer blocks around any of the token-mixing layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from hla_jax import nn
from hla_jax._types import Array, Mask, SegmentIds

MIXERS: dict[str, Callable[..., nn.Mixer]] = {
    "linear": nn.LinearAttention,
    "hla2": nn.HLA2,
    "ahla": nn.AHLA,
    "hla3": nn.HLA3,
    "softmax": nn.SoftmaxAttention,
}

State = tuple[nn.MixerState, ...]


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)), with a squared ReLU inside the MLP.

    The squared ReLU (So et al., "Primer", arXiv 2109.08668, section 3) needs no transcendental
    function: on a CPU the MLP then trains three times as fast as with a GELU.
    """

    def __init__(
        self,
        features: int,
        mlp_features: int,
        mixer: nn.Mixer,
        *,
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.mixer_norm = nnx.RMSNorm(features, **kinds)
        self.mixer = mixer
        self.mlp_norm = nnx.RMSNorm(features, **kinds)
        self.up = nnx.Linear(features, mlp_features, use_bias=False, **kinds)
        self.down = nnx.Linear(mlp_features, features, use_bias=False, **kinds)

    def __call__(
        self,
        x: Float[jax.Array, "B T F"],
        state: nn.MixerState | None = None,
        mask: Mask | None = None,
        segment_ids: SegmentIds | None = None,
    ) -> tuple[Float[jax.Array, "B T F"], nn.MixerState]:
        """Keeps the protocol of the token-mixing layers, see `hla_jax.nn.Mixer`."""
        y, state = self.mixer(self.mixer_norm(x), state, mask, segment_ids)
        x = x + y
        return x + self.down(jnp.square(jax.nn.relu(self.up(self.mlp_norm(x))))), state


class TransformerLM(nnx.Module):
    """A causal language model with constant-size state (or, with softmax, a KV cache).

    Args:
        vocab_size: V, how many tokens there are.
        num_layers: how many blocks.
        num_heads: H, query heads of each.
        features: F, width of the residual stream.
        mixer: the token-mixing layer: "linear", "hla2", "ahla", "hla3", "softmax", or anything that
            makes one when called with num_heads, in_features, dtype, param_dtype, rngs and
            `mixer_options`.
        mlp_features: width inside the MLP (default 4 F).
        tied: whether the logits' matrix is the embedding's.
        dtype: of the computation; None means the parameters'.
        param_dtype: of the parameters.
        rngs: the source of the initial parameters.
        **mixer_options: go to the token-mixing layers, for example num_kv_heads, decay or
            max_length.

    Raises:
        ValueError: mixer is a name that is not among these.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> model = TransformerLM(
        ...     256, num_layers=2, num_heads=2, features=16, mixer="hla2", rngs=nnx.Rngs(0)
        ... )
        >>> logits, state = model(jnp.zeros((1, 5), int))
        >>> next_logits, state = model(jnp.zeros((1, 1), int), state)
        >>> print(logits.shape, next_logits.shape)
        (1, 5, 256) (1, 1, 256)
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        num_layers: int,
        num_heads: int,
        features: int,
        mixer: str | Callable[..., nn.Mixer] = "hla2",
        mlp_features: int | None = None,
        tied: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        **mixer_options: Any,
    ):
        if isinstance(mixer, str) and mixer not in MIXERS:
            raise ValueError(f"mixer must be one of {sorted(MIXERS)} or a callable; got {mixer!r}")
        make = MIXERS[mixer] if isinstance(mixer, str) else mixer
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.embed = nnx.Embed(vocab_size, features, **kinds)
        self.blocks = nnx.List(
            [
                Block(
                    features,
                    mlp_features or 4 * features,
                    make(num_heads=num_heads, in_features=features, **kinds, **mixer_options),
                    **kinds,
                )
                for _ in range(num_layers)
            ]
        )
        self.norm = nnx.RMSNorm(features, **kinds)
        self.head = None if tied else nnx.Linear(features, vocab_size, use_bias=False, **kinds)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        state: State | None = None,
        mask: Mask | None = None,
        segment_ids: SegmentIds | None = None,
    ) -> tuple[Float[Array, "B T V"], State]:
        """Returns the logits of each next token, and the state after the last.

        Args:
            tokens: integers in 0..V-1 (anything where masked), [B, T].
            state: what came before; None means nothing.
            mask: True at real tokens, [B, T]; padding changes nothing, wherever it is.
            segment_ids: integers, [B, T]: documents packed into a row do not see each other.

        Returns:
            logits: [B, T, V]; what masked tokens get has no meaning.
            state: one `hla_jax.nn.MixerState` a block.

        Raises:
            ValueError: a shape or dtype does not fit.
        """
        x, state = self.features(tokens, state, mask, segment_ids)
        return self.logits(x), state

    def features(
        self,
        tokens: Int[Array, "B T"],
        state: State | None = None,
        mask: Mask | None = None,
        segment_ids: SegmentIds | None = None,
    ) -> tuple[Float[jax.Array, "B T F"], State]:
        """Returns what `logits` reads, for the caller who wants them at few tokens only."""
        tokens = jnp.asarray(tokens)
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers, [B, T]; got {tokens.dtype} {tokens.shape}")
        if mask is not None:
            tokens = jnp.where(mask, tokens, 0)
        x = self.embed(tokens)
        states = []
        for i, block in enumerate(self.blocks):
            x, after = block(x, None if state is None else state[i], mask, segment_ids)
            states.append(after)
        return self.norm(x), tuple(states)

    def logits(self, x: Float[jax.Array, "*B F"]) -> Float[jax.Array, "*B V"]:
        """Maps features to logits."""
        return self.embed.attend(x) if self.head is None else self.head(x)

    def init_state(self, batch_size: int) -> State:
        """Returns the state before any token, for `batch_size` rows."""
        return tuple(block.mixer.init_state(batch_size) for block in self.blocks)

    @property
    def max_length(self) -> int | None:
        """How many tokens a row may have, if a KV cache limits it."""
        limits = [getattr(block.mixer, "max_length", None) for block in self.blocks]
        return min((limit for limit in limits if limit is not None), default=None)
