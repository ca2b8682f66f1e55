"""Links to folders of the repository: on the site they lead to the folder's README, as on a forge."""

import re
from pathlib import Path

from sphinx.application import Sphinx

__all__ = ["setup"]

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


def setup(app: Sphinx) -> dict[str, bool]:
    """Complete links when pages are read."""
    app.connect("source-read", _complete_links)
    return {"parallel_read_safe": True}
