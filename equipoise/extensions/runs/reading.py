"""Read what runs leave: run.json, metrics.csv, configurations, and results.csv of sweeps. Nothing read runs code."""

import csv
import json
import math
import platform
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import psutil
import yaml

from equipoise.app.earlier_runs.configurations import flat_configuration
from equipoise.extensions.common.page.markup import cut
from equipoise.extensions.common.page.scales import thin
from equipoise.extensions.report.run_file.live_values import LIVE_FILE
from equipoise.extensions.runs.configuration import with_classes
from equipoise.extensions.runs.found import FoundRun
from equipoise.extensions.runs.run import Curve, Run, Unreadable
from equipoise.formats import format_path, printable

__all__ = ["Reading", "read_run", "read_runs"]

_Value = TypeVar("_Value")
# Name, step, value and seconds.
LiveValue = tuple[str, float, float, float]
# A run, None for a folder that is no run, and those of its files that could not be read.
Reading = tuple[Run | None, list[Unreadable]]

# What a damaged file may raise.
_DAMAGE = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
    OverflowError,
    csv.Error,
    yaml.YAMLError,
)
_MOST_BYTES = {
    "run.json": 2**26,
    "config.yaml": 2**20,
    "hparams.yaml": 2**20,
    "metrics.csv": 2**30,
}
_LONGEST_TEXT = 500
# Points of a curve that come from a file without a bound.
_MOST_POINTS = 254
_ORIGIN = ("module", "command", "folder", "host", "commit")
_STATES = ("finished", "failed", "interrupted", "running")
_STATE_OF_JOB = {
    "done": "finished",
    "failed": "failed",
    "interrupted": "interrupted",
}
# Columns that are no metrics, and metrics that have columns of their own.
_NO_METRIC = re.compile(r"epoch$|step$|memory/")
# The parser in C, where PyYAML has it, makes the same of a file.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_run(run_files: FoundRun) -> Reading:
    """Return a run, None for a folder that is no run, and those of its files that could not be read."""
    readers = {
        "run.json": _read_run_file,
        "config.yaml": _read_configuration,
        "hparams.yaml": _read_configuration,
        "metrics.csv": _read_metrics,
    }
    values: dict[str, Any] = {}
    unreadable = []
    # What a run moves from here to run.json meanwhile is there.
    live = _read_live(run_files.files.get(LIVE_FILE))
    for name, read in readers.items():
        path = run_files.files.get(name)
        if path is None or _is_needless(name, values):
            continue
        try:
            if path.stat().st_size > _MOST_BYTES[name]:
                raise ValueError(f"it has more than {_MOST_BYTES[name]:,} bytes")
            found = read(path)
            if "curves" in found:
                # Loggers receive no learning rates.
                found["curves"] = {**values.get("curves", {}), **found["curves"]}
            values |= found
            written = path.stat().st_mtime
            values.setdefault("began", written)
            # A run that goes on, or was killed, lasted at least until it wrote this.
            if name == "metrics.csv" and "seconds" in values:
                values["seconds"] = max(values["seconds"], written - values["began"])
        except _DAMAGE as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            if isinstance(error, KeyError):
                reason = f"it has no {reason}"
            unreadable.append(Unreadable(path, _text(reason)))
    if not _is_fit(values) and not unreadable:
        return None, []
    if values.get("state") == "running":
        # What the lines hold may not fit to the rest of a damaged run.
        with suppress(*_DAMAGE):
            values |= _with_live(values, live)
    values = _with_end(run_files.folder, values)
    name = printable(format_path(str(run_files.folder.absolute())))
    run = Run(
        folder=run_files.folder,
        name=name,
        report=run_files.files.get("report.html"),
        **values,
    )
    return run, unreadable


def read_runs(
    results: Iterable[FoundRun | Unreadable], read: Callable[[FoundRun], Reading] = read_run
) -> tuple[list[Run], list[Unreadable]]:
    """Return the runs among what was found, and all that could not be read."""
    runs = []
    unreadable = []
    for result in results:
        if isinstance(result, Unreadable):
            unreadable.append(result)
            continue
        run, failures = read(result)
        unreadable += failures
        if run is not None:
            runs.append(run)
    return runs, unreadable


def _read_live(path: Path | None) -> list[LiveValue]:
    """Return the values of a run since its run.json was written."""
    values = []
    with suppress(*_DAMAGE):
        if path is None or path.stat().st_size > _MOST_BYTES["run.json"]:
            return []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            # The last line may be cut off.
            name, step, value, seconds = json.loads(line)
            values.append((_text(name), _finite(step), float(value), _finite(seconds)))
    return values


def _with_live(values: Mapping[str, Any], live: Sequence[LiveValue]) -> dict[str, Any]:
    """Return curves, times, steps and seconds of a run with the values since its run.json."""
    if not live:
        return {}
    curves = {name: dict(curve) for name, curve in values["curves"].items()}
    times = dict(values["times"])
    if not times:
        times[min(float(values["steps"]), live[0][1])] = 0.0
    seconds = values["seconds"]
    done = max(times)
    names = {*curves, *(name for name, *_ in live)}
    for logged, step, value, at in live:
        name = _metric_name(logged, names)
        curves.setdefault(name, {})[step] = value
        seconds = max(seconds, at)
        # A value of step 9 stands where ten steps are done.
        if step + 1 > done:
            done = step + 1
            times[done] = at
    return {
        "curves": curves,
        "times": times,
        "steps": max(values["steps"], int(done)),
        "seconds": seconds,
    }


def _is_needless(name: str, values: Mapping[str, Any]) -> bool:
    """Return whether a file would add nothing to what was read before it."""
    if name == "hparams.yaml":
        return "configuration" in values
    # A run that was killed has later values in its metrics than in the first file.
    return name == "metrics.csv" and values.get("state", "running") != "running"


def _is_fit(values: Mapping[str, Any]) -> bool:
    """Return whether the files of a folder are those of a fit in earnest: others leave a configuration, too."""
    configuration = values.get("configuration", {})
    if configuration.get("trainer.fast_dev_run", "false") not in ("false", "0", "null"):
        return False
    if "state" in values:
        return True
    if "stage" in configuration:
        return bool(configuration["stage"] == "fit")
    return "curves" in values


def _with_end(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a run with those of its sweep, if it could not write the last ones itself."""
    process = values.pop("process", None)
    if values.get("state") == "running" and process is not None and not _is_alive(process):
        values |= {"state": "interrupted", "error": "Its process has ended without a word."}
    elif values.get("state", "unknown") != "unknown":
        return values
    return values | _results_of_sweep(folder.parent).get(folder.name, {})


def _is_alive(process: tuple[str, int, float]) -> bool:
    """Return whether the process of a run goes on; True for one of another machine, of which nothing is known."""
    host, number, began = process
    if host != platform.node():
        return True
    try:
        return bool(abs(psutil.Process(number).create_time() - began) < 2.0)
    except (psutil.Error, ValueError, OverflowError):
        return False


def _results_of_sweep(folder: Path) -> Mapping[str, dict[str, Any]]:
    """Return state, error and time of the jobs in the results.csv of a sweep, by the names of their folders."""
    results: dict[str, dict[str, Any]] = {}
    path = folder / "results.csv"
    with suppress(*_DAMAGE), path.open(encoding="utf-8", errors="replace", newline="") as file:
        for row in csv.DictReader(file):
            result: dict[str, Any] = {
                "state": _STATE_OF_JOB[row["state"]],
                "error": _text(row["error"]),
            }
            if row["seconds"]:
                result["seconds"] = _finite(row["seconds"])
            results[Path(row["folder"]).name] = result
    return results


# Files of a run.


def _read_run_file(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    state = content["state"]
    if state not in _STATES:
        raise ValueError("it names no state that runs have")
    return {
        "state": state,
        "error": _text(content["error"]),
        "began": datetime.fromisoformat(content["began"]).timestamp(),
        "seconds": _finite(content["seconds"]),
        "epochs": _count(content["epochs"]),
        "steps": _count(content["steps"]),
        "peak_memory": _mapping(content["peak_memory"], _count),
        "monitored": _mapping(content["monitored"], _text),
        "curves": _mapping(content["curves"], _curve),
        "times": _curve(content["times"]),
        "origin": _origin(content),
        # Files of earlier versions have none.
        "overrides": [_text(override) for override in content.get("overrides", ())],
        "process": (
            content["host"],
            int(content["process"]),
            float(content["process_began"]),
        ),
    }


def _origin(content: Mapping[str, Any]) -> dict[str, str]:
    origin = {}
    for name in _ORIGIN:
        origin[name] = _text(content[name])
    if content["changed"]:
        origin["commit"] += " with changes"
    return origin | _mapping(content["versions"], _text)


def _mapping(values: Mapping[Any, Any], read: Callable[[Any], _Value]) -> dict[str, _Value]:
    """Return a mapping with its values read; what is none is damage."""
    return {_text(name): read(value) for name, value in values.items()}


def _curve(columns: Sequence[Sequence[Any]]) -> Curve:
    """Return values by steps. Numbers that JSON lacks are texts."""
    steps, values = columns
    curve = {}
    for step, value in zip(steps, values, strict=True):
        curve[_finite(step)] = float(value)
    return curve


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no finite number")
    return number


def _count(value: Any) -> int:
    return int(_finite(value))


def _text(value: Any) -> str:
    if value is None:
        return ""
    return cut(printable(str(value)), _LONGEST_TEXT)


def _read_configuration(path: Path) -> dict[str, Any]:
    content = yaml.load(path.read_bytes(), _LOADER)
    if not isinstance(content, dict):
        raise ValueError("it is no mapping")
    return {"configuration": with_classes(flat_configuration(content))}


def _metric_name(logged: str, names: Container[str]) -> str:
    """Return the name that run.json has for what a logger has received among others: "loss" for "loss_epoch"."""
    name = logged.removesuffix("_epoch")
    return name if f"{name}_step" in names else logged


def _read_metrics(path: Path) -> dict[str, Any]:
    curves: dict[str, dict[float, float]] = defaultdict(dict)
    epochs = 0
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        rows = csv.reader(file)
        heads = [_text(head) for head in next(rows, [])]
        heads = [_metric_name(head, heads) for head in heads]
        step_column = heads.index("step")
        for row in rows:
            # The last row of a run that was killed may be cut off.
            if len(row) != len(heads):
                continue
            step = float(row[step_column])
            for head, cell in zip(heads, row, strict=True):
                if cell and head == "epoch":
                    epochs = max(epochs, int(float(cell)) + 1)
                elif cell and not _NO_METRIC.match(head):
                    curves[head][step] = float(cell)
    # Thinning keeps the least and the greatest value.
    last = -1
    thinned = {}
    for name, curve in curves.items():
        last = max(last, int(max(curve)))
        thinned[name] = dict(thin(sorted(curve.items()), _MOST_POINTS))
    return {
        "curves": thinned,
        "epochs": epochs,
        "steps": last + 1,
    }
