"""Command lines as typed by a user. One process imports the package and is forked for each of them."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from processes import ROOT, environment, run_python

import dape_jax
from dape_jax import command_line
from dape_jax.__main__ import COMMANDS
from dape_jax.errors import InputError, StoppedError, printable
from dape_jax.hardware import platform_fault
from dape_jax.progress import Progress

# Runs each command line as in a new process, up to its exit handlers. Finalising the interpreter as well would copy all
# memory that the processes share.
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
    options = {"cwd": ROOT, "env": environment(), "capture_output": True, "text": True, "check": True}
    program = [sys.executable, "-u", "-c", FORKED, str(scratch)]
    done = subprocess.run(program, input=json.dumps(commands), timeout=600, **options)
    outputs = [[(scratch / f"{i}.{name}").read_text() for name in ("out", "err")] for i in range(len(commands))]
    return [(int(status), *output) for status, output in zip(done.stdout.split(), outputs, strict=True)]


TRAIN = "train.py --workdir=run --config=configs/"
FLAGS = "--config.train.num_stpes=8 --config.num_steps=8 --config.trian.num_steps=8 --config.model.rotary.factor=4 "
FLAGS += "--config.optimizer.lr=1 --config.train.learning_rate=1 "
FLAGS += "--config.model.bias=alibi --config.model.bias.name=alibi --config.train.num_steps"
WRONG = "--config.model.window=a --config.model.alternate_rotary=rope --config.train.profile_steps=3,a"
# Command lines, and words of each line of error, separated by "&".
REFUSED = {
    # the config file and its argument
    f"{TRAIN}nothing.py": ["configs/nothing.py & configs/paper.py"],
    "train.py --workdir=run --config=README.md": ["README.md & must be a Python file with a function get_config"],
    "train.py --workdir=run --config=eval.py": ["eval.py & with a function get_config"],
    f"{TRAIN}quickstart.py:bias=kerpel": ["model.bias.name = 'kerpel' & 'kerple'"],
    f"{TRAIN}quickstart.py:bias=rope": ["model.bias.name = 'rope' & rotary=rope"],
    f"{TRAIN}quickstart.py:bias=mine": ["model.bias.name = 'mine' & --import=MODULE"],
    f"{TRAIN}quickstart.py --import=nosuch": ["--import = 'nosuch' & nosuch.py & PYTHONPATH"],
    f"{TRAIN}quickstart.py --import=mine.py": ["--import = 'mine.py' & without .py"],
    f"{TRAIN}quickstart.py:processor=none,kernel=5": ["kernel=5 & processor=dape"],
    f"{TRAIN}quickstart.py:kernel=wide": ["kernel=wide & int"],
    f"{TRAIN}quickstart.py:kernal=3": ["kernal=3 & 'kernel'"],
    f"{TRAIN}quickstart.py:bias=kerple,bias=alibi": ["bias=alibi & once"],
    f"{TRAIN}paper.py:13b": ["config argument & 13b & 6.7b"],
    f"{TRAIN}paper.py:125m,bias=alibi": ["data.path & ''"],
    # flags and values of fields
    f"{TRAIN}quickstart.py {FLAGS}": [
        "--config.train.num_stpes=8 & did you mean --config.train.num_steps?",
        "--config.num_steps=8 & did you mean --config.train.num_steps?",
        "--config.trian.num_steps=8 & did you mean --config.train.num_steps?",
        "--config.model.rotary.factor=4 & no such field & --help=SECTION",
        "--config.optimizer.lr=1 & no such field; --help lists the sections, --help=SECTION",
        "--config.train.learning_rate=1 & did you mean --config.optimizer.learning_rate?",
        "--config.model.bias=alibi & by name",
        "--config.model.bias.name=alibi & by name",
        "--config.train.num_steps & =VALUE",
    ],
    f"{TRAIN}quickstart.py {WRONG}": [
        "model.alternate_rotary = 'rope' & name",
        "model.window = 'a' & int",
        "train.profile_steps = '3,a' & int",
    ],
    f"{TRAIN}quickstart.py --config.evaluation.max_windows=0": ["evaluation.max_windows = 0 & positive"],
    f"{TRAIN}quickstart.py --config.data.path=tests/test_dat.py": [
        "data.path = 'tests/test_dat.py': does not exist; did you mean tests/test_data.py?"
    ],
    f"{TRAIN}quickstart.py --config.data.path=tests/*.nothing": ["data.path = 'tests/*.nothing': no files there"],
    f"{TRAIN}quickstart.py --config.data.path=None": ["data.path = None: must be a file"],
    "train.py --config=configs/quickstart.py --config.data.path=tests --workdir=tests/run": [
        "workdir = 'tests/run': must not be in the text 'tests'"
    ],
    "dape_jax.data.prepare --show=docss": ["--show = 'docss' & does not exist; did you mean docs?"],
    # flags of programs
    f"{TRAIN}quickstart.py train.num_steps=3": ["train.num_steps=3 & --name=value"],
    "train.py --help=optimiser": ["--help = 'optimiser' & optimizer?"],
    "train.py --data.path=tests --num_steps=8": [
        "--data.path=tests & fields of the config are --config.SECTION.FIELD=VALUE",
        "--num_steps=8 & fields of the config are --config.SECTION.FIELD=VALUE",
    ],
    "train.py": ["--config: must be given", "--workdir: must be given"],
    "eval.py --workdir=run --lenghts=8": ["--lenghts=8 & did you mean --lengths?"],
    "eval.py --workdir=a --workdir=b": ["--workdir=b: must be given once, with commas"],
    "dape_jax train": ["'train' & --name=value"],
    "-m dape_jax.data.prepare --input=docs --output=docs --tokenizer=bytes": ["output = & must be a new directory"],
    "eval.py --plot=lengths.json --lengths=8": ["lengths = (8,) & only for --workdir"],
    "eval.py --workdir=run --bos=maybe": ["--bos=maybe & yes or no"],
    "eval.py --workdir=run --lengths=8,x": ["--lengths = ['8', 'x'] & first-last"],
    "eval.py --workdir=run --lengths=9-8": ["--lengths = ['9-8'] & empty range"],
    "eval.py --workdir=/tmp --bos=no": ["workdir = '/tmp' & dape-train"],
    "-m dape_jax.tools.generate --workdir=run --max_tokens=8 --top_k=all --frobnicate": [
        "--max_tokens=8 & did you mean --max_new_tokens?",
        "--frobnicate & --help",
    ],
    "-m dape_jax.tools.generate --workdir=run --prompt=a --top_p=2": ["top_p = 2.0 & at most 1"],
    "-m dape_jax.tools.generate --workdir=run --top_k=all": ["--top_k=all"],
    "-m dape_jax.tools.generate --workdir=run --prompt=a --stop=": ["--stop = ('',): must be text"],
}
# Flags that are given a place that is not supported; otherwise it would name a local folder `abfs:`.
ELSEWHERE = "abfs://x/y"
PLACES = (
    "train.py --config=configs/quickstart.py --workdir",
    f"{TRAIN}quickstart.py --config.data.path",
    f"{TRAIN}quickstart.py --config.init.source",
    "eval.py --workdir",
    "eval.py --workdir=run --output",
    "-m dape_jax.data.prepare --output=refused-corpus --tokenizer=bytes --input",
    "-m dape_jax.data.prepare --input=text --tokenizer=bytes --output",
    "-m dape_jax.tools.attention_maps --length=8 --workdir",
    "-m dape_jax.tools.generate --prompt=a --workdir",
    "-m dape_jax.pretrained.export_command --output=exported --workdir",
    "-m dape_jax.pretrained.import_command --workdir=run --source",
)


def test_every_mistake_is_one_line_with_its_field_and_value(tmp_path):
    commands = REFUSED | {f"{command}={ELSEWHERE}": ["abfs"] for command in PLACES}
    results = run_all([command.removeprefix("-m ").split() for command in commands], tmp_path / "scratch")
    for (status, _, stderr), (command, expected) in zip(results, commands.items(), strict=True):
        assert status == 2, (command, stderr)
        assert "Traceback" not in stderr
        lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
        assert len(lines) == len(expected), (command, stderr)
        for words in expected:
            assert any(all(word in line for word in words.split(" & ")) for line in lines), (command, words, stderr)
    assert not [file for file in ROOT.iterdir() if file.name in ("abfs:", "run", "refused-corpus", "exported")]


SETTINGS = """
import dataclasses
from dape_jax import command_line
from dape_jax.command_line import flag

@dataclasses.dataclass(frozen=True)
class Settings:
    workdir: str = flag(dataclasses.MISSING, "Run directory.")
    names: tuple[str, ...] = flag((), "Names.")
    lengths: tuple[int, ...] = flag((64, 128), "Lengths.")
    show: bool = flag(False, "Show the result.")
    count: int | None = flag(None, "Number of items.")
    rate: float = flag(0.5, "Rate.")

if __name__ == "__main__":
    command_line.run(lambda settings: print(dataclasses.asdict(settings)), Settings)
"""


def test_flags_come_from_the_fields_of_a_dataclass(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SETTINGS)
    defaults = {"workdir": "d", "names": (), "lengths": (64, 128), "show": False, "count": None, "rate": 0.5}
    accepted = {
        "": {},
        "--names=a,b --lengths=8,16-18,32-64/16": {"names": ("a", "b"), "lengths": (8, 16, 17, 18, 32, 48, 64)},
        "--show --count=-3 --rate 2": {"show": True, "count": -3, "rate": 2.0},
        "--noshow --lengths=": {"lengths": ()},
    }
    commands = [f"{program} --workdir=d {arguments}".split() for arguments in accepted]
    *results, (status, help_text, _) = run_all([*commands, [str(program), "--help"]], tmp_path / "scratch")
    for (*done, err), (arguments, values) in zip(results, accepted.items(), strict=True):
        assert done == [0, f"{defaults | values}\n"], (arguments, err)
    assert status == 0
    assert "--[no]show: Show the result." in help_text
    assert "--workdir: Run directory." in help_text


def test_every_command_is_installed_listed_and_has_a_version(tmp_path):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {name: f"dape_jax.{module}:command" for name, module in COMMANDS.items()}
    programs = [tmp_path / f"{name}.py" for name in COMMANDS if name != "dape-lm-eval"]  # needs an extra
    for program in programs:
        program.write_text(f"from dape_jax.{COMMANDS[program.stem]} import command\ncommand()\n")
    commands = [["dape_jax"], *([str(program), "--version"] for program in programs)]
    (_, listed, _), *versions = run_all(commands, tmp_path / "scratch")
    assert [line.split()[0] for line in listed.splitlines() if line.startswith("dape-")] == list(COMMANDS)
    assert all(re.fullmatch(r"\S+ +[A-Z].*\.", line) for line in listed.splitlines() if line.startswith("dape-"))
    for program, (status, out, err) in zip(programs, versions, strict=True):
        assert (status, out, err) == (0, f"dape_jax {dape_jax.__version__}\n", ""), program


def test_help_lists_recipes_and_prints_sections(tmp_path):
    commands = [["train.py", "--help"], ["train.py", "--help=optimizer"], ["train.py", "--help=model.bias"]]
    (_, whole, _), (status, optimizer, _), (_, biases, _) = run_all(commands, tmp_path / "scratch")
    for file in (ROOT / "configs").glob("*.py"):
        assert (f"configs/{file.name}: " in whole) == (file.name != "common.py")
    assert all(text in whole for text in ("a size, xs|s|m|l", "kernel=W", "--help=SECTION"))
    assert status == 0
    for text in ("--config.optimizer.learning_rate  (float)", "default: 0.002 (quick", "allowed: one of cosine, wsd"):
        assert text in optimizer
    assert "--config.model.bias.num_buckets  (int)" in biases


ENDINGS = {
    2: [InputError("a = 1: b", "c = 2: d"), "error: a = 1: b", "error: c = 2: d"],
    1: [PermissionError(13, "Permission denied", "a/b"), "error: [Errno 13] Permission denied: 'a/b'"],
    138: [StoppedError("stopped", signal.SIGUSR1), "stopped"],
    143: [StoppedError("stopped"), "stopped"],
}


@pytest.mark.parametrize("status", ENDINGS)
def test_expected_errors_are_lines_and_a_status(status, monkeypatch, capsys):
    def main():
        raise ENDINGS[status][0]

    monkeypatch.setattr(command_line.app, "run", lambda main, flags_parser: main(["program"]))
    with pytest.raises(SystemExit) as ended:
        command_line.run(main)
    assert (ended.value.code, capsys.readouterr().err.splitlines()) == (status, ENDINGS[status][1:])


def test_an_interrupt_is_one_line():
    program = "from dape_jax import command_line\ndef main(): raise KeyboardInterrupt\ncommand_line.run(main)"
    done = run_python("-c", program)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_listing_ends_quietly_with_its_reader():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "dape_jax"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_compilation_cache_that_cannot_be_made_is_one_line():
    message = "^--compilation_cache = '/dev/null/a': cannot be created or read: .*Not a directory"
    with pytest.raises(InputError, match=message):
        command_line.use_compilation_cache("/dev/null/a")


def test_a_closed_standard_error_changes_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)  # as Python sets it after `2>&-`
    monkeypatch.setattr(command_line.app, "run", lambda main, flags_parser: main(["program"]))
    command_line.run(lambda: print(sum(Progress([1, 2, 3]))))
    sys.stderr.close()  # the null device
    assert capsys.readouterr().out == "6\n"


def test_a_backend_that_matplotlib_has_no_longer_changes_nothing():
    program = "from dape_jax import command_line\ndef main(): import matplotlib; print(1)\ncommand_line.run(main)"
    assert run_python("-c", program, MPLBACKEND="Qt4Agg").stdout == "1\n"


PLATFORMS = {
    "cuda": r"its plugin is missing: pip install 'jax\[cuda13\]>=[\d.]+' or pip install 'jax\[cuda12\]>=[\d.]+'; or .*",
    "cpu,nosuch": r"must be cpu, cuda or tpu, and the device must be ready: Unable to initialize backend 'nosuch': .*",
}


@pytest.mark.extra
@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_platform_that_is_asked_for_and_missing_is_one_line(tmp_path, platform):
    command = ["train.py", "--config=configs/quickstart.py", f"--workdir={tmp_path}/run"]
    done = run_python(*command, JAX_PLATFORMS=platform)
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode == 2
    versions = "; installed: jax [0-9.]+, jaxlib [0-9.]+"
    assert re.fullmatch(f"error: JAX_PLATFORMS = '{platform}': {PLATFORMS[platform]}{versions}.*", line), line


def test_an_error_without_a_missing_platform_is_a_bug(monkeypatch):
    for platform in ("cpu", "cuda,cpu", "nosuch", ""):
        monkeypatch.setenv("JAX_PLATFORMS", platform)
        assert platform_fault(AssertionError()) is None


def test_escapes_in_a_flag_are_characters():
    """As in `--stop` and `--document_separator`, where a shell passes `\\n` as it is."""
    assert command_line.unescape(r"a\n\r\t\f\\n\x") == "a\n\r\t\f\\n\\x"


def test_control_characters_are_escaped():
    assert printable("a\x1b[31m\nb\u202e") == r"a\x1b[31m\nb\u202e"
    assert printable("a\x1b\n\tb", keep="\n\t") == "a\\x1b\n\tb"


# ---- start-up

JAX = {"jax", "flax"}
LARGE = {"orbax", "grain", "jax.experimental.pallas", "matplotlib", "scipy", "tensorboardX", "lm_eval", "torch"}
LARGE |= {"transformers", "wandb"}
MARGIN = 2.0  # other tests run on the same cores, and share their caches
MODULES = ("data.prepare", "planning", "pretrained.export_command", "pretrained.import_command")
MODULES += ("tools.attention_maps", "tools.generate")

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
        *((f"dape_jax.{module} --nosuch=1", set(), 0.5) for module in MODULES),
    ],
)
@pytest.mark.extra
def test_help_and_a_wrong_flag_need_little_time_and_no_large_package(command, allowed, seconds):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_python("-c", PROGRAM, *command.split())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    imported = set(done.stdout.splitlines()[-1].split())
    assert "absl" in imported, done.stderr
    assert "flags:" in done.stdout or "nosuch=1: " in done.stderr
    assert not (JAX | LARGE) - allowed & imported
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < seconds * MARGIN


def test_importing_the_training_loop():
    done = run_python("-c", "import sys, dape_jax.training.loop; print(*sys.modules)")
    assert not (LARGE - {"orbax"}) & set(done.stdout.split())
    assert done.stderr == ""
