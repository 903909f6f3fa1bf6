"""Measure throughput and memory of `dape_jax.data.prepare`, and check that kills do not change the digest.

    python -m benchmarks.prepare --gigabytes=2 --workers=2 --kills=5
    python -m benchmarks.prepare --gigabytes=0.2 --kills=0 --train_bpe=50304 --output=results/prepare/bpe.json

The corpus has the format of the Pile: jsonl.zst files of several frames. Its documents of 100 to 100,000 bytes are
drawn from 50,000 phrases, and these from a list of words by Zipf's law, so that it compresses about as well as text.
The same seed gives the same bytes. `python -m dape_jax.data.prepare` runs on it as from a shell: once uninterrupted,
and once killed at `--kills` random times (SIGKILL of the parent; its workers end with it) and restarted each time. Both
digests must be equal. Throughput is measured on the uninterrupted run, from process start to end; a busy machine lowers
it, but hardly changes the total CPU time of all processes. Memory is the peak resident memory of the largest process.
"""

import itertools
import json
import random
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
from dape_jax.data.prepare.build import SHARDS_DIRECTORY
from dape_jax.data.store import open_corpus
from dape_jax.errors import require
from dape_jax.provenance import make_results_directory, provenance

NUM_WORDS, NUM_PHRASES = 50_000, 50_000
FRAME_BYTES = 2**23
LENGTHS = (100, 100_000)
SETS = ("ArXiv", "Books3")


def define_flags() -> None:
    flags.DEFINE_float("gigabytes", 2.0, "Text in the corpus, in units of 10^9 bytes.")
    flags.DEFINE_integer("files", 16, "Number of input files.")
    flags.DEFINE_integer("workers", 2, "Processes that tokenize.")
    flags.DEFINE_integer("kills", 5, "Number of kills in the second run; 0 for no second run.")
    flags.DEFINE_integer("train_bpe", None, "Vocabulary size of a BPE to train; bytes if unset.")
    flags.DEFINE_integer("seed", 0, "Seed of the text and of the times of the kills.")
    flags.DEFINE_string("directory", None, "Parent of the temporary directory for the data; the system's if unset.")
    flags.DEFINE_string("output", "results/prepare/prepare.json", "JSON file for the figures.")


def words(draw: random.Random) -> list[str]:
    """Return words of 2 to 13 letters; frequent words are short, and letters about as frequent as in English."""
    letters = "eeeeeettttaaaaooooiiinnnsssrrhhlldduuccmmffggyywpbvk"
    return [
        "".join(draw.choices(letters, k=draw.randint(2, 4 + index * 10 // NUM_WORDS))) for index in range(NUM_WORDS)
    ]


def phrases(draw: random.Random) -> list[str]:
    """Return phrases of 3 to 15 words, some with a punctuation mark at the end."""
    cumulative = list(itertools.accumulate(1 / (rank + 3) for rank in range(NUM_WORDS)))
    chosen = iter(draw.choices(words(draw), cum_weights=cumulative, k=15 * NUM_PHRASES))
    ends = ["", "", "", ",", ",", ";", ".", ".", ".\n", ".\n\n"]
    return [" ".join(itertools.islice(chosen, draw.randint(3, 15))) + draw.choice(ends) for _ in range(NUM_PHRASES)]


def documents(draw: random.Random) -> Iterator[str]:
    """Yield documents endlessly, with lengths uniform on a logarithmic scale."""
    vocabulary = phrases(draw)
    mean = sum(map(len, vocabulary)) / NUM_PHRASES
    low, high = LENGTHS
    while True:
        length = low * (high / low) ** draw.random()
        yield " ".join(draw.choices(vocabulary, k=max(1, int(length / mean))))


def write_corpus(directory: Path, num_files: int, num_bytes: int, seed: int) -> int:
    """Write files of frames of `FRAME_BYTES`, and return the bytes of text."""
    draw = random.Random(seed)
    source = documents(draw)
    compressor = zstandard.ZstdCompressor(level=3)
    done = 0
    directory.mkdir()
    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc="writing text") as bar:
        for index in range(num_files):
            with open(directory / f"{index:03}.jsonl.zst", "wb") as out:
                while done < num_bytes * (index + 1) // num_files:
                    lines, held = [], 0
                    while held < FRAME_BYTES and done + held < num_bytes * (index + 1) // num_files:
                        text = next(source)
                        lines.append(json.dumps({"text": text, "meta": {"pile_set_name": draw.choice(SETS)}}) + "\n")
                        held += len(text.encode())
                    out.write(compressor.compress("".join(lines).encode()))
                    bar.update(held)
                    done += held
    return done


def command(source: Path, output: Path) -> list[str]:
    given = flags.FLAGS
    tokenizer = f"--train_bpe={given.train_bpe}" if given.train_bpe else "--tokenizer=bytes"
    arguments = [f"--input={source}", f"--output={output}", tokenizer, f"--workers={given.workers}"]
    return [sys.executable, "-m", "dape_jax.data.prepare", *arguments]


def killed_runs(source: Path, output: Path, seconds: float, draw: random.Random) -> list[dict[str, float]]:
    """Run to the end with `--kills` kills at random times within the time of one run; return these times.

    Each run resumes the previous one. A run that ends before it is killed is started over.
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
            assert running.returncode == 0, f"exit status {running.returncode}"
            shutil.rmtree(output)
            continue
        shards = list(Path(f"{output}.partial", SHARDS_DIRECTORY).glob("[0-9]" * 8))
        kills.append({"after_seconds": round(moment, 2), "finished_shards": len(shards)})
    subprocess.run(command(source, output), check=True, stdout=subprocess.DEVNULL)
    return kills


def main(_: list[str]) -> None:
    """Write the text, run with and without kills, and compare."""
    given = flags.FLAGS
    require(given.gigabytes > 0, "--gigabytes", given.gigabytes, "must be positive")
    require(given.files > 0, "--files", given.files, "must be positive")
    require(given.kills >= 0, "--kills", given.kills, "must be 0 or more")
    report = Path(given.output)
    make_results_directory(report.parent)
    with tempfile.TemporaryDirectory(dir=given.directory) as root:
        source = Path(root, "corpus")
        num_text_bytes = write_corpus(source, given.files, int(given.gigabytes * 1e9), given.seed)
        num_input_bytes = sum(file.stat().st_size for file in source.iterdir())
        start = time.perf_counter()
        done = subprocess.run(command(source, Path(root, "whole")), check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - start
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(done.stdout)
        whole = open_corpus(Path(root, "whole"))
        figures = {
            "text_bytes": num_text_bytes,
            "input_bytes": num_input_bytes,
            "input_files": given.files,
            "documents": whole.train.num_documents + whole.validation.num_documents,
            "tokens": whole.train.num_tokens + whole.validation.num_tokens,
            "tokenizer": "bytes"
            if given.train_bpe is None
            else f"byte-level BPE of {given.train_bpe}, trained in the run",
            "workers": given.workers,
            "seconds": round(seconds, 1),
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
            "text_mb_per_second": round(num_text_bytes / 1e6 / seconds, 1),
            "input_mb_per_second": round(num_input_bytes / 1e6 / seconds, 1),
            "peak_mib": usage.ru_maxrss // 1024,  # peak of the largest process
            "digest": whole.digest,
        }
        if given.kills:
            figures["kills"] = killed_runs(source, Path(root, "killed"), seconds, random.Random(given.seed))
            figures["digest_after_kills"] = open_corpus(Path(root, "killed")).digest
    report.write_text(json.dumps(figures | provenance("zstandard", "tokenizers"), indent=1) + "\n")
    print(json.dumps(figures, indent=1))
    if given.kills:
        require(figures["digest_after_kills"] == whole.digest, "digest", figures["digest_after_kills"], whole.digest)


if __name__ == "__main__":
    define_flags()
    command_line.run(main)
