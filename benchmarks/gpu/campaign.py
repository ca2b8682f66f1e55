"""The items of the campaign, and how each of them runs in a process of its own. Nothing here imports torch."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

__all__ = ["ITEMS", "SECONDS", "Item", "Outcome", "Row", "run_item", "write_row", "write_skipped"]

ROOT = Path(__file__).parents[2]
SECONDS = 540.0
"""The time of the whole campaign."""
LEAST_SECONDS = 5.0
"""An item that has less time left is not started."""


@dataclass(frozen=True)
class Row:
    """One result.

    Attributes:
        what: What was measured.
        value: A number, or a text.
        unit: Its unit. Default: none.
        bound: What it must be. Default: nothing.
        is_kept: Whether the bound is kept; None: there is no bound, or the value cannot be judged.
        is_time: Whether the value says something on a real GPU alone: a time, or a ratio of times.
    """

    what: str
    value: float | str
    unit: str = ""
    bound: str = ""
    is_kept: bool | None = None
    is_time: bool = False

    @classmethod
    def at_most(cls, what: str, value: float, most: float, unit: str = "", *, is_time: bool = False) -> "Row":
        """A number with an upper bound."""
        return cls(what, value, unit, f"≤ {most:g}", value <= most, is_time)

    @classmethod
    def between(cls, what: str, value: float, least: float, most: float, unit: str = "") -> "Row":
        """A number with two bounds."""
        return cls(what, value, unit, f"{least:g} to {most:g}", least <= value <= most)

    @classmethod
    def time(cls, what: str, value: float, unit: str) -> "Row":
        """A time without a bound."""
        return cls(what, value, unit, is_time=True)

    @classmethod
    def holds(cls, what: str, holds: bool, otherwise: str = "no") -> "Row":
        """Return a row for a condition that must be true."""
        return cls(what, "yes" if holds else otherwise, "", "yes", holds)

    def unjudged(self) -> "Row":
        """The same without a judgement."""
        return replace(self, is_kept=None)


@dataclass(frozen=True)
class Item:
    """One item of the campaign.

    Attributes:
        number: Its number in the README.
        name: Its title.
        function: Module and name of the generator of its rows.
        limit: Seconds after which it is ended.
        needs_cuda: Whether a CPU alone can show nothing. Default: True.
    """

    number: int
    name: str
    function: str
    limit: float
    needs_cuda: bool = True


ITEMS = (
    Item(0, "device and ceilings", "measuring:device_facts", 30, needs_cuda=False),
    Item(1, "tests", "measuring:tests", 190, needs_cuda=False),
    Item(2, "cost of a step", "steps:step_costs", 90, needs_cuda=False),
    Item(3, "waits", "steps:waits", 30),
    Item(4, "loader", "speedups:loader", 40),
    Item(5, "memory readings", "memory:readings", 30),
    Item(6, "out of memory", "memory:recovery", 60),
    Item(7, "strategies", "strategies:strategies", 60, needs_cuda=False),
    Item(8, "pipeline's memory", "strategies:pipeline_memory", 20),
    Item(9, "precisions", "steps:precisions", 40, needs_cuda=False),
    Item(10, "checkpoints", "checkpoints:checkpoints", 45, needs_cuda=False),
    Item(11, "captured and compiled steps", "speedups:captured_and_compiled", 60, needs_cuda=False),
    Item(12, "predicted memory", "predictions:predictions", 60),
    Item(13, "weights of few bits, and float8", "few_bits:few_bits", 60, needs_cuda=False),
    Item(14, "compiled blocks", "speedups:compiled_blocks", 90, needs_cuda=False),
    Item(15, "meshes of two GPUs", "meshes:meshes", 90),
)


@dataclass(frozen=True)
class Outcome:
    """Outcome of an item.

    Attributes:
        item: The item.
        rows: Its results, as far as it came.
        seconds: How long it took.
        problem: Why it did not end as it should; empty if it did.
        is_skipped: Whether it was left out, for the reason in `problem`.
    """

    item: Item
    rows: tuple[Row, ...]
    seconds: float
    problem: str = ""
    is_skipped: bool = False

    @property
    def is_good(self) -> bool:
        """Return True if nothing failed and all bounds are kept."""
        failed = bool(self.problem) and not self.is_skipped
        return not failed and all(row.is_kept is not False for row in self.rows)


def run_item(item: Item, options: Sequence[str], seconds_left: float) -> Outcome:
    """Run an item in a process of its own.

    Args:
        item: The item.
        options: Further options of the command.
        seconds_left: Time that is left for the campaign.
    """
    limit = min(item.limit, seconds_left)
    if limit < LEAST_SECONDS:
        return Outcome(item, (), 0.0, "the time of the campaign is over", is_skipped=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "rows")
        results.touch()
        command = [sys.executable, "-m", "benchmarks.gpu", "--child", str(item.number), "--out", str(results), *options]
        problem = run_limited(command, limit)
        lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    seconds = time.monotonic() - begun
    rows = tuple(Row(**line) for line in lines if "skipped" not in line)
    skipped = [line["skipped"] for line in lines if "skipped" in line]
    if skipped:
        return Outcome(item, rows, seconds, skipped[0], is_skipped=True)
    return Outcome(item, rows, seconds, problem)


def run_limited(command: Sequence[str], limit: float) -> str:
    """Run a command, and end it with all its processes after a time; return what went wrong."""
    with tempfile.TemporaryFile("w+b") as written:
        # In a file, since workers could hold a pipe open.
        process = subprocess.Popen(command, cwd=ROOT, stdout=written, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"ended after {limit:.0f} s"
        finally:
            end_group(process)
        written.seek(0)
        text = written.read().decode(errors="replace").strip()
    if code == 0:
        return ""
    last_line = text.splitlines()[-1] if text else "nothing was written"
    return f"exit code {code}: {last_line}"


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started."""
    # It may be that all of them have ended.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def write_row(path: Path, row: Row) -> None:
    """Append a result to a file, so that an item that is ended keeps what it has found."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")


def write_skipped(path: Path, reason: str) -> None:
    """Note that an item was left out."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"skipped": reason}) + "\n")
