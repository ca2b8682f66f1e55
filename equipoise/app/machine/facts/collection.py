"""All facts, collected one kind after the other; a kind that cannot be read does not keep the others away."""

import contextlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from equipoise.app.machine.facts.features import Feature, list_features
from equipoise.app.machine.facts.packages import Package, list_packages
from equipoise.app.machine.facts.privacy import without_paths
from equipoise.app.machine.facts.surroundings import Limits, System, read_environment, read_limits, read_system
from equipoise.app.machine.facts.torch_build import TorchBuild, read_torch_build

if TYPE_CHECKING:
    from equipoise.app.machine.facts.device_list import Devices

__all__ = ["Facts", "collect_facts"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about this machine and its packages. A kind that could not be read is None.

    Attributes:
        system: Versions of Equipoise, Python and the operating system.
        packages: Python, the required packages and the optional ones.
        torch: The build of torch.
        devices: The devices.
        features: The features that use private names of other packages.
        limits: Limits of this process.
        environment: Variables that change a run, by name.
        failures: The reason for each kind that could not be read, by the name of its field.
    """

    system: System
    packages: list[Package]
    torch: TorchBuild | None
    devices: "Devices | None"
    features: list[Feature] | None
    limits: Limits | None
    environment: dict[str, str]
    failures: dict[str, str]


def collect_facts() -> Facts:
    """Collect all facts. What packages print or warn of while they are imported is no part of them."""
    failures: dict[str, str] = {}
    # JSON must stand alone on the output.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packages = list_packages()
        return Facts(
            system=read_system(),
            packages=packages,
            torch=_attempt("torch", read_torch_build, failures),
            devices=_attempt("devices", _read_devices, failures),
            features=_attempt("features", lambda: list_features(packages), failures),
            limits=_attempt("limits", read_limits, failures),
            environment=read_environment(),
            failures=failures,
        )


def _read_devices() -> "Devices":
    # It needs psutil, which may be among the missing packages.
    from equipoise.app.machine.facts.device_list import read_devices

    return read_devices()


def _attempt(kind: str, read: Callable[[], T], failures: dict[str, str]) -> T | None:
    """Return one kind of facts; None after an error, which is noted."""
    try:
        return read()
    except Exception as error:
        # Whatever is wrong with this machine is what the report is about.
        failures[kind] = f"{type(error).__name__}: {without_paths(str(error))}"
        return None
