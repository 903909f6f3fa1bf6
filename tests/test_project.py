"""The project as a whole: import graph, dependencies, version, and the wheel outside the checkout."""

import ast
import email
import graphlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import dape_jax
from dape_jax import provenance

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dape_jax"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def import_graph(package: Path) -> dict[str, set[str]]:
    """Return the modules of the package that each of its modules imports, anywhere in its code, also for types.

    A package's `__init__` counts only where a name is imported from it: being executed on the way to a submodule is no
    dependency.
    """
    files = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph: dict[str, set[str]] = {module: set() for module in files}
    for module, file in files.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                graph[module] |= {alias.name for alias in node.names} & set(files)
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                graph[module] |= {name if name in files else str(node.module) for name in names} & set(files)
    return graph


def test_there_is_no_import_cycle(tmp_path):
    graph = import_graph(PACKAGE)
    assert "dape_jax.errors" in graph["dape_jax.config"]
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.py").write_text("from p.b import c\n")
    (tmp_path / "p" / "b.py").write_text("def f():\n    from p import a\n")
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(import_graph(tmp_path / "p")).prepare()


def test_annotations_with_shapes_are_checked():
    (*checked, _) = PYPROJECT["tool"]["pytest"]["ini_options"]["addopts"].split("--jaxtyping-packages=")[1].split(",")
    with_shapes = [file for file in PACKAGE.rglob("*.py") if "from jaxtyping import" in file.read_text()]
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in with_shapes]
    assert modules
    assert not [module for module in modules if not any(module.startswith(f"{package}.") for package in checked)]


IMPORTED_AS = {"absl-py": "absl", "orbax-checkpoint": "orbax", "backports.zstd": "backports"}  # others: the name


def test_the_package_imports_its_dependencies_and_no_others():
    """Optional packages are imported in functions, except by the PyTorch model, that for lm-eval and contract tests."""
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in PROJECT["dependencies"]}
    names = {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}
    sources = {file: file.read_text() for file in PACKAGE.rglob("*.py")}
    for name in names:
        assert any(re.search(rf"^\s*(import|from) {name}\b", source, re.M) for source in sources.values()), name
    optional = {PACKAGE / "pretrained" / f"{name}_dape.py" for name in ("modeling", "cuda")}
    optional |= {PACKAGE / "tools" / "lm_eval.py", PACKAGE / "testing.py"}
    found = set()
    for node in (node for file in sources.keys() - optional for node in ast.parse(sources[file]).body):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) else []
        found |= {module.partition(".")[0] for module in modules}
    assert found - set(sys.stdlib_module_names) - {"dape_jax"} <= names


def test_messages_name_extras_that_exist():
    pattern = r'dape_jax\[([\w-]+)\]|require_package\("\w+", "([\w-]+)"'
    found = [pair for file in PACKAGE.rglob("*.py") for pair in re.findall(pattern, file.read_text())]
    named = {name for pair in found for name in pair if name}
    assert {"parquet", "wandb"} <= named <= set(PROJECT["optional-dependencies"])


def test_every_mutation_has_its_place():
    """`scripts/mutate.py` applies them."""
    mutations = tomllib.loads((ROOT / "scripts" / "mutations.toml").read_text())["mutation"]
    assert len(mutations) >= 60
    for mutation in mutations:
        assert (PACKAGE / mutation["file"]).read_text().count(mutation["old"]) == 1, mutation["name"]
        files = [name.partition("::")[0] for name in mutation["tests"].split()]
        assert all((ROOT / "tests" / file).exists() for file in files), mutation["name"]


def test_one_version():
    releases = re.findall(r"^## \[?(\d\S*?)\]? - ", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert releases[0] == dape_jax.__version__
    assert f"\nversion: {dape_jax.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_recorded_command_is_the_one_that_was_typed(monkeypatch):
    for typed, expected in (
        (["train.py", "--workdir=a"], "python train.py --workdir=a"),
        (["-m", "dape_jax.planning"], "python -m dape_jax.planning"),
        (["/env/bin/dape-eval", "--workdir=a"], "dape-eval --workdir=a"),
    ):
        monkeypatch.setattr(sys, "orig_argv", ["/env/bin/python", *typed])
        assert provenance.command() == expected


# ---- the wheel


def call(*command: str, cwd: Path, path: Path | None = None) -> str:
    """Return the output of a command whose packages are those of this environment, after those in `path`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"JAX_PLATFORMS": "cpu"} | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# The documentation of every command, which `--help` prints; that of the harness is an extra.
ENTRIES = """
import sys
from importlib.metadata import distribution

for entry in distribution("dape_jax").entry_points.select(group="console_scripts"):
    if entry.name != "dape-lm-eval":
        entry.load()
        print(entry.name, sys.modules[entry.module].__doc__)
"""


@pytest.mark.slow
def test_an_installed_wheel_trains_and_evaluates_outside_of_the_checkout(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(PACKAGE, source / "dape_jax", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    call(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir=dist", ".", cwd=source)
    (wheel,) = (source / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        contents = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (archive.read(name) for name in archive.namelist() if name.endswith("dist-info/METADATA"))
    files = {file.relative_to(ROOT).as_posix() for file in PACKAGE.rglob("*") if file.is_file()}
    assert contents == {name for name in files if "__pycache__" not in name}
    assert email.message_from_bytes(metadata)["Version"] == dape_jax.__version__

    call(*pip, "install", "--no-deps", "--no-index", f"--target={site}", str(wheel), cwd=tmp_path)
    assert {file.name for file in (site / "bin").iterdir()} == set(PROJECT["scripts"])
    here = tmp_path / "here"
    here.mkdir()

    def run(program: str, *flags: str) -> str:
        return call(sys.executable, str(site / "bin" / program), *flags, cwd=here, path=site)

    text = call(sys.executable, "-c", ENTRIES, cwd=here, path=site)
    assert all(re.search(f"^ *{name} --", text, re.M) for name in set(PROJECT["scripts"]) - {"dape-lm-eval"})
    assert "/dape-plan:\n  --" in run("dape-plan", "--help")  # its flags
    small = [
        f"--config.{x}" for x in ("model.num_layers=1", "model.width=16", "model.num_heads=2", "train.num_steps=2")
    ]
    small += ["--config.train.validation_batches=2"]
    run("dape-train", "--config=configs/quickstart.py:processor=dape,kernel=3", *small, "--workdir=run")
    run("dape-eval", "--workdir=run", "--lengths=64,128", "--max_windows=2")
    results = json.loads((here / "run" / "lengths.json").read_text())
    assert results["command"] == "dape-eval --workdir=run --lengths=64,128 --max_windows=2"
    assert [each["length"] for each in results["runs"][0]["lengths"]] == [64, 128]
