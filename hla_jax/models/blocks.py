"""Pre-norm Transformer blocks around the token-mixing layers: what models are made of."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Float

from hla_jax import _compiled, nn
from hla_jax._layout import divide, divide_parameter
from hla_jax._types import Mask, SegmentIds

MIXERS: dict[str, Callable[..., nn.Mixer]] = {
    "linear": nn.LinearAttention,
    "hla2": nn.HLA2,
    "ahla": nn.AHLA,
    "hla3": nn.HLA3,
    "softmax": nn.SoftmaxAttention,
    "flash": nn.FlashAttention,
    "mla": nn.MLA,
    "sliding_window": nn.SlidingWindowAttention,
    "sparse": nn.SparseAttention,
    "longformer": nn.Longformer,
    "big_bird": nn.BigBird,
    "performer": nn.Performer,
    "reformer": nn.Reformer,
}

# Those whose cache has a slot for each token: they take max_length.
CACHED = {"softmax", "flash", "mla", "sparse", "longformer", "big_bird", "reformer"}

State = tuple[nn.MixerState, ...]
Mixers = str | Callable[..., nn.Mixer] | Sequence[str | Callable[..., nn.Mixer]]


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)), with a squared ReLU inside the MLP.

    The squared ReLU needs no transcendental function, unlike a GELU.

    The MLP and x are divided over devices as the mixer's layout says.

    Source: Primer (So et al. 2021, arXiv 2109.08668), for the squared ReLU.
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
        self.layout = getattr(mixer, "layout", None)  # a mixer of one's own may have none
        self.up.kernel = divide_parameter(self.up.kernel, self.layout, "parameters", "heads")
        self.down.kernel = divide_parameter(self.down.kernel, self.layout, "heads", "parameters")

    def __call__(
        self,
        x: Float[jax.Array, "B T F"],
        state: nn.MixerState | None = None,
        mask: Mask | None = None,
        segment_ids: SegmentIds | None = None,
    ) -> tuple[Float[jax.Array, "B T F"], nn.MixerState]:
        """The call of the token-mixing layers, see `hla_jax.nn.Mixer`; x and y are [B, T, F]."""
        y, state = self.mixer(self.mixer_norm(x), state, mask, segment_ids)
        x = x + y
        x = x + self.down(jnp.square(jax.nn.relu(self.up(self.mlp_norm(x)))))
        return divide(x, self.layout, "batch", "sequence", None), state


def make_mixers(
    mixer: Mixers,
    known: Mapping[str, Callable[..., nn.Mixer]],
    count: int,
    *,
    causal: bool,
    **options: Any,
) -> Iterator[nn.Mixer]:
    """Makes so many layers, one by one, of the kind or of the kinds that a model was asked for."""
    kinds = [mixer] * count if isinstance(mixer, str) or callable(mixer) else [*mixer]
    if len(kinds) != count:
        raise ValueError(f"mixer must be one, or one for each of {count} layers, got {len(kinds)}")
    for kind in kinds:
        if isinstance(kind, str) and kind not in known:
            raise ValueError(f"mixer must be one of {sorted(known)} or a callable, got {kind!r}")
        layer = (known[kind] if isinstance(kind, str) else kind)(**options)
        if layer.causal != causal:
            raise ValueError(f"mixer must make layers with causal={causal}, got others: {kind!r}")
        yield layer


def run_blocks(
    blocks: Iterable[Block],
    x: Float[jax.Array, "B T F"],
    state: State | None,
    mask: Mask | None = None,
    segment_ids: SegmentIds | None = None,
    *,
    remat: bool = False,
) -> tuple[Float[jax.Array, "B T F"], State]:
    """Passes x through the blocks; returns it, and the state of each.

    With remat a backward pass computes each block anew, from its x and state, and keeps nothing
    else; a variable that a mixer of one's own changes in its call is then not changed.
    """
    blocks = tuple(blocks)
    states = (None,) * len(blocks) if state is None else state
    after = []
    for block, before in zip(blocks, states, strict=True):
        if remat:
            graph, variables = nnx.split(block)
            inputs = variables, x, before, mask, segment_ids
            x, left = _compiled.call(_rematerialized, *inputs, graph=graph)
        else:
            x, left = block(x, before, mask, segment_ids)
        after.append(left)
    return x, tuple(after)


@partial(jax.jit, static_argnames="graph")
def _rematerialized(variables: Any, *inputs: Any, graph: nnx.GraphDef[Block]) -> Any:
    run = jax.checkpoint(lambda variables, *inputs: nnx.merge(graph, variables)(*inputs))
    return run(variables, *inputs)


def stack_blocks(blocks: Sequence[Block]) -> list[Block]:
    """Stacks what repeats: blocks ABABAB become A and B, each variable with a leading axis of 3.

    Blocks are of the same kind where all but the values of their variables is equal.
    """
    graphs, variables = zip(*(nnx.split(block) for block in blocks), strict=True)
    N = len(blocks)
    period = next(p for p in range(1, N + 1) if N % p == 0 and graphs == graphs[:p] * (N // p))

    def stack(*same: Any) -> Any:
        if not is_variable(same[0]):  # an array that a mixer of one's own holds as it is
            return jnp.stack(same)
        metadata = same[0].get_metadata()
        if spec := metadata.get("out_sharding"):
            metadata = metadata | {"out_sharding": (None, *spec)}
        return type(same[0])(jnp.stack([v[...] for v in same]), **metadata)

    def is_variable(x: Any) -> bool:
        return isinstance(x, nnx.Variable)

    return [
        nnx.merge(graphs[i], jax.tree.map(stack, *variables[i::period], is_leaf=is_variable))
        for i in range(period)
    ]


@partial(jax.jit, static_argnames=("graphs", "repeats", "batch_size"))
def _init_stacked(variables: Any, *, graphs: Any, repeats: int, batch_size: int) -> State:
    # In jit, what a state does not need of the parameters is not sliced.
    layers = (
        nnx.merge(graph, jax.tree.map(lambda a, j=j: a[j], v))
        for j in range(repeats)
        for graph, v in zip(graphs, variables, strict=True)
    )
    return tuple(layer.mixer.init_state(batch_size) for layer in layers)


def init_stacked(stacks: Iterable[Block], *, repeats: int, batch_size: int) -> State:
    """Returns the state before any token of each block that `stack_blocks` has stacked."""
    graphs, variables = zip(*map(nnx.split, stacks), strict=True)
    options = dict(graphs=graphs, repeats=repeats, batch_size=batch_size)
    return _compiled.call(_init_stacked, variables, **options)


def scan_blocks(
    stacks: Iterable[Block],
    x: Float[jax.Array, "B T F"],
    state: State | None,
    mask: Mask | None = None,
    segment_ids: SegmentIds | None = None,
    *,
    repeats: int,
    remat: bool = False,
) -> tuple[Float[jax.Array, "B T F"], State]:
    """Does what `run_blocks` does for blocks that `stack_blocks` has stacked.

    But a variable that a mixer of one's own changes in its call is not changed.
    """
    graphs, variables = zip(*map(nnx.split, stacks), strict=True)
    inputs = variables, x, state, mask, segment_ids
    return _compiled.call(_scan, *inputs, graphs=graphs, repeats=repeats, remat=remat)


@partial(jax.jit, static_argnames=("graphs", "repeats", "remat"))
def _scan(
    variables: Any,
    x: jax.Array,
    state: State | None,
    mask: Any,
    segment_ids: Any,
    *,
    graphs: tuple[nnx.GraphDef[Block], ...],
    repeats: int,
    remat: bool,
) -> tuple[jax.Array, State]:
    period = len(graphs)

    def step(x: jax.Array, inputs: Any) -> Any:
        variables, before = inputs
        blocks = map(nnx.merge, graphs, variables)
        return run_blocks(blocks, x, before, mask, segment_ids, remat=remat)

    def stack(*states: Any) -> Any:
        return jax.tree.map(lambda *arrays: jnp.stack(arrays), *states)

    if state is not None:
        state = tuple(stack(*state[i::period]) for i in range(period))
    x, after = jax.lax.scan(step, x, (variables, state), length=repeats)
    layers = (jax.tree.map(lambda a, j=j: a[j], s) for j in range(repeats) for s in after)
    return x, tuple(layers)


def length_limit(blocks: Iterable[Block]) -> int | None:
    """How many tokens a row may have, if a cache limits it."""
    limits = [getattr(block.mixer, "max_length", None) for block in blocks]
    return min((limit for limit in limits if limit is not None), default=None)
