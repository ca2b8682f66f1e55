"""`equipoise compare`: run the configured module under each strategy, and compare."""

import os
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from equipoise.app.batch_size import check_has_number
from equipoise.app.compose import compose_values
from equipoise.app.torchrun import check_runs_here
from equipoise.errors import ConfigurationError
from equipoise.extensions.common.bench import Bench
from equipoise.extensions.common.page.page import write_page
from equipoise.extensions.comparison.measuring.candidates import batch_size_of, chosen_candidates
from equipoise.extensions.comparison.options import Options
from equipoise.extensions.comparison.results.comparison import Comparison
from equipoise.extensions.comparison.results.page import comparison_page
from equipoise.extensions.comparison.results.recommendation import recommend
from equipoise.extensions.comparison.results.tables import print_comparison
from equipoise.extensions.comparison.trials import Trials
from equipoise.parallel.workers.availability import require_workers
from equipoise.trainer.settings.devices import select_devices

__all__ = ["show_comparison"]


def show_comparison(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Run the command.

    Args:
        arguments: Overrides as for `fit`, and flags; see `Options`.
        folders: The folders with configurations, the one with the primary `config.yaml` first.

    Raises:
        ConfigurationError: If an argument or the configuration is wrong.
        StepError: If a step fails on one device already, for another reason than memory.
        KeyboardInterrupt: After Ctrl-C, when the results until then are shown and written.
    """
    require_workers("equipoise compare")

    # 1. The arguments, the configuration and the devices.
    options, overrides = Options.read(arguments)
    candidates = chosen_candidates(options.strategies)
    with tempfile.TemporaryDirectory(prefix="equipoise-compare-") as temporary:
        values = compose_values(overrides, folders, Path(temporary, "run"))
        _check(values, options)
        # Callbacks and loggers of the user are no part of a step.
        values["callbacks"] = {}
        values["logger"] = {}
        devices = _devices(values, options)

        # 2. The trials.
        bench = Bench(Path(temporary), folders, timeout=options.timeout)
        trials = Trials(values, devices, candidates, bench, options, overrides)
        comparison = trials.comparison
        try:
            trials.run()
        except BaseException:
            # Measured values are shown, also if an error or an interrupt ends the command.
            comparison.interrupt()
            if comparison.measured:
                _show(comparison, values, options)
            raise
    _show(comparison, values, options)


def _check(values: dict[str, Any], options: Options) -> None:
    """Refuse what has no meaning here, or would fail in the end."""
    check_runs_here(values, "equipoise compare")
    check_has_number(values, "equipoise compare")
    if options.searches_largest and batch_size_of(values) is None:
        raise ConfigurationError("--largest changes data.batch_size, but the data have no such key with a number.")
    if options.output is not None:
        _check_folder(options.output)


def _devices(values: dict[str, Any], options: Options) -> list[str]:
    """Return the names of the devices."""
    trainer = values["trainer"]
    selected = select_devices(trainer.get("accelerator", "auto"), trainer.get("devices", "auto"))
    devices = [str(device) for device in selected]
    has_cpu = any(device.startswith("cpu") for device in devices)
    if has_cpu and options.searches_largest and options.bound is None:
        raise ConfigurationError(
            "On a CPU the largest batch is one that fills the memory of the machine; give a bound, such as"
            " --largest=512."
        )
    return devices


def _check_folder(folder: Path) -> None:
    """Check before the measurements that files can be written into a folder, which need not exist."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigurationError(f"--output takes a folder, but {str(existing)!r} is a file.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigurationError(f"--output takes a folder, but nothing can be written into {str(existing)!r}.")


def _show(comparison: Comparison, values: dict[str, Any], options: Options) -> None:
    """Write the files, and print the results. They are printed also if they cannot be written."""
    # 1. The files.
    recommendation = recommend(comparison)
    now = datetime.now()
    folder = options.output or Path("outputs", f"{now:%Y-%m-%d}", f"{now:%H-%M-%S}-compare")
    configuration = {key: value for key, value in values.items() if key not in ("output_dir", "callbacks", "logger")}
    page = comparison_page(comparison, recommendation, configuration)
    files = [folder / "compare.html", folder / "compare.csv"]
    failure = None
    try:
        write_page(page, files[0])
        comparison.write_csv(files[1])
    except OSError as error:
        failure = ConfigurationError(f"The results cannot be written into {str(folder)!r}: {error}")
        files = []

    # 2. The output.
    if options.as_json:
        print(comparison.to_json(recommendation))
    else:
        print_comparison(comparison, recommendation, [str(file) for file in files])
    if failure is not None:
        raise failure
