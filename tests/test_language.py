"""Language of the repository's prose: words and phrases that the project does not use, and first lines of docstrings.

Prose is docstrings, comments and strings of Python files, and the text of Markdown files without blocks of code.
Reports in results/ are not checked. To allow or forbid a phrase, edit `INSTEAD`.
"""

import ast
import collections
import functools
import io
import re
import subprocess
import tokenize
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

# Forms of a phrase, and what to write instead. A space matches a line break too, and case does not matter.
INSTEAD = {
    # Archaic or literary words.
    ("anew",): "again",
    ("besides",): "also, in addition to",
    ("beside",): "next to, in addition to, with",
    ("mend", "mends", "mended"): "fix",
    ("parted by",): "separated by",
    ("hold to", "held to"): "limit to",
    ("goes on", "go on", "going on", "went on"): "resumes, continues",
    ("stands", "stood"): "is, are",
    ("lies",): "is, are",
    ("without further ado", "with no more ado"): "delete it",
    ("whence",): "from which",
    ("so many",): "this number of",
    ("to the bit", "bit by bit"): "bit-exactly, bitwise",
    ("be had", "is had"): "is available, exists",
    ("in the company of",): "with",
    ("hence",): "so, therefore",
    ("thereof", "therein", "whereby", "wherein", "hereby", "hitherto", "heretofore"): "name the thing",
    ("shall",): "must, will",
    ("whoever", "whatsoever"): "the process that, any",
    ("by dint of", "by virtue of"): "because of, with",
    ("alike",): "both, in the same way",
    # Left column of the table in the style guide.
    ("the same one again",): "re-running with the same directory",
    ("whole numbers", "whole number"): "integers",
    ("made if need be", "if need be"): "creating it if missing",
    ("steps in a row", "times in a row"): "consecutive steps",
    ("at one more",): "before aborting",
    ("and not what comes out of it", "what comes out of it"): "the result",
    ("may stand anywhere", "as against"): "name the difference",
    ("said step by step",): "say why the constraint is needed",
    ("does it fit",): "name the quantity: peak memory",
    ("texts that end it",): "stop sequences",
    ("says where",): "prints the path of",
    ("a guess is right",): "chance is",
    ("without a word",): "by default",
    ("machines that die",): "fault tolerance",
    # Metaphors for software parts.
    ("houses", "housed"): "package, module",
    ("rooms",): "module, memory",
    ("doors", "door"): "interface, neighbouring",
    ("walls",): "limit",
    ("tenants", "guests"): "user, process",
    # Clauses in place of nouns, and words with two meanings.
    ("of its own",): "own, separate",
    ("of their own",): "own, separate",
    ("what it takes", "what is read", "what is there", "what is left"): "name the thing",
    ("what it says", "what it is given", "what it has"): "name the thing",
    ("that is not here", "that is not there", "that are not there yet"): "that is not available, missing",
    ("as often as they run", "as often as it runs"): "with trip counts",
    ("looks after", "look after"): "check",
    ("made of it", "makes of it", "makes of the", "made of them"): "name the result",
    ("the least of",): "the minimum of",
    ("nobody",): "no process, no user",
    ("of ours",): "name the thing",
    ("give it away", "gives it away"): "shows, detects",
    ("up to now", "thus far"): "so far",
    ("leads nowhere",): "is broken",
    ("over and over", "again and again"): "repeatedly",
    ("at any rate",): "always",
    ("is no dict", "is no part"): "is not a",
    ("in the way of",): "name the conflict",
    ("likewise",): "also, the same",
    ("outside of",): "outside",
    ("in silence",): "silently",
    ("drive a terminal", "drive the terminal"): "contain control characters",
}

# Beginnings of docstrings that are not imperatives and not names of things.
NOT_FIRST = frozenset(
    "of what how which whose where whether who the a an this that these those its their our all every each any no some "
    "both another either neither most such".split()
)

# Words about the way in which the repository is worked on.
WORKPLACE = {
    r"\bsessions?\b": "test run, training run",
    r"\b(?<![/_`])helpers?\b(?!\.py|s?\b functions?\b)": "function, process",
    r"\b(sub)?-?agents?\b": "process",
    r"(?<![\w.])/work\b": "a relative path",
    r"(?<![\w.])/tmp/": "a relative path",
    r"\b(pypi\.org|pythonhosted\.org|anaconda\.org|npmjs\.(org|com)|golang\.org|crates\.io)\b": "pip, without a host",
    r"--?(extra-)?index-url|trusted-host": "pip, without a host",
}

# One example for each pattern of `WORKPLACE`.
EXAMPLES = ("session", "helper", "sub-agent", "/work", "/tmp/", "pypi.org", "--index-url")


class Text(NamedTuple):
    """Piece of prose.

    Args:
        file: name of the file.
        line: line at which the piece starts.
        kind: "docstring", "comment", "string" or "markdown".
        content: the prose.
    """

    file: str
    line: int
    kind: str
    content: str


def texts_of_python(file: str, source: str) -> list[Text]:
    """Return docstrings, comments (consecutive lines as one) and strings of more than one word."""
    found, docstrings = [], set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node) is not None:
                constant = node.body[0].value  # pyright: ignore[reportAttributeAccessIssue]
                docstrings.add(constant)
                found.append(Text(file, constant.lineno, "docstring", constant.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            if len(node.value.split()) > 1:
                found.append(Text(file, node.lineno, "string", node.value))
    previous = (-1, -1)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            (line, column), content = token.start, token.string.lstrip("# ")
            if previous == (line - 1, column):
                found[-1] = found[-1]._replace(content=f"{found[-1].content}\n{content}")
            else:
                found.append(Text(file, line, "comment", content))
            previous = line, column
    return found


def texts_of_markdown(file: str, source: str) -> list[Text]:
    """Return paragraphs, without blocks of code."""
    fenced = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
    without_code = fenced.sub(lambda block: "\n" * block[0].count("\n"), source)
    return [
        Text(file, without_code.count("\n", 0, found.start()) + 1, "markdown", found[0])
        for found in re.finditer(r"(?:.*\S.*\n?)+", without_code)
    ]


@functools.cache
def texts() -> tuple[Text, ...]:
    """Return the prose of all tracked files except this one."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found: list[Text] = []
    for file in listed.splitlines():
        path = ROOT / file
        if file.startswith("results/") or path == Path(__file__) or not path.is_file():
            continue
        if path.suffix == ".py":
            found += texts_of_python(file, path.read_text())
        elif path.suffix == ".md":
            found += texts_of_markdown(file, path.read_text())
    return tuple(found)


@functools.cache
def patterns() -> dict[str, list[tuple[re.Pattern[str], str]]]:
    """Return patterns and what to write instead, by the pattern's first word, or by "" if it has none."""
    found = {"": [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in WORKPLACE.items()]}
    for form, instead in ((form, instead) for forms, instead in INSTEAD.items() for form in forms):
        pattern = rf"\b{re.escape(form)}\b".replace(r"\ ", r"\s+")
        found.setdefault(form.split()[0], []).append((re.compile(pattern, re.IGNORECASE), instead))
    return found


def faults_of_words(text: Text) -> list[str]:
    """Return a message for each phrase of `INSTEAD` and `WORKPLACE` in a text."""
    faults = []
    words = {"", *re.findall(r"[a-z]+", text.content.lower())}
    for pattern, instead in (each for word in words & patterns().keys() for each in patterns()[word]):
        for found in pattern.finditer(text.content):
            line = text.line if text.kind == "string" else text.line + text.content.count("\n", 0, found.start())
            faults.append(f"{text.file}:{line}: {' '.join(found[0].split())!r}: write instead: {instead}")
    return faults


def faults_of_first_line(docstring: Text) -> list[str]:
    """Return a message if a docstring's first line has a wrong first word or no period."""
    first, faults = docstring.content.strip().split("\n")[0], []
    where = f"{docstring.file}:{docstring.line}: {first!r}"
    if re.split(r"[\s:,]", first)[0].lower() in NOT_FIRST:
        faults.append(f"{where}: begin with an imperative, or with the name of the thing")
    if not first.endswith("."):
        faults.append(f"{where}: end the first line with a period")
    return faults


def test_no_phrase_of_the_list_is_used():
    faults = [fault for text in texts() for fault in faults_of_words(text)]
    assert not faults, "\n".join(["", *faults])


def test_first_lines_of_docstrings_are_imperatives_or_names_with_a_period():
    faults = [fault for text in texts() if text.kind == "docstring" for fault in faults_of_first_line(text)]
    assert not faults, "\n".join(["", *faults])


def test_prose_of_every_kind_is_read():
    kinds = collections.Counter(text.kind for text in texts())
    assert all(kinds[kind] > 300 for kind in ("docstring", "comment", "string", "markdown")), kinds
    files = {text.file for text in texts()}
    assert {
        "README.md",
        "docs/kernel.md",
        "dape_jax/configs/paper.py",
        "dape_jax/model/attention.py",
        "train.py",
    } <= files


SYNTHETIC = {
    "docstring": 'def f():\n    """Return a number.\n\n    It {}.\n    """\n',
    "comment": "x = 1  # it {}\n",
    "two comments": "# it\n# {}\nx = 1\n",
    "string": 'raise ValueError(f"{{x}} = 1: it {}")\n',
    "markdown": "# Title\n\nOne line, and\nit {}.\n",
}


@pytest.mark.parametrize("kind", SYNTHETIC)
def test_each_phrase_would_be_caught(kind):
    """Negative control: put each phrase into a synthetic file of each kind."""
    read = texts_of_markdown if kind == "markdown" else texts_of_python
    assert not [fault for text in read("file", SYNTHETIC[kind].format("is right")) for fault in faults_of_words(text)]
    for forms, instead in (INSTEAD | {(example,): "" for example in EXAMPLES}).items():
        for form in forms:
            faults = [fault for text in read("file", SYNTHETIC[kind].format(form)) for fault in faults_of_words(text)]
            assert any(fault.endswith(instead) and repr(form)[1:-1] in fault for fault in faults), (form, faults)


@pytest.mark.parametrize(("kind", "line"), [("docstring", 4), ("two comments", 2), ("markdown", 4)])
def test_the_line_of_a_phrase_is_named(kind, line):
    read = texts_of_markdown if kind == "markdown" else texts_of_python
    (fault,) = [fault for text in read("file", SYNTHETIC[kind].format("anew")) for fault in faults_of_words(text)]
    assert fault == f"file:{line}: 'anew': write instead: again"


def test_a_phrase_in_two_lines_or_in_capitals_is_caught_and_code_is_not():
    assert len(faults_of_words(Text("file", 1, "markdown", "It Goes\n    on."))) == 1
    assert not texts_of_markdown("file", "```\nit goes on\n```\n")


@pytest.mark.parametrize(
    "first", ["A number.", "Of a number.", "What it is.", "How: so.", "Return a number", "Every one."]
)
def test_a_wrong_first_line_would_be_caught(first):
    (docstring,) = texts_of_python("file", f'def f():\n    """{first}"""\n')
    assert len(faults_of_first_line(docstring)) == 1
    assert not faults_of_first_line(docstring._replace(content="Return a number.\n\nOf two lines"))
