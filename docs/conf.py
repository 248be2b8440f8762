"""Configuration of the documentation: launch/docs.sh builds it. It is strict and needs no network.

The notebooks in docs/notebooks are executed when their pages are read, by the interpreter that builds the pages, each
in a temporary directory. An exception in a cell fails the build.
"""

import os
import re
import sys
from functools import partialmethod
from pathlib import Path

from docutils.nodes import SkipNode, Text, literal_block
from docutils.utils.math.latex2mathml import tex2mathml
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from option_pages import write_pages  # noqa: E402

import jaxlm  # noqa: E402

write_pages(HERE / "generated")

# The kernels inherit the environment: the kernel of this interpreter is used, whatever the user has installed, and
# `python` in a cell is this interpreter too.
os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
os.environ["JAX_PLATFORMS"] = "cpu"
# The output of a cell arrives in parts, which would be shown apart from each other. MyST-NB has no setting for it, and
# its nb_merge_streams breaks lines at the parts.
NotebookClient.__init__ = partialmethod(NotebookClient.__init__, coalesce_streams=True)

project = "jaxlm"
author = "the jaxlm authors"
copyright = "the jaxlm authors, Apache-2.0"
release = version = jaxlm.__version__

# Without sphinx.ext.napoleon: the docstrings are prose, in which "text:GLOB" is not a name with a type.
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton"]  # myst_nb includes myst_parser
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600  # seconds of one cell; machines may be busy
smartquotes = False
exclude_patterns = ["_build"]
nitpicky = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"
default_role = "literal"  # of single backticks in docstrings

html_theme = "sphinx_book_theme"
html_title = "jaxlm"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_math_renderer = "mathml"
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],  # the sidebar has the search box
}
WIDTH = 76  # characters of a block of code that a page shows


SECTIONS = {"Args:": "Arguments", "Returns:": "Returns", "Raises:": "Raises", "Example:": "Example"}


def with_sections(lines: list[str]) -> list[str]:
    """Return a docstring with its sections in bold, and its arguments and errors as lists."""
    found: list[str] = []
    section = ""
    for line in lines:
        if line in SECTIONS:
            section = line
            found += ["", f"**{SECTIONS[line]}**", ""]
        elif section in ("Args:", "Raises:") and line.startswith("  ") and line[2:3].strip():
            name, _, text = line.strip().partition(": ")
            found.append(f"- ``{name}``: {text}")
        else:
            found.append(line[2:] if section and line.startswith("  ") else line)
    return found


def write_mathml(writer, node):
    """Write a formula as MathML, which browsers render by themselves: no script, image or font is loaded."""
    inline = node.tagname == "math"
    formula = tex2mathml(node.astext(), as_block=not inline)
    writer.body.append(formula if inline else f'<div class="formula">{formula}</div>')
    raise SkipNode


def with_broken_commands(app, doctree):
    """Continue the commands that are wider than a page before one of their flags, on a line of its own."""
    for node in doctree.findall(literal_block):
        if node.get("language") == "bash":
            text = "\n".join(part for line in node.astext().split("\n") for part in broken(line))
            node.children, node.rawsource = [], text
            node += Text(text)


def broken(line: str) -> list[str]:
    """Return a line of a shell as lines of at most WIDTH characters, as far as it has flags outside of quotes."""
    found = []
    while len(line) > WIDTH:
        places = [match.start() for match in re.finditer(r" --?[a-z]", line[: WIDTH - 1])]
        places = [at for at in places if line[:at].strip() and not line[:at].count("'") % 2]
        if not places or line[: places[-1]].strip() in ("", "\\"):
            break
        found.append(f"{line[: places[-1]].rstrip()} \\")
        line = "  " + line[places[-1] :].lstrip()
    return [*found, line]


def setup(app):
    """Connect the formulas, the commands and the reading of docstrings."""
    app.connect("doctree-read", with_broken_commands)
    app.add_html_math_renderer("mathml", (write_mathml, None), (write_mathml, None))

    def process(app, what, name, value, options, lines):
        lines[:] = with_sections(lines)

    app.connect("autodoc-process-docstring", process)
