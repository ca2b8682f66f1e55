"""The page of a report."""

import os
import re
from collections.abc import Iterable, Mapping

from equipoise.extensions.common.page.markup import Markup, cut, plain, tag
from equipoise.extensions.common.page.page import (
    configuration_section,
    facts_section,
    html_page,
    page_header,
    write_page,
)
from equipoise.extensions.report.page.memory_sections import memory_section, peak_section
from equipoise.extensions.report.page.record import RunRecord
from equipoise.extensions.report.page.sections import (
    added_section,
    curves_section,
    devices_section,
    events_section,
    learning_rates_section,
    pipeline_section,
    throughput_section,
)
from equipoise.formats import format_path, format_span
from equipoise.notices import is_of_library

__all__ = ["render_report", "write_report"]

# Characters of a traceback that the page shows, and of its message.
_LONGEST_ERROR = 40_000
_LONGEST_CAUSE = 2000
_COPIED = ("overrides", "command")
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
        >>> from pathlib import Path
        >>> from datetime import datetime
        >>> now = datetime(2026, 1, 1, 12, 0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_report(RunRecord(title="Net", started=now, finished=now), Path(folder, "report.html"))
        ...     Path(folder, "report.html").read_text(encoding="utf-8")[:15]
        '<!DOCTYPE html>'
    """
    write_page(render_report(record), path)


def render_report(record: RunRecord) -> str:
    """Return the HTML of the page.

    Args:
        record: The facts of the run.
    """
    return html_page(f"{record.title}: {record.outcome}", _header(record), _sections(record))


def _sections(record: RunRecord) -> Iterable[Markup | None]:
    duration = (record.finished - record.started).total_seconds()
    yield _origin(record.origin)
    yield _error(record)
    yield facts_section(record.facts)
    yield curves_section(record.curves, record.epoch_ends)
    yield learning_rates_section(record.learning_rates)
    yield throughput_section(record.throughput, record.throughput_unit, record.events, duration)
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
    end_label = "last seen" if record.outcome == "running" else "ended"
    times = f"Began {record.started:%d %b %Y, %H:%M:%S}, {end_label} {record.finished:%H:%M:%S} ({duration})"
    return page_header("Run report", record.title, times, record.outcome)


def _origin(origin: Mapping[str, str]) -> Markup | None:
    """Say which run this is, and what was run; overrides and command are there to be copied."""
    if not origin:
        return None
    pairs = []
    for name, text in origin.items():
        if name == "overrides" and origin.get("command", "").endswith(f" {text}"):
            # The command of a job of a sweep has the values of all jobs instead.
            continue
        content: object = text
        if name in _COPIED:
            content = tag("code", text, class_="copied")
        pairs.append(tag("div", tag("dt", name), tag("dd", content)))
    return tag("section", tag("h2", "What was run", class_="unseen"), tag("dl", *pairs, class_="origin"))


def _error(record: RunRecord) -> Markup | None:
    """Show the message at the end of a traceback, and the rest below it."""
    text = plain(record.error).strip()
    if not text:
        return None
    cause = _message(text)
    if len(text) > _LONGEST_ERROR:
        half = _LONGEST_ERROR // 2
        text = f"{text[:half]}\n…\n{text[-half:]}"
    # The traceback is folded if a line of the user is shown above it. An attribute that is None is left out.
    lines = _lines_of_user(text)
    is_open = None if lines else ""
    trace = None
    if cause != text:
        trace = tag("details", tag("summary", "Traceback"), tag("pre", text), open=is_open)
    return tag(
        "section",
        tag("h2", "What went wrong"),
        tag("p", cut(cause, _LONGEST_CAUSE), class_="cause"),
        *lines,
        trace,
        class_="error",
    )


def _message(trace: str) -> str:
    """Return all lines of the message of the last error in a traceback."""
    lines = trace.splitlines()
    begin = 0
    for number, line in enumerate(lines):
        if line.startswith(("Traceback (", "  File ")):
            begin = number + 1
    # Below the place of a frame stand its code and marks.
    while begin < len(lines) - 1 and lines[begin].startswith(" "):
        begin += 1
    return "\n".join(lines[begin:])


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
