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
        f"lengths.{e}" for e in ("csv", "json", "md", "pdf", "png", "txt")
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
    (["--config=configs/nothing.py"], ["configs/nothing.py", "does not exist", "configs/paper.py"]),
    (["--config=configs/common.py/nothing.py"], ["configs/common.py/nothing.py", "does not exist"]),
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
        ["error: workdir = ", "must be a directory written by dape-train"],
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


QUICKSTART = ["train.py", "--config=configs/quickstart.py"]
SEVERAL = [
    (
        [
            *QUICKSTART,
            "--config.train.num_stpes=8",
            "--config.num_steps=8",
            "--config.trian.num_steps=8",
            "--config.model.window=wide",
            "--config.optimizer.beta1=low",
            "--config.data.seed=None",
            "--config.model.bias=alibi",
            "--workdri=there",
        ],
        [
            "--config.train.num_stpes=8: the config has no such field; did you mean --config.train.num_steps?",
            "--config.num_steps=8: the config has no such field; did you mean --config.train.num_steps?",
            "--config.trian.num_steps=8: the config has no such field; did you mean --config.train.num_steps?",
            "--config.model.window=wide: invalid literal for int()",
            "--config.optimizer.beta1=low: could not convert string to float",
            "--config.model.bias=alibi: is a section; set its fields, or choose it by name",
            "--workdri=there: no such flag; did you mean --workdir?",
        ],
    ),
    (
        [
            *QUICKSTART,
            "--config.model.num_layers=0",
            "--config.model.window=None",
            "--config.data.seed=99999999999",
            "--config.evaluation.max_windows=0",
            "--config.evaluation.block_size=0",
            "--config.train.num_steps=None",
            "--config.optimizer.beta1=2.0",
        ],
        [
            "data.seed = 99999999999: must be below 2**32",
            "evaluation.block_size = 0: must be positive",
            "evaluation.max_windows = 0: must be positive",
            "model.num_layers = 0: must be positive",
            "optimizer.beta1 = 2.0: must be at least 0 and below 1",
            "train.num_steps = None: must be of type int",
        ],
    ),
    (["eval.py", "--lenghts=8"], ["--lenghts=8: no such flag; did you mean --lengths?"]),
    (
        ["dape_jax.tools.generate", "--max_tokens=8", "--top_k=all", "--frobnicate"],
        [
            "--max_tokens=8: no such flag; did you mean --max_new_tokens?",
            "--top_k=all: invalid literal for int()",
            "--frobnicate: no such flag; see --help",
        ],
    ),
    (["dape_jax.tools.attention_maps", "--len=8"], ["--len=8: no such flag"]),
    (["experiments", "--preste=paper"], ["--preste=paper: no such flag; did you mean --preset?"]),
    (["dape_jax.planning", "--topolgy=v5e"], ["--topolgy=v5e: no such flag; did you mean --topology?"]),
    (["dape_jax.data.prepare", "--ouput=there"], ["--ouput=there: no such flag; did you mean --output?"]),
    (["dape_jax.data.inspect", "--ouput=there"], ["--ouput=there: no such flag; did you mean"]),
    (["dape_jax.pretrained.export_command", "--ouput=there"], ["--ouput=there: no such flag; did you mean --output?"]),
    (["dape_jax.pretrained.import_command", "--sorce=there"], ["--sorce=there: no such flag; did you mean --source?"]),
]


def test_all_mistakes_are_reported_at_once_with_the_nearest_name(tmp_path):
    results = run_all([[*command, f"--workdir={tmp_path}/run"] for command, _ in SEVERAL], tmp_path / "scratch")
    for (status, _, stderr), (command, messages) in zip(results, SEVERAL, strict=True):
        # Every program has been given --workdir, which not all have.
        lines = [line for line in stderr.splitlines() if not line.startswith(f"error: --workdir={tmp_path}")]
        assert status == 2, (command, stderr)
        assert len(lines) == len(messages), stderr
        for line, message in zip(sorted(lines), sorted(messages), strict=True):
            assert line.startswith(f"error: {message}")
    assert not (tmp_path / "run").exists()


ELSEWHERE = "abfs://x/y"
DATA = "--config.data.path"
SCHEMES = [
    ["train.py", "--config=configs/quickstart.py", f"--workdir={ELSEWHERE}"],
    ["train.py", "--config=configs/quickstart.py", "--workdir=run", f"--config.data.cache_dir={ELSEWHERE}"],
    ["train.py", "--config=configs/quickstart.py", "--workdir=run", f"{DATA}={ELSEWHERE}"],
    ["train.py", "--config=configs/quickstart.py", "--workdir=run", f"{DATA}=abfss2://x/y"],  # fsspec has none
    ["train.py", "--config=configs/quickstart.py", "--workdir=run", f"--config.data.tokenizer={ELSEWHERE}/a.json"],
    ["train.py", "--config=configs/quickstart.py", "--workdir=run", f"--config.init.source={ELSEWHERE}"],
    ["train.py", f"--config=configs/continue.py:source={ELSEWHERE}", "--workdir=run"],
    ["eval.py", f"--workdir={ELSEWHERE}"],
    ["eval.py", "--workdir=run", f"--output={ELSEWHERE}"],
    ["dape_jax.data.prepare", f"--input={ELSEWHERE}", "--output=corpus", "--tokenizer=bytes"],
    ["dape_jax.data.prepare", "--input=text", f"--output={ELSEWHERE}", "--tokenizer=bytes"],
    ["dape_jax.data.inspect", ELSEWHERE],
    ["experiments", "report", f"--results={ELSEWHERE}"],
    ["experiments", "run", "fig2", f"--workdirs={ELSEWHERE}"],
    ["dape_jax.planning", "--config=configs/paper.py:125m", "--topology=v5e:2x2", f"--output={ELSEWHERE}"],
    ["dape_jax.tools.attention_maps", f"--workdir={ELSEWHERE}", "--length=8"],
    ["dape_jax.tools.attention_maps", "--workdir=run", "--length=8", f"--text={ELSEWHERE}"],
    ["dape_jax.tools.attention_maps", "--workdir=run", "--length=8", f"--output={ELSEWHERE}"],
    ["dape_jax.tools.generate", f"--workdir={ELSEWHERE}", "--prompt=a"],
    ["dape_jax.tools.generate", "--workdir=run", "--prompt=a", f"--output={ELSEWHERE}"],
    ["dape_jax.tools.generate", "--workdir=run", f"--prompt_file={ELSEWHERE}"],
    ["dape_jax.pretrained.export_command", f"--workdir={ELSEWHERE}", "--output=exported"],
    ["dape_jax.pretrained.export_command", "--workdir=run", f"--output={ELSEWHERE}"],
    ["dape_jax.pretrained.import_command", f"--source={ELSEWHERE}", "--workdir=run"],
    ["dape_jax.pretrained.import_command", "--source=there", f"--workdir={ELSEWHERE}"],
]


def test_a_scheme_that_is_not_supported_is_refused_by_every_program(tmp_path):
    """Otherwise it would name a local folder `abfs:`."""
    for (status, _, stderr), command in zip(run_all(SCHEMES, tmp_path / "scratch"), SCHEMES, strict=True):
        assert status == 2, (command, stderr)
        line = stderr.splitlines()[-1]
        assert line.startswith("error: "), (command, stderr)
        assert "abfs" in line, (command, stderr)
        assert "Traceback" not in stderr
    assert not [file for file in ROOT.iterdir() if file.name in ("abfs:", "run", "corpus", "exported")]


def test_none_on_a_command_line_is_none(tmp_path):
    """Set an optional flag, and fields whose recipe has another value or none."""
    program = tmp_path / "program.py"
    program.write_text(SETTINGS)
    results = run_all([[str(program), "--workdir=d", "--count=None", "--names=None"]], tmp_path / "scratch")
    assert "'names': ('None',)" in results[0][1]  # a text
    assert "'count': None" in results[0][1]
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from ml_collections import ConfigDict, config_dict\n"
        "def get_config():\n"
        "    return ConfigDict({'a': {'x': 3, 'y': 'text', 'z': config_dict.placeholder(int), 'n': 1}})\n"
    )
    reader = tmp_path / "reader.py"
    reader.write_text(
        "from ml_collections import config_flags\n"
        "from dape_jax import command_line\n"
        "CONFIG = config_flags.DEFINE_config_file('config')\n"
        "command_line.run(lambda _: print(command_line.config_of(CONFIG)))\n"
    )
    flags = ["--config.a.x=None", "--config.a.y=None", "--config.a.z=None", "--config.a.n=2"]
    (changed, kept) = run_all(
        [[str(reader), f"--config={recipe}", *more] for more in (flags, [])], tmp_path / "scratch2"
    )
    assert changed[1] == "{'a': {'n': 2, 'x': None, 'y': None, 'z': None}}\n", changed
    assert kept[1] == "{'a': {'n': 1, 'x': 3, 'y': 'text', 'z': None}}\n"


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
    *results, (help_status, help_text, _) = run_all(commands, tmp_path / "scratch")
    for (status, out, err), (arguments, values) in zip(results, accepted, strict=False):
        assert (status, out) == (0, f"{defaults | values}\n"), (arguments, err)
    for (status, _, err), (arguments, message) in zip(results[len(accepted) :], refused, strict=True):
        assert status == 2, arguments
        assert message in err
        assert err.count("\n") == 1
    assert help_status == 0
    assert "--[no]show: Show the result." in help_text
    assert "--workdir: Run directory." in help_text


def test_control_characters_are_escaped():
    assert printable("a\x1b[31m\nb\u202e") == r"a\x1b[31m\nb\u202e"
    assert printable("a\x1b\n\tb", keep="\n\t") == "a\\x1b\n\tb"


def test_evaluating_nothing_is_one_line(tmp_path):
    done = run("eval.py", f"--workdir={tmp_path}")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: workdir = {str(tmp_path)!r}: must be a directory written by dape-train"
    ]


@pytest.mark.parametrize("config", sorted({file.name for file in (ROOT / "configs").glob("*.py")} - {"common.py"}))
def test_every_config_says_how_to_run_it(config):
    text = (ROOT / "configs" / config).read_text()
    assert f"--config=configs/{config}" in text
    assert "python eval.py" in text


def test_the_package_has_no_hidden_defaults():
    """`.get(key, default)` of a config would be an option that no config file shows."""
    for file in (ROOT / "dape_jax").rglob("*.py"):
        assert not re.search(r"\b(config|cfg|spec|choice|c)\.get\(", file.read_text()), file
