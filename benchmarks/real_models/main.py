"""Cuts models of other libraries into stages, without an edit, and compares their training with that on one device.

python benchmarks/real_models/main.py                                    all models, an hour and more
python benchmarks/real_models/main.py --sections timm --engines threads  one section, in one process
python benchmarks/real_models/main.py --only bert resnet18               some models, by their names
"""

import argparse
import json
import multiprocessing
import os
import platform
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from catalogue import Model
from libraries import LIBRARIES, absence, version_of
from other_models import diffusers_models, geometric_models, timm_models, torch_models, torchvision_models
from training import judge
from transformers_models import base_models, task_models

MOST, MOST_IN_SINGLE_PRECISION = 1e-10, 1e-5
"""The bounds of the deviation; the second is for models that compute in single precision by themselves."""

MOST_TO_MEAN, MOST_TO_BEST = 1.15, 1.02
"""The bounds of the slowest stage: by the mean; by that of the best possible cut, where no cut keeps the first."""

ENGINES = ("threads", "processes")
SECTIONS: dict[str, Callable[[], list[Model]]] = {
    "transformers": base_models,
    "transformers-tasks": task_models,
    "timm": timm_models,
    "torchvision": torchvision_models,
    "diffusers": diffusers_models,
    "torch": torch_models,
    "torch_geometric": geometric_models,
}
COLUMNS = (
    *("model", "parameters", "followed by", "cut before", "slowest / mean", "best possible", "as it ran", "memory"),
    *("time", "whole", *ENGINES, "seconds"),
)


@dataclass
class Row:
    """Outcome of a model.

    Attributes:
        section: Its section.
        model: The model.
        record: What its process wrote; see `training.judge`.
        wrong: What breaks a bound, by engine.
        refused: Reasons of refusals, by engine.
        unbalanced: Why the slowest stage takes more than `MOST_TO_MEAN`, by engine.
        worse: The engines whose cut is not about as good as the best possible one, among those.
    """

    section: str
    model: Model
    record: dict[str, Any]
    wrong: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    unbalanced: dict[str, str] = field(default_factory=dict)
    worse: set[str] = field(default_factory=set)

    def weigh(self, engines: Sequence[str], limit: float) -> None:
        """Finds what is wrong."""
        if "error" in self.record:
            self.wrong["one device"] = self.record["error"]
            return
        most = MOST_IN_SINGLE_PRECISION if self.record.get("single_precision") else MOST
        for engine in engines:
            found = self.record.get("engines", {}).get(engine)
            if found is None:
                self.wrong[engine] = f"no result in {limit:.0f} s, with all engines before"
            elif "refused" in found:
                self.refused[engine] = found["refused"]
                if not self.model.refusal or self.model.refusal not in found["refused"]:
                    self.wrong[engine] = f"refused: {found['refused']}"
            elif "failed" in found:
                self.wrong[engine] = found["traceback"]
            elif not found["deviation"] <= most:
                self.wrong[engine] = f"the deviation is {found['deviation']:.1e}, more than {most:.0e}"
            if found is not None and "cut" in found:
                self._weigh_balance(engine, found["cut"])

    def _weigh_balance(self, engine: str, cut: dict[str, Any]) -> None:
        """Compares the slowest stage with the mean of both, and with the best possible cut by the same times."""
        if cut["to_mean"] <= MOST_TO_MEAN:
            return
        reason = f"the slowest stage takes {cut['to_mean']:.2f} of the mean, more than {MOST_TO_MEAN}"
        best = cut.get("best_to_mean")
        if best is not None:
            reason += f"; no cut takes less than {best:.2f}: `{cut['piece']}`, which no cut divides,"
            reason += f" takes {cut['piece_to_mean']:.2f}"
        self.unbalanced[engine] = reason
        if best is None or cut["to_mean"] > MOST_TO_BEST * best:
            self.worse.add(engine)

    def cells(self) -> list[str]:
        """The line of the table."""
        found = self.record.get("engines", {})
        cut = next((found[engine]["cut"] for engine in ENGINES if "cut" in found.get(engine, {})), None)
        described = [""] * 8
        if cut is not None:
            costs = found.get("threads", {}).get("costs", {})
            measured = [f"{cut['best_to_mean']:.2f}" if "best_to_mean" in cut else ""]
            measured += [f"{costs[name]:.2f}" if name in costs else "" for name in ("to_mean", "memory", "time")]
            described = [cut.get("followed_by", ""), ", ".join(cut["names"])]
            described += [f"{cut['to_mean']:.2f}", *measured, str(len(cut["opaque"]))]
        parameters = self.record.get("parameters")
        size = "" if parameters is None else f"{parameters:,}"
        states = [self._state(engine) for engine in ENGINES]
        return [self.model.name, size, *described, *states, f"{self.record.get('seconds', 0.0):.0f}"]

    def _state(self, engine: str) -> str:
        found = self.record.get("engines", {}).get(engine)
        if found is None:
            return "no result" if engine in self.wrong else ""
        if "deviation" in found:
            return f"{found['deviation']:.1e}"
        return "refused" if "refused" in found else "failed"


@dataclass
class Attempt:
    """A process that judges a model."""

    section: str
    model: Model
    record: Path
    process: Any
    begun: float


def start(section: str, model: Model, engines: Sequence[str], record: Path) -> Attempt:
    """Judges a model in a process of its own, which shares what is imported here."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_in_child, args=(model, engines, record))
    process.start()
    return Attempt(section, model, record, process, time.monotonic())


def _in_child(model: Model, engines: Sequence[str], record: Path) -> None:
    os.setsid()
    output = os.open(record.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # Processes of stages are forked by a server, which imports the library once for both.
    multiprocessing.set_forkserver_preload([model.library])
    judge(model, engines, record)


def end(attempt: Attempt) -> dict[str, Any]:
    """Ends a process with all that it has started, and reads what it wrote."""
    seconds = time.monotonic() - attempt.begun
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(attempt.process.pid, signal.SIGKILL)
    attempt.process.join()
    record = read(attempt.record)
    output = attempt.record.with_suffix(".txt")
    if not record:
        printed = output.read_text(errors="replace")[-2000:] if output.exists() else ""
        record["error"] = f"{printed}\nno result after {seconds:.0f} s".strip()
    record["seconds"] = record.get("seconds", 0.0) + seconds
    attempt.record.write_text(json.dumps(record))
    return record


def read(path: Path) -> dict[str, Any]:
    """The record of a model; empty if there is none."""
    record: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        record = json.loads(path.read_text())
    return record


def run(section: str, models: Sequence[Model], options: argparse.Namespace) -> Iterator[Row]:
    """Judges the models of a section, so many at a time."""
    waiting = deque(models)
    running: list[Attempt] = []
    while waiting or running:
        while waiting and len(running) < options.jobs:
            model = waiting.popleft()
            record = options.records / f"{section} {model.name}.json"
            if not options.reuse:
                record.unlink(missing_ok=True)
            known = read(record)
            engines = [engine for engine in options.engines if engine not in known.get("engines", {})]
            if engines:
                running.append(start(section, model, engines, record))
            else:
                yield row_of(section, model, known, options)
        time.sleep(0.05)
        for attempt in list(running):
            is_late = time.monotonic() - attempt.begun > options.limit
            if is_late or not attempt.process.is_alive():
                running.remove(attempt)
                yield row_of(section, attempt.model, end(attempt), options)


def row_of(section: str, model: Model, record: dict[str, Any], options: argparse.Namespace) -> Row:
    """The row of a model, with what is wrong."""
    row = Row(section, model, record)
    row.weigh(options.engines, options.limit)
    return row


def campaign(options: argparse.Namespace, console: Console) -> tuple[dict[str, list[Row]], list[str]]:
    """Runs all sections; returns their rows, and what was skipped."""
    rows: dict[str, list[Row]] = {}
    skipped: list[str] = []
    for section in options.sections:
        models = [model for model in SECTIONS[section]() if not options.only or model.name in options.only]
        missing = {model.library: absence(model.library) for model in models}
        reasons = [f"{section}: skipped, {reason}" for reason in missing.values() if reason]
        if reasons:
            skipped += reasons
            console.print(*reasons, sep="\n", markup=False)
            continue
        rows[section] = []
        for row in run(section, models, options):
            rows[section].append(row)
            console.print(f"{section}:", " | ".join(row.cells()), markup=False, highlight=False, soft_wrap=True)
            for engine, reason in (*row.wrong.items(), *row.unbalanced.items()):
                console.print(f"    {engine}: {reason}", markup=False, soft_wrap=True)
    return rows, skipped


def table_of(section: str, rows: Sequence[Row]) -> Table:
    """The table of a section."""
    table = Table(*COLUMNS, title=section)
    for row in rows:
        table.add_row(*row.cells())
    return table


def summary(rows: dict[str, list[Row]]) -> Table:
    """Return the number of models of each section that were cut, and the quality of the cuts."""
    columns = ("section", "models", "cut", "refused", "wrong", "largest deviation", "slowest / mean")
    table = Table(*columns, f"above {MOST_TO_MEAN}", "of these not the best", title="All")
    for section, those in rows.items():
        found = [one for row in those for one in row.record.get("engines", {}).values() if "cut" in one]
        cut = [row for row in those if not row.wrong and not row.refused]
        refused = [row for row in those if row.refused]
        wrong = [row for row in those if row.wrong]
        deviations = [one["deviation"] for one in found]
        ratios = [one["cut"]["to_mean"] for one in found]
        counts = [str(len(each)) for each in (those, cut, refused, wrong)]
        largest = f"{max(deviations):.1e}" if deviations else ""
        slowest = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
        unbalanced = [row for row in those if row.unbalanced]
        worse = [row for row in those if row.worse]
        table.add_row(section, *counts, largest, slowest, str(len(unbalanced)), str(len(worse)))
    return table


def markdown(table: Table) -> str:
    """A table for the README."""
    columns = [list(column.cells) for column in table.columns]
    lines = [[str(column.header) for column in table.columns], ["---"] * len(columns), *zip(*columns, strict=True)]
    return f"{table.title}:\n\n" + "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def reasons(rows: dict[str, list[Row]], skipped: Sequence[str]) -> str:
    """A list of what was refused, wrong or skipped, for the README."""
    lines = list(skipped)
    for section, those in rows.items():
        for row in those:
            for found in (row.refused, row.wrong, row.unbalanced):
                for engine, reason in found.items():
                    lines.append(f"{section}, {row.model.name}, {engine}: {_last_line(reason)}")
            for name, reason in _opaque(row).items():
                lines.append(f"{section}, {row.model.name}: `{name}` stays whole: {reason}")
    return "".join(f"- {line}\n" for line in lines)


def _last_line(reason: str) -> str:
    """The message of an error, without its traceback and without where it was raised."""
    lines = [line for line in reason.strip().splitlines() if line and not line.startswith("Raised in rank")]
    return lines[-1] if lines else ""


def _opaque(row: Row) -> dict[str, str]:
    """The submodules of a model that stay whole, with the reasons."""
    names: dict[str, str] = {}
    for found in row.record.get("engines", {}).values():
        names.update(found.get("cut", {}).get("opaque", {}))
    return names


def arguments(command: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="(default: all)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="models of these names (default: all)")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="(default: both)")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time (default: 1)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a model (default: 120)")
    parser.add_argument("--records", type=Path, default=Path("outputs/real_models"), help="where results are written")
    parser.add_argument("--reuse", action="store_true", help="run only what has no record")
    parser.add_argument("--markdown", type=Path, help="write the tables for the README into this file")
    options = parser.parse_args(command)
    if options.only:
        known = {model.name for section in options.sections for model in SECTIONS[section]()}
        unknown = sorted(set(options.only) - known)
        if unknown:
            parser.error(f"there is no model {unknown[0]!r} in these sections; there are {', '.join(sorted(known))}")
    return options


def main(command: list[str] | None = None) -> int:
    """Runs the campaign, prints the tables, and returns the exit code: 1 if a bound is broken."""
    options = arguments(command)
    console = Console()
    console.width = max(console.width, 140)
    torch.set_num_threads(1)  # processes are forked, and threads do not survive that
    options.records.mkdir(parents=True, exist_ok=True)
    rows, skipped = campaign(options, console)
    tables = [summary(rows), *(table_of(section, those) for section, those in rows.items() if those)]
    for table in reversed(tables):
        console.print(table)
    versions = [f"{library} {version_of(library)}" for library in LIBRARIES if version_of(library)]
    console.print(f"Python {platform.python_version()}, torch {torch.__version__}, {', '.join(versions)}")
    if options.markdown is not None:
        parts = [*map(markdown, tables), reasons(rows, skipped)]
        options.markdown.write_text("\n".join(parts))
    broken = [row for those in rows.values() for row in those if row.wrong or row.worse]
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
