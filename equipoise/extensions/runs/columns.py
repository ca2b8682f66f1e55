"""The columns of a comparison of runs, and the order of its rows."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from equipoise.app.config.suggestions import did_you_mean
from equipoise.errors import ConfigurationError
from equipoise.extensions.report.curve_names import is_learning_rate
from equipoise.extensions.runs.configuration import differing_keys
from equipoise.extensions.runs.found import natural
from equipoise.extensions.runs.run import Run
from equipoise.formats import counted, format_bytes, format_count, format_duration, format_number

__all__ = [
    "Column",
    "best_run",
    "columns_of",
    "further_keys",
    "main_metrics",
    "newest_first",
    "sorted_runs",
    "telling_columns",
]

Value = float | str | None

# Words in the names of metrics, the most important first.
_KINDS = ("val", "test", "train")


@dataclass(frozen=True)
class Column:
    """Column of a comparison.

    Attributes:
        head: Its head.
        value: Returns the value of a run, for the order of rows; None where there is none.
        text: Returns a value as text.
        kind: "result" of a metric, "key" of a configuration, or "cost".
        metric: The metric of which it is the best value. Default: none.
    """

    head: str
    value: Callable[[Run], Value]
    text: Callable[[Any], str] = str
    kind: str = "cost"
    metric: str = ""

    def cell(self, run: Run) -> str:
        """Return the cell of a run; empty without a value."""
        value = self.value(run)
        if value is None:
            return ""
        return self.text(value)


def columns_of(keys: Sequence[str], metrics: Sequence[str]) -> list[Column]:
    """Return the columns behind name and state: what differs, the best and last value of metrics, then the costs."""
    columns = [Column(key, _value_of_key(key), kind="key") for key in keys]
    for name in metrics:
        if not is_learning_rate(name):
            columns.append(Column(f"best {name}", _value_of_metric(name, "best"), format_number, "result", name))
        columns.append(Column(f"last {name}", _value_of_metric(name, "last"), format_number, "result"))
    return [
        *columns,
        Column("epochs", attrgetter("epochs"), format_count),
        Column("steps", attrgetter("steps"), format_count),
        Column("time", attrgetter("seconds"), format_duration),
        Column("peak memory", attrgetter("peak"), format_bytes),
    ]


def telling_columns(columns: Sequence[Column], runs: Sequence[Run]) -> list[Column]:
    """Return the columns without empty ones, and without last values that are the best ones in all runs.

    Where runs have a single value of a metric, such as that of a test, its name alone is the head.
    """
    cells = {column.head: [column.cell(run) for run in runs] for column in columns}
    telling = []
    for column in columns:
        best = column.head.replace("last ", "best ", 1)
        is_twice = column.kind == "result" and best != column.head and cells[column.head] == cells.get(best)
        if is_twice or not any(cells[column.head]):
            continue
        if column.metric and all(len(run.curves.get(column.metric, ())) <= 1 for run in runs):
            column = replace(column, head=column.metric)
        telling.append(column)
    return telling


def _value_of_key(key: str) -> Callable[[Run], Value]:
    """Return a function from a run to a value of its configuration."""

    def value(run: Run) -> Value:
        return run.configuration.get(key)

    return value


def _value_of_metric(name: str, which: str) -> Callable[[Run], Value]:
    """Return a function from a run to the "best" or "last" value of a metric."""

    def value(run: Run) -> Value:
        metric = run.metrics.get(name)
        if metric is None:
            return None
        number: float = getattr(metric, which)
        return number

    return value


def main_metrics(runs: Sequence[Run]) -> list[str]:
    """Return the names of metrics, the most important first: monitored, of validation, test, training, others."""
    counts: Counter[str] = Counter()
    monitored: set[str] = set()
    for run in runs:
        counts.update(run.metrics.keys())
        monitored.update(run.monitored)

    # False comes before True.
    def position(name: str) -> tuple[bool, int, int]:
        return name not in monitored, _place_of_kind(name), -counts[name]

    return sorted(counts, key=position)


def best_run(runs: Sequence[Run], metric: str) -> Run | None:
    """Return the run with the best value of a metric; None if no run has one."""
    rivals = [run for run in runs if metric in run.metrics and math.isfinite(run.metrics[metric].best)]
    if not rivals:
        return None
    choose = max
    if rivals[0].metrics[metric].mode == "min":
        choose = min
    return choose(rivals, key=lambda run: run.metrics[metric].best)


def further_keys(count: int) -> str:
    """Return the beginning of a sentence about keys that are left out.

    Example:
        >>> further_keys(2)
        '2 more keys differ'
    """
    verb = "differs" if count == 1 else "differ"
    return f"{counted(count, 'more key')} {verb}"


def _place_of_kind(name: str) -> int:
    for place, word in enumerate(_KINDS):
        if word in name.lower():
            return place
    if is_learning_rate(name):
        return len(_KINDS) + 1
    return len(_KINDS)


def sorted_runs(runs: Sequence[Run], by: str | None = None) -> list[Run]:
    """Return runs in order.

    Args:
        runs: The runs.
        by: Name of a metric, whose best values come first, or of a key or another column, of which the least values
            come first; "-" before it turns the order round. Runs without a value are last. Default: by their start.

    Raises:
        ConfigurationError: If there is no such column.
    """
    # 1. By their start. Runs of equal values stay in this order.
    ordered = sorted(runs, key=lambda run: (run.began or 0.0, natural(run.name)))
    if by is None or not runs:
        return ordered

    # 2. By the column, apart from runs without a value.
    value, is_turned = _order_by(by.removeprefix("-"), runs)
    if by.startswith("-"):
        is_turned = not is_turned
    valued = []
    unvalued = []
    for run in ordered:
        if _is_unknown(value(run)):
            unvalued.append(run)
        else:
            valued.append(run)
    valued.sort(key=lambda run: _place(value(run)), reverse=is_turned)
    return valued + unvalued


def newest_first(runs: Sequence[Run]) -> list[Run]:
    """Return runs in the order of a page: those under way, then all others, each the newest first."""
    newest = [*reversed(sorted_runs(runs))]
    return sorted(newest, key=lambda run: run.state != "running")


def _order_by(name: str, runs: Sequence[Run]) -> tuple[Callable[[Run], Value], bool]:
    """Return the values of a column, and whether the greatest come first; see `sorted_runs`."""
    # 1. A metric.
    metrics = main_metrics(runs)
    if name in metrics:
        modes = [run.metrics[name].mode for run in runs if name in run.metrics]
        return _value_of_metric(name, "best"), modes[0] == "max"

    # 2. Another column.
    values: dict[str, Callable[[Run], Value]] = {
        "name": attrgetter("name"),
        "state": attrgetter("state"),
        "began": attrgetter("began"),
        "memory": attrgetter("peak"),
    }
    for column in columns_of(differing_keys(runs), []):
        values[column.head] = column.value
    if name not in values:
        hint = did_you_mean(name, [*metrics, *values])
        raise ConfigurationError(f"--sort takes a metric, a key that differs, or a column, not {name!r}{hint}")
    return values[name], False


def _is_unknown(value: Value) -> bool:
    if isinstance(value, float):
        return math.isnan(value)
    return value is None


def _place(value: Value) -> tuple[float, list[tuple[int, str]]]:
    """Return a key by which numbers come in their order, then other texts in natural order."""
    try:
        number = float(value or 0.0)
    except ValueError:
        return math.inf, natural(str(value))
    return number, []
