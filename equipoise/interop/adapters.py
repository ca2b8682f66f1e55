"""Private names of other packages: which feature needs them, and what becomes of it where a version lacks one.

A file of `interop` looks its private names up with `find`, so a missing one disturbs no import. A feature that has no
other way is refused when it is chosen, by `check_feature`.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from equipoise.errors import ConfigurationError
from equipoise.interop.versions import TESTED, installed_version

__all__ = ["ADAPTERS", "FEATURES", "Adapter", "check_feature", "find", "missing_names"]


@dataclass(frozen=True)
class Adapter:
    """Private names of one package, behind one function or class of `interop`.

    Attributes:
        package: The package, as pip knows it.
        names: The names, with their modules, such as "torch.autograd.graph._engine_run_backward".
        features: Keys of `FEATURES` that use them.
        fallback: What is done without them. Empty: the features are refused.
    """

    package: str
    names: tuple[str, ...]
    features: tuple[str, ...]
    fallback: str = ""


FEATURES: Mapping[str, str] = {
    "steps": "Training",
    "fsdp": "strategy='fsdp'",
}
"""Features that use private names: the key, and the user's words for it."""

ADAPTERS: tuple[Adapter, ...] = (
    Adapter("torch", ("torch.autograd.graph._engine_run_backward",), ("steps",), "`Tensor.backward` runs it"),
)
"""All private names that the package uses."""


def find(name: str) -> Any:
    """Return what a dotted name stands for; None if a module or attribute of it is missing.

    Args:
        name: A name with its module, such as "torch.autograd.graph._engine_run_backward".

    Example:
        >>> find("math.tau") > 6, find("math._tau")
        (True, None)
    """
    parts = name.split(".")
    # 1. Import the longest part of the name that is a module.
    value: Any = None
    attributes: list[str] = []
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        attributes = parts[length:]
        break
    # 2. Read the rest from it.
    for attribute in attributes:
        value = getattr(value, attribute, None)
    return value


def missing_names(feature: str, *, with_fallback: bool = False) -> list[str]:
    """Return the private names that a feature needs and the installed versions lack.

    Args:
        feature: A key of `FEATURES`.
        with_fallback: Include names that the feature can do without. Default: False.
    """
    missing = []
    for adapter in ADAPTERS:
        counts = with_fallback or not adapter.fallback
        if feature in adapter.features and counts:
            missing += [name for name in adapter.names if find(name) is None]
    return missing


def check_feature(feature: str) -> None:
    """Check that the installed versions have the private names that a feature cannot do without.

    Args:
        feature: A key of `FEATURES`.

    Raises:
        ConfigurationError: With the feature, the version and a remedy, if a name is missing.
    """
    missing = missing_names(feature)
    if not missing:
        return
    package = next(adapter.package for adapter in ADAPTERS if missing[0] in adapter.names)
    oldest, newest = TESTED[package]
    raise ConfigurationError(
        f"{FEATURES[feature]} does not work with {package} {installed_version(package)}, which lacks"
        f" {', '.join(missing)}. It was tested with {package} {oldest} to {newest}:"
        f" pip install '{package}>={oldest},<={newest}'."
    )
