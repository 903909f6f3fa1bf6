"""How fast are the tasks' batches made, inputs and answers, and is the accelerator ever waiting for them?

    python -m benchmarks.tasks

Sampled and solved are batches of 128 sequences, at the longest length of training and of evaluation, in one thread, as
a run does it. Symbols are those of inputs and targets together. Out, in --output: `sampling.json`, the table as
`sampling.txt` and `sampling.md`.
"""

import statistics
import time
from pathlib import Path

import numpy as np
from absl import flags
from tqdm import tqdm

from dape_jax import command_line
from dape_jax.errors import require
from dape_jax.evaluation import report
from dape_jax.tasks import TASKS
from dape_jax.tasks.task import Task

LENGTHS = (40, 500)
BATCH_SIZE = 128
UNTIMED = 3  # batches, of each task and length


def define_flags() -> None:
    flags.DEFINE_integer(
        "batches", 100, f"Batches that are timed of each task and length, after {UNTIMED} that are not."
    )
    flags.DEFINE_string("output", "results/tasks", "Directory of the report.")


def measure(task: Task, length: int, num_batches: int) -> dict[str, float]:
    """Median milliseconds of a batch, and the symbols a second that they make."""
    rng = np.random.default_rng(length)
    sample_ms, solve_ms, num_symbols = [], [], 0
    for _ in range(UNTIMED + num_batches):
        start = time.perf_counter()
        inputs_BN = task.sample(rng, BATCH_SIZE, length)
        between = time.perf_counter()
        targets_BM = task.solve(inputs_BN)
        end = time.perf_counter()
        sample_ms.append(1000 * (between - start))
        solve_ms.append(1000 * (end - between))
        num_symbols = inputs_BN.size + targets_BM.size
    sample, solve = statistics.median(sample_ms[UNTIMED:]), statistics.median(solve_ms[UNTIMED:])
    return {
        "length": length,
        "sample_ms": round(sample, 3),
        "solve_ms": round(solve, 3),
        "symbols_per_second": round(1000 * num_symbols / (sample + solve)),
    }


def main(_arguments: list[str]) -> None:
    num_batches = flags.FLAGS.batches
    require(num_batches >= 1, "--batches", num_batches, "at least 1")
    directory = Path(flags.FLAGS.output)
    report.make_directory(directory)
    tasks, rows = {}, [["", *(f"{what} at {length}" for length in LENGTHS for what in ("ms", "million symbols/s"))]]
    for name, task in tqdm(TASKS.items(), unit="task"):
        tasks[name] = [measure(task, length, num_batches) for length in LENGTHS]
        rows.append([name])
        for found in tasks[name]:
            rows[-1] += [
                f"{found['sample_ms'] + found['solve_ms']:.2f}",
                f"{found['symbols_per_second'] / 1e6:.1f}",
            ]
    caption = (
        f"Sampling and solving a batch of {BATCH_SIZE} sequences by sequence length, one thread: milliseconds a batch "
        f"(median of {num_batches}) and symbols of inputs and targets a second."
    )
    content = {"batch_size": BATCH_SIZE, "batches": num_batches, "tasks": tasks}
    print(report.save("sampling", directory, content, caption, rows, None).table)


if __name__ == "__main__":
    define_flags()
    command_line.run(main)
