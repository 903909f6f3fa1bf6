"""Apply the examples of CONTRIBUTING.md to a copy of the package, as a reader would."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

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
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600, check=False)


CONTRACTS = """
import jax, numpy as np
from flax import nnx
from dape_jax import BIASES, PROCESSORS, Blockwise, attend
from dape_jax.tasks import TASKS

bias = BIASES["inverse"]().build(2, 4, nnx.Rngs(0))
processor = PROCESSORS["talking_heads"]().build(2, has_bias=True, rngs=nnx.Rngs(0))
processor.mix_HI[...] += jax.random.normal(jax.random.key(0), (2, 2))
draw = np.random.default_rng(0)
q, k, v, other = (draw.normal(size=(1, 11, 2, 4)).astype(np.float32) for _ in range(4))

def run(keys, implementation="dense", bias=bias, processor=processor):
    return np.asarray(attend(q, keys, v, bias=bias, processor=processor, implementation=implementation))

out = run(k)
assert np.abs(out - run(k, processor=None)).max() > 1e-2
assert np.abs(out - run(k, bias=None)).max() > 1e-2
np.testing.assert_allclose(run(k, Blockwise(block_size=4, num_buckets=2)), out, atol=1e-5)
later = run(np.where(np.arange(11)[None, :, None, None] > 6, other, k))
np.testing.assert_array_equal(later[:, :7], out[:, :7])
assert np.abs(later - out)[:, 7:].max() > 1e-2
assert TASKS["has_pair"].solve(np.array([[0, 1, 0, 1], [0, 1, 1, 0]])).tolist() == [[0], [1]]
"""
TRAIN = "from dape_jax.training.command import command; command()"


def test_the_added_bias_and_processor_are_causal_and_used_and_the_added_task_is_solved(changed):
    done = run(changed, "-c", CONTRACTS)
    assert done.returncode == 0, done.stderr


def test_a_model_with_the_added_bias_and_processor_trains(changed, tmp_path):
    tiny.write_text(tmp_path / "text")
    done = run(
        changed,
        "-c",
        TRAIN,
        "--config=configs/quickstart.py:bias=inverse,processor=talking_heads",
        f"--config.data.path={tmp_path}/text",
        f"--config.data.cache_dir={tmp_path}/cache",
        "--config.data.validation_fraction=0.3",
        "--config.model.num_layers=1",
        "--config.model.width=16",
        "--config.model.num_heads=2",
        "--config.train.train_length=16",
        "--config.train.num_steps=2",
        "--config.train.validation_batches=1",
        f"--workdir={tmp_path}/run",
    )
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["config"]["model"]
    assert (saved["bias"], saved["processor"]) == ({"name": "inverse"}, {"name": "talking_heads"})


def test_the_added_experiment_is_shown(changed):
    done = run(changed, "-m", "experiments", "show", "short")
    assert done.returncode == 0, done.stderr
    assert "configs/small.py:xs,bias=alibi,processor=dape,kernel=3,train_length=32" in done.stdout
