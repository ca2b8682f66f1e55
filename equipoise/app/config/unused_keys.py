"""Warn of keys that a command line adds to a configuration, and that nothing reads."""

import re
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from equipoise.app.config.keys import KEYS
from equipoise.names.synonyms import meant_keys

__all__ = ["warn_of_unused_keys"]

# Groups that leave no key of their own, so a key below them is not read.
_WITHOUT_KEY = ("experiment", "precision")


def warn_of_unused_keys(config: DictConfig, overrides: Sequence[str]) -> None:
    """Warn of keys that `+key=value` has added, if neither Equipoise nor another value of the configuration reads them.

    Keys in files are not looked at: a project may keep notes there.
    """
    values: Any = OmegaConf.to_container(config, resolve=False)
    # The names of folders may refer to keys, too.
    everything: list[Any] = [values]
    if HydraConfig.initialized():
        everything.append(OmegaConf.to_container(HydraConfig.instance().cfg, resolve=False))
    referred = set(_names_referred_to(everything))
    if "override_dirname" in referred:
        # The name of a folder contains all overrides.
        return
    for override in overrides:
        key = override.partition("=")[0].lstrip("+").partition("@")[0]
        first = key.partition(".")[0]
        is_ours = first in KEYS and (first == key or first not in _WITHOUT_KEY)
        # An option of a group of the user's may leave no key of that name.
        is_there = first in values
        if not override.startswith("+") or is_ours or not is_there or first in referred:
            continue
        print(
            f"equipoise: nothing reads the key {key!r}, which the command line adds{_hint(key, values)}",
            file=sys.stderr,
        )


def _names_referred_to(values: Any) -> Iterator[str]:
    """Yield the names in interpolations, such as `rate` of `${rate}`."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, str):
        for reference in re.findall(r"\$\{([^}]*)", values):
            yield from re.findall(r"\w+", reference)
    if isinstance(values, list):
        for value in values:
            yield from _names_referred_to(value)


def _paths(values: Any, start: str = "") -> Iterator[str]:
    if isinstance(values, dict):
        for name, value in values.items():
            yield f"{start}{name}"
            yield from _paths(value, f"{start}{name}.")


def _hint(key: str, values: Any) -> str:
    """Return the end of the warning: the nearest key, by its last name or its whole path, if there is one."""
    first = key.partition(".")[0]
    paths = [path for path in _paths(values) if path.partition(".")[0] not in (first, "hydra")]
    name = key.rpartition(".")[2]
    meant = meant_keys(key)
    same_names = [path for path in paths if path.rpartition(".")[2] == name]
    nearest = same_names or meant or get_close_matches(key, paths, n=1)
    if nearest:
        return f"; did you mean {nearest[0]!r}?"
    return (
        ". A key of the module or the data is module.NAME or data.NAME; a key that others refer to is read by ${NAME}."
    )
