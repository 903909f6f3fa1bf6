"""Configuration of the documentation's site: `make docs` builds it into build/docs.

Pages are Markdown (MyST) that also reads well without Sphinx; `api.md` is made from docstrings.
"""

import dataclasses
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from dape_jax.fields import meanings_of  # noqa: E402

project = "dape_jax"
author = "the dape_jax authors"
project_copyright = ""
html_show_copyright = False
html_title = "dape_jax"
html_theme = "sphinx_book_theme"
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],  # the sidebar has the search field
}
html_show_sourcelink = False
html_context = {"default_mode": "light"}
html_static_path = ["_static"]
html_css_files = ["wide.css"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]

myst_heading_anchors = 3
smartquotes = False  # options keep their two hyphens, and code its quotes
suppress_warnings = ["mystnb.unknown_mime_type"]

# The notebook has the outputs of one run: `jupyter execute --inplace docs/quickstart.ipynb`. The build runs nothing.
nb_execution_mode = "off"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")
LABELLED = re.compile(r"(Source|Differs|Example|In|Out): ")


def escape(line: str) -> str:
    """Return a line of plain text as reStructuredText: code stays code, and no other character is markup."""
    parts = line.split("`")
    for i, part in enumerate(parts):
        parts[i] = re.sub(r"([\\*|]|_(?!\w))", r"\\\1", part) if i % 2 == 0 else f"``{part}``"
    return "".join(parts)


def block_to_rst(block: list[str]) -> list[str]:
    """Return a paragraph, list or drawing as reStructuredText."""
    if LABELLED.match(block[0]):
        lines = []
        for line in block:
            label = LABELLED.match(line)
            lines += ["", f"**{label[1]}.** {escape(line[label.end() :])}"] if label else [escape(line.strip())]
        return [*lines, ""]
    if block[0].startswith("- "):
        return [*map(escape, block), ""]
    if any(line.startswith(" ") or re.search(r"\S {2,}\S", line) for line in block):
        return [".. code-block:: text", "", *(f"    {line}" for line in block), ""]
    return [*map(escape, block), ""]


def docstring_to_rst(app, what, name, obj, options, lines):
    """Convert a docstring before napoleon reads it; its sections (Args, Raises ..) are left to napoleon.

    A config's docstring gets that of its module, and the meanings of its fields.
    """
    if inspect.isclass(obj) and (module := getattr(obj, "module", None)):
        lines += ["", *(inspect.getdoc(module) or "").splitlines()]
    if inspect.isclass(obj) and (dataclasses.is_dataclass(obj) or hasattr(obj, "_fields")):
        meanings = [f"    {name}: {meaning}" for name, meaning in meanings_of(obj).items() if meaning]
        lines += ["", "Args:", *meanings] if meanings else []
    converted, block, in_section = [], [], False
    for line in [*lines, ""]:
        if SECTION.match(line):
            converted += block_to_rst(block) if block else []
            converted, block, in_section = [*converted, "", line], [], True
        elif in_section and (line.startswith(" ") or not line.strip()):
            converted.append(escape(line))
        elif line.strip():
            block, in_section = [*block, line.rstrip()], False
        elif block:
            converted, block = [*converted, *block_to_rst(block)], []
    lines[:] = converted


def shorten_types(app, what, name, obj, options, signature, returned):
    """Write the type of arrays as in the code."""
    return tuple(part and part.replace("jaxlib._jax.Array", "Array") for part in (signature, returned))


OPTION = re.compile(r"(?<=[\s>])--?(?=\w)")  # the hyphens of an option, in the text of an element
IMAGE = re.compile(r'<img [^>]*src="(_images/[^"]+)"[^>]*/>')


def improve_page(app, page, template, context, doctree):
    """Mark the hyphens of options in code, which a style sheet keeps on one line, and link images to their files."""
    parts = re.split(r"(<(pre|code)\b.*?</\2>)", context.get("body", ""), flags=re.DOTALL)
    for i, part in enumerate(parts):
        if part.startswith("<pre") or part.startswith("<code"):
            parts[i] = OPTION.sub(r'<span class="option">\g<0></span>', part)
    del parts[2::3]  # the names of the elements
    context["body"] = IMAGE.sub(r'<a href="\1">\g<0></a>', "".join(parts))


def setup(app):
    """Register the conversions; docstrings ahead of napoleon's own at priority 500."""
    app.connect("html-page-context", improve_page)
    app.connect("autodoc-process-signature", shorten_types)
    app.connect("autodoc-process-docstring", docstring_to_rst, priority=400)
