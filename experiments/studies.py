"""Parts of the studies of texts and trained models: `needle.py`, `copying.py` and `repetition.py`."""

import dataclasses
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Float64, Int

from dape_jax.config import RunConfig
from dape_jax.data.store import TokenStore
from dape_jax.evaluation import report
from dape_jax.evaluation.perplexity import Window, choose_windows, common_text
from dape_jax.evaluation.statistics import over_seeds
from dape_jax.evaluation.trained import TrainedModel, named_apart, read_trained
from dape_jax.provenance import make_results_directory
from dape_jax.storage import to_path


@dataclasses.dataclass(frozen=True)
class Study:
    """Models, and the held-out windows on which they are compared; these are the windows of `eval.py`."""

    models: list[TrainedModel[RunConfig]]
    store: TokenStore
    data_digest: str
    windows: list[Window]
    directory: epath.Path  # of the results

    @property
    def documents(self) -> Int[np.ndarray, "windows"]:
        """Document of each window."""
        return np.array([window.document for window in self.windows])

    @property
    def sample(self) -> str:
        """Sentence on the windows, for captions."""
        number = len(set(self.documents.tolist()))
        return (
            f"{len(self.windows)} windows from {number} validation documents; 95 % bootstrap intervals over documents."
        )


def read_study(settings: Any, **evaluation: int) -> Study:
    """Return the models and windows that flags name: `workdir`, `lengths`, `windows` and `output`.

    `evaluation` are further fields of the configs' evaluation sections.

    Raises:
        InputError: a model or the text cannot be read, the models do not have the same text, or the results cannot be
            written.
    """
    changes = {"lengths": settings.lengths, "max_windows": settings.windows} | evaluation
    models = named_apart(
        [read_trained(to_path(workdir, "--workdir"), "newest", changes) for workdir in settings.workdir], "--workdir"
    )
    store, digests = common_text(models, None)
    directory = make_results_directory(to_path(settings.output, "--output"), "--output")
    windows = choose_windows(store, max(settings.lengths), settings.windows)
    return Study(models, store, digests[models[0].name], windows, directory)


def interval(
    documents: Int[np.ndarray, "windows"], sums: Float64[np.ndarray, "windows"], counts: Any = None
) -> dict[str, float | None]:
    """Return the 95 % bootstrap interval, over documents, of sum(sums) / sum(counts); counts are 1 by default."""
    counts = np.ones_like(sums) if counts is None else counts
    ((_, low, high),) = over_seeds(documents, (sums[None, :, None],), counts[:, None], np.divide)
    return {"low": low, "high": high}


def save(stem: str, directory: epath.Path, content: dict[str, Any], caption: str) -> None:
    """Write the JSON of a study, and print a table with a row for each record of its runs."""
    first = content["runs"][0]["lengths"][0]
    rows = [["name", *first]]
    for run in content["runs"]:
        rows += [[run["name"], *map(_shown, record.values())] for record in run["lengths"]]
    report.save(stem, directory, content, report.Table(caption, rows))


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
