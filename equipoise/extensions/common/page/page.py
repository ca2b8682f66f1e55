"""A page in one HTML file, without scripts or styles from elsewhere, and sections that several pages have."""

import base64
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from equipoise.extensions.common.page.markup import Markup, breakable, hint, join, section, tag
from equipoise.interop.remote.paths import to_path

__all__ = [
    "configuration_section",
    "facts_section",
    "html_page",
    "page_header",
    "recommendation_section",
    "write_page",
]

# A tile gets more room where its value is longer than this number of characters.
_WIDE = 24
_MIDDLE = 11
# Lines of a configuration, and characters of each.
_CONFIGURATION_LINES = 1000
_CONFIGURATION_LINE = 1000
# Steps of indentation that a line which is too long keeps.
_DEEPEST = 4
# Lines of a configuration that fit without scrolling.
_SHORT_CONFIGURATION = 24


def write_page(page: str, path: str | os.PathLike[str]) -> None:
    """Write a page under another name and rename it, so that no reader finds half of one.

    Args:
        page: The HTML of the page.
        path: The file. Its folder is created if need be.

    Raises:
        OSError: If the file cannot be written.
    """
    path = to_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = page.encode(errors="replace")
    if not isinstance(path, Path):
        path.write_bytes(content)
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def html_page(
    title: str,
    header: Markup,
    sections: Iterable[Markup | None],
    *,
    style: str = "",
    script: str = "",
    asks_server: bool = False,
) -> str:
    """Return the HTML of a page that is complete in itself.

    Args:
        title: Title of the window.
        header: The content above the sections.
        sections: The sections; None is left out.
        style: Rules after those of all pages. Default: none.
        script: JavaScript after that of all pages, which may run as well. Default: none.
        asks_server: Whether the script may ask the server of the page for more. Default: False.
    """
    styles = Markup(_file("page.css") + style)
    scripts = Markup(_file("page.js") + script)
    head = _head(title, styles, scripts, asks_server=asks_server)
    body = tag(
        "body",
        header,
        tag("main", *sections),
        _footer(asks_server=asks_server),
        tag("script", scripts),
    )
    page = tag("html", head, body, lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _head(title: str, style: Markup, script: Markup, *, asks_server: bool) -> Markup:
    # Only this style and this script may run, whatever text came into the page.
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
        "; img-src data:"
    )
    if asks_server:
        policy += "; connect-src 'self'"
    icon = None
    if asks_server:
        # Else a browser asks the server for a picture.
        icon = tag("link", rel="icon", href="data:,")
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        icon,
        tag("title", title),
        tag("style", style),
    )


def _file(name: str) -> Markup:
    return Markup("\n" + Path(__file__).with_name(name).read_text(encoding="utf-8"))


def _hash(source: str) -> str:
    """Return the name of a source in a content security policy."""
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _footer(*, asks_server: bool) -> Markup:
    text = "Made by Equipoise. This page is complete in itself: it asks no network for anything."
    if asks_server:
        text = "Made by Equipoise. This page asks the program that serves it, and nothing else."
    return tag("footer", text)


def page_header(kind: str, title: str, time: str = "", outcome: str = "") -> Markup:
    """Return what stands above the sections of a page.

    Args:
        kind: The kind of page, in two words.
        title: Name of the module.
        time: A sentence on times. Default: the present time.
        outcome: The outcome in a word, which is a CSS class as well. Default: none.
    """
    if not time:
        time = f"{datetime.now():%d %b %Y, %H:%M}"
    pill = None
    if outcome:
        pill = join(" ", tag("span", outcome, class_=f"pill {outcome}"))
    return tag(
        "header",
        tag("p", kind, class_="over"),
        tag("h1", title, pill),
        tag("p", time),
    )


def facts_section(facts: Mapping[str, str]) -> Markup | None:
    """Draw a tile for each fact, if there are any."""
    if not facts:
        return None
    tiles = []
    for name, value in facts.items():
        tiles.append(
            tag(
                "div",
                tag("dt", name),
                tag("dd", value),
                class_=_tile_style(value),
            )
        )
    return tag("section", tag("h2", "In short", class_="unseen"), tag("dl", *tiles, class_="facts"))


def _tile_style(value: str) -> str | None:
    if len(value) > _WIDE:
        return "wide"
    if len(value) > _MIDDLE:
        return "middle"
    return None


def recommendation_section(sentences: str, overrides: Sequence[str], title: str = "Recommended") -> Markup:
    """Show what is recommended, and the overrides that choose it, if there are any."""
    code = None
    if overrides:
        code = hint(tag("code", " ".join(overrides), class_="copied"))
    return section(title, tag("p", sentences), code)


def configuration_section(text: str) -> Markup | None:
    """Show the configuration with coloured keys."""
    if not text.strip():
        return None
    lines = text.splitlines()
    shown = lines[:_CONFIGURATION_LINES]
    if len(lines) > len(shown):
        shown.append(f"# … {len(lines) - len(shown):,} more lines")
    style = "configuration"
    if len(shown) > _SHORT_CONFIGURATION:
        style += " long"
    return section("Configuration", tag("pre", join(*map(_coloured, shown)), class_=style))


def _coloured(line: str) -> Markup:
    line = line[:_CONFIGURATION_LINE]
    # Groups: indentation and the dash of a list, the key with its colon, the rest of the line.
    match = re.match(r"(\s*(?:- )?)([\w.\-/]+:)(?=\s|$)(.*)", line, re.DOTALL)
    if match is None:
        return tag("span", line, "\n")
    # A line that is too long goes on to the right of its key.
    depth = min(_DEEPEST, len(match[1]) // 2)
    style = None
    if depth:
        style = f"i{depth}"
    return tag("span", match[1], tag("span", match[2], class_="name"), breakable(match[3]), "\n", class_=style)
