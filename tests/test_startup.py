"""Test the CPU time that a program takes to answer, and the packages that it imports for that."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Takes twice as long under load as alone: other tests run on the same cores, and share their caches.
MARGIN = 2.0

JAX = ["jax", "flax"]
CHECKPOINTS = ["orbax", "grain", "jax.experimental.pallas"]
FIGURES_AND_MORE = ["matplotlib", "scipy", "tensorboardX", "lm_eval", "torch", "transformers", "wandb"]

# Runs a program as if by its command line, and then prints the packages that it has imported.
PROGRAM = """
import runpy, sys
packages, sys.argv = sys.argv[1].split(","), sys.argv[2:]
try:
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
finally:
    print("imported:", *[name for name in packages if sys.modules.get(name) is not None])
"""


def cpu_seconds_of(code: str, *arguments: str) -> tuple[float, subprocess.CompletedProcess]:
    """Run Python code in a separate process; return its CPU time and the process."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done


@pytest.mark.parametrize(
    "program",
    [
        "train.py",
        "eval.py",
        "dape_jax.data.inspect",
        "dape_jax.data.prepare",
        "experiments",
        "dape_jax.planning",
        "dape_jax.pretrained.export_command",
        "dape_jax.pretrained.import_command",
        "dape_jax.tools.attention_maps",
        "dape_jax.tools.generate",
    ],
)
def test_help_and_a_wrong_flag_need_no_jax(program):
    packages = ",".join(JAX + CHECKPOINTS + FIGURES_AND_MORE)
    seconds, done = cpu_seconds_of(PROGRAM, packages, program, "--help")
    assert "flags:" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "imported:"
    assert seconds < 0.5 * MARGIN
    if program == "train.py":
        return  # tells the other processes of the run, see below
    seconds, done = cpu_seconds_of(PROGRAM, packages, program, "--nosuch=1")
    assert "error: --nosuch=1: no such flag" in done.stderr
    assert done.stdout.splitlines()[-1] == "imported:"
    assert seconds < 0.5 * MARGIN


@pytest.mark.parametrize(("flag", "words"), [("--nosuch=1", "nosuch"), ("--config.train.nosuch=1", "nosuch=1")])
def test_a_wrong_flag_or_field_of_a_training_run(flag, words):
    """Import JAX and flax, which recipes and the other processes of the run need, and nothing else that is large."""
    packages = ",".join(CHECKPOINTS + FIGURES_AND_MORE)
    arguments = ("--workdir=never", "--config=configs/quickstart.py", flag)
    seconds, done = cpu_seconds_of(PROGRAM, packages, "train.py", *arguments)
    assert words in done.stderr.splitlines()[-1]
    assert done.stdout.splitlines()[-1] == "imported:"
    assert seconds < 2.0 * MARGIN


def test_importing_the_training_loop():
    packages = [*FIGURES_AND_MORE, "grain", "jax.experimental.pallas"]
    code = f"import sys, dape_jax.training.loop; print(*[name for name in {packages} if name in sys.modules])"
    seconds, done = cpu_seconds_of(code)
    assert (done.stdout, done.stderr) == ("\n", "")
    assert seconds < 2.0 * MARGIN
