"""Apply the examples of CONTRIBUTING.md to a copy of the package, and type those of `docs/own_methods.md`."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from processes import environment, run_python

from dape_jax.__main__ import COMMANDS

pytestmark = pytest.mark.extra

ROOT = Path(__file__).parents[1]
FILES = (
    *(f"dape_jax/{file}" for file in ("model/biases.py", "model/processors.py", "tasks/__init__.py")),
    "experiments/catalogue.py",
)


@pytest.fixture(scope="module")
def changed(tmp_path_factory) -> Path:
    """Return a directory with a copy of the package to which the examples were added."""
    root = tmp_path_factory.mktemp("contributing")
    for name in ("dape_jax", "experiments"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    page = (ROOT / "CONTRIBUTING.md").read_text()
    examples = re.findall(r"In `([\w/]+\.py)`[^`]*```python\n(.*?)```", page, re.S)
    assert tuple(file for file, _ in examples) == FILES
    for file, code in examples:
        (table,) = re.findall(r"^([A-Z]+) = \{", code, re.M)
        with (root / file).open("a") as source:
            source.write("\n\n" + re.sub(r"\{\s*\.\.\.", f"{{**{table}", code))
    return root


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    return run_python(*arguments, cwd=root, PYTHONPATH=str(root))


SOLVES = """
import numpy as np
from dape_jax.tasks import TASKS

assert TASKS["has_pair"].solve(np.array([[0, 1, 0, 1], [0, 1, 1, 0]])).tolist() == [[0], [1]]
"""
SMALL = "data.validation_fraction=0.3 model.num_layers=1 model.width=16 model.num_heads=2 train.train_length=16 "
SMALL += "train.num_steps=2 train.validation_batches=1"


def small(root: Path) -> list[str]:
    """Return the flags of a small model of the text in a directory."""
    return [f"--config.{each}" for each in (f"data.path={root}/text", f"data.cache_dir={root}/cache", *SMALL.split())]


TRAIN = "from dape_jax.training.command import command; command()"


def test_the_added_bias_and_processor_keep_the_contracts_and_the_added_task_is_solved(changed):
    options = "-p", "no:cacheprovider", "-k", "inverse-talking_heads"
    done = run(changed, "-m", "pytest", "--pyargs", "dape_jax.testing", *options)
    assert re.search("6 passed, ", done.stdout), done.stdout[-3000:]
    done = run(changed, "-c", SOLVES)
    assert done.returncode == 0, done.stderr


def test_a_model_with_the_added_bias_and_processor_trains(changed, tmp_path):
    tiny.write_text(tmp_path / "text")
    recipe = "--config=configs/quickstart.py:bias=inverse,processor=talking_heads"
    done = run(changed, "-c", TRAIN, recipe, *small(tmp_path), f"--workdir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["config"]["model"]
    assert (saved["bias"], saved["processor"]) == ({"name": "inverse"}, {"name": "talking_heads"})


def test_the_added_experiment_is_shown(changed):
    done = run(changed, "-m", "experiments", "show", "short")
    assert done.returncode == 0, done.stderr
    assert "configs/small.py:xs,bias=alibi,processor=dape,kernel=3,train_length=32" in done.stdout


# A processor that reads the next key, and a run whose module is not there.
FAULTY = """
class Ahead(TalkingHeads):
    def __call__(self, scores_BHTS, bias_BHTS, mask):
        return super().__call__(scores_BHTS, bias_BHTS, mask) + jnp.roll(scores_BHTS, -1, 3)


@dataclasses.dataclass(frozen=True)
class AheadConfig(ProcessorConfig):
    module = Ahead


PROCESSORS["ahead"] = AheadConfig
"""


def test_methods_outside_the_package(tmp_path):
    """Write the module of `docs/own_methods.md`, and type the page's commands, with a small model."""
    page = (ROOT / "docs" / "own_methods.md").read_text()
    (module,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    here = tmp_path / "here"
    (here / "other").mkdir(parents=True)
    (here / "my_methods.py").write_text(module)
    tiny.write_text(tmp_path / "text")

    for name, module_of in COMMANDS.items():  # console commands, whose directory is in the search path, not this one
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        more = f"import sys; sys.argv += {small(tmp_path) if name == 'dape-train' else []}"
        program.write_text(f"#!{sys.executable}\n{more}\nfrom dape_jax.{module_of} import command\ncommand()\n")
        program.chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])

    def type_in(lines: str, where: Path = here) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", "-ec", lines], cwd=where, env=environment(PATH=path), capture_output=True, text=True, check=False
        )

    commands, contracts = (
        block for block in re.findall(r"(?:^    .*\n)+", page, re.MULTILINE) if "my_methods" in block
    )
    done = type_in(commands)
    assert done.returncode == 0, done.stderr[-2000:]
    saved = json.loads((here / "runs/own/seed1/config.json").read_text())["config"]["model"]
    assert (saved["bias"], saved["imports"]) == ({"name": "inverse", "initial_a": 1.0}, ["my_methods"])
    report = json.loads((here / "runs/lengths.json").read_text())
    assert [run["name"] for run in report["runs"]] == [f"{name}/seed{i}" for name in ("dape", "own") for i in range(3)]
    assert [(method["name"], "differences" in method) for method in report["methods"]] == [
        ("dape", False),
        ("own", True),
    ]
    assert (here / "runs/lengths.pdf").read_bytes().startswith(b"%PDF")
    train = re.findall(r"dape-train .*\\\n.*", commands)[0].replace("$seed", "0")
    assert "complete: step 2 of 2" in type_in(train).stderr
    done = type_in("dape-train --import=my_methods --config=configs/quickstart.py --help=model.bias")
    assert "--config.model.bias.initial_a  (float)\n      initial value of a\n      default: 1.0" in done.stdout

    for line, words in (
        (
            "dape-export --workdir=runs/own/seed0 --output=exported",
            "error: model.bias.name = 'inverse': .* to be exported",
        ),
        (train.replace("--import=my_methods", ""), "error: model.bias.name = 'inverse': .*--import=MODULE.*"),
        (
            "dape-eval --workdir=../runs/own/seed0 --lengths=8",
            "error: model.imports = 'my_methods': not found: .* PYTHONPATH.*",
        ),
    ):
        done = type_in(line, here / "other" if "../" in line else here)
        assert done.returncode == 2, (line, done.stderr)
        assert re.fullmatch(words, done.stderr.splitlines()[-1]), (line, done.stderr)
        assert "Traceback" not in done.stderr

    contracts = contracts.strip()
    done = type_in(f"{contracts} -q -p no:cacheprovider")
    assert re.search("30 passed in", done.stdout), done.stdout[-3000:]
    (here / "my_methods.py").write_text(module + FAULTY)
    done = type_in(f"{contracts} -q -p no:cacheprovider -k 'rows and dense-kerple'")
    assert re.search("1 failed, 1 passed, ", done.stdout), done.stdout[-3000:]
    broken = module.replace("import jax.numpy as jnp", "import jax.numpyy as jnp")
    (here / "my_methods.py").write_text(broken)
    done = type_in(train)
    assert re.fullmatch("error: --import = 'my_methods': No module named 'jax.numpyy'", done.stderr.splitlines()[-1])
