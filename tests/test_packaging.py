"""Test the package as installed: recipes in any directory, version, extras, and a wheel outside the checkout."""

import ast
import email
import importlib.util
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
from dape_jax.data.prepare.command import PrepareConfig, prepare
from dape_jax.errors import InputError
from dape_jax.recipes import find_recipe, recipe_names

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dape_jax"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_recipes_of_the_package_are_found_in_any_directory(tmp_path, monkeypatch):
    assert recipe_names() == [f"configs/{name}.py" for name in ("che", "continue", "paper", "quickstart", "small")]
    monkeypatch.chdir(tmp_path)
    assert find_recipe("configs/small.py") == PACKAGE / "configs" / "small.py"
    for missing in ("configs/common.py", "small.py", "mine/configs/small.py", "configs/nothing.py"):
        with pytest.raises(InputError, match=f"^config file = '{missing}': does not exist.* configs/small.py$"):
            find_recipe(missing)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "small.py").touch()
    assert find_recipe("configs/small.py") == Path("configs/small.py")  # the reader's own


def test_one_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", dape_jax.__version__)
    assert "version" in PROJECT["dynamic"]
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


# ---- dependencies


IMPORTED_AS = {"absl-py": "absl", "orbax-checkpoint": "orbax"}  # others: the name itself


def names_of(requirements: list[str]) -> set[str]:
    """Return the names under which the packages are imported."""
    names = [re.match(r"[\w.-]+", requirement).group() for requirement in requirements]
    return {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}


def imports_at_start(file: Path) -> set[str]:
    """Return the packages that a module imports when it is imported itself."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"dape_jax"}


def test_modules_import_packages_of_the_base_alone():
    """Except the PyTorch model, which exported checkpoints carry, and the model for lm-evaluation-harness."""
    optional = {PACKAGE / "pretrained" / "modeling_dape.py", PACKAGE / "tools" / "lm_eval.py"}
    assert any("torch" in imports_at_start(file) for file in optional)
    found = set().union(*(imports_at_start(file) for file in PACKAGE.rglob("*.py") if file not in optional))
    assert {"jax", "tokenizers"} <= found
    assert found <= names_of(PROJECT["dependencies"])


def test_packages_of_the_base_are_imported():
    sources = [file.read_text() for file in PACKAGE.rglob("*.py")]
    for name in names_of(PROJECT["dependencies"]):
        assert any(re.search(rf"^\s*(import|from) {name}\b", source, re.M) for source in sources), name


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    given = PrepareConfig(input=(str(tmp_path / "a.parquet"),), output=str(tmp_path / "out"), tokenizer="bytes")
    with pytest.raises(InputError, match=r"a\.parquet': needs the package pyarrow: pip install 'dape_jax\[parquet\]'$"):
        prepare(given)
    assert "parquet" in PROJECT["optional-dependencies"]


def test_messages_name_extras_that_exist():
    pattern = r'dape_jax\[([\w-]+)\]|require_package\("\w+", "([\w-]+)"'
    found = [pair for file in PACKAGE.rglob("*.py") for pair in re.findall(pattern, file.read_text())]
    named = {name for pair in found for name in pair if name}
    assert {"lm-eval", "parquet", "wandb"} <= named <= set(PROJECT["optional-dependencies"])


# ---- the wheel


def call(*command: str, cwd: Path, path: Path | None = None) -> str:
    """Return the output of a command whose packages are those of this environment, after those in `path`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"JAX_PLATFORMS": "cpu"} | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build the wheel from a copy of the sources, because setuptools writes next to them."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(PACKAGE, source / "dape_jax", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--wheel-dir=dist"]
    call(sys.executable, "-m", "pip", "wheel", *options, ".", cwd=source)
    (built,) = (source / "dist").iterdir()
    return built


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(wheel):
    files = {file.relative_to(ROOT).as_posix() for file in PACKAGE.rglob("*") if file.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as archive:
        contents = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (archive.read(name) for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        (licence,) = (archive.read(name) for name in archive.namelist() if name.endswith("dist-info/licenses/LICENSE"))
    assert contents == files
    named = ("configs/quickstart.py", "pretrained/modeling_dape.py", "py.typed")
    assert {f"dape_jax/{name}" for name in named} <= contents
    assert licence == (ROOT / "LICENSE").read_bytes()
    fields = email.message_from_bytes(metadata)
    assert fields["Version"] == dape_jax.__version__
    assert fields["License-Expression"] == "Apache-2.0"
    assert "Project-URL" not in fields


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """Install the wheel without its dependencies into a new directory."""
    site = tmp_path_factory.mktemp("installed") / "site"
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check", f"--target={site}"]
    call(sys.executable, "-m", "pip", "install", *options, str(wheel), cwd=site.parent)
    code = "import dape_jax; print(dape_jax.__file__)"
    where = call(sys.executable, "-c", code, cwd=site.parent, path=site)
    assert where.strip() == str(site / "dape_jax" / "__init__.py")
    return site


@pytest.mark.slow
def test_an_installed_wheel_trains_and_evaluates_outside_of_the_checkout(site, tmp_path):
    def run(program: str, *flags: str) -> str:
        return call(sys.executable, str(site / "bin" / program), *flags, cwd=tmp_path, path=site)

    steps = ["--config.train.num_steps=20", "--config.train.eval_interval=20", "--config.train.validation_batches=2"]
    run("dape-train", "--config=configs/quickstart.py:processor=dape,kernel=3", *steps, "--workdir=run")
    out = run("dape-eval", "--workdir=run", "--lengths=64,128", "--max_windows=8")
    assert f"figure: {tmp_path / 'run' / 'lengths.png'}" in out
    results = json.loads((tmp_path / "run" / "lengths.json").read_text())
    assert results["command"] == "dape-eval --workdir=run --lengths=64,128 --max_windows=8"
    assert results["commit"] == "unknown"
    assert [each["length"] for each in results["runs"][0]["lengths"]] == [64, 128]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "run"]


@pytest.mark.slow
def test_installed_programs_and_data(site, tmp_path):
    assert {file.name for file in (site / "bin").iterdir()} == set(PROJECT["scripts"])
    for program in PROJECT["scripts"]:
        help_text = call(sys.executable, str(site / "bin" / program), "--help", cwd=tmp_path, path=site)
        assert f"    {program} --" in help_text  # its docstring
        assert f"/{program}:\n  --" in help_text  # its flags
