"""The history of releases: a line of JSON for each, and its chart."""

import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import torch

import equipoise

__all__ = ["HISTORY", "draw", "record"]

HISTORY = Path(__file__).with_name("history.jsonl")
CHART = Path(__file__).parents[2] / "docs" / "images" / "speed.svg"

# Pixels of the chart.
WIDTH, STRIP, TOP = 780, 44, 34
LEFT, RIGHT = 190, 620


def record(ratios: Mapping[str, tuple[float, float]], history: Path = HISTORY, chart: Path = CHART) -> None:
    """Add a line for this version, in place of one that it has, and draw the chart.

    Args:
        ratios: Ratio and bound of each row.
        history: The file of the history.
        chart: The file of the chart.
    """
    lines = read(history)
    lines.append(
        {
            "version": equipoise.__version__,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "ratios": {name: {"ratio": ratio, "bound": bound} for name, (ratio, bound) in ratios.items()},
        }
    )
    releases = list({line["version"]: line for line in lines}.values())
    history.write_text("".join(f"{json.dumps(line)}\n" for line in releases), encoding="utf-8")
    chart.write_text(draw(releases), encoding="utf-8")


def read(history: Path = HISTORY) -> list[dict[str, Any]]:
    """Return a dictionary for each release."""
    return [json.loads(line) for line in history.read_text(encoding="utf-8").splitlines()]


def draw(releases: Sequence[Mapping[str, Any]]) -> str:
    """Return a picture with a strip for each row: its ratio in each release, below the line of its bound."""
    names = list(releases[-1]["ratios"])
    height = TOP + STRIP * len(names) + 10
    versions = ", ".join(release["version"] for release in releases)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' role="img" font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#1f2933">',
        f"<title>Speed of each release: {escape(versions)}</title>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" fill="#f3f5f7" stroke="#c9d0d8"/>',
        *(_text(_across(index, len(releases)), 20, each["version"]) for index, each in enumerate(releases)),
        _text(RIGHT + 20, 20, "last ratio, bound", anchor="start"),
    ]
    for index, name in enumerate(names):
        parts += _strip(name, releases, TOP + STRIP * index)
    return "\n".join([*parts, "</svg>", ""])


def _strip(name: str, releases: Sequence[Mapping[str, Any]], top: int) -> list[str]:
    """Draw a row: from zero at the lower edge to the bound near the upper one."""
    points = []
    for index, release in enumerate(releases):
        values = release["ratios"].get(name)
        if values is not None:
            share = values["ratio"] / values["bound"]
            points.append((_across(index, len(releases)), top + STRIP - 6 - 28 * max(0.0, min(share, 1.2))))
    last = releases[-1]["ratios"][name]
    bound = top + STRIP - 6 - 28
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return [
        f'<rect x="{LEFT - 10}" y="{top}" width="{RIGHT - LEFT + 20}" height="{STRIP - 6}" fill="#ffffff"/>',
        f'<path d="M{LEFT - 10} {bound} H{RIGHT + 10}" stroke="#b4442f" stroke-dasharray="4 3"/>',
        _text(14, top + 24, name, anchor="start"),
        f'<polyline points="{line}" fill="none" stroke="#2b6cb0" stroke-width="1.5"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="#2b6cb0"/>' for x, y in points),
        _text(RIGHT + 20, top + 24, f"{last['ratio']:.3f}, at most {last['bound']:.3f}", anchor="start"),
    ]


def _across(index: int, count: int) -> float:
    """Return the place of a release; the last one stands at the right."""
    return RIGHT if count == 1 else LEFT + (RIGHT - LEFT) * index / (count - 1)


def _text(x: float, y: float, text: str, *, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
