"""Files written by commit bbabf1f, before the package was halved, are still read: a run, its corpus and its export.

`fixtures/written_by_bbabf1f.tar.xz` has a run of `tiny.SPEC` with its checkpoint of step 2 of 4, its text, the export
of step 4, and the logits of step 4 at the last of some tokens.
"""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from helpers import logits

from dape_jax.evaluation.trained import read_trained, restore
from dape_jax.training import loop

ARCHIVE = Path(__file__).parent / "fixtures" / "written_by_bbabf1f.tar.xz"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Return the directory with the unpacked files."""
    directory = tmp_path_factory.mktemp("written")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    return directory


@pytest.mark.extra
def test_a_run_is_resumed_and_read(written):
    expected = json.loads((written / "expected.json").read_text())
    spec = json.loads((written / "run" / "config.json").read_text())["config"]
    spec["data"] |= {"path": str(written / "text"), "cache_dir": str(written / "cache")}

    def last_logits() -> np.ndarray:
        trained = read_trained(written / "run", "newest", {})
        _, params = restore(trained)
        return logits(trained.run.model, params, np.array([expected["tokens"]]))[0, -1]

    assert np.abs(last_logits() - expected["last_logits"]).max() > 1e-2  # step 2
    loop.train(spec, written / "run")
    np.testing.assert_allclose(last_logits(), expected["last_logits"], atol=1e-4)  # step 4


def test_an_export_is_loaded(written):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    expected = json.loads((written / "expected.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(written / "export", trust_remote_code=True)
    with torch.no_grad():
        found = model(torch.tensor([expected["tokens"]])).logits[0, -1]
    np.testing.assert_allclose(found.numpy(), expected["last_logits"], atol=1e-4)
