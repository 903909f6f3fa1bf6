"""How fast are files turned into tokens, in how much memory, and does a killed run come to the same tokens?

    python -m benchmarks.prepare --gigabytes=2 --workers=2 --kills=5
    python -m benchmarks.prepare --gigabytes=0.2 --kills=0 --train_bpe=50304 --output=results/prepare/bpe.json

Written is a corpus in the form of the Pile, one jsonl.zst of many frames. Its documents, of 100 to 100,000 bytes, are
drawn from 50,000 phrases, those from a list of words by Zipf's law, so that it compresses about as text does.
The same seed gives the same bytes. Then `python -m dape_jax.data.prepare` runs on it as from a shell: once undisturbed,
and once killed at `--kills` random moments (SIGKILL, of the process that reads and writes; its workers end with it) and
started again each time. Both must come to one digest. Throughput is that of the undisturbed run, from the start of the
process to its end; a busy machine lowers it, but hardly the CPU seconds of all processes together.

Written are OUTPUT and the summary of the command line. Memory is resident memory at its peak, of the process that reads
and writes and of the largest worker.
"""

import itertools
import json
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import zstandard
from absl import flags
from tqdm import tqdm

from dape_jax import command_line
from dape_jax.data.prepare.build import read_record
from dape_jax.data.store import open_corpus
from dape_jax.errors import require
from dape_jax.provenance import provenance

NUM_WORDS, NUM_PHRASES = 50_000, 50_000
FRAME_BYTES = 2**23
LENGTHS = (100, 100_000)
SETS = ("ArXiv", "Books3")


def define_flags() -> None:
    flags.DEFINE_float("gigabytes", 2.0, "Text in the corpus, in units of 10^9 bytes.")
    flags.DEFINE_integer("workers", 2, "As of the command line.")
    flags.DEFINE_integer("kills", 5, "Times that the second run is killed; 0 for no second run.")
    flags.DEFINE_integer("train_bpe", None, "As of the command line; bytes if unset.")
    flags.DEFINE_integer("seed", 0, "Of the text and the moments.")
    flags.DEFINE_string("directory", None, "Where a temporary directory is made for the data; the system's if unset.")
    flags.DEFINE_string("output", "results/prepare/prepare.json", "JSON file for the figures.")


def words(draw: random.Random) -> list[str]:
    """Words of 2 to 13 letters, the frequent ones short, letters about as frequent as in English."""
    letters = "eeeeeettttaaaaooooiiinnnsssrrhhlldduuccmmffggyywpbvk"
    return [
        "".join(draw.choices(letters, k=draw.randint(2, 4 + index * 10 // NUM_WORDS))) for index in range(NUM_WORDS)
    ]


def phrases(draw: random.Random) -> list[str]:
    """Runs of 3 to 15 words, some with a mark at their end."""
    cumulative = list(itertools.accumulate(1 / (rank + 3) for rank in range(NUM_WORDS)))
    chosen = iter(draw.choices(words(draw), cum_weights=cumulative, k=15 * NUM_PHRASES))
    ends = ["", "", "", ",", ",", ";", ".", ".", ".\n", ".\n\n"]
    return [" ".join(itertools.islice(chosen, draw.randint(3, 15))) + draw.choice(ends) for _ in range(NUM_PHRASES)]


def documents(draw: random.Random) -> Iterator[str]:
    """Endless documents, their lengths uniform on a logarithmic scale."""
    vocabulary = phrases(draw)
    mean = sum(map(len, vocabulary)) / NUM_PHRASES
    low, high = LENGTHS
    while True:
        length = low * (high / low) ** draw.random()
        yield " ".join(draw.choices(vocabulary, k=max(1, int(length / mean))))


def write_corpus(file: Path, num_bytes: int, seed: int) -> int:
    """Write frames of `FRAME_BYTES`; returns the bytes of text."""
    draw = random.Random(seed)
    lines, held, done = [], 0, 0
    compressor = zstandard.ZstdCompressor(level=3)
    with open(file, "wb") as out, tqdm(total=num_bytes, unit="B", unit_scale=True, desc="writing text") as bar:
        for text in documents(draw):
            record = {"text": text, "meta": {"pile_set_name": draw.choice(SETS)}}
            lines.append(json.dumps(record) + "\n")
            held += len(text.encode())
            if held >= FRAME_BYTES or done + held >= num_bytes:
                out.write(compressor.compress("".join(lines).encode()))
                bar.update(held)
                done += held
                lines, held = [], 0
            if done >= num_bytes:
                return done
    raise AssertionError("documents do not end")


def command(source: Path, output: Path) -> list[str]:
    given = flags.FLAGS
    tokenizer = f"--train_bpe={given.train_bpe}" if given.train_bpe else "--tokenizer=bytes"
    arguments = [f"--input={source}", f"--output={output}", tokenizer, f"--workers={given.workers}"]
    return [sys.executable, "-m", "dape_jax.data.prepare", *arguments]


def killed_runs(source: Path, output: Path, seconds: float, draw: random.Random) -> list[dict[str, float]]:
    """Run to the end with `--kills` kills at any moment up to the time that one run takes; what each left behind.

    A run goes on from what the one before it has recorded. One that ends before it is killed is begun anew.
    """
    kills = []
    while len(kills) < flags.FLAGS.kills:
        running = subprocess.Popen(command(source, output), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        moment = seconds * draw.random()
        try:
            running.wait(moment)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGKILL)
            running.wait()
        else:
            assert running.returncode == 0, f"ended by itself, with status {running.returncode}"
            shutil.rmtree(output)
            continue
        record = read_record(output.with_name(output.name + ".partial"))
        kills.append({"after_seconds": round(moment, 2), "input_bytes_recorded": record.num_input_bytes})
    subprocess.run(command(source, output), check=True, stdout=subprocess.DEVNULL)
    return kills


def main(_: list[str]) -> None:
    """Write the text, run, kill, compare."""
    given = flags.FLAGS
    require(given.gigabytes > 0, "--gigabytes", given.gigabytes, "a positive number")
    require(given.kills >= 0, "--kills", given.kills, "0 or more")
    report = Path(given.output)
    with tempfile.TemporaryDirectory(dir=given.directory) as root:
        source = Path(root, "corpus.jsonl.zst")
        num_text_bytes = write_corpus(source, int(given.gigabytes * 1e9), given.seed)
        start = time.perf_counter()
        done = subprocess.run(command(source, Path(root, "whole")), check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - start
        cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(done.stdout)
        peak, worker_peak = [*re.findall(r"([\d,]+) MiB", done.stdout), "0"][:2]
        whole = open_corpus(Path(root, "whole"))
        figures = {
            "text_bytes": num_text_bytes,
            "input_bytes": source.stat().st_size,
            "documents": whole.train.num_documents + whole.validation.num_documents,
            "tokens": whole.train.num_tokens + whole.validation.num_tokens,
            "tokenizer": "bytes"
            if given.train_bpe is None
            else f"byte-level BPE of {given.train_bpe}, trained in the run",
            "workers": given.workers,
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu.ru_utime + cpu.ru_stime, 1),
            "text_mb_per_second": round(num_text_bytes / 1e6 / seconds, 1),
            "input_mb_per_second": round(source.stat().st_size / 1e6 / seconds, 1),
            "peak_mib": int(peak.replace(",", "")),
            "largest_worker_peak_mib": int(worker_peak.replace(",", "")),
            "digest": whole.digest,
        }
        if given.kills:
            figures["kills"] = killed_runs(source, Path(root, "killed"), seconds, random.Random(given.seed))
            figures["digest_after_kills"] = open_corpus(Path(root, "killed")).digest
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps(figures | provenance("zstandard", "tokenizers"), indent=1) + "\n")
    print(json.dumps(figures, indent=1))
    if given.kills:
        require(figures["digest_after_kills"] == whole.digest, "digest", figures["digest_after_kills"], whole.digest)


if __name__ == "__main__":
    define_flags()
    command_line.run(main)
