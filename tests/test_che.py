"""Algorithmic tasks end to end: golden tapes, losses and protocol, the encoder, training, accuracy by length."""

import dataclasses
import functools
import json
import math
import runpy
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import tiny
from etils import epath
from flax import nnx
from helpers import logits, read_runs
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import ROOT, run_python
from test_tasks import FOLDERS

from dape_jax.config import TaskRunConfig, read_model
from dape_jax.errors import InputError
from dape_jax.evaluation import accuracy, trained
from dape_jax.evaluation.accuracy import Tapes, compile_tapes, length_accuracy
from dape_jax.evaluation.options import Options
from dape_jax.evaluation.programs import padded_batches, predicted_bytes
from dape_jax.evaluation.protocols import table_of
from dape_jax.evaluation.report import ReportPaths
from dape_jax.evaluation.trained import TrainedModel, are_algorithmic, read_trained, restore
from dape_jax.files import write_json
from dape_jax.model.attention import Dense
from dape_jax.model.loss import nll
from dape_jax.model.transformer import ENCODER, Params, Transformer, TransformerConfig, model_structure
from dape_jax.sharding import MeshConfig, make_mesh, put_batch
from dape_jax.tasks import CHE, TASKS
from dape_jax.tasks.tapes import TRAINING, TaskConfig, draw_tapes, make_tapes
from dape_jax.training import loop
from dape_jax.training.step import Training, init_state, make_sums_step, make_train_step

pytestmark = pytest.mark.extra

get_config = runpy.run_path(str(ROOT / "configs" / "che.py"))["get_config"]
in_every_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)

TINY = {
    "model": {"num_layers": 1, "width": 16, "num_heads": 2},
    "data": {"pad_to": 16},  # one program
    "train": {"train_length": 5, "batch_size": 8, "num_steps": 4, "eval_interval": 2, "validation_batches": 2}
    | {"checkpoint_interval": 2},
    "evaluation": {"lengths": (2, 5, 6, 20), "num_sequences": 11, "batch_tokens": 128, "pad_to": 16, "block_size": 8}
    | {"blockwise_from": 32},
}


def spec(argument: str, **changes: Any) -> dict[str, Any]:
    """Return a small form of a recipe of configs/che.py, with changes such as train__num_steps=3."""
    result = get_config(argument).to_dict()
    for section, values in TINY.items():
        result[section] |= values
    return tiny.changed(result, **changes)


def task_config(task: str, *, pad_to: int = 1, computation_steps: int = 0, max_position: int | None = None):
    return TaskConfig(task, computation_steps, pad_to, max_position, 0)


# ---- golden


@in_every_folder
def test_golden_che_tapes(folder):
    golden = json.loads((folder / "full_inputs.json").read_text())
    assert golden.keys() == CHE.keys()
    for task, examples in golden.items():
        assert len(examples) >= 3
        for example in examples:
            config = task_config(task, computation_steps=example["computation_steps_mult"])
            assert config.vocab_size == example["full_input_size"]
            inputs_BN = np.array([example["input"]], np.int32)
            targets_BM = config.of.solve(inputs_BN)
            for pad_to in (1, 8):
                padded = dataclasses.replace(config, pad_to=pad_to)
                tape = make_tapes(padded, inputs_BN, targets_BM, np.random.default_rng(0))
                length = len(example["full_input"])
                assert tape["inputs"].shape[1] == -(-length // pad_to) * pad_to
                assert tape["inputs"][0, :length].tolist() == example["full_input"]
                start, stop = example["output_positions"]
                np.testing.assert_array_equal(np.flatnonzero(tape["weights"][0]), np.arange(start, stop))
                np.testing.assert_array_equal(tape["targets"][0, start:stop], targets_BM[0])
                expected = [*range(length), *[-1] * (tape["inputs"].shape[1] - length)]
                assert tape["positions"][0].tolist() == expected


@in_every_folder
@pytest.mark.parametrize("task", CHE)
def test_golden_che_loss_and_accuracy(folder, task):
    """Loss and accuracy for the golden logits at the output tokens and random logits elsewhere."""
    with np.load(folder / "loss_accuracy.npz") as arrays:
        logits, target, mask, loss, right_share = (
            arrays[f"{task}.{name}"] for name in ("logits", "target", "mask", "loss", "accuracy")
        )
    targets_BM = target.reshape(len(target), -1).astype(np.int32)
    outputs = TASKS[task].output_length
    length = next(n for n in range(2, 100) if outputs(n) == targets_BM.shape[1])
    config = task_config(task, pad_to=8)
    inputs_BN = config.of.sample(np.random.default_rng(0), len(targets_BM), length)
    tapes = make_tapes(config, inputs_BN, targets_BM, np.random.default_rng(0))
    is_output_BT = tapes["weights"] > 0
    np.testing.assert_array_equal(tapes["counted"][is_output_BT], mask.astype(bool).ravel())
    logits_BTV = np.random.default_rng(1).normal(size=(*is_output_BT.shape, config.num_outputs))
    logits_BTV[is_output_BT] = logits.reshape(-1, config.num_outputs)
    nll_BT = np.asarray(jax.jit(nll)(logits_BTV.astype(np.float32), tapes["targets"]))
    assert np.average(nll_BT, weights=tapes["weights"]) == pytest.approx(float(loss), abs=1e-6)
    right_BT = (logits_BTV.argmax(axis=-1) == tapes["targets"]) & tapes["counted"]
    found = length_accuracy(length, right_BT.sum(axis=1), tapes["counted"].sum(axis=1))
    assert found["accuracy"] == pytest.approx(float(right_share), abs=1e-6)


@in_every_folder
def test_golden_che_protocol(folder):
    """Constants of the config equal the reference's, except the number of steps (200,000 as in the paper)."""
    golden = json.loads((folder / "protocol.json").read_text())
    config = get_config("task=even_pairs")
    model, reference = config.model.to_dict(), golden["model_transformer_encoder"]
    expected = {"num_layers": "num_layers", "num_heads": "num_heads", "width": "embedding_dim"}
    expected |= {"activation": "activation", "dropout": "dropout"}
    assert model.items() >= (ENCODER | {ours: reference[theirs] for ours, theirs in expected.items()}).items()
    assert model["width"] == reference["num_heads"] * reference["head_dim"] == reference["ffn_width"] / 4
    train = config.train.batch_size, config.train.train_length, config.train.num_steps
    assert train == (golden["batch_size"], golden["max_train_length_N"], 200_000)
    optimizer, reference = config.optimizer.to_dict(), golden["optimizer"]
    assert (reference["name"], reference["schedule"]) == ("adam", "constant")
    expected = {"learning_rate": "learning_rate", "clip_norm": "clip_by_global_norm", "weight_decay": "weight_decay"}
    expected |= {"beta1": "b1", "beta2": "b2", "epsilon": "eps"}
    expected = {ours: reference[theirs] for ours, theirs in expected.items()}
    assert optimizer.items() >= (expected | {"warmup_fraction": 0, "final_fraction": 1}).items()
    assert config.evaluation.num_sequences == golden["evaluation"]["sequences_per_length"]
    assert config.evaluation.lengths == tuple(range(1, 501))
    assert config.data.computation_steps == golden["input_construction"]["computation_steps_mult_default"]
    # The paper's score begins one length above the train length, the reference's two.
    assert golden["score"]["first_length_included"] == config.train.train_length + 2


# ---- the encoder


def encoder(**options: Any) -> TransformerConfig:
    """Return a config of two layers whose initial embedding is as large as other weights, so that inputs matter."""
    sizes = {"vocab_size": 12, "num_outputs": 3, "initializer": "gpt_neox"}
    return read_model(tiny.SPEC["model"] | ENCODER | sizes | options)


def initial_params(config: TransformerConfig) -> Params:
    return nnx.to_pure_dict(nnx.state(Transformer(config, rngs=nnx.Rngs(1)), nnx.Param))


def test_encoder_is_bidirectional_and_its_causal_form_is_not():
    """Change the last token: every row changes, or only the last."""
    params, tokens_BT = initial_params(encoder()), np.arange(12)[None]
    for causal in (False, True):
        before, after = (logits(encoder(causal=causal), params, x) for x in (tokens_BT, np.minimum(tokens_BT, 10)))
        is_changed_T = (before != after).any(axis=(0, 2))
        np.testing.assert_array_equal(is_changed_T, np.arange(12) >= (11 if causal else 0))


@pytest.mark.parametrize("options", [{}, {"causal": True, "bias": {"name": "cope"}, "processor": {"name": "none"}}])
def test_padding_changes_nothing_and_blockwise_is_dense(options):
    """Compare logits at real positions, and the gradients of all parameters."""
    rng = np.random.default_rng(0)
    tokens_BT, padding = jnp.asarray(rng.integers(0, 12, (2, 10))), 5
    padded_BT = jnp.pad(tokens_BT, ((0, 0), (0, padding)), constant_values=11)
    dense = encoder(**options)
    blocks = encoder(**options, attention={"name": "blockwise", "block_size": 4, "num_buckets": 2})
    dense_graphdef, blocks_graphdef = (model_structure(config)[0] for config in (dense, blocks))
    params = initial_params(dense)

    @functools.partial(jax.jit, static_argnums=1)
    @functools.partial(jax.grad, has_aux=True)
    def gradient(params, graphdef, tokens_BT, pos_T):
        logits_BTV = nnx.merge(graphdef, params)(tokens_BT, pos_T)[:, :10]
        return nll(logits_BTV, tokens_BT[:, :10] % 3)[:, 3:].mean(), logits_BTV

    for pos_T in (np.arange(10), np.sort(rng.choice(100, 10, replace=False))):  # consecutive, then random
        expected, logits_BTV = gradient(params, dense_graphdef, tokens_BT, jnp.asarray(pos_T))
        assert np.ptp(logits_BTV) > 0.1
        assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected)) > 1e-3
        padded_pos_T = jnp.asarray(np.pad(pos_T, (0, padding), constant_values=-1))
        for graphdef in (dense_graphdef, blocks_graphdef):
            found = gradient(params, graphdef, padded_BT, padded_pos_T)
            chex.assert_trees_all_close(found, (expected, logits_BTV), atol=1e-5)


def test_validation_counts_answers_at_their_places_only():
    """Every prediction is right; one of four places counts for the accuracy, and two have a weight in the loss."""

    class Fixed(nnx.Module):
        def __init__(self):
            self.logits_BTV = nnx.Param(jnp.zeros((1, 4, 3)).at[..., 1].set(2.0))

        def __call__(self, tokens_BT, *_):
            return self.logits_BTV[...]

    graphdef, state = nnx.split(Fixed())
    of_places = {"weights": jnp.array([[0.0, 0, 1, 1]]), "counted": jnp.array([[False, False, True, False]])}
    tokens = jnp.ones((1, 4), jnp.int32)
    sums = make_sums_step(graphdef)(nnx.to_pure_dict(state), {"inputs": tokens, "targets": tokens, **of_places})
    nll_nats = math.log(2 + math.exp(2)) - 2
    np.testing.assert_allclose(sums, [2 * nll_nats, 2, 1, 1], rtol=1e-6)


# ---- training


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Return a trained run and a copy of it under another name."""
    root = tmp_path_factory.mktemp("che")
    loop.train(spec("task=reverse_string,bias=kerple,processor=dape"), root / "dape")
    return [root / "dape", shutil.copytree(root / "dape", root / "other")]


def evaluate_tasks(
    workdirs: list[Path], *, mesh: MeshConfig | None = None, output: Path | None = None, **options: Any
) -> ReportPaths:
    """Evaluate with the options as keywords."""
    return accuracy.evaluate_tasks(workdirs, Options(**options), mesh=mesh, output=output)


def read_task_run(workdir: Path) -> TrainedModel[TaskRunConfig]:
    return read_trained(workdir, "newest", {}, config=TaskRunConfig)


@pytest.fixture(scope="module")
def evaluated(runs, tmp_path_factory) -> ReportPaths:
    """Return the report of one evaluation of both runs at all lengths of their config."""
    return evaluate_tasks(runs, output=tmp_path_factory.mktemp("evaluated"))


@pytest.mark.slow
def test_devices_that_share_a_tape_train_the_same():
    """Loss, gradient and accuracy of one step on all devices equal those on one. Dropout is off: it would differ."""
    argument = "task=duplicate_string,bias=kerple,processor=dape,positions=80"
    run = TaskRunConfig.from_dict(spec(argument, model__dropout=0.0))
    graphdef, _ = model_structure(run.model)
    batch = draw_tapes(run.data, TRAINING, 0, 8, length=4)
    assert batch["inputs"].shape[1] == 16
    found = []
    for sizes, devices in (((1, 1, 1, 1), 1), ((1, 2, 4, 1), 8)):
        mesh = make_mesh(MeshConfig(*sizes), jax.devices()[:devices])
        training = Training.of(run, mesh)
        state = init_state(training)
        with jax.set_mesh(mesh):
            placed = put_batch(batch, mesh)
            sums = make_sums_step(graphdef)(state.params, placed)  # validation
            state, metrics = make_train_step(training)(state, placed)
        found.append(jax.device_get((metrics["loss_nats"], sums, state.opt_state)))
    chex.assert_trees_all_close(found[0], found[1], atol=2e-5, rtol=1e-5)


# ---- accuracy by length


def test_accuracy_equals_that_of_a_plain_model(runs, evaluated):
    """Independent of padding, batches (of 8 at length 20, the second padded), blocks of rows and devices."""
    trained = read_task_run(runs[0])
    _, params = restore(trained)
    config = dataclasses.replace(trained.run.model, attention=Dense())
    model = nnx.merge(model_structure(config)[0], jax.device_put(params, jax.devices()[0]))
    answer = jax.jit(lambda tokens_BT, pos_T: model(tokens_BT, pos_T).argmax(axis=-1))
    short, *_, long = read_runs(evaluated.directory, "accuracy")[0]["lengths"]
    assert (short["length"], long["length"]) == (2, 20)
    for result in (short, long):
        right = counted = 0
        tapes = Tapes(trained.run.data, result["length"], 11, padded=96)
        for rows, num_real in padded_batches(11, 8):
            batch, rows = tapes.batch(rows), rows[:num_real]
            length = trained.run.data.tape_length(result["length"])
            answers_BT = np.asarray(answer(batch["inputs"][:num_real, :length], batch["positions"][0, :length]))
            counted_BT = tapes.counted_BT[rows, :length]
            right += int(((answers_BT == tapes.targets_BT[rows, :length]) & counted_BT).sum())
            counted += int(counted_BT.sum())
        assert (result["num_symbols"], result["num_sequences"]) == (counted, 11)
        assert result["accuracy"] == pytest.approx(right / counted)


def test_report_has_means_and_accuracies_of_every_run(runs, evaluated, tmp_path):
    """Means are over the lengths in the caption; equal models have bit-identical results, with the same dropout too."""
    found = read_runs(evaluated.directory, "accuracy")
    assert [run["name"] for run in found] == ["dape", "other"]
    for row, run in zip(evaluated.table.splitlines()[3:], found, strict=True):
        accuracies = [result["accuracy"] for result in run["lengths"]]
        shown = [f"{100 * share:.2f}" for share in (run["trained"], run["score"], *accuracies)]
        assert row.split() == [run["name"], *shown]
    assert "<= 5: mean over 2 lengths; > 5, the score: mean over 2 lengths, 6 to 20." in evaluated.table
    assert "Chance: 50.00 (reverse_string)" in evaluated.table
    run, other = found
    assert run["lengths"] == other["lengths"]
    assert (run["task"], run["step"], run["train_length"], run["dropout"]) == ("reverse_string", 4, 5, False)
    at = {result["length"]: result["accuracy"] for result in run["lengths"]}
    assert list(at) == [2, 5, 6, 20]
    assert (run["trained"], run["score"]) == pytest.approx(((at[2] + at[5]) / 2, (at[6] + at[20]) / 2))
    for result in run["lengths"]:
        assert result["low"] < result["accuracy"] < result["high"]
        assert (result["num_sequences"], result["num_symbols"]) == (11, 11 * result["length"])
    lengths = [run["lengths"][0] | {"length": length} for length in (*range(3, 40, 3), *range(60, 500, 60))]
    header = table_of("accuracy", [run | {"lengths": lengths}], Options())[1].rows[0]
    assert header[3:] == ["9", "21", "39", "120", "180", "300", "420", "480"]  # near 10, 20, 40, 100, 200, .., 500
    evaluate_tasks(runs, dropout=True, lengths=(20,), output=tmp_path)
    on, again = read_runs(tmp_path, "accuracy")
    assert on["lengths"] == again["lengths"] != run["lengths"][-1:]


def test_only_output_symbols_count_and_a_diverged_model_answers_nothing(runs, monkeypatch, tmp_path, caplog):
    """Answer 0 everywhere, also the target of input symbols and padding: only answers of 0 count as right."""
    with monkeypatch.context() as patch:
        patch.setattr(accuracy, "run_in_batches", lambda *_, num_rows, **__: np.zeros((num_rows, 1), np.int32))
        evaluate_tasks(runs[:1], lengths=(2, 20), num_sequences=11, output=tmp_path / "zeros")
    config = read_task_run(runs[0]).run.data
    for result in read_runs(tmp_path / "zeros", "accuracy")[0]["lengths"]:
        answers_BM = Tapes(config, result["length"], 11, padded=96).targets_BM
        assert 0 < (answers_BM == 0).mean() < 1
        assert result["accuracy"] == pytest.approx((answers_BM == 0).mean())

    def diverged(model):
        mesh, params = restore(model)
        return mesh, jax.tree.map(lambda leaf: leaf * np.float32(np.nan), params)

    monkeypatch.setattr(trained, "restore", diverged)
    evaluate_tasks(runs[:1], lengths=(2,), num_sequences=11, output=tmp_path / "diverged")
    assert [result["accuracy"] for result in read_runs(tmp_path / "diverged", "accuracy")[0]["lengths"]] == [0]
    assert "the model has diverged: its logits at length 2 are not finite" in caplog.text


def test_every_model_answers_the_same_strings():
    """Strings depend on task and length, not on seed, batch size or positions, which a batch draws for all its rows."""
    asked = []
    for seed, batch_size, padded, max_position in ((0, 5, 48, None), (3, 4, 64, 100)):
        tapes = Tapes(TaskConfig("reverse_string", 0, 8, max_position, seed), 20, 12, padded)
        batches = [(tapes.batch(numbers), num_real) for numbers, num_real in padded_batches(12, batch_size)]
        assert {batch["inputs"].shape for batch, _ in batches} == {(batch_size, padded)}
        asked.append([row for batch, num_real in batches for row in batch["inputs"][:num_real, :20].tolist()])
    assert len({tuple(row) for batch, _ in batches for row in batch["positions"]}) == len(batches) == 3
    assert asked[0] == asked[1]
    assert len({tuple(row) for row in asked[0]}) == 12


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0, 1)), min_size=1, max_size=50))
def test_intervals(rows):
    """The interval contains the accuracy; for one symbol per sequence it is Wilson's."""
    counted_B = np.array([counted for counted, _ in rows])
    right_B = np.array([round(counted * share) for counted, share in rows])
    found = length_accuracy(5, right_B, counted_B)
    assert found["accuracy"] == right_B.sum() / counted_B.sum()
    assert 0 <= found["low"] <= found["accuracy"] + 1e-12
    assert found["accuracy"] - 1e-12 <= found["high"] <= 1
    assert found["high"] - found["low"] > 1e-4
    right_B = (right_B > counted_B / 2).astype(int)
    found = length_accuracy(5, right_B, np.ones_like(right_B))
    wilson = scipy.stats.binomtest(int(right_B.sum()), len(rows)).proportion_ci(method="wilson")
    assert (found["low"], found["high"]) == pytest.approx((wilson.low, wilson.high), abs=1e-6)


def test_intervals_have_95_percent_coverage():
    """In about 95 % of 400 evaluations of sequences with correlated symbols, the interval has the true accuracy."""
    for spread in (0.0, 0.4):
        rng, hits = np.random.default_rng(0), 0
        for _ in range(400):
            share_B = np.where(rng.random(64) < 0.5, 0.5 - spread, 0.5 + spread)
            counted_B = rng.integers(5, 30, 64)
            found = length_accuracy(5, rng.binomial(counted_B, share_B), counted_B)
            hits += found["low"] <= 0.5 <= found["high"]
        assert 0.92 <= hits / 400 <= 0.98


def test_the_longest_tapes_need_little_memory():
    """Check the compiler's prediction for 1,000 output tokens after 500 inputs, with DAPE."""
    run = TaskRunConfig.from_dict(get_config("task=duplicate_string,bias=kerple,processor=dape").to_dict())
    run = dataclasses.replace(run, evaluation=dataclasses.replace(run.evaluation, lengths=(500,)))
    trained = TrainedModel("run", epath.Path("run"), 1, run, "", MeshConfig(data=8, fsdp=1, context=1, tensor=1))
    (program,) = compile_tapes(trained).values()
    assert program.length == 1504
    assert predicted_bytes(program.step) * jax.device_count() < 2**30


# ---- bad input


TRAINED, DAPE = "task=even_pairs,bias=kerple", "task=even_pairs,bias=kerple,processor=dape"
LEAK = {"name": "dape", "leak": True}
BAD_CONFIGS = [
    (TRAINED, {"data__task": "odd_pairs"}, "data.task = 'odd_pairs': must be one of"),
    (TRAINED, {"evaluation__lengths": (4, 2)}, "evaluation.lengths = .*increasing"),
    (TRAINED, {"model__vocab_size": 4}, "model.vocab_size = 4: .*3 for even_pairs"),
    (TRAINED, {"model__num_outputs": 3}, "model.num_outputs = 3: .*2 for even_pairs"),
    ("task=duplicate_string,positions=14", {"evaluation__lengths": (2, 4)}, "data.max_position = 14: .* 15, .* train"),
    ("task=duplicate_string,positions=59", {}, "data.max_position = 59: .* 60, .* evaluation.lengths = 20"),
    (DAPE, {"model__processor": LEAK}, "data.pad_to = 16: must be 1: .*leak"),
    (TRAINED, {"train__batch_size": 12}, "train.batch_size = 12: must be a multiple of .*8 devices"),
    (TRAINED, {"mesh__context": 2, "data__pad_to": 7}, "data.pad_to = 7: must be a multiple of mesh.context"),
    ("task=even_pairs,bias=cope", {}, "model.bias = 'cope': .*needs causal attention"),
]


@pytest.mark.parametrize(("argument", "changes", "words"), BAD_CONFIGS)
def test_bad_configs_are_named(tmp_path, argument, changes, words):
    with pytest.raises(InputError, match=words):
        loop.train(spec(argument, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_smallest_number_of_positions_and_a_wrong_task():
    TaskRunConfig.from_dict(spec("task=duplicate_string,positions=60"))
    with pytest.raises(InputError, match=r"config argument = 'task=odd_pairs': must be one of .*'even_pairs'"):
        get_config("task=odd_pairs")


def test_runs_on_tasks_are_not_compared_with_others(runs, tmp_path):
    """A workdir without a run is refused as such, whatever the others are."""
    assert are_algorithmic([*runs, tmp_path / "none"])
    assert not are_algorithmic([tmp_path / "none"])
    write_json(tmp_path / "config.json", {"config": {"data": {"path": "text"}}, "data_digest": ""})
    with pytest.raises(InputError, match=r"workdir = .*must be all runs on tasks or all language models"):
        are_algorithmic([*runs, tmp_path])


def test_bad_evaluations_are_named_before_the_work(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(trained, "restore", None)  # calling it is a TypeError
    for sizes, words in (
        ((1, 1, 4, 2), "model.vocab_multiple = 1: .*model.vocab_size = 3: must be a multiple of mesh.tensor = 2"),
        ((1, 1, 16, 1), "mesh = 'context=16': must multiply to 8 devices"),
    ):
        with pytest.raises(InputError, match=words):
            evaluate_tasks(runs[:1], mesh=MeshConfig(*sizes), output=tmp_path)
    with pytest.raises(TypeError):  # this mesh divides the padded tapes
        evaluate_tasks(runs[:1], mesh=MeshConfig(1, 1, 8, 1), lengths=(3,), output=tmp_path)
    with pytest.raises(InputError, match="last_tokens = 5"):
        evaluate_tasks(runs[:1], last_tokens=5, output=tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match=r"data.task = 'reverse_string': must not be set"):
        read_trained(runs[0], "newest", {})


@pytest.mark.slow
def test_train_and_evaluate_from_the_command_line(tmp_path):
    config = "configs/che.py:task=missing_duplicate_string,bias=kerple,processor=dape,kernel=3"
    changes = "model.num_layers=1 model.width=16 model.num_heads=2 data.pad_to=96 train.batch_size=8 train.num_steps=2"
    flags = [f"--config.{change}" for change in changes.split()]
    result = run_python("train.py", f"--config={config}", *flags, f"--workdir={tmp_path}/mine")
    assert result.returncode == 0, result.stderr
    options = ("--lengths=2-10/4,60", "--num_sequences=5", "--dropout")
    result = run_python("eval.py", f"--workdir={tmp_path}/mine", *options)
    assert result.returncode == 0, result.stderr
    assert "the score: mean over 1 lengths, 60 to 60" in result.stdout
    (run,) = read_runs(tmp_path / "mine", "accuracy")
    assert [found["length"] for found in run["lengths"]] == [2, 6, 10, 60]
    assert run["dropout"]
