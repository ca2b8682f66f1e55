"""`equipoise compare`: run the configured module under each strategy, and compare."""

import tempfile
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from equipoise.app.comparison.candidates.candidates import Attempt, Candidate, chosen_candidates
from equipoise.app.comparison.candidates.prediction import predicted_peaks
from equipoise.app.comparison.measuring.largest import largest_that_runs
from equipoise.app.comparison.measuring.trial import request_of, run_attempt
from equipoise.app.comparison.results.comparison import Comparison, Row
from equipoise.app.comparison.results.page import comparison_page
from equipoise.app.comparison.results.recommendation import notes_on, recommend
from equipoise.app.comparison.results.tables import ComparisonDisplay, print_comparison
from equipoise.app.compose import compose_values
from equipoise.app.trials.flags import list_of_names, present, read_flags, seconds, whole_number
from equipoise.errors import ConfigurationError, StepError
from equipoise.memory.profile.places import names_of_devices
from equipoise.report.page.page import write_page
from equipoise.trainer.settings.devices import select_devices

__all__ = ["show_comparison"]

_TIMEOUT = 600.0
_STEPS = 5
# The largest batch to try, in multiples of the configured one.
_MOST_TIMES = 64
_TAKES = (
    "equipoise compare takes overrides, --config-dir FOLDER, --strategies=NAME,NAME, --steps=N, --largest[=N],"
    " --timeout=SECONDS, --output=FOLDER and --json"
)


@dataclass(frozen=True)
class _Options:
    """Flags of the command.

    Attributes:
        strategies: Names of the strategies; None for the usual ones.
        steps: Number of steps whose time is measured.
        searches_largest: Whether the largest batch is looked for.
        bound: The largest batch to try; None for a multiple of the configured one.
        timeout: Seconds for each trial.
        output: The folder for files; None for a new one under outputs.
        as_json: Whether the output is JSON.
    """

    strategies: list[str] | None
    steps: int
    searches_largest: bool
    bound: int | None
    timeout: float
    output: Path | None
    as_json: bool

    @classmethod
    def read(cls, arguments: Sequence[str]) -> tuple["_Options", list[str]]:
        """Return the options, and the overrides."""
        readers = {
            "--strategies": list_of_names,
            "--steps": whole_number,
            "--largest": _bound,
            "--timeout": seconds,
            "--output": _folder,
            "--json": present,
        }
        overrides, flags = read_flags(arguments, readers, _TAKES)
        options = cls(
            strategies=flags.get("--strategies"),
            steps=flags.get("--steps", _STEPS),
            searches_largest="--largest" in flags,
            bound=flags.get("--largest"),
            timeout=flags.get("--timeout", _TIMEOUT),
            output=flags.get("--output"),
            as_json="--json" in flags,
        )
        return options, overrides


def _bound(name: str, text: str | None) -> int | None:
    # The flag may stand alone.
    if text is None:
        return None
    return whole_number(name, text)


def _folder(name: str, text: str | None) -> Path:
    if not text:
        raise ConfigurationError(f"{name} takes a folder, such as {name}=comparison.")
    return Path(text)


def show_comparison(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Run the command.

    Args:
        arguments: Overrides as for `fit`, and the flags that `_TAKES` names.
        folders: The folders with configurations, the one with the primary `config.yaml` first.

    Raises:
        ConfigurationError: If an argument or the configuration is wrong.
        StepError: If a step fails on one device already, for another reason than memory.
        KeyboardInterrupt: After Ctrl-C, when the results until then are shown and written.
    """
    # 1. The arguments, the configuration and the devices.
    options, overrides = _Options.read(arguments)
    candidates = chosen_candidates(options.strategies)
    with tempfile.TemporaryDirectory(prefix="equipoise-compare-") as temporary:
        values = compose_values(overrides, folders, Path(temporary, "run"))
        _check(values, options)
        # Callbacks and loggers of the user are no part of a step.
        values["callbacks"] = {}
        values["logger"] = {}
        trainer = values["trainer"]
        selected = select_devices(trainer.get("accelerator", "auto"), trainer.get("devices", "auto"))
        devices = [str(device) for device in selected]

        # 2. The trials. Results that are there are shown, whatever ends the command.
        paths = [str(folder.parent) for folder in folders]
        trials = _Trials(values, devices, candidates, Path(temporary), paths, options)
        try:
            trials.run()
        except KeyboardInterrupt:
            trials.comparison.interrupt()
            raise
        finally:
            if trials.comparison.measured:
                _show(trials.comparison, values, options)
    if not trials.comparison.measured:
        _show(trials.comparison, values, options)


def _check(values: dict[str, Any], options: _Options) -> None:
    """Refuse what has no meaning here."""
    if values.get("launcher"):
        raise ConfigurationError("equipoise compare runs on the devices of this machine; leave the launcher out.")
    if values["trainer"].get("num_nodes") not in (None, 1):
        raise ConfigurationError("equipoise compare runs on this machine alone; leave trainer.num_nodes out.")
    if options.searches_largest and _batch_size(values) is None:
        raise ConfigurationError("--largest changes data.batch_size, but the data have no such key with a number.")


def _batch_size(values: dict[str, Any]) -> int | None:
    data = values.get("data") or {}
    size = data.get("batch_size")
    # By type, because isinstance counts true and false among the integers.
    if type(size) is int:
        return size
    return None


def _show(comparison: Comparison, values: dict[str, Any], options: _Options) -> None:
    """Write the files, and print the results."""
    # 1. The files.
    recommendation = recommend(comparison)
    now = datetime.now()
    folder = options.output or Path("outputs", f"{now:%Y-%m-%d}", f"{now:%H-%M-%S}-compare")
    configuration = {key: value for key, value in values.items() if key not in ("output_dir", "callbacks", "logger")}
    page = comparison_page(comparison, recommendation, configuration)
    try:
        write_page(page, folder / "compare.html")
        comparison.write_csv(folder / "compare.csv")
    except OSError as error:
        raise ConfigurationError(f"The results cannot be written into {str(folder)!r}: {error}") from error

    # 2. The output.
    if options.as_json:
        print(comparison.to_json(recommendation))
    else:
        files = [str(folder / "compare.html"), str(folder / "compare.csv")]
        print_comparison(comparison, recommendation, files)


class _Trials:
    """Runs one trial after the other.

    Args:
        values: The configuration.
        devices: Names of the devices.
        candidates: The strategies.
        folder: A folder for files.
        paths: Folders from which processes import the user's modules.
        options: Flags of the command.

    Attributes:
        comparison: The results so far.
    """

    def __init__(
        self,
        values: dict[str, Any],
        devices: list[str],
        candidates: Sequence[Candidate],
        folder: Path,
        paths: Sequence[str],
        options: _Options,
    ) -> None:
        size = _batch_size(values)
        self.comparison = Comparison(
            title=values["module"]["_target_"].rpartition(".")[2],
            devices=names_of_devices(devices),
            batch_size=size,
            # One before the measurements, and two beside the timed ones; see `DeviceProbe`.
            steps=options.steps + 3,
            notes=notes_on(devices, has_batch_size=size is not None),
        )
        self._values = values
        self._devices = devices
        self._folder = folder
        self._paths = paths
        self._options = options
        self._count = 0
        self._attempts: list[tuple[Attempt, Row]] = []
        for candidate in candidates:
            attempt = candidate.attempt(values, devices)
            row = Row(candidate.label, attempt.overrides, attempt.devices)
            self._attempts.append((attempt, row))
            self.comparison.rows.append(row)

    def run(self) -> None:
        """Run all strategies.

        Raises:
            ConfigurationError: If the configuration is wrong, so that the trial on one device cannot run.
            StepError: If a step fails on one device for another reason than memory.
        """
        display = ComparisonDisplay(self.comparison)
        with display.shown():
            for attempt, row in self._attempts:
                if attempt.reason is not None:
                    row.refuse(attempt.reason)
                else:
                    display.begin(row)
                    self._run_one(attempt, row)
                display.end(row)

    def _run_one(self, attempt: Attempt, row: Row) -> None:
        """Run a strategy, and search its largest batch."""
        prediction = predicted_peaks(attempt)
        row.begin(prediction)
        measured = self._measure(attempt, self._options.steps)
        if attempt.candidate.name == "single_device":
            _raise_error(measured)
        # Steps of other sizes lead to other weights.
        if not attempt.has_same_batches:
            measured.pop("distance", None)
        is_memory = bool(measured.get("is_memory"))
        has_run = "reason" not in measured
        if self._options.searches_largest and (has_run or is_memory):
            self._search_largest(attempt.candidate, row, has_run=has_run)
        row.finish(measured)

    def _measure(self, attempt: Attempt, steps: int) -> dict[str, Any]:
        self._count += 1
        weights = self._folder / "weights.pt"
        request = request_of(attempt, self._paths, steps=steps, weights=weights)
        return run_attempt(request, self._folder / f"trial-{self._count}", self._options.timeout)

    def _search_largest(self, candidate: Candidate, row: Row, *, has_run: bool) -> None:
        """Search the largest batch of a strategy."""
        size = self.comparison.batch_size
        assert size is not None
        # 1. What the configured size has shown.
        running_size = 0
        failed_size: int | None = size
        if has_run:
            running_size = size
            failed_size = None

        # 2. Processes share a batch evenly.
        multiple = 1
        if candidate.has_processes:
            multiple = len(self._devices)
        bound = self._options.bound or _MOST_TIMES * size
        largest, is_bound = largest_that_runs(
            lambda tried: self._runs(candidate, tried),
            running_size,
            failed_size,
            bound,
            multiple,
        )
        row.note_largest(largest, is_bound=is_bound)

    def _runs(self, candidate: Candidate, size: int) -> bool:
        """Return True if a batch size runs."""
        values = deepcopy(self._values)
        values["data"]["batch_size"] = size
        attempt = candidate.attempt(values, self._devices)
        return "reason" not in self._measure(attempt, 1)


def _raise_error(measured: dict[str, Any]) -> None:
    """Raise the error of the trial on one device, with which no strategy could run."""
    reason = measured.get("reason")
    if reason is None:
        return
    if measured.get("is_configuration"):
        raise ConfigurationError(reason)
    if measured.get("is_error"):
        raise StepError(f"A step fails on one device already, so there is nothing to compare: {reason}")
