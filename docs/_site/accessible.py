"""What readers need, by eye or by ear, and the pages of Sphinx and its theme lack."""

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

__all__ = ["setup"]

# The parameters of a signature of several lines: descriptions in a list without a term.
_PARAMETERS = re.compile(
    r"<dl>\s*((?:<dd><em class=\"sig-param.*?</dd>\s*)+)</dl>", re.DOTALL
)


# A long name, which is divided between its parts where it must be.
_LONG_NAME = re.compile(r'(?<=<span class="pre">)[^<]{13,}')
_BETWEEN_PARTS = re.compile(r"(?<=\w[_.(=/])(?=\w)|(?<=[a-z])(?=[A-Z])")
# A type that Sphinx has left as it stands in its sources, behind a literal.
_LONG_TYPE = re.compile(r"<em>~(?:\w+\.)*(\w+)")
# The head of a column without a name, as in a table whose first column holds the heads of rows.
_EMPTY_HEAD = re.compile(r'<th class="head">\s*(?:<p>\s*</p>)?\s*</th>')


def setup(app: Sphinx) -> dict[str, bool]:
    """Mend each page before it is written."""
    # The theme makes the sidebar by a function of priority 500.
    app.connect("html-page-context", _mend, priority=600)
    app.connect("build-finished", _name_sidebars)
    return {"parallel_read_safe": True}


def _mend(
    app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object
) -> None:
    """Add the level of the headings in the sidebar, and mend the body of the page."""
    sidebar = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = sidebar.replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )
    body = _PARAMETERS.sub(_as_list, context.get("body", ""))
    body = _LONG_TYPE.sub(r"<em>\1", body)
    body = _LONG_NAME.sub(lambda name: _BETWEEN_PARTS.sub("<wbr>", name[0]), body)
    context["body"] = _EMPTY_HEAD.sub('<td class="head"></td>', body)


def _name_sidebars(app: Sphinx, error: Exception | None) -> None:
    """Tell the two sidebars of the theme's pages apart, for which no template has a place."""
    if error is not None or app.builder.format != "html":
        return
    for path in Path(app.outdir).rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        named = page.replace(
            '<aside class="sidebar', '<aside aria-label="Site" class="sidebar'
        )
        if named != page:
            path.write_text(named, encoding="utf-8")


def _as_list(match: re.Match[str]) -> str:
    items = match[1].replace("<dd><em", "<li><em").replace("</dd>", "</li>")
    return f'<ul class="parameters">{items}</ul>'
