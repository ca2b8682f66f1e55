"""`equipoise doctor`: print what a bug report says about the machine and its packages, as text or JSON.

The text has 80 columns, for a terminal, a pipe or a bug report.
"""

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import Any

from equipoise.app.config.suggestions import did_you_mean
from equipoise.app.machine.facts.features import CHECKED, CheckedFeature, list_features
from equipoise.app.machine.facts.packages import Package, list_packages
from equipoise.app.machine.facts.privacy import without_paths
from equipoise.app.machine.facts.system import read_environment, read_limits, read_system
from equipoise.app.machine.facts.torch_build import read_torch_build
from equipoise.errors import ConfigurationError
from equipoise.formats import format_bytes

__all__ = ["show_doctor"]

_COLUMNS = 80
# Label and text.
Row = tuple[str, str]


def show_doctor(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Run the command.

    Args:
        arguments: None, or `--json`.
        folders: None.

    Raises:
        ConfigurationError: If there are other arguments.
    """
    for argument in arguments:
        if argument != "--json":
            hint = did_you_mean(argument, ["--json"])
            raise ConfigurationError(f"equipoise doctor takes no argument {argument!r}{hint}")
    # All facts come before the first line: what packages print while they are imported is not between the lines.
    facts = _collect_facts()
    if "--json" in arguments:
        print(json.dumps(facts, indent=2, default=asdict))
    else:
        print(_as_text(facts))


def _collect_facts() -> dict[str, Any]:
    """Return the facts of each kind. A kind that cannot be read is None, and the reason is among the failures."""
    readers = {
        "system": read_system,
        "packages": list_packages,
        "torch": read_torch_build,
        "devices": _read_devices,
        "features": lambda: list_features(list_packages()),
        "limits": read_limits,
        "environment": read_environment,
    }
    facts: dict[str, Any] = {}
    failures: dict[str, str] = {}
    # What packages print or warn of while they are imported is no part of them. JSON must stand alone on the output.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, read in readers.items():
            try:
                facts[kind] = read()
            except Exception as error:
                # Whatever is wrong with this machine is what the report is about.
                facts[kind] = None
                failures[kind] = f"{type(error).__name__}: {without_paths(str(error))}"
    return {**facts, "failures": failures}


def _read_devices() -> Any:
    # It needs psutil, which may be among the missing packages.
    from equipoise.app.machine.facts.device_list import read_devices

    return read_devices()


def _as_text(facts: Mapping[str, Any]) -> str:
    sections: dict[str, tuple[str, Callable[[Any], list[Row]]]] = {
        "system": ("System", _system_rows),
        "packages": ("Packages", _package_rows),
        "torch": ("torch", _torch_rows),
        "devices": ("Devices", _device_rows),
        # The explanation stands in the title, since many features are checked.
        "features": (f"Features (checked: {CHECKED})", _feature_rows),
        "limits": ("Limits", _limit_rows),
        "environment": ("Environment variables", lambda variables: list(variables.items())),
        "failures": ("Not read", lambda failures: list(failures.items())),
    }
    lines = []
    for kind, (title, rows_of) in sections.items():
        # Most machines have no failures, and many no such variables.
        if facts[kind]:
            lines += ["", *wrap(title, _COLUMNS), *_aligned(rows_of(facts[kind]))]
    return "\n".join(lines[1:])


def _aligned(rows: Sequence[Row]) -> list[str]:
    """Return rows as lines: labels in one column, and what does not fit in indented lines below."""
    width = max(len(label) for label, _ in rows)
    lines = []
    for label, text in rows:
        # A long word goes to a line of its own, and is broken only where it is longer than that.
        line = f"{label:<{width}}  {text}"
        lines += wrap(line, _COLUMNS, initial_indent="  ", subsequent_indent=" " * 6, break_on_hyphens=False)
    return lines


def _system_rows(system: Mapping[str, Any]) -> list[Row]:
    default, *other_methods = system["start_methods"]
    names = [system["os"], system["machine"], system["libc"]]
    return [
        ("Equipoise", system["equipoise"]),
        ("Python", f"{system['python']} ({system['implementation']})"),
        ("system", ", ".join(filter(None, names))),
        ("start methods", ", ".join([f"{default} (default)", *other_methods])),
    ]


def _package_rows(packages: Sequence[Package]) -> list[Row]:
    width = max(len(package.version or "-") for package in packages)
    return [(package.name, f"{package.version or '-':<{width}}  {package.remark}") for package in packages]


def _torch_rows(build: Mapping[str, Any]) -> list[Row]:
    is_found = "found" if build["has_compiler"] else "not found; torch.compile needs it on a CPU"
    return [
        ("built for", build["built_for"]),
        ("cuDNN", build["cudnn"] or "none"),
        ("NCCL", build["nccl"] or "none"),
        ("gloo", "available" if build["gloo"] else "not available"),
        ("C++ compiler", f"{build['compiler']}: {is_found}"),
    ]


def _device_rows(devices: Any) -> list[Row]:
    rows = [(info.device, _described(info)) for info in devices.devices]
    if devices.failure is not None:
        rows.append(("GPUs", f"not read: {devices.failure}"))
    elif len(rows) == 1:
        rows.append(("GPUs", "torch finds none"))
    rows.append(("driver", devices.driver or "none found"))
    return rows


def _described(info: Any) -> str:
    parts = [info.name]
    if info.device == "cpu" and info.cores is not None:
        parts.append(f"{info.cores} cores")
    memory = format_bytes(info.memory_total)
    if info.memory_free is not None:
        memory += f", {format_bytes(info.memory_free)} free"
    parts.append(memory)
    if info.compute_capability is not None:
        major, minor = info.compute_capability
        parts.append(f"compute capability {major}.{minor}")
    return ", ".join(parts)


def _feature_rows(features: Sequence[CheckedFeature]) -> list[Row]:
    rows = []
    for feature in features:
        text = feature.remark
        if feature.status == "checked":
            # The title of the section explains the word.
            text = "checked"
        elif feature.status == "refused":
            text = f"refused: {feature.remark}"
        rows.append((feature.name, text))
    return rows


def _limit_rows(limits: Mapping[str, int | None]) -> list[Row]:
    shared_memory = "none"
    size = limits["shared_memory"]
    free = limits["free_shared_memory"]
    if size is not None and free is not None:
        shared_memory = f"{format_bytes(size)}, {format_bytes(free)} free"
    open_files = f"{_number(limits['open_files'])}, at most {_number(limits['most_open_files'])}"
    return [("open files", open_files), ("/dev/shm", shared_memory)]


def _number(limit: int | None) -> str:
    return "unlimited" if limit is None else str(limit)
