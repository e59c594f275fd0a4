"""Sphinx's settings; pages of the reference are generated from the code before every build."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import drawings  # noqa: E402
import generate  # noqa: E402
from docutils import nodes  # noqa: E402
from docutils.utils.math.latex2mathml import tex2mathml  # noqa: E402

project = "decentnode"
copyright = "the decentnode authors"
extensions = ["sphinx.ext.autodoc", "sphinxcontrib.bibtex", "sphinx_copybutton"]
bibtex_bibfiles = ["references.bib"]
bibtex_default_style = "unsrt"
html_theme = "furo"
html_title = "decentnode"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_math_renderer = "mathml"
highlight_language = "text"
exclude_patterns = ["_build"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # else the page shows the environment of whoever builds it, where that is a default
autoclass_content = "both"
nitpicky = False
copybutton_prompt_text = "$ "
suppress_warnings = ["autodoc.import_cycle"]


def _plain(_app: object, _what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Docstrings are plain text, not reStructuredText."""
    lines[:] = [generate.escaped(line) for line in lines]


def _math(writer: object, node: nodes.Element) -> None:
    """Equations as MathML, which browsers draw without a script from elsewhere."""
    writer.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))  # type: ignore[attr-defined]
    raise nodes.SkipNode


def setup(app: object) -> None:
    app.add_html_math_renderer("mathml", inline_renderers=(_math, None), block_renderers=(_math, None))  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", _plain)  # type: ignore[attr-defined]
    app.connect("builder-inited", lambda _: drawings.write_all(HERE / "drawings"))  # type: ignore[attr-defined]
    app.connect("builder-inited", lambda _: generate.write_all(HERE / "reference" / "generated"))  # type: ignore[attr-defined]
