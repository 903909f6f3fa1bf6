"""Measure how much code there is, and how much of it a run, an evaluation, an import and `--help` use.

    python -m benchmarks.weight [--results=results/weight]

Counts lines per folder, the functions and files of the package that are called when `train.py` trains two steps on a
few text files and when `eval.py` evaluates that run, and the modules of the package that a program imports. All figures
are independent of the machine, except the bytes of a compiled program, which depend on its compiler.
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from absl import flags

from dape_jax import command_line

ROOT = Path(__file__).resolve().parents[1]
RESULTS = flags.DEFINE_string("results", "results/weight", "Directory of the JSON.")
FOLDERS = ("model", "kernels", "data", "training", "evaluation", "tasks", "tools", "pretrained", "planning", "configs")


def lines(files: Any) -> int:
    """Count the lines of files."""
    return sum(file.read_text().count("\n") for file in files)


def lines_per_folder() -> dict[str, int]:
    """Return the number of lines of Python in each folder of the project, and in the package's own modules."""
    package = ROOT / "dape_jax"
    counts = {f"dape_jax/{name}": lines((package / name).rglob("*.py")) for name in FOLDERS}
    counts["dape_jax/*.py"] = lines(package.glob("*.py"))
    counts["dape_jax"] = lines(package.rglob("*.py"))
    return counts | {
        name: lines((ROOT / name).rglob("*.py")) for name in ("experiments", "benchmarks", "scripts", "tests")
    }


def profile(arguments: list[str]) -> dict[str, Any]:
    """Run a script of the project in this process; return the functions and files of the package that it calls."""
    package, called = str(ROOT / "dape_jax") + os.sep, set()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package) and not code.co_name.startswith("<"):
            called.add((code.co_filename.removeprefix(package), code.co_firstlineno))

    sys.argv = arguments
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    files = {file for file, _ in called}
    return {"functions": len(called), "files": len(files), "lines": lines(ROOT / "dape_jax" / f for f in files)}


def imported(statement: str) -> dict[str, Any]:
    """Return the number and lines of the package's modules that a statement imports, and whether JAX is among them."""
    program = f"""
import contextlib, io, json, sys
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    {statement}
names = [n for n in sys.modules if n.split(".")[0] == "dape_jax"]
print(json.dumps([[sys.modules[n].__file__ for n in names], "jax" in sys.modules]))
"""
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    files, has_jax = json.loads(ran.stdout.splitlines()[-1])
    return {"modules": len(files), "lines": lines(map(Path, files)), "imports_jax": has_jax}


def in_own_process(arguments: list[str]) -> dict[str, Any]:
    """Return `profile(arguments)` of a new process: absl's flags can be parsed once."""
    program = f"import json, benchmarks.weight as w; print(json.dumps(w.profile({arguments!r})))"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def main(_: list[str]) -> None:
    """Measure, print and write the figures."""
    with tempfile.TemporaryDirectory() as folder:
        for i in range(40):
            Path(folder, f"{i}.txt").write_text("the attention scores of a long text are a picture " * 60 + str(i))
        config = "--config=configs/quickstart.py"
        small = ("num_steps=2", "batch_size=8", "eval_interval=2", "validation_batches=2")
        run = [config, f"--config.data.path={folder}/*.txt", f"--workdir={folder}/run"]
        run += ["--config.data.validation_fraction=0.4", *(f"--config.train.{field}" for field in small)]
        figures = {
            "lines": lines_per_folder(),
            "train": in_own_process(["train.py", *run]),
            "eval": in_own_process(["eval.py", f"--workdir={folder}/run", "--lengths=64,128", "--max_windows=4"]),
        }
    helps = "sys.argv = ['train.py', '--help']; import runpy; runpy.run_path('train.py', run_name='__main__')"
    attend = "from dape_jax import attend, KerpleConfig, DapeConfig"
    figures["imports"] = {"train --help": imported(helps), "attend": imported(attend)}
    results = [file for file in (ROOT / "results").rglob("*") if file.is_file()]
    figures["results"] = {"files": len(results), "bytes": sum(file.stat().st_size for file in results)}
    print(json.dumps(figures, indent=1))
    output = Path(RESULTS.value)
    output.mkdir(parents=True, exist_ok=True)
    (output / "weight.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    command_line.run(main)
