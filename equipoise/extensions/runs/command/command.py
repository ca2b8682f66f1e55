"""`equipoise runs`: find runs, and show them as a table, as JSON or as a page."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import rich
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from equipoise.app.command import present, read_flags
from equipoise.errors import ConfigurationError
from equipoise.extensions.common.page.markup import cut
from equipoise.extensions.common.page.page import write_page
from equipoise.extensions.report.run_file.plain_json import as_json
from equipoise.extensions.runs.columns import (
    Column,
    columns_of,
    further_keys,
    main_metrics,
    newest_first,
    sorted_runs,
    telling_columns,
)
from equipoise.extensions.runs.command.page import runs_page
from equipoise.extensions.runs.command.runs_table import beside_curves
from equipoise.extensions.runs.command.shown_runs import shown_runs
from equipoise.extensions.runs.configuration import differing_keys
from equipoise.extensions.runs.found import find_runs, folders_of
from equipoise.extensions.runs.reading import read_runs
from equipoise.extensions.runs.run import Run, Unreadable
from equipoise.formats import format_path, printable
from equipoise.tables.whole_table import print_table, print_text

__all__ = ["page_of_sweep", "show_runs"]

_TAKES = "equipoise runs takes FOLDERS, --sort=COLUMN, --json and --html=PATH"
# Columns of a terminal; the page has more, and JSON has all.
_MOST_KEYS = 6
_MOST_METRICS = 3
_LONGEST_NAME = 25
_STYLES = {"finished": "green", "failed": "red", "interrupted": "yellow", "running": "cyan", "unknown": "dim"}


def show_runs(arguments: Sequence[str], configurations: Sequence[Path] = ()) -> None:
    """Run the command.

    Raises:
        ConfigurationError: If an argument is wrong, or a folder does not exist.
    """
    readers = {"--json": present, "--sort": _some_text, "--html": _some_text}
    names, flags = read_flags(arguments, readers, _TAKES)
    folders = folders_of(names, _TAKES)
    runs, unreadable = read_runs(find_runs(folders))
    order = flags.get("--sort")
    runs = sorted_runs(runs, order)
    if "--json" in flags:
        print(json.dumps(_as_json(runs, unreadable), indent=2))
    else:
        _print(runs, unreadable, folders)
    if "--html" in flags:
        path = Path(flags["--html"])
        try:
            write_page(runs_page(runs if order else newest_first(runs), unreadable, path.parent), path)
        except OSError as error:
            raise ConfigurationError(f"--html={path} cannot be written: {error}. Name another file.") from error
        if "--json" not in flags:
            print(f"Page: {format_path(str(path))}")


def page_of_sweep(folder: Path) -> Path | None:
    """Write `runs.html`, the jobs of a sweep side by side.

    Returns:
        The page; None if there are fewer than two runs.

    Raises:
        OSError: If the page cannot be written.
    """
    runs, unreadable = read_runs(find_runs([folder]))
    if len(runs) < 2:
        return None
    path = folder / "runs.html"
    # The best job comes first.
    write_page(runs_page(sorted_runs(runs, next(iter(main_metrics(runs)), None)), unreadable, folder), path)
    return path


def _some_text(name: str, text: str | None) -> str:
    if not text:
        raise ConfigurationError(f"{name} takes a value: {_TAKES}.")
    return text


def _print(runs: Sequence[Run], unreadable: Sequence[Unreadable], folders: Sequence[Path]) -> None:
    console = rich.get_console()
    if runs:
        _print_table(runs, console)
    else:
        places = ", ".join(map(str, folders)) or "outputs and multirun, which do not exist here"
        print_text(Text(f"There are no runs in {places}."), console)
    # Errors and paths stand outside of the table, so that it does not break them.
    for run in runs:
        if run.error:
            print_text(Text.assemble((f"{run.name}: ", "dim"), cut(run.error)), console)
    for failure in unreadable:
        text = printable(f"{failure.path}: {failure.reason}")
        print_text(Text.assemble(("Not read: ", "dim"), text), console)


def _print_table(runs: Sequence[Run], console: Console) -> None:
    keys = differing_keys(runs)
    columns = telling_columns(columns_of(keys[:_MOST_KEYS], main_metrics(runs)[:_MOST_METRICS]), runs)
    main = beside_curves(columns)
    # Those that find no room are the last ones.
    columns.sort(key=lambda column: (column not in main, _place_of(column)))
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("run", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for column in columns:
        # As texts, since rich would read brackets as markup.
        if column.kind == "key":
            table.add_column(Text(column.head), overflow="fold")
        else:
            table.add_column(Text(column.head), justify="right")
    for row in shown_runs(runs):
        cells = [Text(column.cell(row.run) or "-") for column in columns]
        table.add_row(Text(row.name_of(_LONGEST_NAME)), Text(row.run.state, _STYLES[row.run.state]), *cells)
    print_table(table, console, repeated=2, leaves_out=True)
    further = len(keys) - _MOST_KEYS
    if further > 0:
        print_text(f"{further_keys(further)}: --json shows all.", console)


def _place_of(column: Column) -> int:
    """Return the place of a column by its kind."""
    if column.kind == "result":
        return 0 if column.metric else 2
    return 1 if column.kind == "key" else 3


def _as_json(runs: Sequence[Run], unreadable: Sequence[Unreadable]) -> Any:
    keys = differing_keys(runs)
    entries = []
    for run in runs:
        began = None
        if run.began is not None:
            began = datetime.fromtimestamp(run.began).astimezone().isoformat()
        entry = {
            "folder": str(run.folder),
            "state": run.state,
            "error": run.error,
            "began": began,
            "seconds": run.seconds,
            "epochs": run.epochs,
            "steps": run.steps,
            "peak_memory": run.peak_memory,
            "metrics": {name: vars(metric) for name, metric in run.metrics.items()},
            "differences": {key: run.configuration.get(key) for key in keys},
            "origin": run.origin,
        }
        entries.append(entry)
    failures = [{"path": str(failure.path), "reason": failure.reason} for failure in unreadable]
    return as_json({"runs": entries, "unreadable": failures})
