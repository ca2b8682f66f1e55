"""The table of runs: a line for each, its results first."""

from collections.abc import Iterator, Mapping, Sequence

from equipoise.extensions.common.page.markup import Markup, breakable, cut, hint, join, tag
from equipoise.extensions.runs.columns import Column, best_run, columns_of, further_keys, telling_columns
from equipoise.extensions.runs.command.shown_runs import ShownRun
from equipoise.extensions.runs.configuration import differing_keys
from equipoise.extensions.runs.run import Run
from equipoise.formats import format_number

__all__ = ["beside_curves", "key_to_lines", "name_in_parts", "runs_table"]

_MOST_KEYS = 12
_KEYS_OF_SWEEP = 2
_LONGEST_CELL = 80
_COLOURED = ("finished", "failed", "interrupted", "running")


def runs_table(
    shown: Sequence[ShownRun], links: Sequence[str | None], metrics: Sequence[str], *, is_sweep: bool = False
) -> Iterator[Markup]:
    """Yield the table, which the script of the page sorts by `data-value`, and a note on what it lacks.

    Args:
        shown: The runs.
        links: For each the link to its report, if it has one.
        metrics: Names of the metrics that have columns.
        is_sweep: Whether the runs are jobs of a sweep, whose short names leave room for more columns. Default: False.
    """
    # 1. The columns, results first.
    runs = [row.run for row in shown]
    keys = differing_keys(runs)
    columns = telling_columns(columns_of(keys[:_MOST_KEYS], metrics), runs)
    columns.sort(key=lambda column: column.kind != "result")
    styles = _styles(columns, beside_curves(columns, _KEYS_OF_SWEEP if is_sweep else 1), runs)
    best = {name: _best_text(name, runs) for name in metrics}

    # 2. The rows.
    heads = [tag("th", "Run", scope="col"), tag("th", "State", scope="col")]
    for column, style in zip(columns, styles, strict=True):
        heads.append(_head(column, style, runs))
    rows = []
    for number, (row, link) in enumerate(zip(shown, links, strict=True)):
        cells = [*_first_cells(number, row, link)]
        cells += [_cell(row.run, column, style, best) for column, style in zip(columns, styles, strict=True)]
        rows.append(tag("tr", *cells, data_run=number, data_state=row.run.state))

    # 3. The table scrolls where it is too wide.
    element = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="runs")
    yield tag("div", element, class_="scroll")
    if len(keys) > _MOST_KEYS:
        yield hint(f"{further_keys(len(keys) - _MOST_KEYS)}: ", tag("code", "equipoise runs --json"), " shows all.")


def key_to_lines(row: ShownRun) -> Markup:
    """Return the key to the lines of a run."""
    return tag("i", class_=f"key {row.style}")


def name_in_parts(row: ShownRun, link: str | None = None) -> Markup:
    """Return the name of a run, which leads to a link; where there is little room, its end stays."""
    start, end = row.name_parts
    content = tag("span", cut(start, _LONGEST_CELL)), tag("span", end)
    return tag("span" if link is None else "a", *content, href=link, title=cut(row.run.name), class_="run-name")


def beside_curves(columns: Sequence[Column], most_keys: int = 1) -> list[Column]:
    """Return the columns that stay where the table stands beside the curves: a result, and the keys of most values."""
    results = [column for column in columns if column.kind == "result"]
    keys = [column for column in columns if column.kind == "key"]
    return results[:1] + keys[:most_keys]


def _head(column: Column, style: str | None, runs: Sequence[Run]) -> Markup:
    """Return the head of a column; by it the script of the page knows that the greatest value is the best."""
    first = None
    if any(run.metrics[column.metric].mode == "max" for run in runs if column.metric in run.metrics):
        first = "greatest"
    return tag("th", breakable(cut(column.head, _LONGEST_CELL)), scope="col", class_=style, data_first=first)


def _styles(columns: Sequence[Column], beside: Sequence[Column], runs: Sequence[Run]) -> list[str | None]:
    """Return the CSS classes of columns: numbers, and those that have no place beside the curves."""
    styles = []
    for column in columns:
        classes = []
        if column.kind != "key" or all(_is_number(column.cell(run)) for run in runs):
            classes.append("number")
        if column not in beside:
            classes.append("more")
        styles.append(" ".join(classes) or None)
    return styles


def _is_number(text: str) -> bool:
    """Return whether a cell is empty or a number."""
    try:
        float(text or 0)
    except ValueError:
        return False
    return True


def _best_text(metric: str, runs: Sequence[Run]) -> str | None:
    """Return the best value of a metric as cells show it, where several runs have one."""
    best = best_run(runs, metric)
    others = [run for run in runs if run is not best]
    if best is None or best_run(others, metric) is None:
        return None
    return format_number(best.metrics[metric].best)


def _first_cells(number: int, row: ShownRun, link: str | None) -> Iterator[Markup]:
    """Yield the name of a run with the key to its lines, and its state, which opens its error."""
    run = row.run
    yield tag("td", key_to_lines(row), name_in_parts(row, link))
    style = "pill"
    if run.state in _COLOURED:
        style += f" {run.state}"
    state = tag("span", run.state, class_=style)
    if run.error:
        # What is opened lies above the table, whose rows stay as they are.
        key = f"error-{number}"
        line = tag("span", cut(run.error, _LONGEST_CELL), class_="cause")
        button = tag("button", state, line, type="button", popovertarget=key)
        state = join(button, tag("div", run.error, id=key, popover="auto", class_="cause"))
    yield tag("td", state, data_value=run.state)


def _cell(run: Run, column: Column, style: str | None, best: Mapping[str, str | None]) -> Markup:
    """Return a cell; its value for the script, where that is not its text."""
    text = cut(column.cell(run), _LONGEST_CELL)
    value = column.value(run)
    content: object = text
    if isinstance(value, float):
        # Values that look the same stand out together.
        if column.metric and text == best[column.metric]:
            content = tag("b", text)
        value = f"{value:.9g}"
    hidden = None
    if value is not None and str(value) != text:
        hidden = cut(value, _LONGEST_CELL)
    return tag("td", content, class_=style, data_value=hidden)
