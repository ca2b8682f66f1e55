"""`equipoise savings`: measure one step of the configured module under each memory saver."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from equipoise.app.command import present, read_flags, report, seconds
from equipoise.app.compose import compose_values
from equipoise.errors import ConfigurationError
from equipoise.extensions.common.bench import TIMEOUT, Bench
from equipoise.extensions.comparison.savings.results import Result, compare, print_results, to_json
from equipoise.extensions.comparison.savings.savers import SAVERS, Saver, combined
from equipoise.extensions.comparison.savings.trial import measure
from equipoise.parallel.workers.availability import require_workers
from equipoise.parallel.workers.bounded_call import CallError

__all__ = ["show_savings"]

_TAKES = "equipoise savings takes overrides, --config-dir FOLDER, --json and --timeout=SECONDS"


def show_savings(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Run the command.

    Args:
        arguments: Overrides as for `fit`, `--json`, and `--timeout=SECONDS`, the bound for each saver.
        folders: The folders with configurations, the one with the primary `config.yaml` first.

    Raises:
        ConfigurationError: If an argument or the configuration is wrong.
        KeyboardInterrupt: After Ctrl-C, when the results until then are shown.
    """
    require_workers("equipoise savings")

    # 1. The arguments and the configuration.
    overrides, flags = read_flags(arguments, {"--json": present, "--timeout": seconds}, _TAKES)
    as_json = "--json" in flags
    with tempfile.TemporaryDirectory(prefix="equipoise-savings-") as temporary:
        values = compose_values(overrides, folders, Path(temporary, "run"))
        # Callbacks and loggers of the user are no part of a step.
        values["callbacks"] = {}
        values["logger"] = {}

        # 2. The trials. The results so far are shown, also if an error or an interrupt ends the command.
        trials = _Trials(values, Bench(Path(temporary), folders, timeout=flags.get("--timeout", TIMEOUT)))
        try:
            trials.run()
        finally:
            if trials.results and as_json:
                print(to_json(trials.results, trials.device))
            elif trials.results:
                print_results(trials.results, trials.device)


class _Trials:
    """Runs one trial after the other.

    Attributes:
        results: The results so far.
        device: The device on which the steps ran; None before the first.
    """

    def __init__(self, values: dict[str, Any], bench: Bench) -> None:
        self.results: list[Result] = []
        self.device: str | None = None
        self._values = values
        self._bench = bench
        self._first: dict[str, Any] | None = None

    def run(self) -> None:
        """Run all savers, and at last those together that change no number.

        Raises:
            ConfigurationError: If the configuration is wrong, so that the first trial cannot run.
        """
        equal = []
        for saver in SAVERS:
            result = self._run_one(saver)
            self.results.append(result)
            if result.numbers == "to the bit" and saver is not SAVERS[0]:
                equal.append(saver)
        if len(equal) > 1:
            self.results.append(self._run_one(combined(equal)))

    def _run_one(self, saver: Saver) -> Result:
        # 1. The trial, unless it is known that it cannot run.
        trial = saver.trial(self._values)
        result = Result(saver.name, trial.overrides, reason=trial.reason)
        if trial.reason is not None:
            return result
        report(f"measuring {saver.name}")
        try:
            measured = self._bench.run(measure, trial, self._bench.new_folder())
        except CallError as error:
            if saver is SAVERS[0] and error.is_wrong_input:
                raise ConfigurationError(str(error)) from None
            # A failure is a result as well.
            return replace(result, reason=str(error))

        # 2. Its result.
        numbers = compare(measured, self._first)
        if saver is SAVERS[0]:
            self._first = measured
        self.device = measured["device"]
        return replace(
            result,
            overrides=[*trial.overrides, *measured["overrides"]],
            peak=measured["peak"],
            seconds=measured["seconds"],
            numbers=numbers,
        )
