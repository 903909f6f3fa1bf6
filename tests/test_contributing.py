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
from processes import ROOT, arguments, environment, run_python

pytestmark = pytest.mark.extra

FILES = (
    *(f"dape_jax/{file}" for file in ("model/biases.py", "model/processors.py", "tasks/__init__.py")),
    "experiments/catalogue.py",
)
SOLVES = """
import numpy as np
from dape_jax.tasks import TASKS

assert TASKS["has_pair"].solve(np.array([[0, 1, 0, 1], [0, 1, 1, 0]])).tolist() == [[0], [1]]
"""


def test_the_added_bias_processor_task_and_experiment_work(tmp_path):
    """The bias and the processor keep the contracts and are trained."""
    for name in ("dape_jax", "experiments"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    page = (ROOT / "CONTRIBUTING.md").read_text()
    examples = re.findall(r"In `([\w/]+\.py)`[^`]*```python\n(.*?)```", page, re.S)
    assert tuple(file for file, _ in examples) == FILES
    for file, code in examples:
        (table,) = re.findall(r"^([A-Z]+) = \{", code, re.M)
        with (tmp_path / file).open("a") as source:
            source.write("\n\n" + re.sub(r"\{\s*\.\.\.", f"{{**{table}", code))

    def run(*command: str) -> str:
        done = run_python(*command, cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    contracts = ("--pyargs", "dape_jax.testing", "-p", "no:cacheprovider", "-k", "inverse-talking_heads")
    assert "6 passed, " in run("-m", "pytest", *contracts)
    run("-c", SOLVES)
    experiment = run("-m", "experiments", "show", "short")
    assert "configs/small.py:xs,bias=alibi,processor=dape,kernel=3,train_length=32" in experiment
    recipe = "--config=configs/quickstart.py:bias=inverse,processor=talking_heads"
    train = "from dape_jax.training.command import command; command()"
    tiny.write_text(tmp_path / "text")
    run("-c", train, recipe, *arguments(tmp_path), "--config.train.num_steps=2", f"--workdir={tmp_path}/run")
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["config"]["model"]
    assert (saved["bias"], saved["processor"]) == ({"name": "inverse"}, {"name": "talking_heads"})


# A processor that reads the next key.
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
    """Write the module of `docs/own_methods.md`, and type the page's commands, with a small model and two seeds."""
    page = (ROOT / "docs" / "own_methods.md").read_text()
    (module,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    here, flags = tmp_path / "here", " ".join([*arguments(tmp_path), "--config.train.num_steps=2"])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # of the console commands
    tiny.write_text(tmp_path / "text")
    (here / "other").mkdir(parents=True)
    (here / "my_methods.py").write_text(module)

    def type_in(lines: str, where: Path = here) -> subprocess.CompletedProcess:
        command = ["bash", "-ec", lines.replace("dape-train ", f"dape-train {flags} ")]
        return subprocess.run(
            command, cwd=where, env=environment(PATH=path), capture_output=True, text=True, check=False
        )

    commands, contracts = (
        block for block in re.findall(r"(?:^    .*\n)+", page, re.MULTILINE) if "my_methods" in block
    )
    assert commands.count("for seed in 0 1 2;") == 1
    done = type_in(commands.replace("for seed in 0 1 2;", "for seed in 0 1;"))
    assert done.returncode == 0, done.stderr[-2000:]
    saved = json.loads((here / "runs/own/seed1/config.json").read_text())["config"]["model"]
    assert (saved["bias"], saved["imports"]) == ({"name": "inverse", "initial_a": 1.0}, ["my_methods"])
    report = json.loads((here / "runs/lengths.json").read_text())
    assert [run["name"] for run in report["runs"]] == [f"{name}/seed{i}" for name in ("dape", "own") for i in range(2)]
    assert ["differences" in method for method in report["methods"]] == [False, True]
    assert (here / "runs/lengths.pdf").read_bytes().startswith(b"%PDF")
    train = re.findall(r"dape-train .*\\\n.*", commands)[0].replace("$seed", "0")
    assert "complete: step 2 of 2" in type_in(train).stderr
    in_another_style = f"from __future__ import annotations\n{module.replace('    ', '  ')}"
    for text in (in_another_style, module):
        (here / "my_methods.py").write_text(text)
        done = type_in("dape-train --import=my_methods --config=configs/quickstart.py --help=model.bias")
        assert "--config.model.bias.initial_a  (float)\n      initial value of a\n      default: 1.0" in done.stdout
    for line, where, words in (
        ("dape-export --workdir=runs/own/seed0 --output=exported", here, "model.bias.name = 'inverse': .*exported"),
        ("dape-eval --workdir=../runs/own/seed0", here / "other", "model.imports = 'my_methods': not found: .*"),
    ):
        done = type_in(line, where)
        assert done.returncode == 2, done.stderr
        assert re.fullmatch(f"error: {words}", done.stderr.splitlines()[-1]), done.stderr

    contracts = f"{contracts.strip()} -q -p no:cacheprovider"
    assert "30 passed in" in type_in(contracts).stdout
    (here / "my_methods.py").write_text(module + FAULTY)
    assert "1 failed, 1 passed, " in type_in(f"{contracts} -k 'rows and dense-kerple'").stdout
