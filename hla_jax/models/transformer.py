"""A language model."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Float, Integer

from hla_jax._check import checked
from hla_jax._layout import Layout, divide, divide_parameter
from hla_jax._types import Array, Mask, SegmentIds, result_type
from hla_jax.models._values import check_range
from hla_jax.models.blocks import (
    MIXERS,
    Block,
    Mixers,
    State,
    init_stacked,
    length_limit,
    make_mixers,
    run_blocks,
    scan_blocks,
    stack_blocks,
)


class TransformerLM(nnx.Module):
    """A causal language model.

    Args:
      vocab_size: V, how many tokens there are.
      num_layers: how many blocks.
      num_heads: H, query heads of each.
      features: F, width of the residual stream.
      mixer: the token-mixing layer, a causal one: "linear", "hla2", "ahla", "hla3", "softmax",
        "flash", "mla", "sliding_window" (which needs `window`), "sparse" (`pattern`), "longformer"
        (`window`), "big_bird", "performer", "reformer", or anything that makes one when called
        with num_heads, in_features, dtype, param_dtype, rngs and the `mixer_options`. Or one of
        these for each block, such as ["hla2", "hla2", "softmax"] * 4.
      mlp_features: width inside the MLP (default 4 F).
      tied: whether the logits' matrix is the embedding's.
      scan: whether the blocks are one loop, in which a block is compiled once (or the blocks that
        repeat, once each) and `blocks` holds the parameters of all that are of a kind, stacked.
        The values are those without it, but a mixer of one's own cannot change its variables.
      remat: whether a backward pass computes the inside of each block anew, instead of keeping it;
        a mixer of one's own cannot change its variables here either.
      layout: how parameters and tokens are divided over devices, a `hla_jax.parallel.Layout`.
      dtype: of the computation; None means the parameters'. Parameters in float32 and a dtype of
        bfloat16 are mixed precision.
      param_dtype: of the parameters.
      rngs: the source of the initial parameters.
      **mixer_options: what else is given goes to the token-mixing layers, for example
        num_kv_heads, decay or max_length. Where blocks differ, all must take them; options of one
        come with it: functools.partial(hla_jax.nn.SoftmaxAttention, max_length=512).

    Raises:
      ValueError: mixer is another name, makes a layer that is not causal, or is not one for each
        block.

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
        mixer: Mixers = "hla2",
        mlp_features: int | None = None,
        tied: bool = True,
        scan: bool = False,
        remat: bool = False,
        layout: Layout | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        **mixer_options: Any,
    ):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.embed = nnx.Embed(vocab_size, features, **kinds)
        mixer_options |= dict(num_heads=num_heads, in_features=features, **kinds)
        if layout is not None:
            mixer_options["layout"] = layout
        mixers = make_mixers(mixer, MIXERS, num_layers, causal=True, **mixer_options)
        mlp_features = mlp_features or 4 * features
        blocks = [Block(features, mlp_features, m, **kinds) for m in mixers]
        self.blocks = nnx.List(stack_blocks(blocks) if scan else blocks)
        self.num_layers, self.scan, self.remat, self.layout = num_layers, scan, remat, layout
        self.norm = nnx.RMSNorm(features, **kinds)
        self.head = None if tied else nnx.Linear(features, vocab_size, use_bias=False, **kinds)
        self.embed.embedding = divide_parameter(self.embed.embedding, layout, "heads", "parameters")
        if self.head is not None:
            self.head.kernel = divide_parameter(self.head.kernel, layout, "parameters", "heads")

    def __call__(
        self,
        tokens: Integer[Array, "B T"],
        state: State | None = None,
        mask: Mask | None = None,
        segment_ids: SegmentIds | None = None,
    ) -> tuple[Float[Array, "B T V"], State]:
        """The logits of each next token, and the state after the last token.

        Args:
          tokens: [B, T], integers in 0..V-1 (any where masked). Others are an error where their
            values are known, outside of jit; inside, they make logits NaN.
          state: what the model returned for the tokens before; None is the beginning.
          mask: [B, T], False at padding, which changes nothing, wherever it is.
          segment_ids: [B, T], integers: documents packed into a row do not see each other.

        Returns:
          Logits [B, T, V], of no meaning where masked, and the state, a `hla_jax.nn.MixerState` for
          each block.

        Raises:
          ValueError: an argument has a wrong shape or dtype; the message names it.
        """
        x, state = self.features(tokens, state, mask, segment_ids)
        return self.logits(x), state

    def features(
        self,
        tokens: Integer[Array, "B T"],
        state: State | None = None,
        mask: Mask | None = None,
        segment_ids: SegmentIds | None = None,
    ) -> tuple[Float[jax.Array, "B T F"], State]:
        """What `logits` reads, for the caller who wants those of a few tokens alone.

        Args:
          tokens: [B, T], as in a call of the model, and so are the other arguments.
          state: one `hla_jax.nn.MixerState` for each block, or None.
          mask: [B, T].
          segment_ids: [B, T].

        Returns:
          Features [B, T, F], and the state after the last token.

        Raises:
          ValueError: an argument has a wrong shape or dtype; the message names it.
        """
        given, tokens = tokens, jnp.asarray(tokens)
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers, [B, T], got {tokens.dtype} {tokens.shape}")
        if mask is not None:
            mask = checked("mask", mask, tokens.shape, jnp.bool_)
        if state is not None:
            N, got = self.num_layers, type(state).__name__
            if type(state) is tuple:
                got = f"({', '.join(type(s).__name__ for s in state)})"
            if got != f"({', '.join(['MixerState'] * N)})":
                raise ValueError(f"state must be None or a tuple of {N} MixerStates, got {got}")
        V = self.embed.num_embeddings
        check_range(
            "tokens", given, 0, V - 1, True if mask is None else mask, which=" where unmasked"
        )
        tokens = tokens.astype(result_type(tokens, jnp.int32))
        if mask is not None:
            tokens = jnp.where(mask, tokens, 0)
        exists = (tokens >= 0) & (tokens < V)
        # Looked up in the whole of each row, or its parts would have to become parts of tokens.
        table = self.embed.embedding[...].astype(self.embed.dtype)
        x = jnp.take(divide(table, self.layout, "heads", None), tokens, axis=0, mode="clip")
        x = jnp.where(exists[..., None], x, jnp.nan)
        x = divide(x, self.layout, "batch", "sequence", None)
        run = partial(scan_blocks, repeats=self._repeats) if self.scan else run_blocks
        x, after = run(self.blocks, x, state, mask, segment_ids, remat=self.remat)
        return self.norm(x), after

    def logits(self, x: Float[jax.Array, "*B F"]) -> Float[jax.Array, "*B V"]:
        """The logits [*B, V] of features [*B, F]."""
        logits = self.embed.attend(x) if self.head is None else self.head(x)
        # Features of one token of each row are [B, F].
        names = {1: (), 2: ("batch",), 3: ("batch", "sequence")}
        return divide(logits, self.layout, *names.get(x.ndim, (None,) * (x.ndim - 1)), "heads")

    def init_state(self, batch_size: int) -> State:
        """The state before any token, for `batch_size` rows: a `MixerState` for each block."""
        if self.scan:
            return init_stacked(self.blocks, repeats=self._repeats, batch_size=batch_size)
        return tuple(block.mixer.init_state(batch_size) for block in self.blocks)

    @property
    def _repeats(self) -> int:
        return self.num_layers // len(self.blocks)

    @property
    def max_length(self) -> int | None:
        """How many tokens a row may have, if a KV cache limits it."""
        return length_limit(self.blocks)
