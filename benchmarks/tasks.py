"""Measure the time to make batches of the algorithmic tasks, which shows whether the accelerator waits for them.

    python -m benchmarks.tasks

Batches of 128 sequences are sampled, solved and converted to tapes, at the longest length of training and of
evaluation, in one thread, as in a run. Prints a table and writes OUTPUT/sampling.json.
"""

import dataclasses
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks.measure import Row, table
from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.errors import require
from dape_jax.evaluation import report
from dape_jax.provenance import make_results_directory
from dape_jax.tasks import TASKS
from dape_jax.tasks.tapes import TaskConfig, make_tapes

LENGTHS = (40, 500)
BATCH_SIZE = 128
UNTIMED = 3  # batches of each task and length that are not timed


@dataclasses.dataclass(frozen=True)
class Settings:
    """Flags of the command line."""

    batches: int = flag(100, f"Batches to time for each task and length, after {UNTIMED} that are not timed.")
    output: str = flag("results/tasks", "Directory of the report.")

    def __post_init__(self):
        require(self.batches >= 1, "--batches", self.batches, "must be at least 1")


def time_batches(config: TaskConfig, length: int, num_batches: int) -> Row:
    """Return the median milliseconds of the three parts of a batch, and the tokens of tapes per second."""
    rng = np.random.default_rng(length)
    times = []
    for _ in range(UNTIMED + num_batches):
        marks = [time.perf_counter()]
        inputs_BN = config.of.sample(rng, BATCH_SIZE, length)
        marks.append(time.perf_counter())
        targets_BM = config.of.solve(inputs_BN)
        marks.append(time.perf_counter())
        make_tapes(config, inputs_BN, targets_BM, rng)
        marks.append(time.perf_counter())
        times.append(1000 * np.diff(marks))
    milliseconds = np.median(times[UNTIMED:], axis=0)
    tokens = BATCH_SIZE * config.tape_length(length)
    return {
        "length": length,
        **dict(zip(("sample_ms", "solve_ms", "tape_ms"), milliseconds.round(3).tolist(), strict=True)),
        "tokens_per_second": round(1000 * tokens / milliseconds.sum()),
    }


def main(settings: Settings) -> None:
    """Time every task and write the report."""
    directory = make_results_directory(Path(settings.output))
    tasks: dict[str, list[Row]] = {}
    for name in tqdm(TASKS, unit="task"):
        config = TaskConfig(name, computation_steps=0, pad_to=1, max_position=None, seed=0)
        tasks[name] = [time_batches(config, length, settings.batches) for length in LENGTHS]
    rows = [{"task": name} | times for name, of_task in tasks.items() for times in of_task]
    figures = {f"{part} ms": (f"{part}_ms", ".3f") for part in ("sample", "solve", "tape")}
    cells = table(rows, {"": "task", "length": "length"}, figures | {"tokens/s": ("tokens_per_second", ",")})
    caption = (
        f"Making a batch of {BATCH_SIZE} tapes (strings, answers, layout) by input length, one thread: milliseconds "
        f"per batch (median of {settings.batches}) and tokens of tapes per second."
    )
    content = {"batch_size": BATCH_SIZE, "batches": settings.batches, "tasks": tasks}
    report.save("sampling", directory, content, caption, cells, None)


if __name__ == "__main__":
    command_line.run(main, Settings)
