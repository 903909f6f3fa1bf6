"""How fast are the tasks' batches made, inputs and answers, and is the accelerator ever waiting for them?

    python -m benchmarks.tasks

Sampled, solved and laid out as tapes are batches of 128 sequences, at the longest length of training and of evaluation,
in one thread, as a run does it ahead of its steps. Tokens are those of the tapes. Out, in --output: `sampling.json`,
the table as `sampling.txt` and `sampling.md`.
"""

import time
from pathlib import Path

import numpy as np
from absl import flags
from tqdm import tqdm

from dape_jax import command_line
from dape_jax.errors import require
from dape_jax.evaluation import report
from dape_jax.tasks import TASKS
from dape_jax.tasks.tapes import TaskConfig, make_tapes

LENGTHS = (40, 500)
BATCH_SIZE = 128
UNTIMED = 3  # batches, of each task and length


def define_flags() -> None:
    flags.DEFINE_integer(
        "batches", 100, f"Batches that are timed of each task and length, after {UNTIMED} that are not."
    )
    flags.DEFINE_string("output", "results/tasks", "Directory of the report.")


def measure(config: TaskConfig, length: int, num_batches: int) -> dict[str, float]:
    """Median milliseconds of a batch, and the tokens a second that they make."""
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


def main(_arguments: list[str]) -> None:
    num_batches = flags.FLAGS.batches
    require(num_batches >= 1, "--batches", num_batches, "at least 1")
    directory = Path(flags.FLAGS.output)
    report.make_directory(directory)
    tasks, rows = {}, [["", *(f"{what} at {length}" for length in LENGTHS for what in ("ms", "million tokens/s"))]]
    for name in tqdm(TASKS, unit="task"):
        config = TaskConfig(name, computation_steps=0, pad_to=1, max_position=None, seed=0)
        tasks[name] = [measure(config, length, num_batches) for length in LENGTHS]
        rows.append([name])
        for found in tasks[name]:
            rows[-1] += [
                f"{found['sample_ms'] + found['solve_ms'] + found['tape_ms']:.2f}",
                f"{found['tokens_per_second'] / 1e6:.1f}",
            ]
    caption = (
        f"Making a batch of {BATCH_SIZE} tapes (strings, answers, layout) by input length, one thread: milliseconds a "
        f"batch (median of {num_batches}) and tokens of tapes a second."
    )
    content = {"batch_size": BATCH_SIZE, "batches": num_batches, "tasks": tasks}
    print(report.save("sampling", directory, content, caption, rows, None).table)


if __name__ == "__main__":
    define_flags()
    command_line.run(main)
