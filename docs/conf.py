"""The documentation site: `make docs` builds it of the pages in this folder and of the docstrings.

The pages are Markdown that GitHub shows as well, so nothing in them is for the site alone but `:::` blocks. Two things
are therefore done here while a page is read. A paragraph that is nothing but a link to a Markdown file outside this
folder, or to a section of one, becomes that text. And other links that leave this folder lead to the page that holds
their target, else to the repository, else (as long as no repository is published) nowhere: they become plain text.
"""

import importlib
import re
import sys
from pathlib import Path

from sphinx.util import logging


DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

import dcformer  # noqa: E402


SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
REPOSITORY = re.search(r'^REPOSITORY = "(.*)"', SETUP, re.M).group(1)
# Packages whose public names (`__all__`) must all stand in the reference.
DOCUMENTED = [
    "dcformer",
    *(
        f"dcformer.{room}"
        for room in (
            *("analysis", "cards", "conversion", "demo", "eval", "experiments"),
            *("generation", "head_tasks", "loading", "training"),
        )
    ),
]

project = "dcformer"
author = copyright = "The dcformer contributors"
version = release = dcformer.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_build"]
nitpicky = True  # [`Name`] in a docstring has to lead somewhere
nitpick_ignore_regex = [("py:class", ".*"), ("py:exc", ".*")]  # many of them of other packages
default_role = "code"  # a name in single backticks in a docstring

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints = "none"  # the docstrings say types, with shapes
napoleon_numpy_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"dcformer {version}"
html_static_path, html_css_files = ["_static"], ["site.css"]
html_copy_source = False
html_theme_options = {"source_repository": REPOSITORY, "source_directory": "docs/"} if REPOSITORY else {}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

FENCED = re.compile(r"^(```+).*?^\1", re.S | re.M)
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
ALONE = re.compile(r"(?:\A|(?<=\n\n))\[[^\]]*\]\((\.\./[^)\s]*\.md)(?:#([^)\s]*))?\)(?=\n\n|\n?\Z)")
DOCSTRING_LINK = re.compile(r"\[`([\w.]+)`\]")


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")


def section(text: str, anchor: str) -> str:
    """The section of a Markdown text with its heading, or all of the text for no anchor."""
    if not anchor:
        return text
    parts = re.split(r"^(?=## )", text, flags=re.M)
    found = [part for part in parts if slug(part.splitlines()[0].lstrip("# ")) == anchor]
    if len(found) != 1:
        raise ValueError(f"{len(found)} sections have the anchor {anchor!r}; link to one heading of the second level.")
    return found[0]


def outside_fences(function, text: str) -> str:
    """Apply a function to what is not inside a fenced block."""
    pieces, start = [], 0
    for fence in FENCED.finditer(text):
        pieces += [function(text[start : fence.start()]), fence.group()]
        start = fence.end()
    return "".join([*pieces, function(text[start:])])


def pages_that_show(file: Path) -> dict[str, str]:
    """Anchor in a Markdown file outside this folder -> the page which shows that section ("" is the whole file)."""
    shown = {}
    for page in sorted(DOCS.glob("*.md")):
        for target, anchor in ALONE.findall(page.read_text(encoding="utf-8")):
            if (DOCS / target).resolve() == file:
                shown[anchor] = page.name
    return shown


def link_for_the_site(link: re.Match, source: Path) -> str:
    """A Markdown link in a file of the repository, as the page of this folder that shows the file needs it."""
    image, text, target = link["image"], link["text"], link["target"]
    path, _, anchor = target.partition("#")
    if not path or ":" in target:
        return link.group()
    file = (source.parent / path).resolve()
    if file.is_relative_to(DOCS):
        return f"{image}[{text}]({file.relative_to(DOCS)}{anchor and '#' + anchor})"
    shown = pages_that_show(file)
    if page := shown.get(anchor) or shown.get(""):
        return f"[{text}]({page}{anchor and '#' + anchor})"
    name = str(file.relative_to(ROOT))
    if REPOSITORY:
        return f"{image}[{text}]({REPOSITORY}/{'raw' if image else 'blob'}/main/{name}{anchor and '#' + anchor})"
    return text if text.strip("`/") in name else f"{text} (`{name}`)"


def text_for_the_site(text: str, source: Path) -> str:
    """A Markdown text of the repository with the texts that it is to show, and links that work on the site."""

    def shown(link: re.Match) -> str:
        file = (source.parent / link[1]).resolve()
        return text_for_the_site(section(file.read_text(encoding="utf-8"), link[2]), file)

    if source.parent == DOCS:
        text = ALONE.sub(shown, text)
    return outside_fences(lambda prose: LINK.sub(lambda link: link_for_the_site(link, source), prose), text)


def read_page(app, name: str, content: list[str]) -> None:
    source = app.env.doc2path(name)
    if source.parent == DOCS:
        content[0] = text_for_the_site(content[0], source)


def read_docstring(app, what, name, obj, options, lines: list[str]) -> None:
    """From the conventions of Transformers' docstrings to those of Sphinx: [`Name`] and fenced examples."""
    text = DOCSTRING_LINK.sub(as_reference, "\n".join(lines).replace("|", r"\|"))
    text = re.sub(
        r"^( *)```python\n(.*?)^ *```", lambda block: as_code_block(block[1], block[2]), text, flags=re.S | re.M
    )
    lines[:] = text.split("\n")


def as_reference(link: re.Match) -> str:
    shown = re.sub(r"^([a-z_]+\.)+", "", link[1])  # without the modules
    return f":py:obj:`{shown} <.{link[1]}>`"


def as_code_block(indent: str, code: str) -> str:
    inner = "".join(f"   {line}" if line.strip() else line for line in code.splitlines(keepends=True))
    return f"{indent}.. code-block:: python\n\n{inner}"


def check_reference(app, env) -> list[str]:
    """Every public name has to be in the reference; with `-W` one that is not ends the build."""
    known = set(env.domains.python_domain.objects)
    for package in DOCUMENTED:
        for name in importlib.import_module(package).__all__:
            if f"{package}.{name}" not in known:
                logging.getLogger(__name__).warning("%s.%s is public, but on no page of docs/api/", package, name)
    return []


def setup(app) -> dict[str, bool]:
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", read_docstring, priority=100)  # before napoleon
    app.connect("env-check-consistency", lambda app, env: check_reference(app, env))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
