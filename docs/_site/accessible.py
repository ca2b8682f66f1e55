"""What screen readers need and the pages of Sphinx and its theme lack."""

import re
from typing import Any

from sphinx.application import Sphinx

__all__ = ["setup"]

# The parameters of a signature of several lines: descriptions in a list without a term.
_PARAMETERS = re.compile(
    r"<dl>\s*((?:<dd><em class=\"sig-param.*?</dd>\s*)+)</dl>", re.DOTALL
)


def setup(app: Sphinx) -> dict[str, bool]:
    """Mend each page before it is written."""
    # The theme makes the sidebar by a function of priority 500.
    app.connect("html-page-context", _mend, priority=600)
    return {"parallel_read_safe": True}


def _mend(
    app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object
) -> None:
    """Add the level of the headings in the sidebar, and make plain lists of parameters."""
    sidebar = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = sidebar.replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )
    context["body"] = _PARAMETERS.sub(_as_list, context.get("body", ""))


def _as_list(match: re.Match[str]) -> str:
    items = match[1].replace("<dd><em", "<li><em").replace("</dd>", "</li>")
    return f'<ul class="parameters">{items}</ul>'
