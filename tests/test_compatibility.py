"""Files written by commit bbabf1f, before the package was halved, are still read: a run, its corpus and its export.

`fixtures/written_by_bbabf1f.tar.xz` has a run of `tiny.SPEC` with its checkpoint of step 2 of 4, its text, the export
of step 4, and the logits of step 4 at the last of some tokens.
"""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

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
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from dape_jax.evaluation.trained import read_trained, restore
    from dape_jax.model.transformer import model_structure
    from dape_jax.training import loop

    expected = json.loads((written / "expected.json").read_text())
    spec = json.loads((written / "run" / "config.json").read_text())["config"]
    spec["data"] |= {"path": str(written / "text"), "cache_dir": str(written / "cache")}

    def logits() -> np.ndarray:
        trained = read_trained(written / "run", "newest", {})
        _, params = restore(trained)
        graphdef, _ = model_structure(trained.run.model)
        run = jax.jit(lambda params, tokens_BT: nnx.merge(graphdef, params)(tokens_BT)[0, -1])
        return np.asarray(run(params, jnp.asarray([expected["tokens"]])))

    assert np.abs(logits() - expected["last_logits"]).max() > 1e-2  # step 2
    loop.train(spec, written / "run")
    np.testing.assert_allclose(logits(), expected["last_logits"], atol=1e-4)  # step 4


def test_an_export_is_loaded(written):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    expected = json.loads((written / "expected.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(written / "export", trust_remote_code=True)
    with torch.no_grad():
        logits = model(torch.tensor([expected["tokens"]])).logits[0, -1]
    np.testing.assert_allclose(logits.numpy(), expected["last_logits"], atol=1e-4)
