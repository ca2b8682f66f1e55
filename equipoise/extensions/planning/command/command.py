"""`equipoise plan`: predict the memory of the configured training under every strategy."""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from equipoise.app.batch_size import check_has_number
from equipoise.app.compose import compose_values
from equipoise.errors import ConfigurationError
from equipoise.extensions.planning.command.page import plan_page
from equipoise.extensions.planning.command.table import print_plan
from equipoise.extensions.planning.command.trial import write_plan
from equipoise.extensions.planning.description.devices import describe_devices
from equipoise.extensions.report.page.page import write_page
from equipoise.parallel.workers.availability import require_workers
from equipoise.parallel.workers.bounded_call import call_bounded

__all__ = ["show_plan"]

_TIMEOUT = 600.0


@dataclass(frozen=True, kw_only=True)
class _Flags:
    """Flags of the command.

    Attributes:
        as_json: True to print JSON. Default: False.
        page: File for the page; None: no page. Default: None.
        timeout: Seconds for the process. Default: 600.
    """

    as_json: bool = False
    page: Path | None = None
    timeout: float = _TIMEOUT


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
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    flags = _flags_of([argument for argument in arguments if argument.startswith("-")])
    with tempfile.TemporaryDirectory(prefix="equipoise-plan-") as temporary:
        values = compose_values(overrides, folders, Path(temporary, "run"))
        check_has_number(values, "equipoise plan")
        devices = describe_devices(_devices_of(values["trainer"]))

        # 2. The plan, in a process of its own.
        request = {
            "values": values,
            "devices": [asdict(device) for device in devices],
            "with_curves": flags.page is not None,
        }
        paths = [str(folder.parent) for folder in folders]
        with _progress("tracing a step without memory ..."):
            result = _run(request, Path(temporary), paths, flags.timeout)

    # 3. What the user sees.
    if result.get("reason"):
        raise ConfigurationError(f"{str(result['reason']).rstrip('.')}.")
    if flags.page is not None:
        _write(plan_page(result), flags.page)
    if flags.as_json:
        print(json.dumps(result, indent=2))
    else:
        print_plan(result)


def _flags_of(texts: Sequence[str]) -> _Flags:
    """Return the flags of the command line.

    Raises:
        ConfigurationError: If there is another flag, or a wrong value.
    """
    flags = _Flags()
    for text in texts:
        name, _, value = text.partition("=")
        if text == "--json":
            flags = replace(flags, as_json=True)
        elif name == "--timeout":
            flags = replace(flags, timeout=_seconds(value))
        elif name == "--html":
            if not value or Path(value).is_dir():
                raise ConfigurationError(f"--html takes the name of a file, such as --html=plan.html, not {value!r}.")
            flags = replace(flags, page=Path(value))
        else:
            raise ConfigurationError(
                "equipoise plan takes overrides, --config-dir FOLDER, --json, --html=FILE and --timeout=SECONDS, not"
                f" {text}."
            )
    return flags


def _seconds(text: str) -> float:
    """Return the seconds of `--timeout`."""
    try:
        seconds = float(text)
    except ValueError:
        # A text is as wrong as zero seconds.
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ConfigurationError(f"--timeout takes seconds above 0, such as --timeout=300, not {text!r}.")
    return seconds


@contextmanager
def _progress(text: str) -> Iterator[None]:
    """Show what is done in a `with` block: moving on a terminal, as a line elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"equipoise: {text}", file=sys.stderr, flush=True)
        yield
        return
    with console.status(f"equipoise: {text}"):
        yield


def _write(page: str, path: Path) -> None:
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


def _run(request: dict[str, Any], folder: Path, paths: Sequence[str], timeout: float) -> dict[str, Any]:
    """Return the answer of the process: a plan, or the reason why there is none."""
    result_file = folder / "plan.json"
    reason = call_bounded(
        write_plan,
        result_file,
        json.dumps(request, default=str),
        timeout=timeout,
        output=folder / "output.txt",
        option=" (--timeout=SECONDS)",
        paths=paths,
    )
    if result_file.is_file():
        result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
        return result
    return {"reason": f"The plan was not made: {reason or 'its process left no result'}."}
