"""The page of a report: one HTML file without scripts or styles from elsewhere."""

import base64
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from equipoise.extensions.report.page.markup import Markup, hint, join, plain, section, tag
from equipoise.extensions.report.page.memory_sections import memory_section, peak_section
from equipoise.extensions.report.page.record import RunRecord
from equipoise.extensions.report.page.sections import (
    added_section,
    configuration_section,
    curves_section,
    devices_section,
    events_section,
    learning_rates_section,
    pipeline_section,
    throughput_section,
)
from equipoise.formats import format_path, format_span
from equipoise.interop.remote.paths import to_path
from equipoise.notices import is_of_library

__all__ = [
    "facts_section",
    "html_page",
    "page_header",
    "recommendation_section",
    "render_report",
    "write_page",
    "write_report",
]

# A tile gets more room where its value is longer than this number of characters.
_WIDE = 24
_MIDDLE = 11
# Characters of a traceback that the page shows, and of its last line.
_LONGEST_ERROR = 40_000
_LONGEST_CAUSE = 2000
# A frame of a traceback, with its line.
_FRAME = re.compile(r'^  File "([^"\n]+)", line (\d+), in (\S.*)\n    (.+)$', re.MULTILINE)


def write_report(record: RunRecord, path: str | os.PathLike[str]) -> None:
    """Write a report.

    Args:
        record: The facts of the run.
        path: The file, or its URL. Its folder is created if need be.

    Raises:
        OSError: If the file cannot be written.

    Example:
        >>> import tempfile
        >>> from datetime import datetime
        >>> now = datetime(2026, 1, 1, 12, 0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_report(RunRecord(title="Net", started=now, finished=now), Path(folder, "report.html"))
        ...     Path(folder, "report.html").read_text(encoding="utf-8")[:15]
        '<!DOCTYPE html>'
    """
    write_page(render_report(record), path)


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


def render_report(record: RunRecord) -> str:
    """Return the HTML of the page.

    Args:
        record: The facts of the run.
    """
    return html_page(f"{record.title}: {record.outcome}", _header(record), _sections(record))


def html_page(
    title: str,
    header: Markup,
    sections: Iterable[Markup | None],
    *,
    style: str = "",
    script: str = "",
    asks_server: bool = False,
) -> str:
    """Return the HTML of a page in the style of the reports, complete in itself.

    Args:
        title: Title of the window.
        header: The content above the sections.
        sections: The sections; None is left out.
        style: Rules after those of the reports. Default: none.
        script: JavaScript after that of the reports, which may run as well. Default: none.
        asks_server: Whether the script may ask the server of the page for more. Default: False.
    """
    styles = Markup(_file("report.css") + style)
    scripts = Markup(_file("report.js") + script)
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
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", style),
    )


def _file(name: str) -> Markup:
    return Markup("\n" + Path(__file__).with_name(name).read_text(encoding="utf-8"))


def _hash(source: str) -> str:
    """Return the name of a source in a content security policy."""
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _sections(record: RunRecord) -> Iterable[Markup | None]:
    duration = (record.finished - record.started).total_seconds()
    yield _error(record)
    yield facts_section(record.facts)
    yield curves_section(record.curves, record.epoch_ends)
    yield learning_rates_section(record.learning_rates)
    yield throughput_section(
        record.throughput,
        record.throughput_unit,
        record.events,
        duration,
    )
    yield memory_section(record.memory, record.events)
    yield peak_section(record.compositions, expected=bool(record.memory))
    yield pipeline_section(record.pipeline)
    yield events_section(record.events)
    yield devices_section(record.devices)
    for added in record.sections:
        yield added_section(added)
    yield configuration_section(record.configuration)


def _header(record: RunRecord) -> Markup:
    duration = format_span((record.finished - record.started).total_seconds())
    last = "ended"
    if record.outcome == "running":
        last = "last seen"
    times = f"Began {record.started:%d %b %Y, %H:%M:%S}, {last} {record.finished:%H:%M:%S} ({duration})"
    return page_header("Run report", record.title, times, record.outcome)


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


def _error(record: RunRecord) -> Markup | None:
    """Show the last line of a traceback, which states the error, and the rest below it."""
    text = plain(record.error).strip()
    if not text:
        return None
    cause = next(line for line in reversed(text.splitlines()) if line.strip())
    if len(text) > _LONGEST_ERROR:
        half = _LONGEST_ERROR // 2
        text = f"{text[:half]}\n…\n{text[-half:]}"
    # The traceback is folded where the line of the user says where to look.
    lines = _lines_of_user(text)
    opened = None
    if not lines:
        opened = ""
    trace = tag(
        "details",
        tag("summary", "Traceback"),
        tag("pre", text),
        open=opened,
    )
    return tag(
        "section",
        tag("h2", "What went wrong"),
        tag("p", cause[:_LONGEST_CAUSE], class_="cause"),
        *lines,
        trace,
        class_="error",
    )


def _lines_of_user(trace: str) -> list[Markup]:
    """Return place and text of the innermost line of a traceback that belongs to no library, if it has one."""
    for path, number, function, code in reversed(_FRAME.findall(trace)):
        is_installed = "site-packages" in path or "dist-packages" in path
        if is_installed or is_of_library(path):
            continue
        return [
            tag("p", f"{format_path(path)}, line {number}, in {function}", class_="place"),
            tag("pre", code),
        ]
    return []


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


def recommendation_section(sentences: str, overrides: Sequence[str]) -> Markup:
    """Show what is recommended, and the overrides that choose it, if there are any."""
    code = None
    if overrides:
        code = hint(tag("code", " ".join(overrides)))
    return section("Recommended", tag("p", sentences), code)


def _tile_style(value: str) -> str | None:
    if len(value) > _WIDE:
        return "wide"
    if len(value) > _MIDDLE:
        return "middle"
    return None


def _footer(*, asks_server: bool) -> Markup:
    text = "Made by Equipoise. This page is complete in itself: it asks no network for anything."
    if asks_server:
        text = "Made by Equipoise. This page asks the program that serves it, and nothing else."
    return tag("footer", join(text))
