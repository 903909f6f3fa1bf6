"""Start from weights: parameters of another run, frozen parameters, and configs saved before either existed."""

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
from flax import nnx
from test_training import interrupt_at, saved_arrays

from dape_jax.config import read_run, resolved
from dape_jax.data.tokenizers import save_tokenizer, train_bpe
from dape_jax.errors import InputError
from dape_jax.model.positions import Rope
from dape_jax.model.transformer import flat_params, model_structure, parameter_kind
from dape_jax.planning import plan
from dape_jax.recipes import read_module
from dape_jax.sharding import make_mesh, put_batch
from dape_jax.training import checkpoint, loop
from dape_jax.training.optimizer import make_optimizer
from dape_jax.training.source import open_source
from dape_jax.training.step import TrainState, abstract_state, init_state, make_train_step, shardings_of

ROOT = Path(__file__).parents[1]
DAPE = {"name": "dape", "kernel_width": 3, "channels": 4}
IDENTITY = DAPE | {"init": "identity"}


class StartedError(Exception):
    """Error with the initial state of a run."""


def start(monkeypatch, spec: dict[str, Any], workdir: Path) -> TrainState:
    """Return the state with which a run starts, on the host, and stop the run there."""

    def stop(*args):
        raise StartedError(jax.device_get(init_state(*args)))

    with monkeypatch.context() as patch:
        patch.setattr(loop, "init_state", stop)
        with pytest.raises(StartedError) as started:
            loop.train(spec, workdir)
    return started.value.args[0]


def save_run(spec: dict[str, Any], workdir: Path) -> dict[str, Any]:
    """Write a run with a checkpoint of its random parameters at step 1, and return these."""
    run = read_run(spec)
    state = init_state(run.model, make_optimizer(run.optimizer, 10), 5, make_mesh(run.mesh))
    record = {"config": resolved(run), "data_digest": "digest"}
    workdir.mkdir()
    checkpoint.write_config(workdir, record)
    with checkpoint.Checkpoints(workdir, 1) as manager:
        checkpoint.save(manager, 1, state._asdict(), {"data": {}, "config": record}, 1.0)
    return jax.device_get(state.params)


def logits(spec: dict[str, Any], params: dict[str, Any]) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(0, 257, (2, 16), np.int32)
    graphdef, _ = model_structure(read_run(spec).model)
    return np.asarray(jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))(params, tokens))


@pytest.fixture(scope="module")
def sources(trained_root) -> Path:
    """Return the directory of the trained runs `none` and `dape`, which have steps 2 and 4. Read-only."""
    return trained_root / "runs"


# ---- where the parameters come from


@pytest.mark.parametrize(("which", "step"), [("", 4), ("@2", 2), ("@best", 4)])
def test_a_continued_run_starts_with_the_parameters_of_the_step(
    trained_root, sources, tmp_path, monkeypatch, which, step
):
    """Compare also the validation loss; the optimizer and the position in the data are new."""
    spec = tiny.spec(trained_root, init__source=f"{sources}/dape{which}", train__seed=3)
    state = start(monkeypatch, spec, tmp_path / "run")
    source = saved_arrays(sources / "dape", step)
    chex.assert_trees_all_equal(state.params, source["params"])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))
    run = read_run(spec)
    mesh = make_mesh(run.mesh)
    validate = loop.make_validation(run, model_structure(run.model)[0], open_source(run, mesh).validation, mesh)
    with jax.set_mesh(mesh):
        found = validate(jax.device_put(state.params, shardings_of(planned_state(spec)).params))
    with checkpoint.Checkpoints(shutil.copytree(sources / "dape", tmp_path / "copy"), 2) as manager:
        assert found["loss_nats"] == pytest.approx(manager.metrics(step)["validation_nats"], rel=1e-6)
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["init"]["workdir"] == str(sources / "dape")
    assert record["init"]["step"] == step
    assert record["init"]["data_digest"] == record["data_digest"]


def planned_state(spec: dict[str, Any]) -> TrainState:
    run = read_run(spec)
    optimizer = make_optimizer(run.optimizer, run.train.num_steps)
    return abstract_state(run.model, optimizer, make_mesh(run.mesh), run.init.trained_kinds)


def test_a_new_identity_processor_changes_the_logits_by_rounding(trained_root, sources, tmp_path, monkeypatch, caplog):
    """Check up to rounding: the compiler orders the sums of the new program differently."""
    plain = tiny.spec(trained_root, model__processor={"name": "none"})
    expected = logits(plain, saved_arrays(sources / "none", 4)["params"])
    found = {}
    for name, processor in (("identity", IDENTITY), ("uniform", DAPE)):
        caplog.clear()
        spec = tiny.spec(trained_root, init__source=f"{sources}/none", model__processor=processor)
        found[name] = logits(spec, start(monkeypatch, spec, tmp_path / name).params)
        assert ("model.processor.init=identity" in caplog.text) == (name == "uniform")
    assert np.abs(found["uniform"] - expected).max() > 1e-3
    np.testing.assert_allclose(found["identity"], expected, atol=2e-6)


def test_rotary_is_removed_and_the_bias_replaced(trained_root, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    roped = tiny.spec(trained_root, model__rotary={"name": "rope"}, model__bias={"name": "kerple_power"})
    roped["model"]["processor"] = {"name": "none"}
    given = flat_params(save_run(roped, tmp_path / "source"))
    spec = tiny.spec(trained_root, init__source=str(tmp_path / "source"), model__processor=IDENTITY)
    params = flat_params(start(monkeypatch, spec, tmp_path / "run").params)
    run = read_run(spec)
    fresh = flat_params(init_state(run.model, make_optimizer(run.optimizer, 6), 0, make_mesh(run.mesh)).params)
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
        ({"init__source": "/nowhere/at/all"}, ["init.source = '/nowhere/at/all'", "written by dape-train"]),
        ({"init__source": "SOURCE@3"}, ["init.source", "step = '3'", "'2', '4'"]),
        ({"init__source": "SOURCE@"}, ["init.source", "directory@step"]),
        ({"init__source": "ftp://a/b"}, ["init.source", "gs://"]),
        ({"model__width": 32}, ["init.source", "(257, 16)", "(257, 32)", "embedding_VD"]),
        ({"model__num_layers": 3}, ["init.source", "layers/", "(2, ", "(3, "]),
        ({"model__processor": DAPE | {"kernel_width": 5}}, ["init.source", "layers/attention/processor/", "shape"]),
        ({"model__norm_first": False}, ["init.source", "norm/", "this model has no such parameter"]),
        ({"model__output_bias": True}, ["init.source", "output_bias_V", "the source has no such parameter"]),
        ({"init__train_only": "embedding"}, ["init.train_only = 'embedding'", "'bias', 'processor'"]),
        ({"init__train_only": "bias,bias"}, ["init.train_only", "at most once"]),
        ({"init__train_only": ""}, ["init.train_only = ''", "'processor'"]),
        (
            {"init__train_only": "bias,processor", "model__processor": {"name": "none"}},
            ["init.train_only = 'bias,processor'", "no parameters of: processor"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_any_device_work(
    trained_root, sources, tmp_path, monkeypatch, changes, words
):
    spec = tiny.spec(trained_root, **{"init__source": "SOURCE"} | changes)
    if changes.get("model__output_bias"):
        spec["model"]["output_bias"] = not tiny.SPEC["model"]["output_bias"]
    spec["init"]["source"] = spec["init"]["source"].replace("SOURCE", str(sources / "dape"))
    monkeypatch.setattr(loop, "init_state", None)  # calling it would be a TypeError
    with pytest.raises(InputError) as error:
        loop.train(spec, tmp_path / "run")
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_another_tokenizer_is_refused(trained_root, sources, tmp_path):
    shutil.copytree(sources / "dape", tmp_path / "source")
    save_tokenizer(train_bpe(["the attention scores " * 9], 270), tmp_path / "source")
    with pytest.raises(
        InputError, match=r"init\.source = .*has the tokenizer .*, but this run has the tokenizer bytes"
    ):
        loop.train(tiny.spec(trained_root, init__source=str(tmp_path / "source")), tmp_path / "run")


# ---- frozen parameters


@pytest.fixture(scope="module")
def frozen_spec(trained_root, sources) -> dict[str, Any]:
    return tiny.spec(trained_root, init__source=f"{sources}/dape@2", init__train_only="processor", train__num_steps=4)


def test_frozen_parameters_are_bit_unchanged_and_a_resumed_run_is_bit_exact(
    frozen_spec, sources, tmp_path, monkeypatch
):
    """Check also that the source may be deleted when the run resumes."""
    loop.train(frozen_spec, tmp_path / "whole")
    source = tmp_path / "source"
    shutil.copytree(sources / "dape", source)
    spec = frozen_spec | {"init": frozen_spec["init"] | {"source": f"{source}@2"}}
    with monkeypatch.context() as patch:
        interrupt_at(patch, 6)  # two steps, two batches of validation, step 3, step 4
        with pytest.raises(KeyboardInterrupt):
            loop.train(spec, tmp_path / "parts")
    assert checkpoint.step_names(tmp_path / "parts") == ["2"]
    source.rename(tmp_path / "elsewhere")
    loop.train(spec, tmp_path / "parts")
    whole = saved_arrays(tmp_path / "whole", 4)
    chex.assert_trees_all_equal(whole, saved_arrays(tmp_path / "parts", 4))
    assert checkpoint.restore_config(tmp_path / "parts")[1]["init"]["step"] == 2

    before, after = (flat_params(each) for each in (saved_arrays(sources / "dape", 2)["params"], whole["params"]))
    changed = {path for path in after if np.any(after[path] != before[path])}
    assert {parameter_kind(path) for path in changed} == {"processor"}
    moments = planned_state(frozen_spec).opt_state
    trained = [path for path in after if parameter_kind(path) == "processor"]
    assert sum(leaf.ndim > 0 for leaf in jax.tree.leaves(moments)) == 2 * len(trained)
    assert plan.state_bytes(read_run(frozen_spec), make_mesh(read_run(frozen_spec).mesh))["moments"] < 10_000


def test_a_run_that_died_before_its_first_checkpoint_starts_from_the_source_again(
    frozen_spec, sources, tmp_path, monkeypatch
):
    spec = frozen_spec | {"init": frozen_spec["init"] | {"source": str(tmp_path / "source")}}
    shutil.copytree(sources / "dape", tmp_path / "source")
    first = start(monkeypatch, spec, tmp_path / "run")
    shutil.rmtree(tmp_path / "source" / "checkpoints" / "4")
    again = start(monkeypatch, spec, tmp_path / "run")
    chex.assert_trees_all_equal(again.params, saved_arrays(sources / "dape", 2)["params"])
    assert np.any(first.params["embedding_VD"] != again.params["embedding_VD"])
    assert json.loads((tmp_path / "run" / "config.json").read_text())["init"]["step"] == 2


def test_the_gradient_norm_is_that_of_the_trained_parameters(trained_root):
    """A step of plain gradient descent shows the gradient of every parameter."""
    run = read_run(tiny.spec(trained_root, model__num_layers=1))
    mesh, optimizer = make_mesh(run.mesh), optax.sgd(1.0)
    tokens = np.random.default_rng(1).integers(0, 257, (8, 17), np.int32)
    batch = put_batch({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}, mesh)
    norms = {}
    for kinds in ((), ("processor",)):
        state = init_state(run.model, optimizer, 0, mesh, kinds)
        before = flat_params(jax.device_get(state.params))
        step = make_train_step(model_structure(run.model)[0], optimizer, shardings_of(state), train_only=kinds)
        with jax.set_mesh(mesh):
            state, metrics = step(state, batch)
        after = flat_params(jax.device_get(state.params))
        squares = {path: np.sum((after[path] - before[path]) ** 2) for path in after}
        assert float(metrics["gradient_norm"]) == pytest.approx(np.sqrt(sum(squares.values())), rel=1e-3)
        norms[kinds] = {path: square for path, square in squares.items() if square > 0}
    assert {parameter_kind(path) for path in norms["processor",]} == {"processor"}
    assert len(norms["processor",]) < len(norms[()])


def test_the_recipe_takes_everything_but_the_method_from_the_source(trained_root, sources, tmp_path, monkeypatch):
    recipe = read_module(ROOT / "configs" / "continued.py")
    spec = recipe.get_config(f"source={sources}/dape@2").to_dict()
    expected = json.loads(json.dumps(resolved(read_run(tiny.spec(trained_root, train__num_steps=4)))))
    assert resolved(read_run(spec)) == expected | {"init": {"source": f"{sources}/dape@2", "train_only": None}}
    argument = f"source={sources}/none,rotary=rope,processor=dape,kernel=5,channels=3"
    config = recipe.get_config(argument)
    config.model.window, config.init.train_only = 8, "processor"  # a flag can set fields that are None
    run = read_run(config.to_dict())
    assert (
        run.model.processor
        == read_run(
            tiny.spec(trained_root, model__processor=IDENTITY | {"kernel_width": 5, "channels": 3})
        ).model.processor
    )
    assert run.model.rotary == Rope()
    assert run.init.trained_kinds == ("processor",)
    start(monkeypatch, config.to_dict(), tmp_path / "run")
    for bad, words in (
        (None, "must contain source="),
        (f"source={tmp_path}/nothing", "written by dape-train"),
        (f"source={sources}/dape,kernel=5", "needs processor=dape"),
    ):
        with pytest.raises(InputError, match=words):
            recipe.get_config(bad)
