"""Links of a page within the repository: to files, folders, images and headings."""

import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

__all__ = ["broken_links", "slugs"]

_IMAGE = re.compile(r'<img[^>]*\bsrc="([^"]+)"')


def broken_links(page: Path) -> list[str]:
    """Return the links of a page that lead nowhere; those to other sites are not followed.

    Args:
        page: A file of Markdown.
    """
    return [link for link in _links(page) if not _leads_somewhere(page, link)]


@cache
def slugs(page: Path) -> list[str]:
    """Return the anchors of a page's headings, as a forge makes them."""
    found: list[str] = []
    tokens = _parsed(page)
    for opening, inline in itertools.pairwise(tokens):
        if opening.type != "heading_open":
            continue
        text = "".join(child.content for child in inline.children or [])
        kept = re.sub(r"[^\w\- ]", "", text.lower())
        slug = kept.replace(" ", "-")
        repeated = sum(1 for other in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other))
        found.append(f"{slug}-{repeated}" if repeated else slug)
    return found


@cache
def _parsed(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def _links(page: Path) -> Iterator[str]:
    for token in _parsed(page):
        for each in [token, *(token.children or [])]:
            if each.type == "link_open":
                yield str(each.attrs["href"])
            elif each.type == "image":
                yield str(each.attrs["src"])
            elif each.type in ("html_block", "html_inline"):
                yield from _IMAGE.findall(each.content)


def _leads_somewhere(page: Path, link: str) -> bool:
    if re.match(r"\w+:", link):
        return True
    path, _, anchor = unquote(link).partition("#")
    target = page.parent / path if path else page
    if target.is_dir() and anchor:
        target = target / "README.md"
    if not target.exists():
        return False
    return not anchor or (target.suffix == ".md" and anchor in slugs(target))
