"""The tables of docs/results.md are what the files in docs/results say."""

import importlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "examples"))
results = importlib.import_module("results")

PAGE = results.PAGE.read_text()


def test_tables_are_those_of_the_files() -> None:
    assert results.fill(PAGE) == PAGE


def test_each_file_has_its_table_and_each_picture_its_place() -> None:
    tables = [f"{name}.json" for _, name, _ in results.BLOCK.findall(PAGE)]
    pictures = re.findall(r"\]\(results/(.*?\.png)\)", PAGE)
    assert sorted(path.name for path in results.FOLDER.iterdir()) == sorted(tables + pictures)


@pytest.mark.parametrize("name", results.TABLES)
def test_another_number_makes_another_table(name, tmp_path) -> None:
    shutil.copytree(results.FOLDER, tmp_path, dirs_exist_ok=True)
    file = tmp_path / f"{name}.json"
    numbers = re.compile(r"\d+\.\d+")
    file.write_text(numbers.sub(lambda m: f"{1.5 * float(m[0])}", file.read_text()))
    assert results.fill(PAGE, tmp_path) != PAGE


@pytest.mark.parametrize("name", results.TABLES)
def test_results_tell_how_to_get_them(name) -> None:
    result = json.loads((results.FOLDER / f"{name}.json").read_text())
    assert re.fullmatch(r"python examples/\w+\.py( [-\w./]+)*", result["command"])
    assert not re.search(r" /", result["command"])  # paths of one machine
    assert {"preset", "seed"} & set(result)
    assert result["seconds"] > 0
    assert {"device", "jax", "date"} <= set(result["hardware"])
