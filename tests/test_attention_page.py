"""The table of states in docs/attention.md says what the layers hold."""

from pathlib import Path

import jax
import pytest
from flax import nnx

from hla_jax import nn
from hla_jax.attention.patterns import strided

PAGE = Path(__file__).parents[1] / "docs" / "attention.md"

# The layers of the table, made for sequences of T tokens.
LAYERS = {
    "softmax, flash": lambda T, **o: nn.SoftmaxAttention(max_length=T, **o),
    "GQA, 2 kv heads": lambda T, **o: nn.SoftmaxAttention(max_length=T, num_kv_heads=2, **o),
    "MQA": lambda T, **o: nn.SoftmaxAttention(max_length=T, num_kv_heads=1, **o),
    "MLA": lambda T, **o: nn.MLA(max_length=T, kv_rank=256, rotary_dim=32, **o),
    "strided, fixed, Big Bird": lambda T, **o: nn.SparseAttention(
        max_length=T, pattern=strided(64), **o
    ),
    "sliding window": lambda T, **o: nn.SlidingWindowAttention(window=128, **o),
    "Longformer": lambda T, **o: nn.Longformer(max_length=T, window=128, **o),
    "Performer": lambda T, **o: nn.Performer(num_features=128, **o),
    "Reformer": lambda T, **o: nn.Reformer(max_length=T, num_rounds=2, **o),
    "linear attention": lambda T, **o: nn.LinearAttention(**o),
    "HLA2": lambda T, **o: nn.HLA2(**o),
    "AHLA": lambda T, **o: nn.AHLA(**o),
    "HLA3": lambda T, **o: nn.HLA3(**o),
}


def megabytes(name: str, T: int) -> float:
    def memory():
        options = dict(num_heads=8, in_features=512, rngs=nnx.Rngs(0))
        return LAYERS[name](T, **options).init_state(1).memory

    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(jax.eval_shape(memory))) / 1e6


def table() -> dict[str, list[str]]:
    """The cells of each row of the table of states."""
    section = PAGE.read_text().split("## Decoding\n")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines[2:]}


def test_every_layer_with_a_state_is_in_the_table() -> None:
    assert set(table()) == set(LAYERS)


@pytest.mark.parametrize("name", LAYERS)
def test_states_have_the_size_that_the_page_says(name) -> None:
    for T, said in zip((4096, 65536), table()[name][-2:], strict=True):
        assert float(said) == float(f"{megabytes(name, T):.3g}")
