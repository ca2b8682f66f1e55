"""`equipoise plan`: predict the memory of the configured training under every strategy."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from equipoise.app.batch_size import check_has_number
from equipoise.app.command import present, read_flags, report, seconds
from equipoise.app.compose import compose_values
from equipoise.errors import ConfigurationError
from equipoise.extensions.common.bench import TIMEOUT, Bench
from equipoise.extensions.common.page.page import write_page
from equipoise.extensions.common.planned_devices import describe_devices
from equipoise.extensions.planning.command.page import plan_page
from equipoise.extensions.planning.command.rows import print_plan
from equipoise.extensions.planning.command.trial import make_plan
from equipoise.extensions.planning.tracing.obstacles import reason_of
from equipoise.interop.remote.paths import AnyPath, to_path
from equipoise.parallel.workers.availability import require_workers
from equipoise.parallel.workers.bounded_call import CallError

__all__ = ["show_plan"]

_TAKES = "equipoise plan takes overrides, --config-dir FOLDER, --json, --html=FILE and --timeout=SECONDS"


def show_plan(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Run the command.

    Args:
        arguments: Overrides as for `fit`, where `trainer.devices` may describe devices that are not here; `--json`;
            `--html=FILE` for a page with a picture; and `--timeout=SECONDS`.
        folders: The folders with configurations, the one with the primary `config.yaml` first.

    Raises:
        ConfigurationError: If an argument or the configuration is wrong, or the step can neither be traced nor run.
    """
    require_workers("equipoise plan")

    # 1. The arguments, the configuration and the devices.
    readers = {"--json": present, "--html": _file, "--timeout": seconds}
    overrides, flags = read_flags(arguments, readers, _TAKES)
    page = flags.get("--html")
    with tempfile.TemporaryDirectory(prefix="equipoise-plan-") as temporary:
        values = compose_values(overrides, folders, Path(temporary, "run"))
        check_has_number(values, "equipoise plan")
        devices = describe_devices(_devices_of(values["trainer"]))

        # 2. The plan, in a process of its own.
        report("tracing a step without memory")
        bench = Bench(Path(temporary), folders, timeout=flags.get("--timeout", TIMEOUT), explain=reason_of)
        try:
            result = bench.run(make_plan, values, devices, page is not None)
        except CallError as error:
            reason = str(error).rstrip(".")
            if not error.is_raised:
                reason = f"The plan was not made: {reason}"
            raise ConfigurationError(f"{reason}.") from error

    # 3. What the user sees.
    if page is not None:
        _write(plan_page(result), page)
    if "--json" in flags:
        print(json.dumps(result, indent=2))
    else:
        print_plan(result)


def _file(name: str, text: str | None) -> AnyPath:
    """Read the name of a file."""
    if not text or to_path(text).is_dir():
        raise ConfigurationError(f"{name} takes the name of a file, such as {name}=plan.html, not {text or ''!r}.")
    return to_path(text)


def _write(page: str, path: AnyPath) -> None:
    try:
        write_page(page, path)
    except OSError as error:
        raise ConfigurationError(f"The page cannot be written to {path}: {error.strerror or error}.") from error


def _devices_of(trainer: dict[str, Any]) -> Any:
    """Return the devices of the configuration; a CPU counts once unless a number is given."""
    devices = trainer.get("devices")
    if devices is None:
        devices = "auto"
    is_cpu = trainer.get("accelerator") == "cpu"
    if is_cpu and devices in ("auto", -1):
        return ["cpu"]
    if is_cpu and isinstance(devices, int):
        return [f"{devices}xcpu"]
    return devices
