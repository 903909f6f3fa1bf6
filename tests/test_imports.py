"""Import graph of the package, read from its source: no cycles, not even through imports in functions or for types."""

import ast
import graphlib
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "dape_jax"


def import_graph(package: Path) -> dict[str, set[str]]:
    """Return the modules of the package that each of its modules imports, anywhere in its code.

    `from package.a import b` is an import of the module `package.a.b` if there is one, else of `package.a`. A package's
    `__init__` counts only where a name is imported from it: being executed on the way to a submodule is no dependency.
    """
    files = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        graph[module] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}: relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in files else str(node.module) for name in names]
            else:
                continue
            graph[module] |= {name for name in names if name in files}
    return graph


def test_the_package_has_no_import_cycle():
    graph = import_graph(PACKAGE)
    assert len(graph) > 50
    assert "dape_jax.errors" in graph["dape_jax.config"]
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize(
    "late", ["def f():\n    from p import a", "from typing import *\nif TYPE_CHECKING:\n    import p.a", "import p.a"]
)
def test_a_cycle_is_found(tmp_path, late):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "__init__.py").touch()
    (tmp_path / "p" / "a.py").write_text("from p.b import c\n")
    (tmp_path / "p" / "b.py").write_text(late + "\n")
    with pytest.raises(graphlib.CycleError, match=r"p\.a"):
        graphlib.TopologicalSorter(import_graph(tmp_path / "p")).prepare()


def test_shapes_in_annotations_are_checked_in_every_module_that_has_them():
    """`--jaxtyping-packages` in pyproject.toml lists the packages, and last what checks them."""
    options = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    (*checked, _) = options.split("--jaxtyping-packages=")[1].split(",")
    with_shapes = {file for file in PACKAGE.rglob("*.py") if "from jaxtyping import" in file.read_text()}
    modules = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in with_shapes}
    assert "dape_jax.model.attention" in modules
    assert not [module for module in modules if not any(module.startswith(f"{package}.") for package in checked)]
