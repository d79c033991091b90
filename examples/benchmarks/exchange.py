"""Prints what a layer of a sequence over many devices exchanges, by formulas, and for how long.

    python examples/benchmarks/exchange.py

For the operators of hla_jax, and for softmax attention by a ring and by all-to-all. Nothing is
measured here; tests compare the formulas of the operators with compiled programs.

Sources: Ring Attention (Liu et al. 2023, arXiv 2310.01889) and DeepSpeed Ulysses (Jacobs et al.
2023, arXiv 2309.14509), sections 3; link speeds from the makers' data sheets.
"""

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple


class Machine(NamedTuple):
    link: float  # bytes a second into a device, by all its links
    peak: float  # operations a second, of bfloat16 products


# As Google's and NVIDIA's data sheets have them; the last with one InfiniBand port a device.
MACHINES = {
    "TPU v5e": Machine(200e9, 197e12),
    "TPU v5p": Machine(600e9, 459e12),
    "H100, NDR": Machine(50e9, 989e12),
}
STATE, TOKEN = 4, 2  # bytes of a number: states are float32, tokens bfloat16
CHUNK = 128  # tokens
FEW = 4  # devices: up to so many the operators gather, beyond they scan


class Layer(NamedTuple):
    T: int  # tokens of a row
    H: int  # heads of queries
    K: int  # and of keys and values
    D: int  # width of queries and keys
    E: int  # of values


MODEL = Layer(T=2**20, H=32, K=8, D=128, E=128)

# The states of each stage of an operator: how many, and their two widths. Linear attention has
# ones beside its values, to normalise with.
STAGES: dict[str, Callable[[Layer], list[tuple[int, int, int]]]] = {
    "linear": lambda m: [(m.K, m.D, m.E + 1)],
    "hla2": lambda m: [(m.K, m.D, m.D), (m.H, m.D, m.E)],
    "ahla": lambda m: [(m.K, m.D, m.E), (m.H, m.D, m.E)],
    "hla3": lambda m: [(m.K, m.D, m.D), (m.K, m.D, m.E), (m.H, m.D, m.E)],
}


def states(name: str, m: Layer, n: int) -> float:
    """Bytes of states and the logs of their decays that reach a device, gathered or by a scan.

    In a forward pass. In the backward pass as many gradients of them go the other way: a gather
    becomes a reduce-scatter, and each permute turns round. Nothing is exchanged a second time.
    """
    arrivals = n - 1 if n <= FEW else 1 + math.ceil(math.log2(n))
    return STATE * sum(N * (a * b + 1) for N, a, b in STAGES[name](m)) * arrivals


def ring(m: Layer, n: int) -> float:
    """The keys and values of all other devices."""
    return TOKEN * m.T * m.K * (m.D + m.E) * (n - 1) / n


def all_to_all(m: Layer, n: int) -> float:
    """Queries, keys, values and outputs, from divided by tokens to divided by heads and back."""
    return TOKEN * m.T / n * (m.H + m.K) * (m.D + m.E) * (n - 1) / n


def operations(name: str, m: Layer) -> float:
    """Of a layer's forward pass, over all devices; half of softmax's pairs are masked."""
    if name.startswith("softmax"):
        return m.T**2 * m.H * (m.D + m.E)
    # A token is added to each state twice, before the exchange and after, and each query head reads
    # its state and the tokens of its chunk.
    return m.T * sum(
        4 * N * a * b + 2 * m.H * (a * b + CHUNK * (a + b)) for N, a, b in STAGES[name](m)
    )


def arrivals(m: Layer) -> dict[str, Callable[[int], float]]:
    """Bytes that reach a device in a layer's forward pass, of one row of tokens, for n devices."""
    operators = {name: partial(states, name, m) for name in STAGES}
    return operators | {
        "softmax, ring": partial(ring, m),
        # More devices than kv heads would have to keep copies of keys and values.
        "softmax, all-to-all": lambda n: all_to_all(m, n) if n <= m.K else math.nan,
    }


def limit(name: str, m: Layer, machine: Machine) -> tuple[int, float]:
    """The most devices, a power of 2, whose exchange takes no longer than their products.

    And what both take one after the other, in seconds, at the peak of products and links.
    """

    def exchange(n: int) -> float:
        return arrivals(m)[name](n) / machine.link if n > 1 else 0.0

    def products(n: int) -> float:
        return operations(name, m) / n / machine.peak

    n = 1
    while exchange(2 * n) <= products(2 * n):
        n *= 2
    return n, exchange(n) + products(n)


def table(m: Layer, devices: list[int]) -> str:
    head = ["", *(f"{n} devices" for n in devices), *MACHINES]
    lines = [head, ["---"] * len(head)]
    for name, count in arrivals(m).items():
        cells = ["-" if math.isnan(count(n)) else f"{count(n) / 1e6:,.3g} MB" for n in devices]
        for n, seconds in (limit(name, m, machine) for machine in MACHINES.values()):
            cells.append(f"{n}: {1e3 * seconds:,.2g} ms")
        lines.append([name, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 8, 64, 512])
    args = parser.parse_args()
    print(f"{MODEL}\nbytes, and for each machine the most devices whose exchange takes no longer")
    print("than their products, with the time of both\n")
    print(table(MODEL, args.devices))


if __name__ == "__main__":
    main()
