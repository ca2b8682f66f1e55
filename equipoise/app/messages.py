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
    """One message for one of Hydra's errors: what is wrong, and the nearest right thing."""
    chain = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"Cannot read {error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}."
    where = re.match(r"In '([^']+)': Config\w+Error", str(error))
    start = f"In {where[1]}.yaml: " if where else ""
    for link in chain:
        if isinstance(link, MissingConfigException) and link.missing_cfg_file:
            group, _, option = link.missing_cfg_file.rpartition("/")
            hint = did_you_mean(option, link.options or options(group, folders))
            more = f" A file conf/{group}/{option}.yaml adds one." if group in ("callbacks", "logger") else ""
            return f"There is no {option!r} in the group {group!r}{hint}{more}"
        if isinstance(link, OverrideParseException):
            return f"Cannot read {link.override!r}: write key=value, special characters in quotes, as in key='\"a=b\"'."
        if isinstance(link, ConfigKeyError | ConfigAttributeError) and link.full_key:
            return start + _unknown_key(link.full_key, link.parent_node or {}, folders)
        if isinstance(link, OmegaConfBaseException) and link.full_key:
            return f"{start}{link.full_key}: {str(link).splitlines()[0].rstrip('.')}."
    return _explain_text(str(error), folders)


def _explain_text(text: str, folders: Sequence[Path]) -> str:
    if match := re.match(r"You must specify '([\w/]+)'", text):
        return f"No {match[1]} is chosen: give {match[1]}=NAME{did_you_mean('', options(match[1], folders))}"
    if match := re.match(r"(In '.*): Could not override '([\w/]+)'.*\s+No match", text):
        return f"{match[1]} there is no group {match[2]!r} to override{did_you_mean(match[2], GROUPS)}"
    if match := re.match(r"Could not delete from config. '([\w.]+)' does not exist", text):
        return f"There is no key {match[1]!r} to leave out{did_you_mean(match[1], KEYS)}"
    if match := re.match(r"(In '.*): .*\s+Cannot merge \w+ with \w+", text):
        return f"{match[1]} a list and a mapping meet; callbacks and logger are mappings, from names to what to build."
    return text.partition("\nConfig search path")[0].strip()


def _unknown_key(key: str, holder: Mapping[Any, Any], folders: Sequence[Path]) -> str:
    names = [str(name) for name in holder]
    parent, _, name = key.rpartition(".")
    if parent in ("callbacks", "logger") and name in options(parent, folders):
        return f"{key!r} is not part of the configuration: choose it first, by {parent}=[{name}]."
    if parent in GROUPS and not names:
        hint = did_you_mean("", options(parent, folders))
        return f"There is no key {key!r}: the present {parent} takes no arguments{hint}"
    if parent == "trainer" and name in GROUPS:
        return f"{key!r} is not a key of the trainer: {name} is a group of its own, given by {name}=NAME."
    if not parent:
        names = [*names, *GROUPS]
        for part in ("module", "data"):
            if part in holder and OmegaConf.is_dict(holder[part]) and name in holder[part]:
                return f"There is no key {key!r} in the configuration; did you mean '{part}.{name}'?"
        below = get_close_matches(name, inspect.signature(equipoise.Trainer).parameters, n=1)
        if below and not get_close_matches(name, names):
            return f"There is no key {key!r} in the configuration; did you mean 'trainer.{below[0]}'?"
    return f"There is no key {key!r} in the configuration{did_you_mean(name, names, parent and parent + '.')}"


def options(group: str, folders: Sequence[Path]) -> list[str]:
    """The names that can be chosen in a group."""
    if GlobalHydra.instance().is_initialized():
        return GlobalHydra.instance().config_loader().get_group_options(group)
    if not folders:
        return []
    with hydra.initialize_config_dir(str(folders[0]), version_base="1.3"):
        return GlobalHydra.instance().config_loader().get_group_options(group)
