"""Start from weights: parameters of another run, frozen parameters, and the recipe `continued`."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest
import tiny
from helpers import logits, random_params, write_run
from test_training import saved_arrays, train_until

from dape_jax.config import read_run, resolved
from dape_jax.data.tokenizers import save_tokenizer, train_bpe
from dape_jax.errors import InputError
from dape_jax.model.positions import Rope
from dape_jax.model.transformer import flat_params, parameter_kind
from dape_jax.planning import plan
from dape_jax.recipes import RECIPES, read_module
from dape_jax.sharding import make_mesh, put_batch
from dape_jax.training import checkpoint, loop, weights
from dape_jax.training.step import Training, TrainState, init_state, make_train_step

DAPE = {"name": "dape", "kernel_width": 3, "channels": 4}
IDENTITY = DAPE | {"init": "identity"}


class StartedError(Exception):
    """Error with the initial state of a run."""


def start(spec: dict[str, Any], workdir: Path) -> TrainState:
    """Return the state with which a run starts, on the host, and stop the run there."""

    def stop(*args):
        raise StartedError(jax.device_get(init_state(*args)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "init_state", stop)
        with pytest.raises(StartedError) as started:
            loop.train(spec, workdir)
    return started.value.args[0]


@pytest.fixture(scope="module")
def sources(trained_root) -> Path:
    """Return the directory of the trained runs `none` and `dape`, which have steps 2 and 4. Read-only."""
    return trained_root / "runs"


@pytest.mark.parametrize(("which", "step"), [("", 4), ("@2", 2), ("@best", 4)])
def test_a_run_starts_with_the_parameters_of_the_step_and_a_new_optimizer(trained_root, sources, tmp_path, which, step):
    spec = tiny.spec(trained_root, init__source=f"{sources}/dape{which}", train__seed=3)
    state = start(spec, tmp_path / "run")
    chex.assert_trees_all_equal(state.params, saved_arrays(sources / "dape", step)["params"])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    origin = {"workdir": str(sources / "dape"), "step": step, "data_digest": record["data_digest"]}
    assert record["init"] == origin


def test_a_new_identity_processor_changes_the_logits_by_rounding(trained_root, sources, tmp_path, caplog):
    """Check up to rounding: the compiler orders the sums of the new program differently."""
    plain = tiny.spec(trained_root, model__processor={"name": "none"})
    tokens = np.random.default_rng(0).integers(0, 257, (2, 16))
    expected = logits(read_run(plain).model, saved_arrays(sources / "none", 4)["params"], tokens)
    found = {}
    for name, processor in (("identity", IDENTITY), ("uniform", DAPE)):
        caplog.clear()
        spec = tiny.spec(trained_root, init__source=f"{sources}/none", model__processor=processor)
        found[name] = logits(read_run(spec).model, start(spec, tmp_path / name).params, tokens)
        assert ("model.processor.init=identity" in caplog.text) == (name == "uniform")
    assert np.abs(found["uniform"] - expected).max() > 1e-3
    np.testing.assert_allclose(found["identity"], expected, atol=2e-6)


def test_rotary_is_removed_and_the_bias_replaced(trained_root, tmp_path, caplog):
    caplog.set_level("INFO")
    roped = tiny.spec(trained_root, model__rotary={"name": "rope"}, model__bias={"name": "kerple_power"})
    roped["model"]["processor"] = {"name": "none"}
    source, given = write_run(tmp_path / "source", roped), flat_params(random_params(read_run(roped).model))
    spec = tiny.spec(trained_root, init__source=str(source), model__processor=IDENTITY)
    params = flat_params(start(spec, tmp_path / "run").params)
    run = read_run(spec)
    fresh = flat_params(init_state(Training.of(run, make_mesh(run.mesh))).params)
    new = {path for path in params if parameter_kind(path) is not None}
    assert {parameter_kind(path) for path in new} == {"bias", "processor"}
    for path, leaf in params.items():
        np.testing.assert_array_equal(leaf, fresh[path] if path in new else given[path])
    assert f"{len(params) - len(new)} arrays are used" in caplog.text
    assert f"{len(new)} arrays are newly initialised: layers/attention/bias/" in caplog.text
    dropped = [path for path in given if parameter_kind(path) == "bias"]
    assert f"{len(dropped)} arrays of the source are not used: {'/'.join(dropped[0])}" in caplog.text
    assert "the model differs" not in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"init__source": "{source}@3"}, ["init.source", "step = '3'", "'2', '4'"]),
        ({"init__source": "{source}@"}, ["init.source", "directory@step"]),
        ({"init__source": "ftp://a/b"}, ["init.source", "gs://"]),
        ({"init__source": "{other}"}, ["init.source", "has the tokenizer", "but this run has the tokenizer bytes"]),
        ({"model__vocab_multiple": 8}, ["init.source", "(257, 16)", "(264, 16)", "--config.model.vocab_multiple=1"]),
        ({"model__width": 32}, ["init.source", "(257, 16)", "(257, 32)", "embedding_VD"]),
        ({"model__processor": DAPE | {"kernel_width": 5}}, ["init.source", "layers/attention/processor/", "shape"]),
        ({"model__norm_first": False}, ["init.source", "norm/", "this model has no such parameter"]),
        ({"model__output_bias": True}, ["init.source", "output_bias_V", "the source has no such parameter"]),
        ({"init__optimizer": True, "init__train_only": "bias"}, ["init.optimizer = True", "moments"]),
        ({"init__optimizer": True, "model__processor": {"name": "none"}}, ["init.optimizer = True", "moments"]),
        ({"init__data": "continue", "data__seed": 3}, ["init.data = 'continue'", "data.seed: source 0, now 3"]),
        ({"init__data": "continue", "train__train_length": 8}, ["init.data = 'continue'", "train_length: source 16"]),
        ({"init__data": "continue", "init__source": None}, ["init.data = 'continue'", "needs init.source"]),
        ({"init__train_only": "embedding"}, ["init.train_only = 'embedding'", "'bias', 'processor'"]),
        ({"init__train_only": "bias,bias"}, ["init.train_only", "at most once"]),
        (
            {"init__train_only": "bias,processor", "model__processor": {"name": "none"}},
            ["init.train_only = 'bias,processor'", "no parameters of: processor"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_any_device_work(
    trained_root, sources, tmp_path, monkeypatch, changes, words
):
    spec = tiny.spec(trained_root, **{"init__source": "{source}"} | changes)
    if spec["init"]["source"] == "{other}":
        shutil.copytree(sources / "dape", tmp_path / "other")
        save_tokenizer(train_bpe(["the attention scores " * 9], 270), tmp_path / "other")
    if spec["init"]["source"] is not None:
        spec["init"]["source"] = spec["init"]["source"].format(source=sources / "dape", other=tmp_path / "other")
    monkeypatch.setattr(loop, "init_state", None)  # calling it would be a TypeError
    with pytest.raises(InputError) as error:
        loop.train(spec, tmp_path / "run")
    assert all(word in str(error.value) for word in words), error.value
    assert not (tmp_path / "run").exists()


def test_a_wrong_source_or_workdir_is_refused_before_the_text_is_read(trained_root, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "open_source", None)  # calling it would be a TypeError
    with pytest.raises(InputError, match=r"init.source = '/nowhere/at/all': .*written by dape-train"):
        loop.train(tiny.spec(trained_root, init__source="/nowhere/at/all"), tmp_path / "run")
    with pytest.raises(InputError, match=rf"^workdir = '{__file__}/run': cannot be written to: {__file__} is not a"):
        loop.train(tiny.spec(trained_root), f"{__file__}/run")


@pytest.mark.extra
def test_frozen_parameters_do_not_change_and_a_resumed_run_is_bit_exact(trained_root, sources, tmp_path):
    """Check also that a run without a checkpoint reads the source again, and that a resumed run does not need it."""
    source = tmp_path / "source"
    shutil.copytree(sources / "dape", source)
    spec = tiny.spec(trained_root, init__source=str(source), init__train_only="processor", train__num_steps=4)
    first = start(spec, tmp_path / "parts")
    shutil.rmtree(source / "checkpoints" / "4")
    before = saved_arrays(source, 2)["params"]
    loop.train(spec, tmp_path / "whole")
    train_until(6, spec, tmp_path / "parts")  # two steps, two batches of validation, step 3, step 4
    assert np.any(first.params["embedding_VD"] != before["embedding_VD"])
    assert json.loads((tmp_path / "parts" / "config.json").read_text())["init"]["step"] == 2
    assert checkpoint.step_names(tmp_path / "parts") == ["2"]
    source.rename(tmp_path / "elsewhere")
    loop.train(spec, tmp_path / "parts")
    whole = saved_arrays(tmp_path / "whole", 4)
    chex.assert_trees_all_equal(whole, saved_arrays(tmp_path / "parts", 4))
    assert checkpoint.restore_config(tmp_path / "parts")[1]["init"]["step"] == 2

    start_params, end_params = flat_params(before), flat_params(whole["params"])
    changed = {path for path in end_params if np.any(end_params[path] != start_params[path])}
    assert {parameter_kind(path) for path in changed} == {"processor"}
    run = read_run(spec)
    num_moments = sum(np.ndim(leaf) > 0 for leaf in jax.tree.leaves(whole["opt_state"]))
    assert num_moments == 2 * sum(parameter_kind(path) == "processor" for path in end_params)
    assert plan.Plan(run, plan.attached()).state_bytes["moments"] < 10_000


@pytest.mark.extra
def test_the_gradient_norm_is_that_of_the_trained_parameters(trained_root):
    """A step of plain gradient descent shows the gradient of every parameter."""
    run = read_run(tiny.spec(trained_root, model__num_layers=1))
    mesh = make_mesh(run.mesh)
    training = Training(run.model, optax.sgd(1.0), mesh, train_only=("processor",))
    tokens = np.random.default_rng(1).integers(0, 257, (8, 17), np.int32)
    state, step = init_state(training), make_train_step(training)
    before = flat_params(jax.device_get(state.params))
    with jax.set_mesh(mesh):
        state, metrics = step(state, put_batch({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}, mesh))
    after = flat_params(jax.device_get(state.params))
    squares = {path: np.sum((after[path] - before[path]) ** 2) for path in after}
    assert float(metrics["gradient_norm"]) == pytest.approx(np.sqrt(sum(squares.values())), rel=1e-3)
    assert {parameter_kind(path) for path, square in squares.items() if square > 0} == {"processor"}


def test_the_recipe_that_gives_a_model_length(sources, tmp_path):
    """Of a run the steps and the rate are parts of its own; of an imported model they are what the import says."""
    recipe = read_module(RECIPES / "retrofit.py")
    for arguments, bias, num_steps in (("", "alibi", 2), (",bias=kerple,percent=100,seed=5", "kerple", 4)):
        run = read_run(recipe.get_config(f"source={sources}/none{arguments}").to_dict())
        assert (run.train.num_steps, run.optimizer.learning_rate, run.optimizer.final_fraction) == (num_steps, 5e-3, 1)
        model = resolved(run)["model"]
        assert [model[field]["name"] for field in ("rotary", "bias", "processor")] == ["none", bias, "dape"]
        assert (model["processor"]["kernel_width"], model["processor"]["init"]) == (3, "identity")
        assert run.init.source == f"{sources}/none"
        assert run.train.seed == run.data.seed == (5 if arguments else 0)
    for wrong in ("bias=t5", "percent=0"):
        with pytest.raises(InputError, match="must be"):
            recipe.get_config(f"source={sources}/none,{wrong}")
    task = {"data_digest": "", "config": read_module(RECIPES / "che.py").get_config("task=even_pairs").to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(task))
    with pytest.raises(InputError, match=r"source=.*: must be a run of a language model"):
        recipe.get_config(f"source={tmp_path}")


def test_learned_positions_may_be_left_out(trained_root):
    model, table = read_run(tiny.spec(trained_root)).model, ("positions_PD",)
    positions = dataclasses.replace(model, learned_positions=64)
    taken, new, dropped = weights._compare(positions, model, "source")
    assert (new, dropped, table in taken) == ((), (table,), False)
    assert weights._compare(model, positions, "source")[1:] == ((table,), ())
    assert table in weights._compare(positions, positions, "source")[0]
    with pytest.raises(InputError, match=r"positions_PD: has shape \(64, 16\), but \(32, 16\)"):
        weights._compare(positions, dataclasses.replace(model, learned_positions=32), "source")


def test_the_recipe_takes_everything_but_the_method_from_the_source(trained_root, sources, tmp_path, monkeypatch):
    recipe = read_module(RECIPES / "continued.py")
    spec = recipe.get_config(f"source={sources}/dape@2").to_dict()
    expected = resolved(read_run(tiny.spec(trained_root, train__num_steps=4)))
    assert resolved(read_run(spec)) == expected | {"init": expected["init"] | {"source": f"{sources}/dape@2"}}
    config = recipe.get_config(f"source={sources}/none,rotary=rope,processor=dape,kernel=5,channels=3")
    # A flag can set fields that are None; checkpoints follow `eval_interval` as in the source.
    config.model.window, config.init.train_only, config.train.eval_interval = 8, "processor", 3
    run = read_run(config.to_dict())
    layers = {"model__alternate_layers": (0,), "model__alternate_rotary": {"name": "rope"}}
    layers |= {"model__learned_positions": 64}
    mixed = resolved(read_run(tiny.spec(trained_root, **layers)))
    with monkeypatch.context() as patch:
        patch.setattr(recipe, "read_config", lambda _: {"config": mixed})
        for argument, expected in (("", (mixed["model"]["alternate_rotary"], 64)), (",rotary=none", (None, None))):
            model = recipe.get_config(f"source={sources}/none{argument}").to_dict()["model"]
            assert (model["alternate_rotary"], model["learned_positions"]) == expected
            assert model["alternate_layers"] == [0]
    changed = tiny.spec(trained_root, model__processor=IDENTITY | {"kernel_width": 5, "channels": 3})
    assert (run.model.processor, run.model.rotary) == (read_run(changed).model.processor, Rope())
    assert (run.init.trained_kinds, run.train.checkpoint_interval) == (("processor",), 3)
    start(config.to_dict(), tmp_path / "run")
    for bad, words in (
        (None, "must contain source="),
        (f"source={tmp_path}/nothing", "written by dape-train"),
        (f"source={sources}/dape,kernel=5", "needs processor=dape"),
    ):
        with pytest.raises(InputError, match=words):
            recipe.get_config(bad)
