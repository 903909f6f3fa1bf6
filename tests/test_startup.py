"""Test the CPU time that a program takes to answer, and the packages that it imports for that."""

import resource

import pytest
from test_command_lines import run

# Takes twice as long under load as alone: other tests run on the same cores, and share their caches.
MARGIN = 2.0
JAX = {"jax", "flax"}
LARGE = {"orbax", "grain", "jax.experimental.pallas", "matplotlib", "scipy", "tensorboardX", "lm_eval", "torch"}
LARGE |= {"transformers", "wandb"}

# Runs a program as if by its command line, and then prints the packages that it has imported.
PROGRAM = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
finally:
    print("imported:", *sys.modules)
"""


@pytest.mark.parametrize(
    ("command", "allowed", "seconds"),
    [
        ("train.py --help", set(), 0.5),
        ("train.py --workdir=never --config=configs/quickstart.py --config.train.nosuch=1", JAX, 2.0),
        ("eval.py --nosuch=1", set(), 0.5),
        ("dape_jax.data.prepare --nosuch=1", set(), 0.5),
        ("dape_jax.planning --nosuch=1", set(), 0.5),
        ("dape_jax.pretrained.export_command --nosuch=1", set(), 0.5),
        ("dape_jax.pretrained.import_command --nosuch=1", set(), 0.5),
        ("dape_jax.tools.attention_maps --nosuch=1", set(), 0.5),
        ("dape_jax.tools.generate --nosuch=1", set(), 0.5),
    ],
)
def test_help_and_a_wrong_flag_need_no_large_package(command, allowed, seconds):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run("-c", PROGRAM, *command.split())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    imported = set(done.stdout.splitlines()[-1].split())
    assert "absl" in imported, done.stderr
    assert "flags:" in done.stdout or "nosuch=1: " in done.stderr
    assert not (JAX | LARGE) - allowed & imported
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < seconds * MARGIN


def test_importing_the_training_loop():
    done = run("-c", "import sys, dape_jax.training.loop; print(*sys.modules)")
    assert not (LARGE - {"orbax"}) & set(done.stdout.split())
    assert done.stderr == ""
