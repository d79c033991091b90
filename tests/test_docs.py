"""Every Python block of the README and of docs/ runs, a page's blocks in order as one program."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def program(page: Path) -> str:
    """The page's Python blocks on the lines where the page has them, so that errors point there."""
    text = page.read_text()
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        start = text.count("\n", 0, block.start(1))
        code = block.group(1).splitlines()
        lines[start : start + len(code)] = code
    return "\n".join(lines)


PROGRAMS = {
    page.relative_to(ROOT).as_posix(): code
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if (code := program(page)).strip()
}


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("page", PROGRAMS)
def test_code_on_the_page_runs(page) -> None:
    exec(compile(PROGRAMS[page], page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", ["README.md", "docs/conventions.md", "docs/extending.md"])
def test_page_has_code(page) -> None:
    assert page in PROGRAMS


def test_readme_examples_are_short() -> None:
    for example, limit in zip(
        BLOCK.findall((ROOT / "README.md").read_text()), (22, 14), strict=True
    ):
        assert len([line for line in example.splitlines() if line.strip()]) <= limit


def test_relative_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    missing = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not missing
