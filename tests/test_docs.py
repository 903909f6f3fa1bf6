"""Documentation: the site builds without warnings, links resolve, tables are up to date, the notebook runs."""

import dataclasses
import importlib
import json
import re
from pathlib import Path
from statistics import fmean
from urllib.parse import urlsplit

import cogapp
import pytest
from processes import ROOT, run_python

import dape_jax
from dape_jax import config, fields
from experiments import tables

DOCS = ROOT / "docs"
NOTEBOOK = DOCS / "quickstart.ipynb"
PAGES = [ROOT / "README.md", ROOT / "results" / "README.md", *sorted(DOCS.glob("*.md"))]


def markdown_links(page: Path) -> list[str]:
    """Return the targets of a page's links, except those in code."""
    text = re.sub(r"```.*?```|`[^`]*`|^    [^\n]*", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not urlsplit(target).scheme]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and the site give to a page's headings."""
    headings = re.findall(r"^#{1,3} (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page):
    """As plain Markdown, without the site."""
    for target in markdown_links(page):
        path, _, anchor = target.partition("#")
        file = page if not path else (page.parent / path).resolve()
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target
        assert page.parent != DOCS or file.suffix != ".md" or file.parent == DOCS, f"{target} is no page of the site"


def test_every_page_is_in_the_index():
    """As a link with a description; Sphinx checks that it is in the site's navigation."""
    linked = {Path(target.partition("#")[0]).name for target in markdown_links(DOCS / "index.md")}
    assert linked >= {page.name for page in DOCS.glob("*.md")} - {"index.md"} | {NOTEBOOK.name}


def test_every_raw_file_that_the_pages_name_exists():
    for page in PAGES:
        for name in re.findall(r"`(results/[\w./-]+)`", page.read_text()):
            assert (ROOT / name).exists() or name == "results/gpu/", (page.name, name)


def test_tables_are_up_to_date(capsys):
    """Change a page's block, not its output, and run `make tables`."""
    pages = [str(page) for page in PAGES if page.parent.name != "results"]
    arguments = ["cog", "-P", "-p", "from experiments.tables import *", "--check", "--diff"]
    assert cogapp.Cog().main([*arguments, *pages]) == 0, capsys.readouterr().out
    assert sum(page.read_text().count("[[[cog print(") for page in PAGES) >= 39


def test_recipes_expect_the_committed_results():
    """Their docstrings have these numbers in this order."""
    demo = [tables.select(tables.read("quickstart/lengths.json")["runs"], name=x)["lengths"] for x in tables.PAIR]
    small = [("fig2", x, 32, at, "small-stdlib") for x in ("dape1x3-kerple", "kerple") for at in (32, 2048)]
    pairs = [tables.select(tables.read("che/accuracy.json")["runs"], task="even_pairs", name=x) for x in tables.PAIR]
    continued = tables.read("retrofit/retrofit.json")["perplexity"]
    ways = ("original, rope", "original, yarn", "ALiBi + DAPE1x3", "Kerple + DAPE1x3")
    for recipe, expected in {
        "quickstart": [tables.select(run, length=at)["perplexity"] for run in demo for at in (64, 2048)],
        "small": [fmean(tables.seeds_of(*each)) for each in small],
        "che": [100 * run[part] for run in pairs for part in ("trained", "score")],
        "retrofit": [continued[way][at] for way in ways for at in ("128", "4096")],
    }.items():
        text = (ROOT / "dape_jax" / "configs" / f"{recipe}.py").read_text()
        numbers = [rf"(?<![\d.]){re.escape(number)}(?!\d)" for number in tables.fixed(expected)]
        assert re.search(".*?".join(numbers), text, re.DOTALL), (recipe, expected)


def test_api_page_has_every_public_name():
    text = (DOCS / "api.md").read_text()
    for name in (name for name in dape_jax.__all__ if not name.startswith("_")):
        assert re.search(rf"(auto\w+:: {name}$|`{name}`)", text, re.MULTILINE), name


def test_every_field_of_a_config_has_a_meaning_and_a_default():
    """`test_tables_are_up_to_date` compares the page of fields with these sections."""
    expected = {field.name for cls in (config.RunConfig, config.TaskRunConfig) for field in dataclasses.fields(cls)}
    for field, table in config.CHOICES.items():
        own = [name for name, kind in table.items() if kind.__module__.startswith("dape_jax")]  # other tests add more
        expected |= {f"model.{field} = {name}" for name in own if field != "alternate_rotary"}
    sections = [section for section in fields.sections() if section.name in expected]
    assert {section.name for section in sections} == expected
    for section in sections:
        for field in section.fields:
            assert all((field.meaning, field.default, field.kind)), (section.name, field.name)
    for text in ("0.002 (quickstart); 0.003 (small); 0.0006 (paper)", "at least 0 and below 1", "one of cosine, wsd"):
        assert text in (DOCS / "config.md").read_text()


STYLED = """
from __future__ import annotations
import dataclasses
from typing import Literal

@dataclasses.dataclass(frozen=True)
class Config:
  initial_a: float = 1.0  # initial value of a
  # name of it
  mode: Literal["a", "b"] = "a"
"""


def test_fields_of_a_users_module_in_another_style(tmp_path, monkeypatch):
    (tmp_path / "styled.py").write_text(STYLED)
    monkeypatch.syspath_prepend(tmp_path)
    found = fields._fields(importlib.import_module("styled").Config(), "model", {})
    rows = [
        ("initial_a", "float", "1.0", "initial value of a", ""),
        ("mode", "Literal['a', 'b']", "a", "name of it", ""),
    ]
    assert found == rows


def test_notebook_has_the_outputs_of_its_cells():
    """The build of the site runs nothing."""
    for cell in (cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"):
        source, outputs = "".join(cell["source"]), cell["outputs"]
        assert bool(outputs) == bool(re.search(r"^(run|print|plt\.show|display)\(", source, re.MULTILINE)), source
        for output in outputs:
            assert output["output_type"] in ("stream", "display_data")
            paths = re.findall(r"(?<![\w.])/\w[\w/-]*", "".join(output.get("text", "")))
            assert all(path.startswith("/tmp/dape-quickstart-") for path in paths), paths


@pytest.mark.slow
def test_notebook_runs(tmp_path):
    """Run the cells one after another, as one program in the notebook's directory, with short training."""
    pytest.importorskip("IPython", reason="pip install jupyterlab is needed to run the notebook")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    program = tmp_path / "notebook.py"
    text = "\n\n".join("".join(cell["source"]) for cell in cells)
    for given, smaller in (
        ("--config.train.num_steps=200", "--config.train.num_steps=2 --config.model.width=32"),
        ("--lengths=64,256,1024 --max_windows=16", "--lengths=64,128 --max_windows=2"),
    ):
        assert text.count(given) == 1
        text = text.replace(given, smaller)
    program.write_text(text)
    done = run_python(program, cwd=DOCS, timeout=3600, MPLBACKEND="Agg", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    loss = re.search(r"loss ([\d.]+) -> ([\d.]+) nats", done.stdout)
    assert float(loss[2]) < 0.7 * float(loss[1])
    assert "unchanged before the changed tokens: True" in done.stdout


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path):
    """As by `make docs`. A link to a page, a heading or a file that does not exist is a warning."""
    for name in ("sphinx", "myst_nb", "sphinx_book_theme", "sphinx_copybutton"):
        pytest.importorskip(name, reason="pip install '.[docs]' is needed to build the site")
    done = run_python("-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", DOCS, tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
