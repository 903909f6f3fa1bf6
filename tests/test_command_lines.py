"""Command lines as typed by a user, in separate processes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from dape_jax.errors import printable

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
    """Train two methods, one of them twice, and compare them: table, JSON, Markdown and figure."""
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


# Imports once and forks for each command line, which then runs as in a new process, up to its exit handlers.
# Finalising the interpreter as well would copy all memory that the processes share.
FORKED = """
import atexit, gc, json, os, runpy, sys
import dape_jax.training.loop
gc.freeze()
for number, (program, *arguments) in enumerate(json.load(sys.stdin)):
    if os.fork() == 0:
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{sys.argv[1]}/{number}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
        sys.argv = [program, *arguments]
        status = 0
        try:
            if program.endswith(".py"):
                runpy.run_path(program, run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        except SystemExit as error:
            status = error.code or 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            status = 1
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def run_all(commands: list[list[str]], scratch: Path) -> list[tuple[int, str, str]]:
    """Run each program or module with its arguments, and return each status, output and error output."""
    scratch.mkdir()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-u", "-c", FORKED, str(scratch)],
        input=json.dumps(commands),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    outputs = [[(scratch / f"{i}.{name}").read_text() for name in ("out", "err")] for i in range(len(commands))]
    return [(int(status), *output) for status, output in zip(done.stdout.split(), outputs, strict=True)]


BAD_INPUT = [
    (["--config=configs/quickstart.py:bias=kerpel"], ["error: model.bias.name = 'kerpel': must be one of", "'kerple'"]),
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
    (["--config=configs/quickstart.py:bias=t5", "--config.model.bias.num_buckets=2"], ["num_buckets", "2", "4"]),
    (["--config=configs/paper.py:13b"], ["config argument", "13b", "6.7b"]),
    (["--config=configs/paper.py:125m,bias=alibi"], ["data.path", "''"]),
]
BAD_INPUT_OF_TOOLS = [
    (["dape_jax.tools.generate", "--prompt_file=/nowhere"], ["--prompt_file = '/nowhere'", "cannot be read"]),
    (["dape_jax.tools.generate", "--prompt=a", "--top_p=2"], ["top_p = 2.0", "at most 1"]),
    (["dape_jax.tools.generate", "--prompt=a", "--top_k=all"], ["--top_k=all"]),
    (
        ["dape_jax.tools.attention_maps", "--length=16"],
        ["error: workdir = ", "must be a directory written by train.py"],
    ),
]


def test_bad_input_is_one_line(tmp_path):
    cases = [(["train.py", *arguments], words) for arguments, words in BAD_INPUT] + BAD_INPUT_OF_TOOLS
    commands = [[*command, f"--workdir={tmp_path}/run"] for command, _ in cases]
    for (status, _, stderr), (command, words) in zip(run_all(commands, tmp_path / "scratch"), cases, strict=True):
        assert status == 2, (command, stderr)
        (line,) = stderr.splitlines()
        assert line.startswith("error: ")
        assert all(word in line for word in words), line
    assert not (tmp_path / "run").exists()


SETTINGS = """
import dataclasses
from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.errors import require

@dataclasses.dataclass(frozen=True)
class Settings:
    workdir: str = flag(dataclasses.MISSING, "Run directory.")
    names: tuple[str, ...] = flag((), "Names.")
    lengths: tuple[int, ...] = flag((64, 128), "Lengths.")
    show: bool = flag(False, "Show the result.")
    count: int | None = flag(None, "Number of items.")
    rate: float = flag(0.5, "Rate.")

    def __post_init__(self):
        require(self.rate > 0, "--rate", self.rate, "must be positive")

command_line.define_flags(Settings)
if __name__ == "__main__":
    command_line.run(lambda _: print(dataclasses.asdict(command_line.from_flags(Settings))))
"""


def test_flags_come_from_the_fields_of_a_dataclass(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SETTINGS)
    defaults = {"workdir": "d", "names": (), "lengths": (64, 128), "show": False, "count": None, "rate": 0.5}
    accepted = [
        ([], {}),
        (["--names=a,b", "--lengths=8,16-18,32-64/16"], {"names": ("a", "b"), "lengths": (8, 16, 17, 18, 32, 48, 64)}),
        (["--show", "--count=3", "--rate=2"], {"show": True, "count": 3, "rate": 2.0}),
        (["--noshow", "--lengths="], {"lengths": ()}),
    ]
    refused = [
        (["--workdir=d", "--lengths=8,x"], "--lengths = ['8', 'x']: must be comma-separated integers"),
        (["--workdir=d", "--lengths=9-8"], "--lengths = ['9-8']: 9-8 is an empty range"),
        (["--workdir=d", "--rate=0"], "--rate = 0.0: must be positive"),
        (["--workdir=d", "--count=many"], "--count"),
        (["--workdir=d", "more"], "command line = 'more': must be a flag"),
        ([], "--workdir"),
    ]
    argument_lists = [["--workdir=d", *arguments] for arguments, _ in accepted]
    argument_lists += [*(arguments for arguments, _ in refused), ["--help"]]
    commands = [[str(program), *arguments] for arguments in argument_lists]
    *results, (_, help_text, _) = run_all(commands, tmp_path / "scratch")
    for (status, out, err), (arguments, values) in zip(results, accepted, strict=False):
        assert (status, out) == (0, f"{defaults | values}\n"), (arguments, err)
    for (status, _, err), (arguments, message) in zip(results[len(accepted) :], refused, strict=True):
        assert status == 2, arguments
        assert message in err
        assert err.count("\n") == 1
    assert "--[no]show: Show the result." in help_text
    assert "--workdir: Run directory." in help_text


def test_control_characters_are_escaped():
    assert printable("a\x1b[31m\nb\u202e") == r"a\x1b[31m\nb\u202e"
    assert printable("a\x1b\n\tb", keep="\n\t") == "a\\x1b\n\tb"


def test_evaluating_nothing_is_one_line(tmp_path):
    done = run("eval.py", f"--workdir={tmp_path}")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"error: workdir = {str(tmp_path)!r}: must be a directory written by train.py"]


@pytest.mark.parametrize("config", sorted({file.name for file in (ROOT / "configs").glob("*.py")} - {"common.py"}))
def test_every_config_says_how_to_run_it(config):
    text = (ROOT / "configs" / config).read_text()
    assert f"--config=configs/{config}" in text
    assert "python eval.py" in text


def test_the_package_has_no_hidden_defaults():
    """`.get(key, default)` of a config would be an option that no config file shows."""
    for file in [*(ROOT / "dape_jax").rglob("*.py"), *(ROOT / "configs").glob("*.py")]:
        assert not re.search(r"\b(config|cfg|spec|choice|c)\.get\(", file.read_text()), file
