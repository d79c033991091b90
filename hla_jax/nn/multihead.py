"""The layers' projections to heads and back."""

from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from hla_jax._check import check_flag, check_sizes, checked_int, known_number
from hla_jax._layout import Layout
from hla_jax.nn.mixer import Mixer, Tokens, refuse_unknown
from hla_jax.nn.rotary import rotary

# Where the parameters of a projection have their kv heads.
HEAD_AXES = {"key": -2, "value": -2, "global_key": -2, "global_value": -2, "decay": -1}


def checked_head_dim(num_heads: int, in_features: int, head_dim: int | None) -> int:
    """Returns D, by default F // H, after a check of all three."""
    check_sizes(num_heads=num_heads, in_features=in_features)
    if head_dim is None and in_features % num_heads:
        raise ValueError(
            f"num_heads={num_heads} must divide in_features={in_features} where head_dim is None; "
            "the first two arguments are num_heads, in_features"
        )
    return in_features // num_heads if head_dim is None else checked_int("head_dim", head_dim)


class MultiHeadOptions(TypedDict, total=False):
    """The options of every layer with heads, see `MultiHead`."""

    num_kv_heads: int | None
    head_dim: int | None
    value_head_dim: int | None
    qk_norm: bool
    output_norm: bool
    rotary: bool
    rotary_base: float
    dtype: DTypeLike | None
    param_dtype: DTypeLike
    layout: Layout | None


class MultiHead(Mixer):
    """The shared part of the layers that project tokens to queries, keys and values.

    A subclass has a method `_mix_heads(x, q, k, v, memory, tokens)`, which returns the mixed heads
    [B, T, H, E] and the next memory.

    Args:
      num_heads: H, query heads.
      in_features: F, features of input and output.
      num_kv_heads: K, a divisor of H (default H). K = 1 is multi-query attention (MQA), 1 < K < H
        grouped-query attention (GQA).
      head_dim: D, width of queries and keys (default F // H, if H divides F).
      value_head_dim: E, width of values (default D).
      qk_norm: whether each query and key is normalised to a root mean square of 1 (times a
        learned gain per channel), before rotary positions and feature maps. With the factor
        D^(-1/2) of the affinities, these are then of order 1. True by default.
      output_norm: whether each head's output is normalised so. Sums of products of affinities grow
        with the number of tokens; this takes their scale away. True by default, but where softmax
        is taken.
      rotary: whether queries and keys are rotated by their positions (`rotary`); True by default.
      rotary_base: its base, 10,000 by default.
      causal: see `Mixer`; True by default.
      dtype: of the computation; None means the promotion of inputs and parameters.
      param_dtype: of the parameters.
      layout: how parameters, batch, heads and tokens are divided over devices, a
        `hla_jax.parallel.Layout`; None leaves that to the compiler.
      rngs: the source of the initial parameters.

    Source: for K < H, Fast Transformer Decoding (Shazeer 2019, arXiv 1911.02150), section 3, and
    GQA (Ainslie et al. 2023, arXiv 2305.13245), section 2.2.

    Raises:
      ValueError: a size is not positive, num_kv_heads does not divide num_heads, or num_heads not
        in_features where head_dim is None.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        qk_norm: bool = True,
        output_norm: bool = True,
        rotary: bool = True,
        rotary_base: float = 10_000.0,
        causal: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        layout: Layout | None = None,
        rngs: nnx.Rngs,
        **unknown: Any,
    ):
        refuse_unknown(self, unknown)
        H, K = num_heads, num_heads if num_kv_heads is None else num_kv_heads
        D = checked_head_dim(num_heads, in_features, head_dim)
        E = D if value_head_dim is None else value_head_dim
        check_sizes(num_kv_heads=K, value_head_dim=E)
        for name, flag in dict(qk_norm=qk_norm, output_norm=output_norm, rotary=rotary).items():
            check_flag(name, flag)
        if H % K:
            raise ValueError(f"num_kv_heads must divide num_heads={H}, got {K}")
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, layout=layout)
        super().__init__(in_features, causal=causal, **kinds)
        self.num_heads, self.num_kv_heads, self.head_dim, self.value_head_dim = H, K, D, E
        self.rotary, self.rotary_base = rotary, known_number("rotary_base", rotary_base)
        self.query = self._to_heads((H, D), rngs)
        self.key = self._to_heads((K, D), rngs)
        self.value = self._to_heads((K, E), rngs)
        self.out = self._linear((H, E), in_features, rngs, "heads", None, "parameters")
        self.query_norm = self._norm(D, rngs) if qk_norm else None
        self.key_norm = self._norm(D, rngs) if qk_norm else None
        self.output_norm = self._norm(E, rngs) if output_norm else None

    @property
    def uses_positions(self) -> bool:
        """Whether the state counts tokens."""
        return self.rotary

    def _mix(self, x: jax.Array, memory: Any, tokens: Tokens) -> tuple[jax.Array, Any]:
        q, k, v = self._project(x, tokens.positions)
        o, memory = self._mix_heads(x, q, k, v, memory, tokens)
        if self.output_norm is not None:
            o = self.output_norm(o)
        return self.out(o), memory

    def _mix_heads(
        self, x: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, memory: Any, tokens: Tokens
    ) -> tuple[jax.Array, Any]:
        # A subclass mixes the tokens here: heads [B, T, H, E], and what to remember of them.
        raise NotImplementedError

    def _to_heads(self, heads_and_width: tuple[int, int], rngs: nnx.Rngs) -> nnx.LinearGeneral:
        return self._linear(self.in_features, heads_and_width, rngs, "parameters", "heads", None)

    def _project(
        self, x: jax.Array, positions: Int[jax.Array, "B T"]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        q = self._positioned(self.query(x), self.query_norm, positions)
        k = self._positioned(self.key(x), self.key_norm, positions)
        return q, k, self.value(x)

    def _positioned(
        self,
        x: Float[jax.Array, "B T heads D"],
        norm: nnx.RMSNorm | None,
        positions: Int[jax.Array, "B T"],
    ) -> Float[jax.Array, "B T heads D"]:
        x = x if norm is None else norm(x)
        return rotary(x, positions, base=self.rotary_base) if self.rotary else x


def mean_pool_kv_heads(params: Any, groups: int) -> Any:
    """Turns multi-head parameters into grouped ones, to go on training from.

    Each group's head is the mean of the kv heads that it replaces, in keys and in values. Queries
    and outputs stay, and query head h then uses group h // (H / groups).

    Source: GQA (Ainslie et al. 2023, arXiv 2305.13245), section 2.1.

    Args:
      params: an `nnx.State`, or a pytree of dicts as `nnx.to_pure_dict` gives, of a layer of this
        library or of `flax.nnx.MultiHeadAttention`, or of a model made of such. Below "key" and
        "value", "kernel" is [F, K, width] and "bias" [K, width]; a learned decay is pooled too.
      groups: how many kv heads remain; divides K. 1 is multi-query attention.

    Returns:
      A pytree of the same structure, for layers of the same kind made with num_kv_heads=groups.

    Raises:
      ValueError: groups does not divide the number of kv heads, or no kv heads are there.

    Example:
      >>> from flax import nnx
      >>> many = MultiHead(num_heads=4, in_features=8, rngs=nnx.Rngs(0))
      >>> few = MultiHead(num_heads=4, in_features=8, num_kv_heads=2, rngs=nnx.Rngs(0))
      >>> nnx.update(few, mean_pool_kv_heads(nnx.state(many, nnx.Param), 2))
      >>> print(many.key.kernel.shape, few.key.kernel.shape)
      (8, 4, 2) (8, 2, 2)
    """
    check_sizes(groups=groups)
    pooled = 0

    def pool(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        nonlocal pooled
        names = ["", *(step.key for step in path if isinstance(step, jax.tree_util.DictKey))]
        axis = HEAD_AXES.get(names[-2]) if names[-1] in ("kernel", "bias") else None
        if axis is None:
            return x
        pooled += 1
        K = x.shape[axis]
        if K % groups:
            raise ValueError(f"groups must divide the {K} kv heads, got {groups}")
        return x.reshape(*x.shape[:axis], groups, K // groups, *x.shape[axis:][1:]).mean(axis)

    result = jax.tree.map_with_path(pool, params)
    if not pooled:
        raise ValueError('params must have a "kernel" below "key" or "value", got none')
    return result
