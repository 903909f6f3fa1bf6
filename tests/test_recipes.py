"""Recipes: values that are None follow from other fields and from the corpus."""

import json
import operator
import sys
from pathlib import Path

import pytest
import tiny
from processes import ROOT
from tiny import load_corpus

from dape_jax.config import RunConfig, read_run
from dape_jax.data.prepare import command
from dape_jax.data.prepare.command import PrepareConfig
from dape_jax.data.store import follow_corpus
from dape_jax.errors import InputError
from dape_jax.model.attention import Blockwise
from dape_jax.recipes import read_config, read_module
from dape_jax.training import checkpoint, loop
from dape_jax.training.source import load_corpora


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("recipes")
    tiny.write_text(root / "text")
    given = PrepareConfig(input=(str(root / "text"),), output=str(root / "bpe"), train_bpe=300, validation_fraction=0.3)
    assert command.prepare(given).corpus.train.tokenizer.vocab_size == 300
    return root


def spec_of(recipe: str, **data: str | None) -> dict:
    spec = read_module(ROOT / "configs" / f"{recipe}.py").get_config().to_dict()
    if recipe == "paper":  # the official size unless told: planning has no corpus
        assert spec["model"]["vocab_size"] == 50_304
        spec["model"]["vocab_size"] = None
    spec["data"] |= data
    return spec


def test_tokenizer_and_vocabulary_follow_the_corpus(root, tmp_path):
    def run_of(recipe: str, path: str, tokenizer: str | None = None, **data: str) -> RunConfig:
        spec = spec_of(recipe, path=str(root / path), tokenizer=tokenizer, cache_dir=str(tmp_path), **data)
        assert spec["train"]["checkpoint_interval"] is None
        run = RunConfig.from_dict(follow_corpus(spec))
        assert run.train.checkpoint_interval == run.train.eval_interval
        return run

    for recipe in ("quickstart", "small", "paper"):
        prepared, raw = run_of(recipe, "bpe"), run_of(recipe, "text")
        assert (prepared.model.vocab_size, prepared.model.num_outputs, prepared.data.tokenizer) == (300, 300, None)
        assert (raw.model.vocab_size, raw.data.tokenizer) == (257, "bytes")
        both = run_of(recipe, "text", None, validation_path=str(root / "bpe"))
        assert (both.model.vocab_size, both.data.tokenizer) == (300, None)
    assert load_corpora(both.data).train[str(root / "text")].sidecar.vocab_size == 300
    assert load_corpus(prepared.data).train.sidecar.vocab_size == 300
    assert run_of("small", "text", str(root / "bpe" / "tokenizer.json")).model.vocab_size == 300


def test_the_seed_of_a_recipe_is_that_of_parameters_and_data():
    for recipe in ("quickstart", "small", "paper", "che"):
        argument = "task=parity_check" if recipe == "che" else {"small": "xs", "paper": "125m"}.get(recipe, "")
        config = read_module(ROOT / "configs" / f"{recipe}.py").get_config(f"{argument},seed=3".lstrip(","))
        assert config.train.seed == config.data.seed == 3


def test_values_that_are_given_are_kept(root):
    spec = spec_of("quickstart", path=str(root / "bpe"))
    spec["model"]["vocab_size"] = 512
    for unchanged in (spec, {}, {"data": {"task": "even_pairs"}, "model": {"vocab_size": None}}):
        assert follow_corpus(unchanged) == unchanged
    spec["data"] |= {"path": str(root / "text")}
    run = RunConfig.from_dict(follow_corpus(spec))
    assert (run.model.vocab_size, run.data.tokenizer) == (512, "bytes")  # raw text means bytes
    spec["data"] |= {"path": str(root / "moved")}
    with pytest.raises(InputError, match=r"data\.path = .*moved': does not exist"):  # it may have been prepared
        follow_corpus(spec)


def test_a_run_records_what_followed_and_starts_again(root, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "init_state", stop)
    spec = tiny.spec(root, train__num_steps=2, train__checkpoint_interval=None)
    spec["model"]["vocab_size"] = spec["data"]["tokenizer"] = None
    spec["data"]["path"] = str(root / "bpe")
    for _ in range(2):  # the second start compares its config with the first's
        with pytest.raises(KeyboardInterrupt):
            loop.train(spec, tmp_path / "run")
    saved = json.loads((tmp_path / "run" / checkpoint.CONFIG_FILE).read_text())["config"]
    assert saved["model"]["vocab_size"] == saved["model"]["num_outputs"] == 300
    assert saved["train"]["checkpoint_interval"] == 2


FLAGS = {
    "train.num_steps=7": 7,
    "train.num_steps=7 train.num_steps=8": 8,
    "optimizer.learning_rate=1e-3": 1e-3,
    "optimizer.clip_norm=2": 2.0,
    "train.wandb_group=1": "1",
    "train.wandb_group=a=b": "a=b",
    "train.checkpoint_seconds=None": None,
    "model.window=8": 8,
    "model.gated_mlp=true": True,
    "model.causal=1": True,
    "train.profile_steps=(3,4)": (3, 4),
    "train.profile_steps=None": (),
    "evaluation.lengths=8": (8,),
    "model.alternate_layers=": (),
    "model.attention=dense model.attention.name=blockwise model.attention.block_size=16": Blockwise(block_size=16),
}


@pytest.mark.parametrize("text", FLAGS)
def test_flags_set_fields_with_the_types_of_the_dataclasses(text: str):
    flags = text.split()
    run = read_run(follow_corpus(read_config("configs/quickstart.py", [f"--config.{each}" for each in flags])))
    assert operator.attrgetter(".".join(flags[-1].split("=")[0].split(".")[:2]))(run) == FLAGS[text]


def own_file(directory: Path, line: str, argument: str = "") -> str:
    """Write a config file of a user, which changes the quickstart's config `c` in one line, and return its path."""
    head = "from ml_collections import FrozenConfigDict\nfrom dape_jax.configs import quickstart\n"
    body = f"    c = quickstart.get_config({argument!r})\n    {line}\n    return c\n"
    (directory / "own.py").write_text(f"{head}def get_config():\n{body}")
    return f"{directory}/own.py"


def test_a_field_that_refers_to_another_follows_its_flag(tmp_path):
    own = own_file(tmp_path, "c.train.eval_interval = c.train.get_ref('num_steps') // 4", "rotary=yarn")
    spec = read_config(own, ["--config.train.num_steps=80", "--config.train.train_length=96"])
    assert (spec["train"]["num_steps"], spec["train"]["eval_interval"]) == (80, 20)
    assert spec["model"]["rotary"]["train_length"] == 96
    spec = read_config(own, ["--config.model.rotary.train_length=32"])
    assert (spec["train"]["train_length"], spec["model"]["rotary"]["train_length"]) == (64, 32)


OWN_FILES = {
    "def get_config():\n    pass\n": (r"own\.py': .* returns a ConfigDict", ""),
    "def get_config(:\n": (r"own\.py': SyntaxError: invalid syntax \(own\.py, line 1\)", ""),
    "def get_config():\n    return [][0]\n": (r"own\.py', line 2: IndexError: list index out of range", ""),
    "def get_config():\n    raise KeyError('a\\nb')\n": (r"line 2: KeyError: 'a b'$", ""),
    "def get_config(size):\n    pass\n": (r"own\.py': TypeError: get_config\(\) missing 1 required .* 'size'", ""),
    "def get_config(): return\n": (r"own\.py': TypeError: get_config\(\) takes 0 positional", ":xs"),
}


@pytest.mark.parametrize("text", OWN_FILES)
def test_a_fault_in_a_config_file_of_ones_own_is_one_line(text: str, tmp_path):
    (tmp_path / "own.py").write_text(text)
    message, argument = OWN_FILES[text]
    with pytest.raises(InputError, match=f"config file = .*{message}"):
        read_config(f"{tmp_path}/own.py{argument}", ["--config.train.num_steps=80"])


def test_a_config_file_of_ones_own_may_have_dataclasses(tmp_path):
    head = "from __future__ import annotations\nfrom dape_jax.configs.quickstart import get_config\n"
    (tmp_path / "own.py").write_text(f"{head}import dataclasses\n@dataclasses.dataclass\nclass Size:\n    width: int\n")
    assert read_config(f"{tmp_path}/own.py") == read_config("configs/quickstart.py")


@pytest.mark.parametrize("line", ["c.optimizer = dict(learning_rate=1)", "c = FrozenConfigDict(c)", "c = c.to_dict()"])
def test_flags_set_fields_of_any_config_file(line: str, tmp_path):
    assert read_config(own_file(tmp_path, line), ["--config.optimizer.beta1=0"])["optimizer"]["beta1"] == 0.0


def test_a_flag_does_not_hide_what_is_wrong_with_a_config_file(tmp_path):
    own = own_file(tmp_path, "c.model.bias = dict(name='mine', p=3)")
    spec = follow_corpus(read_config(own, ["--config.model.bias.p=4"]))
    with pytest.raises(InputError, match=r"model\.bias\.name = 'mine': must be one of .*; --import=MODULE adds"):
        read_run(spec)


@pytest.mark.parametrize("name", ["small.py:xs", "paper.py:125m"])
def test_runs_longer_than_the_longest_evaluation_are_evaluated_at_their_length(name: str):
    assert read_config(f"configs/{name},train_length=16384")["evaluation"]["lengths"] == (16_384,)


@pytest.mark.parametrize("name", ["quickstart.py", "small.py:s", "paper.py", "che.py:task=even_pairs"])
def test_recipes_are_read_and_copied_to_any_directory(name: str, tmp_path: Path, monkeypatch):
    file, _, _ = name.partition(":")
    expected = read_config(f"{ROOT}/configs/{name}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path or ".").resolve() != ROOT])
    assert read_config(f"configs/{name}") == expected
    (tmp_path / file).write_text((ROOT / "configs" / file).read_text())
    assert read_config(name) == expected
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    assert read_config(f"{tmp_path}/{name}") == expected
