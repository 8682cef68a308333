"""How the pages of this folder become a site: `make docs`."""

from __future__ import annotations

import ast
import textwrap

from sphinx.application import Sphinx

import paceline

project = "Paceline"
author = "the Paceline authors"
release = version = paceline.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "Paceline"
html_show_sphinx = False
html_show_copyright = False
myst_heading_anchors = 3
default_role = "code"  # docstrings put one backtick around names
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100


def mark_examples(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Docstrings show code, and drawings, as indented lines; reST wants a mark before them."""
    marked: list[str] = []
    for number, line in enumerate(lines):
        is_first = line.startswith("    ") and (number == 0 or not lines[number - 1].strip())
        if is_first and not _is_inside(lines, number):
            marked += [f".. code-block:: {_language(lines[number:])}", ""]
        marked.append(line)
    lines[:] = marked


def _is_inside(lines: list[str], number: int) -> bool:
    """Whether a blank line before this one is a part of the same code."""
    before = [line for line in lines[:number] if line.strip()]
    return bool(before) and before[-1].startswith("    ")


def _language(lines: list[str]) -> str:
    end = next((at for at, line in enumerate(lines) if line.strip() and not line.startswith("    ")), len(lines))
    try:
        ast.parse(textwrap.dedent("\n".join(lines[:end])))
    except SyntaxError:
        return "text"
    return "python"


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", mark_examples)
