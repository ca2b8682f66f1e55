"""Links within the repository: to a folder's README, as on a forge, and from docstrings to the pages that they name."""

import re
from pathlib import Path

from sphinx.application import Sphinx

__all__ = ["setup"]

_PAGE = re.compile(r"\bdocs/(\w+)\.md\b")
_LINK = re.compile(r"\]\((?P<path>[^)#:\s]+)\)")


def _complete_links(app: Sphinx, page: str, source: list[str]) -> None:
    """Write `benchmarks/ddp/README.md` where a page links to `benchmarks/ddp`."""
    folder = Path(app.srcdir, page).parent

    def completed(link: re.Match[str]) -> str:
        path = link["path"]
        if (folder / path / "README.md").is_file():
            return f"]({path.rstrip('/')}/README.md)"
        return link[0]

    source[0] = _LINK.sub(completed, source[0])


def _link_pages(
    app: Sphinx, what: str, name: str, item: object, options: object, lines: list[str]
) -> None:
    """Write a link where a docstring names a page, such as `docs/ddp.md`."""
    lines[:] = [_PAGE.sub(r":doc:`/docs/\1`", line) for line in lines]


def setup(app: Sphinx) -> dict[str, bool]:
    """Complete links when pages are read."""
    app.connect("source-read", _complete_links)
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", _link_pages)
    return {"parallel_read_safe": True}
