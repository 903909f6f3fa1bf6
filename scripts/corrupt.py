"""Corrupt every kind of file of a run in twelve ways, and check how `train.py` and `eval.py` react.

    python scripts/corrupt.py --output=results/survival

A tiny run is trained for 8 steps, and the checkpoints after step 4 are deleted from a copy. In each case, one file of
the copy or of its corpus is corrupted; then the run is resumed or evaluated. Allowed outcomes:

    equal      no effect: `train.py` ends with a bitwise equal checkpoint, `eval.py` with equal results
    older      `eval.py` skips the damaged checkpoint with a warning, and evaluates an older one
    one line   an error of one line; no file of the run is changed or removed

Any other outcome (a traceback, different bits or results, a process that hangs) is reported, and the exit status is 1.
Of files of one kind, such as the chunks of arrays, only one is corrupted. If root runs this script, its processes drop
the capabilities that bypass file permissions. The counts are written to OUTPUT/corrupt.json.
"""

import atexit
import collections
import ctypes
import dataclasses
import json
import os
import random
import re
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags
from tqdm import tqdm

from dape_jax import command_line
from dape_jax.command_line import define_flags, flag, from_flags
from dape_jax.errors import require
from dape_jax.files import write_json
from dape_jax.provenance import make_results_directory, provenance

ROOT = Path(__file__).resolve().parent.parent
NUM_STEPS, CUT_AT = 8, 4
TIMEOUT_S = 600  # for each process, which takes seconds on an idle machine
# From linux/capability.h: _LINUX_CAPABILITY_VERSION_3; bits of CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
CAPABILITY_VERSION, READ_ALL = 0x20080522, 0b110
ALLOWED = ("equal", "older", "one line")


# ---- ways to corrupt a file


def random_bytes(file: Path, draw: random.Random) -> None:
    """Replace the content with the same number of random bytes, at least one."""
    file.write_bytes(draw.randbytes(max(1, file.stat().st_size)))


def flip(place: Callable[[int, random.Random], int]) -> Callable[[Path, random.Random], None]:
    """Return a function that flips one bit of the byte at `place(size, draw)`."""

    def corrupt(file: Path, draw: random.Random) -> None:
        content = bytearray(file.read_bytes() or b"\0")
        content[place(len(content), draw)] ^= 1 << draw.randrange(8)
        file.write_bytes(content)

    return corrupt


def cut(keep: float) -> Callable[[Path, random.Random], None]:
    """Return a function that truncates a file to the fraction `keep` of its size."""
    return lambda file, draw: os.truncate(file, int(file.stat().st_size * keep))


def replace_by(make: Callable[[Path], object]) -> Callable[[Path, random.Random], None]:
    """Return a function that deletes a file and calls `make` with its path."""

    def corrupt(file: Path, draw: random.Random) -> None:
        file.unlink()
        make(file)

    return corrupt


CORRUPTIONS: dict[str, Callable[[Path, random.Random], object]] = {
    "deleted": replace_by(lambda file: None),
    "empty": cut(0),
    "half": cut(0.5),
    "without the last byte": lambda file, draw: os.truncate(file, max(0, file.stat().st_size - 1)),
    "a bit at the start": flip(lambda size, draw: 0),
    "a bit somewhere": flip(lambda size, draw: draw.randrange(size)),
    "random bytes": random_bytes,
    "zeros": lambda file, draw: file.write_bytes(bytes(file.stat().st_size)),
    "deep JSON": lambda file, draw: file.write_text("[" * 100_000),
    "a directory": replace_by(lambda file: file.mkdir()),
    "a link to nowhere": replace_by(lambda file: file.symlink_to("nowhere")),
    "unreadable": lambda file, draw: file.chmod(0),
}


# ---- processes


class Runner:
    """Runner of command lines in forks of this process, which has imported all modules but not used JAX's devices."""

    def __init__(self, directory: Path, settings: Any):
        """Import the modules of the command lines; `settings` are the caller's flags, which forks remove."""
        os.environ |= {"JAX_PLATFORMS": "cpu", "MPLCONFIGDIR": str(directory / "matplotlib"), "HOME": str(directory)}
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": str(directory / "cache")}
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        import dape_jax.evaluation.perplexity
        import dape_jax.training.loop  # noqa: F401

        self.directory, self.own_flags = directory, [field.name for field in dataclasses.fields(settings)]

    def run(self, *arguments: str) -> tuple[int | None, str]:
        """Run a command line; return its exit status (None if it hangs) and its standard error."""
        log = self.directory / "stderr"
        log.unlink(missing_ok=True)
        process = os.fork()
        if process == 0:
            try:
                self._become(log, arguments)
            except BaseException:  # a fork must never continue as the test
                traceback.print_exc()
                os._exit(1)
        started = time.monotonic()
        while time.monotonic() - started < TIMEOUT_S:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status), log.read_text(errors="replace")
            time.sleep(0.01)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        return None, log.read_text(errors="replace")

    def _become(self, log: Path, arguments: tuple[str, ...]) -> None:
        os.chdir(ROOT)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT, 0o644), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        drop_permission_bypass()
        flags.FLAGS.unparse_flags()
        for name in self.own_flags:  # the command line defines its own flags
            delattr(flags.FLAGS, name)
        sys.argv = list(arguments)
        status = 0
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
            status = 1
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(status)


def train_arguments(directory: Path, workdir: Path) -> tuple[str, ...]:
    """Return the command line of the tiny run."""
    fields = {
        "model.num_layers": 1,
        "model.width": 16,
        "model.num_heads": 2,
        "data.path": directory / "text",
        "data.cache_dir": directory / "data",
        "data.validation_fraction": 0.3,
        "train.train_length": 16,
        "train.batch_size": 8,
        "train.num_steps": NUM_STEPS,
        "train.eval_interval": 2,
        "train.validation_batches": 1,
        "train.checkpoint_interval": 2,
        "train.max_to_keep": NUM_STEPS,
        "evaluation.lengths": "(16,32)",
        "evaluation.last_tokens": 8,
        "evaluation.max_windows": 4,
    }
    return (
        "train.py",
        "--config=configs/quickstart.py",
        f"--workdir={workdir}",
        *(f"--config.{name}={value}" for name, value in fields.items()),
    )


def eval_arguments(workdir: Path, output: Path) -> tuple[str, ...]:
    """Return the command line that evaluates the run."""
    return ("eval.py", f"--workdir={workdir}", f"--output={output}")


# ---- results


def digests(workdir: Path) -> Any:
    """Return the digests of all arrays and JSON items of the last checkpoint."""
    return json.loads((workdir / "checkpoints" / str(NUM_STEPS) / "digests" / "metadata").read_text())


def curves(output: Path) -> Any:
    """Return the evaluation results, without provenance."""
    return json.loads((output / "lengths.json").read_text())["runs"]


def files_of(directory: Path) -> dict[str, bytes | str]:
    """Return the content of all files, except those that every run changes."""
    found: dict[str, bytes | str] = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file() and not name.startswith(("run.lock", "tensorboard")):
            found[name] = path.read_bytes()
    return found


def kind_of(name: str) -> str:
    """Return the kind of a file: its path with placeholders for numbers and hexadecimal names."""
    return re.sub(r"\d+", "N", re.sub(r"[0-9a-f]{12,}", "HASH", name))


def outcome(status: int | None, said: str) -> str:
    """Classify the outcome by exit status and standard error."""
    if status is None:
        return "hangs"
    if status < 0:
        return f"killed by signal {-status}"
    if "Traceback" in said:
        return "traceback"
    if status == 0:
        return "ended"
    said = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", said)  # escape sequences of progress bars
    errors = [line for line in said.splitlines() if line.strip().startswith("error: ")]
    return "one line" if len(errors) == 1 else f"{len(errors)} error lines"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    seed: int = flag(0, "Seed of the random places and bytes.")
    kinds: str = flag("", "Regular expression that selects kinds of files; by default all.")
    ways: tuple[str, ...] = flag(tuple(CORRUPTIONS), f"Ways to corrupt a file: {', '.join(CORRUPTIONS)}.")
    output: str = flag("results/survival", "Directory of the JSON.")

    def __post_init__(self):
        is_valid = bool(self.ways) and set(self.ways) <= set(CORRUPTIONS)
        require(is_valid, "--ways", self.ways, f"must be some of {tuple(CORRUPTIONS)}")


def main(_: list[str]) -> None:
    """Corrupt a file of each kind in each way, and write the counts."""
    settings = from_flags(Settings)
    directory = make_results_directory(Path(settings.output))
    scratch = Path(tempfile.mkdtemp(prefix="corrupt_"))  # a TemporaryDirectory would be removed by each fork
    try:
        result = corrupt(scratch, settings)
    finally:
        shutil.rmtree(scratch)
    result["provenance"] = provenance("orbax-checkpoint", "flax", "grain", "optax")
    write_json(directory / "corrupt.json", result)
    print(json.dumps({name: result[name] for name in ("kinds", "outcomes", "outcomes_by_way")}, indent=1))
    if result["not_allowed"]:
        sys.exit(1)


def corrupt(scratch: Path, settings: Settings) -> dict[str, Any]:
    """Return the counts of outcomes, and the forbidden outcomes; `scratch` is an empty directory."""
    ways = settings.ways
    text = scratch / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"{number} scores of queries and keys, " * 40)
    runner = Runner(scratch, settings)
    whole, cut_off, data = scratch / "whole", scratch / "cut_off", scratch / "data"
    for arguments in (train_arguments(scratch, whole), eval_arguments(whole, scratch / "whole_results")):
        status, said = runner.run(*arguments)
        if status != 0:
            raise RuntimeError(f"the run without corruption fails:\n{said}")
    shutil.copytree(whole, cut_off)
    for step in (cut_off / "checkpoints").iterdir():
        if step.name.isdecimal() and int(step.name) > CUT_AT:
            shutil.rmtree(step)
    (cut_off / "skipped.jsonl").write_text('{"step": 1, "reason": "bad"}\n')
    shutil.copytree(
        cut_off, scratch / "run"
    )  # evaluated under the name of the corrupted copies, which the results contain
    status, said = runner.run(*eval_arguments(scratch / "run", scratch / "cut_off_results"))
    if status != 0:
        raise RuntimeError(f"the run without corruption cannot be evaluated:\n{said}")
    expected = {"train": digests(whole), "eval": curves(scratch / "cut_off_results")}
    shutil.copytree(data, scratch / "data_before")

    roots = {"run": cut_off, "corpus": scratch / "data_before"}
    by_kind: dict[tuple[str, str], str] = {}
    for root, path in roots.items():
        for file in sorted(path.rglob("*")):
            name = str(file.relative_to(path))
            older = any(part in name for part in (f"checkpoints/{step}/" for step in range(CUT_AT)))
            if file.is_file() and not older and re.search(settings.kinds, f"{root} {kind_of(name)}"):
                by_kind[root, kind_of(name)] = name
    cases = [(root, kind, way, which) for root, kind in by_kind for way in ways for which in ("train", "eval")]
    counts: dict[str, collections.Counter] = {way: collections.Counter() for way in ways}
    rows, not_allowed = [], []
    for number, (root, kind, way, which) in enumerate(tqdm(cases, unit="case")):
        workdir, results = scratch / "run", scratch / "results"
        for path in (workdir, results, data):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(cut_off, workdir)
        shutil.copytree(scratch / "data_before", data)
        file = {"run": workdir, "corpus": data}[root] / by_kind[root, kind]
        CORRUPTIONS[way](file, random.Random(settings.seed + number))
        before = files_of(workdir)
        arguments = train_arguments(scratch, workdir) if which == "train" else eval_arguments(workdir, results)
        status, said = runner.run(*arguments)
        found = outcome(status, said)
        if found == "ended" and which == "train":
            found = "equal" if digests(workdir) == expected["train"] else "other bits"
        elif found == "ended":
            skipped = "is damaged and skipped" in said
            found = "equal" if curves(results) == expected["eval"] else "older" if skipped else "other results"
        elif found == "one line" and not files_of(workdir).items() >= before.items():
            found = "one line, but files have changed"
        counts[way][found] += 1
        row = {"root": root, "kind": kind, "way": way, "command": which, "outcome": found}
        rows.append(row)
        if found not in ALLOWED:
            lines = [line for line in re.split(r"[\r\n]", said) if line.strip() and "%|" not in line]
            not_allowed.append(row | {"said": lines[-6:]})
            tqdm.write(f"{kind}, {way}, {which}: {found}: {lines[-1] if lines else ''}")
    return {
        "seed": settings.seed,
        "kinds": len(by_kind),
        "cases": rows,
        "outcomes_by_way": {way: dict(sorted(counter.items())) for way, counter in counts.items()},
        "outcomes": dict(sorted(sum(counts.values(), collections.Counter()).items())),
        "not_allowed": not_allowed,
    }


def drop_permission_bypass() -> None:
    """Drop the capabilities to bypass file permissions in this process."""
    libc = ctypes.CDLL(None)
    header, data = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, data)
    data[:] = [word & ~READ_ALL if place < 3 else word for place, word in enumerate(data)]
    libc.capset(header, data)


if __name__ == "__main__":
    define_flags(Settings)
    command_line.run(main)
