"""The number of lines of each folder is at most its limit in `pyproject.toml`."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMITS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["dape_jax"]["budget"]


@pytest.mark.parametrize("places", LIMITS)
def test_lines_are_within_the_limit(places):
    """`places` is a space-separated list of files and folders; a folder counts with its subfolders."""
    lines = 0
    for place in map(ROOT.joinpath, places.split()):
        files = place.rglob("*.py") if place.is_dir() else [place]
        lines += sum(file.read_text().count("\n") for file in files)
    assert 0 < lines <= LIMITS[places]
