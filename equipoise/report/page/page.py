"""The page of a report: one HTML file without scripts or styles from elsewhere."""

import base64
import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from equipoise.report.page.markup import Markup, join, plain, tag
from equipoise.report.page.record import RunRecord
from equipoise.report.page.scales import format_span
from equipoise.report.page.sections import (
    configuration_section,
    curves_section,
    devices_section,
    events_section,
    memory_section,
    peak_section,
    pipeline_section,
    throughput_section,
)

__all__ = ["render_report", "write_report"]

_WIDTHS = ((24, "wide"), (11, "middle"))  # letters of a fact beyond which it gets more room


def write_report(record: RunRecord, path: str | os.PathLike[str]) -> None:
    """Writes a report under another name and renames it, so that no reader finds half of one.

    Args:
        record: What is known of the run.
        path: The file. Its folder is made if need be.

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
    path = Path(path)
    page = render_report(record).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_bytes(page)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def render_report(record: RunRecord) -> str:
    """Makes the page.

    Args:
        record: What is known of the run.
    """
    style, script = _file("report.css"), _file("report.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{record.title}: {record.outcome}"),
        tag("style", style),
    )
    body = tag("body", _header(record), tag("main", *_sections(record)), _footer(), tag("script", script))
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _file(name: str) -> Markup:
    return Markup("\n" + Path(__file__).with_name(name).read_text(encoding="utf-8"))


def _hash(source: str) -> str:
    """What a policy calls this source: it alone is let run, whatever else came into the page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def _sections(record: RunRecord) -> Iterable[Markup | None]:
    end = (record.finished - record.started).total_seconds()
    yield _error(record)
    yield _facts(record.facts)
    yield curves_section(record.curves, record.epoch_ends)
    yield throughput_section(record.throughput, record.throughput_unit, record.events, end)
    yield memory_section(record.memory, record.events)
    yield peak_section(record.compositions, expected=bool(record.memory))
    yield pipeline_section(record.pipeline)
    yield events_section(record.events)
    yield devices_section(record.devices)
    yield configuration_section(record.configuration)


def _header(record: RunRecord) -> Markup:
    took = format_span((record.finished - record.started).total_seconds())
    last = "last seen" if record.outcome == "running" else "ended"
    times = f"Began {record.started:%d %b %Y, %H:%M:%S}, {last} {record.finished:%H:%M:%S} ({took})"
    pill = tag("span", record.outcome, class_=f"pill {record.outcome}")
    return tag("header", tag("p", "Run report", class_="over"), tag("h1", record.title, " ", pill), tag("p", times))


def _error(record: RunRecord) -> Markup | None:
    """The last line says what was wrong; the rest says where."""
    text = plain(record.error).strip()
    if not text:
        return None
    last = next(line for line in reversed(text.splitlines()) if line.strip())
    if len(text) > 40_000:
        text = f"{text[:20_000]}\n…\n{text[-20_000:]}"
    trace = tag("details", tag("summary", "Traceback"), tag("pre", text), open="")
    return tag("section", tag("h2", "What went wrong"), tag("p", last[:2000], class_="cause"), trace, class_="error")


def _facts(facts: Mapping[str, str]) -> Markup | None:
    """A tile for each, wider ones for what is long."""
    if not facts:
        return None
    tiles = [
        tag("div", tag("dt", name), tag("dd", value), class_=next((s for n, s in _WIDTHS if len(value) > n), None))
        for name, value in facts.items()
    ]
    return tag("section", tag("h2", "In short", class_="unseen"), tag("dl", *tiles, class_="facts"))


def _footer() -> Markup:
    return tag("footer", join("Made by Equipoise. This page is complete in itself: it asks no network for anything."))
