"""Algorithmic tasks end to end: golden tapes, losses and protocol, the encoder, training, accuracy by length."""

import dataclasses
import json
import math
import os
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
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_python

from dape_jax import command_line
from dape_jax.config import RunConfig, TaskRunConfig, choose, read_model
from dape_jax.errors import InputError
from dape_jax.evaluation import accuracy
from dape_jax.evaluation.accuracy import Tapes, compile_tapes, length_accuracy
from dape_jax.evaluation.options import Options
from dape_jax.evaluation.programs import padded_batches, predicted_bytes
from dape_jax.evaluation.report import ReportPaths
from dape_jax.evaluation.trained import TrainedModel, read_trained, restore
from dape_jax.model.attention import Dense
from dape_jax.model.biases import BIASES
from dape_jax.model.contextual import CONTEXTUAL
from dape_jax.model.loss import nll
from dape_jax.model.transformer import ENCODER, Block, Params, Places, Transformer, TransformerConfig, model_structure
from dape_jax.sharding import MeshConfig, make_mesh, put_batch
from dape_jax.tasks import CHE, TASKS
from dape_jax.tasks.tapes import TRAINING, TaskConfig, draw_tapes, make_tapes
from dape_jax.training import loop
from dape_jax.training.optimizer import make_optimizer
from dape_jax.training.step import init_state, make_sums_step, make_train_step, shardings_of

pytestmark = pytest.mark.extra

ROOT = Path(__file__).parents[1]
FOLDERS = [Path(__file__).parent / "golden" / "che"]
if "DAPE_GOLDEN_DIR" in os.environ:
    FOLDERS.append(Path(os.environ["DAPE_GOLDEN_DIR"]) / "che")
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
                tape = make_tapes(config, inputs_BN, targets_BM, np.random.default_rng(0), pad_to=pad_to)
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
    # The same from the four sums of a validation step.
    sums = [nll_BT * tapes["weights"], tapes["weights"], right_BT, tapes["counted"]]
    nats, weight, right, counted = (float(np.sum(of)) for of in sums)
    assert (nats / weight, right / counted) == pytest.approx((float(loss), float(right_share)), abs=1e-6)


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


PROCESSORS = {
    "plain": choose("processor", "none"),
    "dape1x1": choose("processor", "dape", kernel_width=1, channels=4),
    "dape1x3": choose("processor", "dape", kernel_width=3, channels=4),
}
TWO_SIDED = [name for name in BIASES | CONTEXTUAL if name != "cope"]


def encoder(bias: str, processor: str, **options: Any) -> TransformerConfig:
    """Return a config of two layers whose initial embedding is as large as other weights, so that inputs matter."""
    given = {"num_layers": 2, "width": 16, "num_heads": 2, "vocab_size": 12, "num_outputs": 3}
    given |= {"num_kv_heads": None, "head_dim": None, "mlp_width": None}
    given |= ENCODER | {"initializer": "gpt_neox", "window": None, "remat": "none", "dtype": "float32"}
    given |= {"rotary": choose("rotary", "none"), "bias": choose("bias", bias), "processor": PROCESSORS[processor]}
    return read_model(given | {"attention": choose("attention", "dense")} | options)


def initial_params(config: TransformerConfig) -> Params:
    return nnx.to_pure_dict(nnx.state(Transformer(config, rngs=nnx.Rngs(1)), nnx.Param))


def tokens_with_gradient(config: TransformerConfig, params: Params, position: int) -> np.ndarray:
    """Return which tokens have a gradient of the loss at `position`.

    All 12 tokens differ, so the rows of the embedding are the tokens.
    """
    graphdef, _ = model_structure(config)

    @jax.jit
    @jax.grad
    def gradient(embedding_VD):
        logits_BTV = nnx.merge(graphdef, params | {"embedding_VD": embedding_VD})(jnp.arange(12)[None])
        return nll(logits_BTV, jnp.zeros((1, 12), int))[0, position]

    return np.abs(gradient(params["embedding_VD"])).max(axis=1) > 0


@pytest.mark.parametrize(
    ("bias", "processor"), [("kerple", "dape1x3"), pytest.param("transformer_xl", "dape1x1", marks=pytest.mark.slow)]
)
def test_encoder_is_bidirectional_and_its_causal_form_is_not(bias, processor):
    both, causal = encoder(bias, processor), encoder(bias, processor, causal=True)
    params, position = initial_params(both), 5
    assert tokens_with_gradient(both, params, position).all()
    np.testing.assert_array_equal(tokens_with_gradient(causal, params, position), np.arange(12) <= position)


# With DAPE 1x3, gradients are compared too.
QUICK = [
    (False, "kerple", "dape1x3"),
    (True, "transformer_xl", "plain"),
]
SLOW = [(False, bias, "dape1x3") for bias in TWO_SIDED if bias != "kerple"] + [(True, "cope", "dape1x1")]


@pytest.mark.parametrize(
    ("causal", "bias", "processor"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_padding_changes_nothing_and_blockwise_is_dense(causal, bias, processor):
    """Compares logits at real positions, and with DAPE 1x3 the gradients of all parameters."""
    rng = np.random.default_rng(0)
    tokens_BT, padding = jnp.asarray(rng.integers(0, 12, (2, 10))), 5
    padded_BT = jnp.pad(tokens_BT, ((0, 0), (0, padding)), constant_values=11)
    dense = encoder(bias, processor, causal=causal)
    blocks = encoder(bias, processor, causal=causal, attention=choose("attention", "blockwise", block_size=4))
    dense_graphdef, blocks_graphdef = (model_structure(config)[0] for config in (dense, blocks))
    params = initial_params(dense)

    def loss(params, graphdef, tokens_BT, pos_T):
        logits_BTV = nnx.merge(graphdef, params)(tokens_BT, pos_T)[:, :10]
        return nll(logits_BTV, tokens_BT[:, :10] % 3)[:, 3:].mean(), logits_BTV

    gradient_or_loss = jax.grad(loss, has_aux=True) if processor == "dape1x3" else loss

    @jax.jit
    def all_forms(params, pos_T):
        padded_pos_T = jnp.pad(pos_T, (0, padding), constant_values=-1)
        return [
            gradient_or_loss(params, dense_graphdef, tokens_BT, pos_T),
            loss(params, dense_graphdef, padded_BT, padded_pos_T)[1],
            gradient_or_loss(params, blocks_graphdef, padded_BT, padded_pos_T),
        ]

    for pos_T in (np.arange(10), np.sort(rng.choice(100, 10, replace=False))):  # consecutive, then random
        (expected, logits_BTV), padded_BTV, (found, in_blocks_BTV) = all_forms(params, jnp.asarray(pos_T))
        assert np.ptp(logits_BTV) > 0.1
        assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected)) > 1e-3
        np.testing.assert_allclose(padded_BTV, logits_BTV, atol=1e-5)
        np.testing.assert_allclose(in_blocks_BTV, logits_BTV, atol=1e-5)
        chex.assert_trees_all_close(found, expected, atol=1e-5)


# ---- dropout


def test_dropout_keeps_the_expectation():
    """Dropout zeroes or scales attention's output before the residual stream and keeps its mean."""
    config = dataclasses.replace(encoder("nope", "plain"), norm_first=True, dropout=0.25)

    @nnx.jit
    def build():
        block = Block(config, rngs=nnx.Rngs(0))
        block.mlp.down_FD[...] = jnp.zeros((64, 16))  # no MLP output: linear in the dropped values
        return block

    graphdef, params = nnx.split(build(), nnx.Param)
    x_BTD = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 16), np.float32))

    @jax.jit
    def added_by(params, key):
        return nnx.merge(graphdef, params)(x_BTD, Places(jnp.arange(5)), None, dropout_key=key)[0] - x_BTD

    keys = jax.random.split(jax.random.key(1), 4000)
    added, dropped = added_by(params, None), jax.jit(jax.vmap(added_by, in_axes=(None, 0)))(params, keys)
    is_zero = np.isclose(dropped, 0, atol=1e-6)
    np.testing.assert_allclose(dropped, np.where(is_zero, 0, np.broadcast_to(added / 0.75, dropped.shape)), atol=1e-5)
    error = np.abs(added) * (0.25 / 0.75 / len(keys)) ** 0.5
    assert (np.abs(dropped.mean(axis=0) - added) <= 5 * error + 1e-6).all()


@pytest.mark.extra
def test_dropout_depends_on_seed_and_step():
    """One training step with the same parameters and batch, by seed and by number of earlier steps."""
    run = TaskRunConfig.from_dict(spec("task=reverse_string"))
    mesh, optimizer = make_mesh(run.mesh, jax.devices()[:1]), make_optimizer(run.optimizer, 10)
    graphdef, state = model_structure(run.model)[0], init_state(run.model, optimizer, 0, mesh)
    batch = put_batch(draw_tapes(run.data, TRAINING, 0, 8, length=5), mesh)
    steps = [make_train_step(graphdef, optimizer, shardings_of(state), seed=seed) for seed in (0, 1)]

    def loss(seed: int, num_earlier: int) -> float:
        health = state.health._replace(applied=jnp.asarray(num_earlier))
        consumed = jax.tree.map(jnp.copy, state._replace(health=health))
        return float(steps[seed](consumed, batch)[1]["loss_nats"])

    with jax.set_mesh(mesh):
        assert loss(0, 0) == loss(0, 0)
        sums = make_sums_step(graphdef)(state.params, batch)
        without = float(sums[0] / sums[1])
        losses = [loss(0, 0), loss(0, 1), loss(1, 0), loss(1, 1)]
    assert len({*losses, without}) == 5
    np.testing.assert_allclose(losses, without, rtol=0.2)


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
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("che")


@pytest.fixture(scope="module")
def runs(root) -> list[Path]:
    """Return a trained run and a copy of it under another name."""
    loop.train(spec("task=reverse_string,bias=kerple,processor=dape"), root / "dape")
    shutil.copytree(root / "dape", root / "other")
    return [root / "dape", root / "other"]


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
    optimizer = make_optimizer(run.optimizer, 10)
    batch = draw_tapes(run.data, TRAINING, 0, 8, length=4)
    assert batch["inputs"].shape[1] == 16
    found = []
    for sizes, devices in (((1, 1, 1, 1), 1), ((1, 2, 4, 1), 8)):
        mesh = make_mesh(MeshConfig(*sizes), jax.devices()[:devices])
        state = init_state(run.model, optimizer, 0, mesh)
        with jax.set_mesh(mesh):
            placed = put_batch(batch, mesh)
            sums = make_sums_step(graphdef)(state.params, placed)  # validation
            state, metrics = make_train_step(graphdef, optimizer, shardings_of(state))(state, placed)
        found.append(jax.device_get((metrics["loss_nats"], sums, state.opt_state)))
    chex.assert_trees_all_close(found[0], found[1], atol=2e-5, rtol=1e-5)


# ---- accuracy by length


def written(directory: Path) -> list[dict[str, Any]]:
    return json.loads((directory / "accuracy.json").read_text())["runs"]


def test_accuracy_equals_that_of_a_plain_model(runs, evaluated):
    """Independent of padding, batches (of 8 at length 20, the second padded), blocks of rows and devices."""
    trained = read_task_run(runs[0])
    _, params = restore(trained)
    config = dataclasses.replace(trained.run.model, attention=Dense())
    model = nnx.merge(model_structure(config)[0], jax.device_put(params, jax.devices()[0]))
    answer = jax.jit(lambda tokens_BT, pos_T: model(tokens_BT, pos_T).argmax(axis=-1))
    short, *_, long = written(evaluated.directory)[0]["lengths"]
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
    found = written(evaluated.directory)
    for row, run in zip(evaluated.table.splitlines()[3:], found, strict=True):
        accuracies = [result["accuracy"] for result in run["lengths"]]
        shown = [f"{100 * share:.2f}" for share in (run["trained"], run["score"], *accuracies)]
        assert row.split() == [run["name"], *shown]
    assert "<= 5: mean over 2 lengths; > 5, the score: mean over 2 lengths, 6 to 20." in evaluated.table
    assert "Chance: 50.00 (reverse_string)" in evaluated.table
    assert found[0]["lengths"] == found[1]["lengths"]
    assert [run["name"] for run in found] == ["dape", "other"]
    run = found[0]
    assert (run["task"], run["step"], run["train_length"], run["dropout"]) == ("reverse_string", 4, 5, False)
    at = {result["length"]: result["accuracy"] for result in run["lengths"]}
    assert list(at) == [2, 5, 6, 20]
    assert (run["trained"], run["score"]) == pytest.approx(((at[2] + at[5]) / 2, (at[6] + at[20]) / 2))
    for result in run["lengths"]:
        assert result["low"] < result["accuracy"] < result["high"]
        assert (result["num_sequences"], result["num_symbols"]) == (11, 11 * result["length"])
    evaluate_tasks(runs, dropout=True, lengths=(20,), output=tmp_path)
    on, again = written(tmp_path)
    assert on["lengths"] == again["lengths"] != found[0]["lengths"][-1:]
    assert on["dropout"]


def test_only_output_symbols_count_and_a_diverged_model_answers_nothing(runs, monkeypatch, tmp_path, caplog):
    """Answer 0 everywhere, also the target of input symbols and padding: only answers of 0 count as right."""
    with monkeypatch.context() as patch:
        patch.setattr(accuracy, "run_in_batches", lambda *_, num_rows, **__: np.zeros((num_rows, 1), np.int32))
        evaluate_tasks(runs[:1], lengths=(2, 20), num_sequences=11, output=tmp_path / "zeros")
    config = read_task_run(runs[0]).run.data
    for result in written(tmp_path / "zeros")[0]["lengths"]:
        answers_BM = Tapes(config, result["length"], 11, padded=96).targets_BM
        assert 0 < (answers_BM == 0).mean() < 1
        assert result["accuracy"] == pytest.approx((answers_BM == 0).mean())

    def diverged(trained):
        mesh, params = restore(trained)
        return mesh, jax.tree.map(lambda leaf: leaf * np.float32(np.nan), params)

    monkeypatch.setattr(accuracy, "restore", diverged)
    evaluate_tasks(runs[:1], lengths=(2,), num_sequences=11, output=tmp_path / "diverged")
    assert [result["accuracy"] for result in written(tmp_path / "diverged")[0]["lengths"]] == [0]
    assert "the model has diverged: its logits at length 2 are not finite" in caplog.text


def test_every_model_answers_the_same_strings():
    """Strings depend on task and length, not on seed, batch size or positions, which a batch draws for all its rows."""
    asked = []
    for seed, batch_size, padded, max_position in ((0, 5, 48, None), (7, 12, 64, None), (3, 4, 48, 100)):
        tapes = Tapes(TaskConfig("reverse_string", 0, 8, max_position, seed), 20, 12, padded)
        batches = [(tapes.batch(numbers), num_real) for numbers, num_real in padded_batches(12, batch_size)]
        assert {batch["inputs"].shape for batch, _ in batches} == {(batch_size, padded)}
        asked.append([row for batch, num_real in batches for row in batch["inputs"][:num_real, :20].tolist()])
    assert len({tuple(row) for batch, _ in batches for row in batch["positions"]}) == len(batches) == 3
    assert asked[0] == asked[1] == asked[2]
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
    trained = TrainedModel(epath.Path("run"), 1, run, "", MeshConfig(data=8, fsdp=1, context=1, tensor=1))
    (program,) = compile_tapes(trained).values()
    assert program.length == 1504
    assert predicted_bytes(program.step) * jax.device_count() < 2**30


# ---- bad input


def test_bad_configs_are_named(tmp_path):
    with pytest.raises(InputError, match=r"config argument = 'task=odd_pairs': must be one of .*'even_pairs'"):
        get_config("task=odd_pairs")
    fine, dape = "task=even_pairs,bias=kerple", "task=even_pairs,bias=kerple,processor=dape"
    few, many = (f"task=duplicate_string,positions={positions}" for positions in (14, 59))
    leak = dict(choose("processor", "dape", leak=True))
    refusals: list[tuple[str, dict[str, Any], str]] = [
        (fine, {"data__task": "odd_pairs"}, "data.task = 'odd_pairs': must be one of"),
        (fine, {"evaluation__lengths": (4, 2)}, "evaluation.lengths = .*increasing"),
        (fine, {"model__vocab_size": 4}, "model.vocab_size = 4: .*3 for even_pairs"),
        (fine, {"model__num_outputs": 3}, "model.num_outputs = 3: .*2 for even_pairs"),
        (few, {"evaluation__lengths": (2, 4)}, "data.max_position = 14: must be at least 15, .* train.train_length"),
        (many, {}, "data.max_position = 59: must be at least 60, .* evaluation.lengths = 20"),
        (dape, {"model__processor": leak}, "data.pad_to = 16: must be 1: .*leak"),
    ]
    for argument, changes, words in refusals:
        with pytest.raises(InputError, match=words):
            TaskRunConfig.from_dict(spec(argument, **changes))
    for argument in (fine, dape, "task=duplicate_string,positions=60"):
        TaskRunConfig.from_dict(spec(argument))
    in_training: list[tuple[str, dict[str, Any], str]] = [
        (fine, {"train__batch_size": 12}, "train.batch_size = 12: must be a multiple of .*8 devices"),
        (fine, {"mesh__context": 2, "data__pad_to": 7}, "data.pad_to = 7: must be a multiple of mesh.context"),
        ("task=even_pairs,bias=cope", {}, r"model.bias = 'cope': .*needs causal attention"),
    ]
    for argument, changes, words in in_training:
        with pytest.raises(InputError, match=words):
            loop.train(spec(argument, **changes), tmp_path / "run")
        assert not (tmp_path / "run").exists(), words


def test_bad_evaluations_are_named_before_the_work(runs, root, tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy, "restore", None)  # calling it is a TypeError
    refusals: list[tuple[list[str], dict[str, Any], str]] = [
        ([], {}, "workdir = .*must have at least one directory"),
        (["dape"], {"lengths": (6, 3)}, "evaluation.lengths = .*increasing"),
        (["dape"], {"step": "3"}, "step = '3': .*one of"),
        (["dape"], {"mesh": MeshConfig(1, 1, 4, 2)}, "model.vocab_size = 3: must be a multiple of mesh.tensor = 2"),
        (["dape"], {"mesh": MeshConfig(1, 1, 16, 1)}, "mesh = 'context=16': must multiply to 8 devices"),
        (["nowhere"], {}, "workdir = .*nowhere"),
    ]
    for names, options, words in refusals:
        with pytest.raises(InputError, match=words):
            evaluate_tasks([root / name for name in names], **options, output=tmp_path)
    with pytest.raises(TypeError):  # this mesh divides the padded tapes
        evaluate_tasks(runs[:1], mesh=MeshConfig(1, 1, 8, 1), lengths=(3,), output=tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match=r"data.task = 'reverse_string': must not be set"):
        read_trained(root / "dape", "newest", {})
    with pytest.raises(InputError, match=r"data.task = 'even_pairs': must not be set"):
        RunConfig.from_dict(spec("task=even_pairs"))


@pytest.mark.slow
def test_train_and_evaluate_from_the_command_line(tmp_path):
    config = "configs/che.py:task=missing_duplicate_string,bias=kerple,processor=dape,kernel=3"
    changes = "model.num_layers=1 model.width=16 model.num_heads=2 data.pad_to=96 train.batch_size=8 train.num_steps=2"
    changes += " train.checkpoint_interval=2 train.eval_interval=2"
    flags = [f"--config.{change}" for change in changes.split()]
    result = run_python("train.py", f"--config={config}", *flags, f"--workdir={tmp_path}/mine")
    assert result.returncode == 0, result.stderr
    assert "accuracy" in result.stderr
    evaluate = ["eval.py", f"--workdir={tmp_path}/mine"]
    result = run_python(*evaluate, "--lengths=2-10/4,60", "--num_sequences=5", "--dropout")
    assert result.returncode == 0, result.stderr
    assert "the score: mean over 1 lengths, 60 to 60" in result.stdout
    (run,) = written(tmp_path / "mine")
    assert [found["length"] for found in run["lengths"]] == [2, 6, 10, 60]
    assert run["dropout"]
    result = run_python(*evaluate, "--last_tokens=5")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "last_tokens = 5: must not be given: it is only for language models" in result.stderr


def test_numbers_in_a_flag():
    found = command_line.read_numbers("--lengths", ["2-10/4", "20-22", "7"])
    assert found == (2, 6, 10, 20, 21, 22, 7)
    for item in ("", "x", "-3", "1-", "5-1", "1-5/0", "1/2", "1.5", "²", "1-5-9", " 1", "1-999999999"):
        with pytest.raises(InputError, match=r"--lengths = \['4', .*\]: "):
            command_line.read_numbers("--lengths", ["4", item])
