"""Kill a run at random moments; it ends with the same bits as an uninterrupted run.

    pytest tests/test_kills.py -m slow                # 3 kills, 5 of one of two processes, 2 in a bucket
    DAPE_KILLS=20 pytest tests/test_kills.py -m slow -k one_process

Each kill is a SIGKILL or SIGTERM during start-up, a step or a save. Every array of the last checkpoint is compared by
its digest, which depends on every bit, and so are the optimizer, the position in the data and the loss of every step.
"""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from etils import epath
from processes import Run, every, losses

from dape_jax.files import read_json
from dape_jax.storage import names_in, to_path
from dape_jax.training.checkpoint import step_names

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("DAPE_KILLS", "3"))


def kill_at_random(root: Path, workdir: epath.Path, num_processes: int, kills: int, num_steps: int) -> dict[str, int]:
    """Start and kill the run again and again; return how often each moment and signal was hit."""
    draw, hits = random.Random(17), dict.fromkeys(("start-up", "step", "save", "SIGKILL", "SIGTERM"), 0)
    for _ in range(kills):
        moment = draw.choice(("start-up", "step", "save"))
        before = step_names(workdir)[:1]
        run = Run(root, workdir, num_processes, *every(2, num_steps))
        try:
            if moment == "start-up":
                end = time.monotonic() + draw.uniform(0, 6)
                run.until(lambda end=end, old=before: time.monotonic() > end or step_names(workdir)[:1] != old)
            elif moment == "step":
                run.until(lambda old=before: step_names(workdir)[:1] != old)
                time.sleep(draw.uniform(0, 0.05))
            else:
                saved = set(names_in(workdir / "checkpoints"))
                run.until(lambda saved=saved: set(names_in(workdir / "checkpoints")) - saved)
            sent = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
            draw.choice(run.processes).send_signal(sent)
            try:
                statuses = run.wait(40)
            except subprocess.TimeoutExpired:  # one waits for the others to join; a launcher kills it, as `wait` does
                statuses = [process.wait() for process in run.processes]
        finally:
            for process in run.processes:
                process.kill()
        assert 0 not in statuses, "the run ended before the last kill, or despite it"
        assert not names_in(workdir / "damaged"), run.texts()
        hits[moment] += 1
        hits[sent.name] += 1
    return hits


@pytest.mark.parametrize(
    ("place", "num_processes", "kills"),
    [
        pytest.param("local", 1, KILLS, id="one_process"),
        pytest.param("local", 2, 5, id="two_processes", marks=pytest.mark.exhaustive),
        pytest.param("bucket", 1, 2, id="bucket", marks=pytest.mark.exhaustive),
    ],
)
def test_a_killed_run_ends_with_the_same_bits(trained_root, tmp_path, request, place, num_processes, kills):
    if place == "bucket":
        request.getfixturevalue("google_storage")
    workdir = to_path("gs://bucket/killed" if place == "bucket" else str(tmp_path / "killed"), "workdir")
    num_steps = 6 * kills + 8  # with a checkpoint after every second step, a kill comes after a few steps
    hits = kill_at_random(trained_root, workdir, num_processes, kills, num_steps)
    assert place == "bucket" or all(hits.values()), hits
    for each in (workdir, tmp_path / "whole"):
        run = Run(trained_root, each, num_processes, *every(2, num_steps))
        assert run.wait(600) == [0] * num_processes, run.texts()
    digests = [
        read_json(each / "checkpoints" / str(num_steps) / "digests" / "metadata")
        for each in (workdir, tmp_path / "whole")
    ]
    assert digests[0] == digests[1]
    assert len(digests[0]) > 50
    assert losses(workdir) == losses(tmp_path / "whole")
    assert [step for step, _ in losses(workdir)] == list(range(1, num_steps + 1))
