"""Hydra's errors as one message that names the nearest right key or option."""

import inspect
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

import equipoise
from equipoise.app.config.checks import GROUPS, KEYS, did_you_mean

__all__ = ["explain", "options"]


def explain(error: BaseException, folders: Sequence[Path] = ()) -> str:
    """Return one message for one of Hydra's errors: what is wrong, and the nearest right key or option.

    Args:
        error: The error; its causes are examined as well.
        folders: The folders with configurations, as for `main`. Default: none, while Hydra runs.
    """
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"Cannot read {mark.name}, line {mark.line + 1}: {error.problem}."
    file = re.match(r"In '([^']+)': Config\w+Error", str(error))
    start = ""
    if file is not None:
        start = f"In {file[1]}.yaml: "
    link: BaseException | None = error
    while link is not None:
        message = _explain_link(link, start, folders)
        if message is not None:
            return message
        link = link.__cause__ or link.__context__
    return _explain_text(str(error), folders)


def _explain_link(error: BaseException, start: str, folders: Sequence[Path]) -> str | None:
    """Return the message for one error in a chain of causes; None if its class does not say what is wrong."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _explain_missing_file(error, folders)
    if isinstance(error, OverrideParseException):
        return f"Cannot read {error.override!r}: write key=value, special characters in quotes, as in key='\"a=b\"'."
    if not isinstance(error, OmegaConfBaseException) or not error.full_key:
        return None
    key = error.full_key
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return start + _unknown_key(key, error.parent_node or {}, folders)
    first_line = str(error).splitlines()[0]
    return f"{start}{key}: {first_line.rstrip('.')}."


def _explain_missing_file(error: MissingConfigException, folders: Sequence[Path]) -> str:
    path = error.missing_cfg_file or ""
    group, _, option = path.rpartition("/")
    names = error.options or options(group, folders)
    hint = did_you_mean(option, names)
    way_out = ""
    if group in ("callbacks", "logger"):
        way_out = f" A file conf/{group}/{option}.yaml adds one."
    return f"There is no {option!r} in the group {group!r}{hint}{way_out}"


def _explain_text(text: str, folders: Sequence[Path]) -> str:
    """Return the message for an error that Hydra describes by its text alone."""
    match = re.match(r"You must specify '([\w/]+)'", text)
    if match:
        group = match[1]
        hint = did_you_mean("", options(group, folders))
        return f"No {group} is chosen: give {group}=NAME{hint}"

    match = re.match(r"(In '.*): Could not override '([\w/]+)'.*\s+No match", text)
    if match:
        file, group = match.groups()
        hint = did_you_mean(group, GROUPS)
        return f"{file} there is no group {group!r} to override{hint}"

    match = re.match(r"Could not delete from config. '([\w.]+)' does not exist", text)
    if match:
        key = match[1]
        hint = did_you_mean(key, KEYS)
        return f"There is no key {key!r} to leave out{hint}"

    match = re.match(r"(In '.*): .*\s+Cannot merge \w+ with \w+", text)
    if match:
        return f"{match[1]} a list and a mapping meet; callbacks and logger are mappings, from names to what to build."

    message = text.partition("\nConfig search path")[0]
    return message.strip()


def _unknown_key(key: str, mapping: Mapping[Any, Any], folders: Sequence[Path]) -> str:
    """Return the message for a key that its mapping does not have."""
    names = [str(name) for name in mapping]
    parent, _, name = key.rpartition(".")

    # 1. A key in a group.
    if parent in ("callbacks", "logger") and name in options(parent, folders):
        return f"{key!r} is not part of the configuration: choose it first, by {parent}=[{name}]."
    if parent in GROUPS and not names:
        hint = did_you_mean("", options(parent, folders))
        return f"There is no key {key!r}: the present {parent} takes no arguments{hint}"
    if parent == "trainer" and name in GROUPS:
        return f"{key!r} is not a key of the trainer: {name} is a group of its own, given by {name}=NAME."
    if parent:
        hint = did_you_mean(name, names, f"{parent}.")
        return f"There is no key {key!r} in the configuration{hint}"

    # 2. An outermost key.
    names += GROUPS
    path = _path_below(name, mapping, names)
    if path is not None:
        return f"There is no key {key!r} in the configuration; did you mean '{path}'?"
    hint = did_you_mean(name, names)
    return f"There is no key {key!r} in the configuration{hint}"


def _path_below(name: str, mapping: Mapping[Any, Any], names: Sequence[str]) -> str | None:
    """Return the path of an argument for which the user forgot the group; None if there is no such argument."""
    for part in ("module", "data"):
        if part not in mapping:
            continue
        arguments = mapping[part]
        if OmegaConf.is_dict(arguments) and name in arguments:
            return f"{part}.{name}"
    parameters = inspect.signature(equipoise.Trainer).parameters
    matches = get_close_matches(name, parameters, n=1)
    # An outermost key that is as near is more likely.
    if matches and not get_close_matches(name, names):
        return f"trainer.{matches[0]}"
    return None


def options(group: str, folders: Sequence[Path]) -> list[str]:
    """Return the names that can be chosen in a group.

    Args:
        group: The group, such as "callbacks".
        folders: The folders with configurations, used unless Hydra runs. If there are none, no names are returned.
    """
    hydra_instance = GlobalHydra.instance()
    if hydra_instance.is_initialized():
        loader = hydra_instance.config_loader()
        return loader.get_group_options(group)
    if not folders:
        return []
    with hydra.initialize_config_dir(str(folders[0]), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        return loader.get_group_options(group)
