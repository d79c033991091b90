"""What a measurement is made under, and the tables it gives."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

Cell = float | tuple[float, ...]


CLOCKS = {"one core": "CPU", "all cores": "wall"}

# GLIBC_TUNABLES. As it comes, malloc gives back what is freed at the heap's top and maps whatever
# is larger than 32 MB anew; each page then faults when it is touched first.
MALLOC = {
    "as it comes": "",
    "huge pages": "glibc.malloc.hugetlb=1",
    "pages kept": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184",
}


class Setting(NamedTuple):
    """What a process is started with."""

    cores: str  # a key of CLOCKS
    malloc: str  # a key of MALLOC
    quick: bool
    native: str | None

    def __str__(self) -> str:
        return f"{self.cores}, {CLOCKS[self.cores]} time, malloc {self.malloc}"


class Table(NamedTuple):
    """A row of cells for each name."""

    title: str
    columns: list[str]
    rows: Mapping[str, Sequence[Cell]]


def markdown(table: Table) -> Iterator[str]:
    """Yields the lines of a table."""
    yield f"**{table.title}**\n"
    yield "| |" + "|".join(f" {c} " for c in table.columns) + "|"
    yield "|---|" + "---|" * len(table.columns)
    for name, cells in table.rows.items():
        yield f"| {name} |" + "|".join(f" {_text(c)} " for c in cells) + "|"
    yield ""


def _text(cell: Cell) -> str:
    if isinstance(cell, tuple):
        return " / ".join(map(_text, cell))
    return f"{cell:.0f}" if cell >= 100 else f"{cell:.3g}"
