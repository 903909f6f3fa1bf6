"""The command lines as a user types them, each in a process of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

ROOT = Path(__file__).parents[1]


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("command_lines")
    tiny.write_text(root / "text")
    return root


def train_arguments(root: Path, config: str, workdir: Path, *more: str) -> list[str]:
    return [
        "train.py",
        f"--config={config}",
        f"--workdir={workdir}",
        f"--config.data.path={root}/text/*.txt",
        f"--config.data.cache_dir={root}/cache",
        "--config.data.validation_fraction=0.3",
        "--config.model.num_layers=1",
        "--config.model.width=16",
        "--config.model.num_heads=2",
        "--config.train.train_length=16",
        "--config.train.batch_size=4",
        "--config.train.num_steps=4",
        "--config.train.eval_interval=2",
        "--config.train.validation_batches=1",
        "--config.train.checkpoint_interval=2",
        "--config.evaluation.lengths=(16,64)",
        "--config.evaluation.max_windows=4",
        *more,
    ]


@pytest.mark.slow
def test_train_twice_then_evaluate(root, tmp_path):
    """Two methods trained, one of them asked for again, then compared: table, JSON, Markdown and picture."""
    for name, config in (
        ("kerple", "configs/quickstart.py:processor=none"),
        ("fire", "configs/paper.py:125m,bias=fire,processor=dape,kernel=5,channels=3,vocab=257"),
    ):
        done = run(*train_arguments(root, config, tmp_path / name, "--config.data.tokenizer=bytes"))
        assert done.returncode == 0, done.stderr
        assert re.search(r"loss \d\.\d+, [\d,]+ tokens/s, validation \d\.\d+", done.stderr)
    again = run(*train_arguments(root, "configs/quickstart.py:processor=none", tmp_path / "kerple"))
    assert again.returncode == 0, again.stderr
    evaluated = run("eval.py", f"--workdir={tmp_path}/kerple,{tmp_path}/fire", "--last_tokens=8", "--lengths=16,32,64")
    assert evaluated.returncode == 0, evaluated.stderr
    assert str(tmp_path / "lengths.png") in evaluated.stdout
    results = json.loads((tmp_path / "lengths.json").read_text())
    assert [(r["name"], r["last_tokens"], len(r["lengths"])) for r in results["runs"]] == [
        ("kerple", 8, 3),
        ("fire", 8, 3),
    ]
    assert sorted(file.name for file in tmp_path.glob("lengths.*")) == [
        f"lengths.{e}" for e in ("json", "md", "png", "txt")
    ]
    assert list((tmp_path / "kerple" / "tensorboard").iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config=configs/quickstart.py:bias=kerpel"], ["error: model.bias.name = 'kerpel': one of", "'kerple'"]),
        (["--config=configs/quickstart.py:processor=none,kernel=5"], ["error: config argument", "processor=dape"]),
        (
            ["--config=configs/quickstart.py", "--config.model.rotary.factor=4"],
            ["error: --config.model.rotary.factor=4"],
        ),
        (["--config=configs/quickstart.py", "--config.model.bias=alibi"], ["--config.model.bias=alibi", "by name"]),
        (
            ["--config=configs/quickstart.py:bias=nope", "--config.model.processor.inputs=bias"],
            ["error: model.processor.inputs = 'bias'"],
        ),
        (["--config=configs/quickstart.py:kernel=wide"], ["config argument", "kernel=wide", "int"]),
        (["--config=configs/quickstart.py:kernal=3"], ["config argument", "kernal=3", "'kernel'"]),
        (["--config=configs/quickstart.py", "--config.data.path=/nowhere"], ["data.path", "/nowhere"]),
        (["--config=configs/nothing.py"], ["configs/nothing.py", "cannot be read"]),
        (["--config=configs/quickstart.py", "train.num_steps=3"], ["train.num_steps=3", "--name=value"]),
        (["--config=configs/quickstart.py:bias=t5", "--config.model.bias.num_buckets=2"], ["num_buckets", "2", "4 or"]),
        (["--config=configs/paper.py:13b"], ["config argument", "13b", "6.7b"]),
        (["--config=configs/paper.py:125m,bias=alibi"], ["data.path", "''"]),
    ],
)
def test_bad_input_is_one_line(tmp_path, arguments, words):
    done = run("train.py", *arguments, f"--workdir={tmp_path}/run")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert all(word in line for word in words), line
    assert not (tmp_path / "run").exists()


def test_evaluating_nothing_is_one_line(tmp_path):
    done = run("eval.py", f"--workdir={tmp_path}")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"error: workdir = {str(tmp_path)!r}: a directory that train.py has written"]


@pytest.mark.parametrize("config", sorted(file.name for file in (ROOT / "configs").glob("*.py")))
def test_every_config_says_how_to_run_it(config):
    text = (ROOT / "configs" / config).read_text()
    assert f"--config=configs/{config}" in text
    assert "python eval.py" in text


def test_the_package_has_no_hidden_defaults():
    """A config's `.get(key, default)` would be a knob that no config file shows."""
    for file in [*(ROOT / "dape_jax").rglob("*.py"), *(ROOT / "configs").glob("*.py")]:
        assert not re.search(r"\b(config|cfg|spec|choice|c)\.get\(", file.read_text()), file
