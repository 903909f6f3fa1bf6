"""Lines per folder and of the reading path, against the limits in `pyproject.toml`."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

import dape_jax

ROOT = Path(__file__).parents[1]
LIMITS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["dape_jax"]


def num_lines(files: Iterable[Path]) -> int:
    return sum(file.read_text().count("\n") for file in files)


@pytest.mark.parametrize("folders", LIMITS["budget"])
def test_lines_are_within_the_limit(folders):
    assert 0 < sum(num_lines((ROOT / folder).rglob("*.py")) for folder in folders.split()) <= LIMITS["budget"][folders]


def test_the_reading_path_is_short():
    """The package's docstring names its modules."""
    rows = re.findall(r"^    (\S+)/ +(\S.*)$", dape_jax.__doc__, re.M)
    files = [ROOT / "dape_jax" / folder / f"{name}.py" for folder, names in rows for name in names.split()]
    assert 15 <= len(files) <= 20
    assert num_lines(files) <= LIMITS["reading_path"]
