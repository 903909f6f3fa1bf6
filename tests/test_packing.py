"""Training on packed documents: losses are those of the documents alone."""

import jax
import numpy as np
import pytest
import tiny

from dape_jax.config import RunConfig
from dape_jax.errors import InputError
from dape_jax.model.transformer import model_structure
from dape_jax.sharding import make_mesh, put_batch
from dape_jax.training.loop import make_validation, train
from dape_jax.training.optimizer import make_optimizer
from dape_jax.training.source import open_source
from dape_jax.training.step import Training, init_state, make_nll_step, make_train_step


def documents(batch: dict[str, np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the inputs and targets of each document of a packed batch."""
    rows = zip(batch["inputs"], batch["targets"], batch["segment_ids"], strict=True)
    return [(i[ids == segment], t[ids == segment]) for i, t, ids in rows for segment in range(1, ids.max() + 1)]


@pytest.mark.extra
def test_losses_of_packed_documents_are_those_of_the_documents_alone(tmp_path):
    for number in range(150):
        (tmp_path / f"{number}.txt").write_text("the attention scores of a long text"[: 3 + number % 33] + f" {number}")
    changes = {"data__path": f"{tmp_path}/*.txt", "data__packing": "documents", "train__train_length": 64}
    spec = tiny.spec(tmp_path, model__num_layers=1, mesh__context=2, **changes)
    run = RunConfig.from_dict(spec)
    mesh = make_mesh(run.mesh)
    source, (graphdef, _) = open_source(run, mesh), model_structure(run.model)
    batch = next(source.batches)
    batch["weights"][3], batch["segment_ids"][3] = 0, 0  # parts of the batch have different numbers of tokens
    assert len(documents(batch)) > 8
    optimizer = make_optimizer(run.optimizer, 4)
    state = init_state(Training(run.model, optimizer, mesh))
    nll_step = make_nll_step(graphdef, 64)

    def alone(batches: list[dict[str, np.ndarray]]) -> float:
        rows = [document for batch in batches for document in documents(batch)]
        total = 0.0
        for first in range(0, len(rows), 8):
            unpacked = np.zeros((2, 8, 64), np.int32)
            for row, document in enumerate(rows[first : first + 8]):
                unpacked[:, row, : len(document[0])] = document
            inputs, targets = unpacked
            nll = np.asarray(nll_step(state.params, put_batch({"inputs": inputs, "targets": targets}, mesh)))
            total += sum(nll[row, : len(document[0])].sum() for row, document in enumerate(rows[first : first + 8]))
        return total / sum(len(document[0]) for document in rows)

    with jax.set_mesh(mesh):
        expected, validation = alone([batch]), alone(source.validation[run.data.path])
        found = make_validation(run, source.validation, mesh)(state.params)["loss_nats"]
        assert found == pytest.approx(validation, rel=1e-5)
        norms = []
        for parts in (1, 2):
            training = Training(run.model, optimizer, mesh, accumulation_steps=parts)
            _, metrics = make_train_step(training)(init_state(training), put_batch(batch, mesh))
            assert float(metrics["loss_nats"]) == pytest.approx(expected, rel=1e-5)
            norms.append(float(metrics["gradient_norm"]))
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"attention": {"name": "fused", "platform": "tpu"}},
            r"model\.attention\.name = 'fused': .*segment_ids are given",
        ),
        ({"processor": tiny.SPEC["model"]["processor"] | {"edge": "listing"}}, r"segment_ids = .*edge='listing'"),
    ],
)
def test_models_that_cannot_be_trained_on_packed_documents_are_refused(tmp_path, change, message):
    spec = tiny.spec(tmp_path, data__packing="documents")
    with pytest.raises(InputError, match=message):
        train(spec | {"model": spec["model"] | change}, tmp_path / "run")
    assert not (tmp_path / "run").exists()
