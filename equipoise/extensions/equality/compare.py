"""`compare_runs`: the first step at which two runs differ."""

import math
import os
from collections.abc import Iterator

import torch

from equipoise.errors import ConfigurationError
from equipoise.extensions.equality.checkpoints import compare_checkpoints
from equipoise.extensions.equality.findings import LOGGED, Findings, Place
from equipoise.extensions.equality.gaps import Tolerance, largest_gap
from equipoise.extensions.equality.nature import differs_by_nature
from equipoise.extensions.equality.result import RunComparison
from equipoise.extensions.equality.runs import Cell, Run, find_run, in_words
from equipoise.interop.remote.paths import AnyPath
from equipoise.validation import is_number

__all__ = ["compare_runs"]

# Files by name.
_Files = dict[str, AnyPath]


def compare_runs(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
) -> RunComparison:
    """Compare two runs step by step: the values that they logged, and their checkpoints.

    Logged values are those in `metrics.csv`. Of checkpoints that both have of a step, weights, buffers, states of
    optimisers and schedulers, counters, callbacks and all that a resumption needs are compared; those of one name with
    each other, if there are several of the step. They are read as data, so nothing in them is run, and in pieces of a
    tensor, so those of any size need little memory. Values that differ by nature, such as times and paths, are left
    out; what a resumption needs is not compared for other numbers of processes.

    Args:
        first: The folder of a run, a checkpoint of Equipoise or Lightning (a file, or a folder of shards), or a
            `metrics.csv`; a path of this machine, or a URL.
        second: The same of the other run.
        atol: Absolute tolerance. Default: 0.
        rtol: Relative tolerance, of the second value. Default: 0. If both are 0, values are equal if their bits are,
            or if both are NaN.

    Returns:
        How much was compared, the first step at which each name differs, and what was not compared.

    Raises:
        ConfigurationError: If a tolerance is wrong, there is no such run, the runs have no step in common, or are of
            other modules.
        CheckpointError: If a checkpoint cannot be read.

    Example:
        >>> compare_runs("outputs/one_device", "outputs/two_devices").equal  # doctest: +SKIP
        True
    """
    # 1. The arguments.
    for name, value in (("atol", atol), ("rtol", rtol)):
        if not is_number(value) or not 0 <= value < math.inf:
            raise ConfigurationError(f"{name} is a number from 0, not {value!r}.")
    tolerance = Tolerance(atol, rtol)
    runs = (find_run(first), find_run(second))

    # 2. The comparison.
    findings = Findings()
    _compare_logged(*runs, tolerance, findings)
    _compare_saved(*runs, tolerance, findings)
    counts = findings.counts
    if not counts["logged values"] and not counts["checkpoints"]:
        raise ConfigurationError(f"There is nothing to compare: {runs[0]}; {runs[1]}.")
    return RunComparison(
        first=runs[0].path,
        second=runs[1].path,
        atol=atol,
        rtol=rtol,
        logged_values=counts["logged values"],
        steps=counts["steps"],
        checkpoints=counts["checkpoints"],
        tensors=counts["tensors"],
        differences=findings.differences,
        not_compared=findings.reasons,
        left_out=findings.names_left_out,
    )


# Logged values


def _compare_logged(first: Run, second: Run, tolerance: Tolerance, findings: Findings) -> None:
    """Compare the values that both runs have logged at a step."""
    # 1. Those that can be compared.
    cells_of_first = _comparable(first, findings)
    cells_of_second = _comparable(second, findings)
    common = cells_of_first & cells_of_second
    _note_further_cells(first, cells_of_first - common, findings)
    _note_further_cells(second, cells_of_second - common, findings)
    findings.counts.update({"logged values": len(common), "steps": len({cell.step for cell in common})})

    # 2. Their values, in the order of the steps. Equal texts are equal numbers.
    for cell in sorted(common):
        text = first.values[cell]
        other_text = second.values[cell]
        if text == other_text:
            continue
        place = Place(cell.step, LOGGED, cell.name)
        if not findings.has(place):
            _compare_texts(place, (text, other_text), tolerance, findings)


def _comparable(run: Run, findings: Findings) -> set[Cell]:
    """Return the cells of a run without those that differ by nature."""
    names = {cell.name for cell in run.values}
    by_nature = {name for name in names if differs_by_nature(name)}
    for name in sorted(by_nature):
        findings.leave_out(name)
    return {cell for cell in run.values if cell.name not in by_nature}


def _note_further_cells(run: Run, cells: set[Cell], findings: Findings) -> None:
    if not cells:
        return
    listed = ", ".join(sorted({cell.name for cell in cells}))
    steps = in_words(cell.step for cell in cells)
    findings.not_compared(f"logged values that {run.path} alone has: {listed}, of {steps}")


def _compare_texts(place: Place, texts: tuple[str, str], tolerance: Tolerance, findings: Findings) -> None:
    """Compare two texts of a table as numbers, if they are some."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        findings.differs(place, *texts)
        return
    values = torch.tensor(numbers, dtype=torch.float64)
    gap = largest_gap(values[:1], values[1:], 1, tolerance)
    if gap is not None:
        findings.has_gap(place, gap)


# Checkpoints


def _compare_saved(first: Run, second: Run, tolerance: Tolerance, findings: Findings) -> None:
    """Compare the checkpoints that both runs have of a step."""
    common = first.checkpoints.keys() & second.checkpoints.keys()
    for run in (first, second):
        further = run.checkpoints.keys() - common
        if further:
            findings.not_compared(f"checkpoints that {run.path} alone has: of {in_words(further)}")
    for step in sorted(common):
        for files in _pairs(first.checkpoints[step], second.checkpoints[step]):
            compare_checkpoints(files, (first.path, second.path), step, tolerance, findings)


def _pairs(first: _Files, second: _Files) -> Iterator[tuple[AnyPath, AnyPath]]:
    """Yield the checkpoints of one name; of other names, the first of each run."""
    names = [name for name in first if name in second]
    for name in names:
        yield first[name], second[name]
    if not names:
        yield min(first.values(), key=str), min(second.values(), key=str)
