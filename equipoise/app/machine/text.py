"""Facts as plain text of 80 columns, for a terminal, a pipe or a bug report."""

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from equipoise.app.machine.facts.collection import Facts
from equipoise.app.machine.facts.features import CHECKED, Feature
from equipoise.app.machine.facts.packages import Package
from equipoise.app.machine.facts.surroundings import Limits, System
from equipoise.app.machine.facts.torch_build import TorchBuild
from equipoise.formats import format_bytes

if TYPE_CHECKING:
    from equipoise.app.machine.facts.device_list import Devices
    from equipoise.memory.devices import DeviceInfo

__all__ = ["facts_as_text"]

_COLUMNS = 80
# Label and text.
Row = tuple[str, str]


def facts_as_text(facts: Facts) -> str:
    """Return all facts as text, in sections.

    Args:
        facts: The facts.
    """
    sections = {
        "System": _system_rows(facts.system),
        "Packages": _package_rows(facts.packages),
    }
    if facts.torch is not None:
        sections["torch"] = _torch_rows(facts.torch)
    if facts.devices is not None:
        sections["Devices"] = _device_rows(facts.devices)
    if facts.features is not None:
        # The explanation stands in the title, since many features are checked.
        sections[f"Features (checked: {CHECKED})"] = _feature_rows(facts.features)
    if facts.limits is not None:
        sections["Limits"] = _limit_rows(facts.limits)
    sections["Environment variables"] = list(facts.environment.items())
    sections["Not read"] = list(facts.failures.items())
    lines = []
    for title, rows in sections.items():
        # Most machines have no failures, and many no such variables.
        if rows:
            lines += ["", *wrap(title, _COLUMNS), *_aligned(rows)]
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


def _system_rows(system: System) -> list[Row]:
    default, *other_methods = system.start_methods
    names = [system.os, system.machine, system.libc]
    return [
        ("Equipoise", system.equipoise),
        ("Python", f"{system.python} ({system.implementation})"),
        ("system", ", ".join(name for name in names if name)),
        ("start methods", ", ".join([f"{default} (default)", *other_methods])),
    ]


def _package_rows(packages: Sequence[Package]) -> list[Row]:
    width = max(len(package.version or "-") for package in packages)
    rows = []
    for package in packages:
        version = package.version or "-"
        rows.append((package.name, f"{version:<{width}}  {package.remark}"))
    return rows


def _torch_rows(build: TorchBuild) -> list[Row]:
    is_found = "found"
    if not build.has_compiler:
        is_found = "not found; torch.compile needs it on a CPU"
    gloo = "not available"
    if build.gloo:
        gloo = "available"
    return [
        ("built for", build.built_for),
        ("cuDNN", build.cudnn or "none"),
        ("NCCL", build.nccl or "none"),
        ("gloo", gloo),
        ("C++ compiler", f"{build.compiler}: {is_found}"),
    ]


def _device_rows(devices: "Devices") -> list[Row]:
    rows = [(info.device, _described(info)) for info in devices.devices]
    if devices.failure is not None:
        rows.append(("GPUs", f"not read: {devices.failure}"))
    elif len(rows) == 1:
        rows.append(("GPUs", "torch finds none"))
    rows.append(("driver", devices.driver or "none found"))
    return rows


def _described(info: "DeviceInfo") -> str:
    """Return the name, the size and the memory of a device."""
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


def _feature_rows(features: Sequence[Feature]) -> list[Row]:
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


def _limit_rows(limits: Limits) -> list[Row]:
    shared_memory = "none"
    if limits.shared_memory is not None and limits.free_shared_memory is not None:
        size = format_bytes(limits.shared_memory)
        shared_memory = f"{size}, {format_bytes(limits.free_shared_memory)} free"
    open_files = f"{_number(limits.open_files)}, at most {_number(limits.most_open_files)}"
    return [("open files", open_files), ("/dev/shm", shared_memory)]


def _number(limit: int | None) -> str:
    if limit is None:
        return "unlimited"
    return str(limit)
