"""Training: exact resumption, refusal of other configs, sharding, schedule, memory, and preserved checkpoints."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tiny
from etils import epath
from helpers import read_runs
from tiny import load_corpus

from dape_jax.config import RunConfig
from dape_jax.errors import InputError, NonFiniteError
from dape_jax.evaluation.options import Options
from dape_jax.evaluation.perplexity import evaluate
from dape_jax.sharding import MeshConfig, make_mesh, put_batch
from dape_jax.training import checkpoint, loop
from dape_jax.training.changes import allowed_changes
from dape_jax.training.metrics import read_metrics
from dape_jax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from dape_jax.training.source import open_source
from dape_jax.training.step import FIRST_SCALE, Training, TrainState, init_state, make_train_step, shardings_of


def saved_arrays(workdir: Path, step: int) -> dict:
    """Return the arrays and the data position of a checkpoint."""
    items = {name: ocp.args.StandardRestore() for name in ("params", "opt_state")}
    with ocp.CheckpointManager(workdir / "checkpoints") as manager:
        return dict(manager.restore(step, args=ocp.args.Composite(**items, data=ocp.args.JsonRestore())))


def train_until(batch: int, spec: dict[str, Any], workdir: Path) -> None:
    """Train, and interrupt it where it places batch number `batch`, counting validation batches."""
    placed = iter(range(batch - 1))

    def put(*args):
        if next(placed, None) is None:
            raise KeyboardInterrupt
        return put_batch(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "put_batch", put)
        with pytest.raises(KeyboardInterrupt):
            loop.train(spec, workdir)


def small_spec(trained_root: Path, **changes: Any) -> dict[str, Any]:
    """Return the config of the trained run with DAPE, with changes such as train__num_steps=3."""
    return tiny.spec(trained_root, **({"train__num_steps": 4} | changes))


@pytest.fixture
def run(trained_run, tmp_path) -> Path:
    """Return a copy of a run that was trained for 4 steps without interruption."""
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


def test_interrupted_and_resumed_is_bitwise_the_uninterrupted_run(trained_root, trained_run, tmp_path):
    """Compare parameters, optimizer and data position after kills before a checkpoint, in a validation and after it.

    The interrupted run validates and saves after every step, the other run after every second: no number changes.
    """
    spec = small_spec(trained_root, train__eval_interval=1, train__checkpoint_interval=1)
    for batch, newest in ((1, None), (5, 1), (4, 2), (4, 3)):  # of each start: steps, and two batches per validation
        train_until(batch, spec, tmp_path / "parts")
        with checkpoint.Checkpoints(tmp_path / "parts", 2) as manager:
            assert manager.latest_step() == newest
    loop.train(spec, tmp_path / "parts")
    expected, earlier = saved_arrays(trained_run, 4), saved_arrays(trained_run, 2)
    chex.assert_trees_all_equal(saved_arrays(tmp_path / "parts", 4), expected)
    assert np.any(expected["params"]["embedding_VD"] != earlier["params"]["embedding_VD"])


def test_a_finished_run_is_left_alone(trained_root, run, monkeypatch):
    files = list((run / "checkpoints").rglob("*"))
    before = [file.stat().st_mtime_ns for file in files]
    monkeypatch.setattr(loop, "put_batch", None)  # calling it would be a TypeError
    loop.train(small_spec(trained_root), run)
    assert [file.stat().st_mtime_ns for file in files] == before


def test_another_config_in_the_same_workdir_is_refused_with_the_difference(trained_root, run):
    run = shutil.copytree(run, run.with_name("a run"))  # the advice is for a shell
    before = (run / "config.json").read_text()
    with pytest.raises(InputError) as error:
        loop.train(small_spec(trained_root, optimizer__learning_rate=0.5, train__num_steps=9), run)
    advice = f"--config='configs/continued.py:source={run}' --config.init.optimizer=True"
    for words in ("optimizer.learning_rate: saved 0.01, now 0.5", "train.num_steps: saved 4, now 9", advice):
        assert words in str(error.value)
    assert (run / "config.json").read_text() == before


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    """A write that fails names no file."""

    def write(*_):
        Path("/dev/full").write_text("a")

    monkeypatch.setattr(loop, "follow_corpus", write)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"):
        loop.train({}, tmp_path)


def test_what_may_change_on_resume(trained_root, run):
    """Following the advice of the refusal is accepted; a schedule may change if no rate of a step that is done does."""

    def changes(done: int, change: tuple[str, ...] = (), **fields: Any) -> list[str]:
        configs = [RunConfig.from_dict(small_spec(trained_root, **each)) for each in (base, base | fields)]
        return allowed_changes(epath.Path(run), *configs, done, change)

    base: dict[str, Any] = {"optimizer__warmup_steps": 1}
    assert changes(4, train__eval_interval=3, train__validation_batches=9, train__checkpoint_interval=5) == []
    extended = {"train__num_steps": 9}
    assert changes(0, **extended) == ["train.num_steps: saved 4, now 9"]
    for done, schedule, more in (
        (2, {"optimizer__final_fraction": 1.0}, {}),
        (4, {"optimizer__schedule": "wsd"}, {}),
        (4, {"optimizer__schedule": "wsd"}, {"optimizer__decay_steps": 5}),
        (3, {"optimizer__schedule": "wsd", "optimizer__decay_steps": 1}, {"optimizer__decay_steps": 6}),
    ):
        base = {"optimizer__warmup_steps": 1} | schedule
        assert len(changes(done, **extended, **more)) == 1 + len(more)
    base = {}
    for fields in ({"optimizer__learning_rate": 0.5}, {"train__batch_size": 16}, extended | {"optimizer__beta1": 0.5}):
        with pytest.raises(InputError) as error:
            changes(4, ("optimizer.beta1",), **fields)
        advised = re.findall(r"--change=(\S+)", str(error.value))
        assert len(changes(4, tuple(advised[0].split(",")), **fields)) == len(fields)
    assert len(changes(4, ("optimizer",), optimizer__beta1=0.5, optimizer__clip_norm=2.0)) == 2
    for fields, change, words in (
        ({"train__seed": 3}, (), "train.seed: saved 0, now 3"),
        ({"train__seed": 3, "train__batch_size": 16}, ("train.batch_size",), "train.seed: saved 0, now 3"),
        ({}, ("model.width",), "--change = 'model.width': must be one of"),
        ({}, ("optimizer.beta",), "--change = 'optimizer.beta': must be one of"),
        ({"train__num_steps": 3}, ("train.num_steps",), "train.num_steps = 3: must be at least 4"),
    ):
        with pytest.raises(InputError, match=re.escape(words)) as error:
            changes(4, change, **fields)
        assert "resumes with" not in str(error.value)


@pytest.mark.extra
def test_a_run_that_is_extended_is_bitwise_the_longer_run(trained_root, tmp_path):
    """So is another run that begins with its weights, moments and place in the data."""
    whole = {"optimizer__warmup_steps": 1, "optimizer__schedule": "wsd", "optimizer__decay_steps": 2}
    whole |= {"train__eval_interval": 4}
    loop.train(small_spec(trained_root, **whole), tmp_path / "whole")
    first = whole | {"optimizer__decay_steps": 0, "train__num_steps": 2}
    loop.train(small_spec(trained_root, **first), tmp_path / "parts")
    source = {"init__source": str(tmp_path / "parts"), "init__optimizer": True, "init__data": "continue"}
    later = whole | source | {"train__num_steps": 2, "optimizer__warmup_steps": 0}
    loop.train(small_spec(trained_root, **later), tmp_path / "other")
    loop.train(small_spec(trained_root, **whole), tmp_path / "parts")
    expected = saved_arrays(tmp_path / "whole", 4)
    chex.assert_trees_all_equal(saved_arrays(tmp_path / "parts", 4), expected)
    other = saved_arrays(tmp_path / "other", 2)
    chex.assert_trees_all_equal([other["params"], other["data"]], [expected["params"], expected["data"]])
    (change,) = json.loads((tmp_path / "parts" / "config.json").read_text())["changes"]
    assert change["step"] == 2
    assert "train.num_steps: saved 2, now 4" in change["fields"]


@pytest.mark.extra
def test_the_batch_size_changes_if_it_is_named(trained_root, run, caplog):
    """Checkpoints come by time; the step is compiled once, before its first call."""
    fields = {"train__batch_size": 16, "train__num_steps": 6, "train__checkpoint_seconds": 1e-9}
    spec = small_spec(trained_root, **fields, train__checkpoint_interval=100, train__eval_interval=100)
    with jax.log_compiles():
        loop.train(spec, run, change=("train.batch_size", "train.num_steps"))
    assert len(re.findall(r"Finished XLA compilation of jit\(step\)", caplog.text)) == 2  # of training and validation
    assert checkpoint.step_names(run)[:2] == ["6", "5"]
    places = [saved_arrays(run, step)["data"]["global_next_index"] for step in (5, 6)]
    assert places == [4 * 8 + 16, 4 * 8 + 2 * 16]
    record = json.loads((run / "config.json").read_text())
    assert record["config"]["train"]["batch_size"] == 16
    loop.train(spec, run)  # the changed config is now that of the run


def test_other_data_and_damaged_ones_are_refused(run, tmp_path):
    spec = small_spec(tmp_path)
    (tmp_path / "text" / "new.txt").write_text("new text " * 50)
    with pytest.raises(InputError, match=rf"data_digest.*--config=configs/continued\.py:source={run} "):
        loop.train(spec, run)
    tiny.flip(load_corpus(RunConfig.from_dict(spec).data).train.directory / "tokens.bin", 100)
    with pytest.raises(InputError, match="must be the digest of the files"):
        loop.train(spec, tmp_path / "new")


def test_the_newest_and_the_best_are_kept(tmp_path):
    """Check with a resumed run. Orbax's `max_to_keep` with `best_fn` would keep steps 1 and 2 here.

    A step without a validation, after which SIGTERM stopped the run, is kept only while it is new, and never the best.
    """
    state = TrainState({"w": jnp.zeros(3)}, {"count": jnp.zeros(())}, {"applied": jnp.zeros(())})
    for losses in ({1: 3.0, 2: 1.0}, {3: None}, {4: 8.0, 5: None}):
        with checkpoint.Checkpoints(tmp_path, max_to_keep=2) as manager:
            for step, loss in losses.items():
                checkpoint.save(manager, step, state._asdict(), {"data": {}, "config": {}}, loss)
    with checkpoint.Checkpoints(tmp_path, max_to_keep=2) as manager:
        assert sorted(manager.all_steps()) == [2, 4, 5]
    assert [checkpoint.restore_config(tmp_path, which)[0] for which in ("newest", "best")] == [5, 2]


def adam(**changes: Any) -> OptimizerConfig:
    """Return the paper's optimizer with a short warm-up."""
    config = OptimizerConfig(6e-4, 0.01, 0.1, 0.9, 0.95, 1e-8, 0.1, 1.0)
    return dataclasses.replace(config, **changes)


def rates(config: OptimizerConfig, num_steps: int) -> np.ndarray:
    return np.asarray(jax.jit(jax.vmap(make_schedule(config, num_steps)))(np.arange(num_steps + 1)))


def test_schedules():
    """The paper's is a cosine after the warm-up; the stable one is constant until it falls linearly."""
    cosine = rates(adam(), 1000)
    assert cosine[[0, 5, 10, 1000]] == pytest.approx([0, 3e-4, 6e-4, 6e-5])
    assert np.all(cosine[10:990] >= cosine[20:1000])
    stable = rates(adam(learning_rate=1e-3, warmup_fraction=0.1, schedule="wsd", decay_steps=40), 100)
    assert stable[[0, 5, 10, 60, 70, 80, 100]] == pytest.approx([0, 5e-4, 1e-3, 1e-3, 7.75e-4, 5.5e-4, 1e-4], rel=1e-5)
    assert np.ptp(stable[10:61]) < 1e-9


def test_decayed_parameters_are_the_papers():
    two = np.ones(2, np.float32)
    params = {"up_DF": np.ones((2, 2), np.float32), "up_bias_F": two, "norm": {"scale": two, "bias": two}}
    params |= {"p_H": two, "hidden_bias_C": two, "bias_WHC": np.ones((1, 2, 2), np.float32)}
    optimizer = make_optimizer(adam(), 1000)

    @jax.jit
    def second_updates(params):
        gradients, state = jax.tree.map(jnp.zeros_like, params), optimizer.init(params)
        _, state = optimizer.update(gradients, state, params)  # the learning rate of the first step is 0
        return optimizer.update(gradients, state, params)[0]

    updates = second_updates(params)
    decayed = {name for name, update in updates.items() if any(map(np.any, jax.tree.leaves(update)))}
    assert decayed == {"up_DF", "p_H", "bias_WHC"}


def test_gradients_are_clipped_by_their_global_norm():
    optimizer, params = make_optimizer(adam(), 10), {name: np.zeros((1, 1), np.float32) for name in ("a_DF", "b_DF")}

    @jax.jit
    def state_after(scale):
        gradient = {"a_DF": jnp.full((1, 1), scale), "b_DF": jnp.full((1, 1), 2 * scale)}
        return optimizer.update(gradient, optimizer.init(params), params)[1]

    states = [jax.device_get(state_after(scale)) for scale in (3.0, 300.0)]
    chex.assert_trees_all_close(*states, rtol=1e-6)


def test_training_learns(trained_root, tmp_path):
    """Loss falls from that of chance to well below it in twenty steps on repeated words."""
    loop.train(small_spec(trained_root, train__num_steps=20, train__eval_interval=20), tmp_path / "run")
    found = read_metrics(tmp_path / "run")
    assert found["train/loss_nats"][1] == pytest.approx(np.log(257), rel=0.1)
    assert found["validation/loss_nats"][20] < 3.2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh__fsdp": 8, "model__width": 12}, "model.width = 12: .*mesh.fsdp = 8"),
        ({"mesh__tensor": 8}, "model.num_heads = 2: .*mesh.tensor = 8"),
        ({"mesh__tensor": 2, "model__num_kv_heads": 1}, "model.num_kv_heads = 1: .*mesh.tensor = 2"),
        ({"mesh__tensor": 2, "model__vocab_size": 257}, "model.vocab_size = 257: .*mesh.tensor = 2"),
        ({"mesh__context": 8, "train__train_length": 12}, "train_length = 12: .*mesh.context x mesh.tensor = 8"),
        ({"mesh__context": 2, "train__batch_size": 6}, "train.batch_size = 6: .*4"),
        ({"train__profile_steps": (3, 2)}, "train.profile_steps = .*must be empty, or the first and last step"),
        ({"train__profile_steps": (3, 5)}, "train.profile_steps = .*at most train.num_steps = 4"),
        ({"train__profile_steps": (3,)}, "train.profile_steps = .*must be empty, or the first and last step"),
        ({"train__wandb": "False"}, "train.wandb = 'False': must be the name of a project, or None"),
        ({"train__batch_size": 12}, "train.batch_size = 12: .*8 devices x 1"),
        ({"train__batch_size": 8, "train__accumulation_steps": 2}, "train.batch_size = 8: .*16"),
        ({"train__train_length": 8000}, "train.train_length = 8000: must be at most"),
        ({"optimizer__warmup_fraction": 0.95}, "optimizer.warmup_fraction = 0.95: .*num_steps = 4"),
        ({"data__path": "/nowhere/at/all"}, "data.path = '/nowhere/at/all'"),
        ({"data__tokenizer": "gpt2"}, "data.tokenizer = 'gpt2': .*bytes"),
        ({"model__vocab_size": 100}, "model.vocab_size = 100: .*257"),
    ],
)
def test_bad_input_is_refused_before_any_device_work(trained_root, tmp_path, monkeypatch, changes, words):
    monkeypatch.setattr(loop, "init_state", None)  # calling it would be a TypeError
    with pytest.raises(InputError, match=words):
        loop.train(small_spec(trained_root, **{"model__vocab_size": 264} | changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_small_validation_set_gives_the_same_loss_at_any_batch_size(trained_root):
    losses = []
    for batch_size, num_devices, num_parts in ((8, 8, 1), (64, 8, 1), (64, 1, 1), (8, 1, 4)):
        changes = {"data__validation_fraction": 0.06, "train__train_length": 64, "train__accumulation_steps": num_parts}
        run = RunConfig.from_dict(tiny.spec(trained_root, **changes, train__batch_size=batch_size))
        mesh = make_mesh(run.mesh, jax.devices()[:num_devices])
        source = open_source(run, mesh)
        (batches,) = source.validation.values()
        assert sum(len(batch["inputs"]) for batch in batches) < batch_size + num_devices
        assert max(len(batch["inputs"]) for batch in batches) <= batch_size // num_parts
        with jax.set_mesh(mesh):
            params = init_state(Training.of(run, mesh)).params
            losses.append(loop.make_validation(run, source.validation, mesh)(params)["loss_nats"])
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-6)
    corpus = load_corpus(dataclasses.replace(run.data, validation_fraction=0.0)).train.directory.parent
    with pytest.raises(InputError, match=rf"data\.validation_path = '{corpus}': has no documents for validation"):
        open_source(RunConfig.from_dict(tiny.spec(trained_root, data__validation_path=str(corpus))), mesh)


@pytest.mark.extra
def test_a_run_on_a_mixture_resumes_bitwise_and_logs_the_loss_of_each_text(trained_root, tmp_path):
    for file in tiny.write_text(tmp_path / "other").iterdir():
        file.write_text(file.read_text().upper())
    weights = {str(trained_root / "text"): 3.0, str(tmp_path / "other"): 1.0}
    mixture = ",".join(f"{path}={weight}" for path, weight in weights.items())
    spec = small_spec(trained_root, data__mixture=mixture)
    loop.train(spec, tmp_path / "whole")
    train_until(8, spec, tmp_path / "parts")  # in the fourth step: there are four batches per validation
    loop.train(spec, tmp_path / "parts")
    chex.assert_trees_all_equal(saved_arrays(tmp_path / "parts", 4), saved_arrays(tmp_path / "whole", 4))
    found = read_metrics(tmp_path / "parts")
    losses = [found[f"validation/loss_nats/{path}"][4] for path in weights]
    assert abs(losses[0] - losses[1]) > 0.01
    assert found["validation/loss_nats"][4] == pytest.approx((3 * losses[0] + losses[1]) / 4, rel=1e-12)


@pytest.mark.extra
def test_a_run_with_a_text_for_validation_is_evaluated_on_it(trained_root, tmp_path):
    """Two runs on other texts with the same text for validation."""
    tiny.write_text(tmp_path / "other")
    (tmp_path / "other" / "more.txt").write_text("more of it " * 30)
    tiny.write_text(tmp_path / "more")
    (tmp_path / "more" / "new.txt").write_text("new text " * 50)
    spec = small_spec(trained_root, data__validation_path=str(tmp_path / "other"))
    runs = [tmp_path / "run", tmp_path / "more_run"]
    for run, changes in zip(runs, ({}, {"data__path": str(tmp_path / "more")}), strict=True):
        loop.train(tiny.changed(spec, **changes), run)
    evaluate(runs, Options(lengths=(16,), max_windows=100), output=tmp_path)
    results = read_runs(tmp_path)
    assert [run["lengths"][0]["num_documents"] for run in results] == [41, 41]
    digests = [json.loads((run / "config.json").read_text())["data_digest"] for run in runs]
    assert [run["data"] for run in results] == digests
    assert digests[0] != digests[1]


def test_a_lost_config_is_copied_back_from_a_checkpoint(trained_root, run):
    file = run / "config.json"
    before = file.read_text()
    for content in ("{", '{"config": {}, "data_digest": 5}'):
        file.write_text(content)
        with pytest.raises(InputError, match=r"config\.json"):
            loop.train(small_spec(trained_root), run)
    file.unlink()
    with pytest.raises(InputError, match=r"config\.json is missing; copy (\S+) to it") as error:
        loop.train(small_spec(trained_root), run)
    copied = re.findall(r"copy (\S+) to", str(error.value))[0]
    assert json.loads(Path(copied).read_text()) == json.loads(before)


def make_step(trained_root, seed: int = 0, **model):
    """Return a state, and a step as a function of it and of a factor that multiplies its parameters.

    The model has one layer, and neither DAPE nor a bias.
    """
    spec = small_spec(trained_root, model__num_layers=1)
    spec["model"] |= {"bias": {"name": "nope"}, "processor": {"name": "none"}} | model
    mesh = make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])
    training = Training(RunConfig.from_dict(spec).model, optax.sgd(0.5, momentum=0.9), mesh, seed=seed)
    state, step = init_state(training), make_train_step(training)
    shardings = shardings_of(state)
    rows = np.random.default_rng(1).integers(0, 257, (8, 33), np.int32)

    def take(state, factor=1.0):
        state = state._replace(params=jax.tree.map(lambda x: x * np.float32(factor), state.params))
        state = jax.device_put(state, shardings)
        with jax.set_mesh(mesh):
            state, metrics = step(state, put_batch({"inputs": rows[:, :-1], "targets": rows[:, 1:]}, mesh))
        return state, {name: float(value) for name, value in metrics.items()}

    return state, take


@pytest.mark.extra
def test_float16_trains_as_float32_does(trained_root, monkeypatch):
    """Compare losses and parameters after three steps, after which the scale doubles if there is no overflow.

    The unembedding is small at each step, so that gradients underflow in float16 without a loss scale.
    """
    monkeypatch.setattr("dape_jax.training.step.STEPS_TO_DOUBLE", 3)

    def three_steps(dtype, scale=None):
        state, take = make_step(trained_root, dtype=dtype)
        start = jax.device_get(state.params)
        small = {"unembedding_DV": state.params["unembedding_DV"] * 1e-3}
        health = state.health if scale is None else state.health._replace(loss_scale=jnp.float32(scale))
        state = state._replace(health=health)
        for _ in range(3):
            state, metrics = take(state._replace(params=state.params | small))
        moved = jax.tree.map(lambda new, old: new - old, jax.device_get(state.params), start)
        return moved["layers"]["mlp"]["up_DF"], metrics["loss_nats"], state.health.loss_scale

    (expected, loss, _), (found, half, scale), (unscaled, *_) = (
        three_steps(*case) for case in (("float32",), ("float16",), ("float16", 1.0))
    )
    assert found.dtype == np.float32
    assert half == pytest.approx(loss, abs=5e-3)
    assert scale == 2 * FIRST_SCALE
    error, without_scale = (np.linalg.norm(x - expected) / np.linalg.norm(expected) for x in (found, unscaled))
    assert error < 0.01
    assert without_scale > 10 * error


def test_an_overflow_in_float16_is_skipped_and_lowers_the_scale(trained_root):
    """Overflows are not bad steps; the first scale without an overflow is found."""
    state, take = make_step(trained_root, dtype="float16")
    with jax.enable_x64(True):  # a run may resume with and without it
        assert make_step(trained_root, dtype="float16")[0].health.loss_scale.dtype == np.float32
    state = state._replace(health=state.health._replace(loss_scale=jnp.float32(2.0**40)))
    before, scales, metrics = jax.device_get((state.params, state.opt_state)), [], {"applied": 0.0}
    while not metrics["applied"]:
        chex.assert_trees_all_equal(jax.device_get((state.params, state.opt_state)), before)
        state, metrics = take(state)
        assert not metrics["bad"]
        scales.append(metrics["loss_scale"])
    assert scales[:2] == [2.0**40, 2.0**32]  # the largest that is tried
    assert 1 < scales[-1] < 2.0**32
    assert state.health.applied == 1
    assert np.isfinite(metrics["loss_nats"])


def test_a_bad_step_changes_nothing_but_the_count(trained_root):
    """NaN or infinite losses change neither parameters nor optimizer."""
    state, take = make_step(trained_root)
    state, _ = take(state)
    before = jax.device_get(state)
    for number, factor in enumerate((np.nan, np.inf, np.nan), 1):
        bad, metrics = take(state, factor)
        found = [metrics[name] for name in ("bad", "applied", "bad_in_a_row", "num_applied")]
        assert found == [1, 0, number, 1]
        chex.assert_trees_all_equal(jax.device_get(bad.opt_state), before.opt_state)
        state = bad._replace(params=jax.device_put(before.params, shardings_of(bad).params))
    _, metrics = take(state)
    assert [metrics[name] for name in ("applied", "bad_in_a_row", "skipped")] == [1, 0, 3]


def test_dropout_depends_on_the_seed_and_on_steps_with_skipped_ones_and_an_overflow_at_scale_1_is_bad(trained_root):
    """A skipped step is not repeated with the same dropout. Only a loss scale above 1 can cause an overflow."""
    state, take = make_step(trained_root, dtype="float16", dropout=0.5)
    _, take_with_other_seed = make_step(trained_root, seed=1, dtype="float16", dropout=0.5)
    initial = jax.device_get(state)

    def step(factor: float = 1.0, take=take, **health: float):
        changed = {name: np.asarray(value, getattr(initial.health, name).dtype) for name, value in health.items()}
        return take(initial._replace(health=initial.health._replace(**changed)), factor)

    losses = [
        step(loss_scale=1, applied=applied, skipped=skipped)[1]["loss_nats"]
        for applied, skipped in ((1, 0), (1, 1), (2, 0))
    ]
    assert losses[0] != losses[1] == losses[2]
    assert step(take=take_with_other_seed, loss_scale=1, applied=1)[1]["loss_nats"] != losses[0]
    for scale, is_bad in ((1, True), (2, False)):
        state, metrics = step(np.nan, loss_scale=scale)
        assert (metrics["applied"], metrics["bad"], metrics["bad_in_a_row"]) == (False, is_bad, is_bad)
        assert (int(state.health.skipped), float(state.health.loss_scale)) == (1, 1.0)


@pytest.mark.extra
def test_bad_steps_are_skipped_and_recorded_or_stop_the_run(trained_root, tmp_path, monkeypatch, caplog):
    """Steps 4 and 5 have NaN. A run that stops has kept its checkpoints. Metrics come one step late."""
    make_once, calls = loop.make_train_step, []

    def make_poisoned_step(*args, **options):
        step = make_once(*args, **options)
        calls.clear()

        def run(state, batch):
            calls.append(None)
            if len(calls) not in (4, 5):
                return step(state, batch)
            kept = jax.tree.map(jnp.copy, state.params)
            state, metrics = step(state._replace(params=jax.tree.map(lambda x: x * np.nan, kept)), batch)
            return state._replace(params=kept), metrics

        return run

    def train(name, max_bad_steps):
        fields = {"train__num_steps": 8, "train__max_bad_steps": max_bad_steps, "train__validation_batches": 1}
        loop.train(small_spec(trained_root, **fields, model__processor={"name": "none"}), tmp_path / name)

    def recorded(name: str) -> list[str | None]:
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return [line.get("reason") for line in lines if "train/loss_nats" in line]

    monkeypatch.setattr(loop, "make_train_step", make_poisoned_step)
    monkeypatch.setattr(loop, "compile_step", lambda *_: None)
    with pytest.raises(NonFiniteError, match=r"step 5: loss_nats = nan.*skipped before it: 1; .*max_bad_steps = 1"):
        train("stopped", 1)
    assert len(calls) == 6
    assert checkpoint.step_names(tmp_path / "stopped") == ["4", "2"]
    chex.assert_tree_all_finite(saved_arrays(tmp_path / "stopped", 4)["params"])
    train("skipped", 2)
    assert "step 4: skipped (bad): loss_nats = nan" in caplog.text
    assert recorded("skipped") == [None] * 3 + ["bad"] * 2 + [None] * 3
    assert recorded("stopped") == [None] * 3 + ["bad"] * 2
    # A run that resumes from step 4 repeats step 5, which is recorded once.
    monkeypatch.setattr(loop, "make_train_step", make_once)
    train("stopped", 1)
    assert recorded("stopped") == [None] * 3 + ["bad"] + [None] * 4
