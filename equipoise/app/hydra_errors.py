"""Explain Hydra's errors in one message: an unknown key or option, and the nearest right one."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from traceback import walk_tb
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

import equipoise
from equipoise.app.config.checks import import_paths, takes_argument
from equipoise.app.config.keys import GROUPS, KEYS
from equipoise.app.config.suggestions import did_you_mean, unknown_trainer_key
from equipoise.app.output import cannot_be_made, is_job_of_sweep
from equipoise.errors import ConfigurationError
from equipoise.names.synonyms import meant_keys, meant_options

__all__ = ["explain", "explained", "options", "unknown_key"]

# Groups of which a run may choose several options.
_GROUPS_OF_MAPPINGS = ("callbacks", "logger")
# What is no key, since the module makes it.
_OPTIMISERS = ("optim", "optimiser", "optimizer", "optimizers", "scheduler", "lr_scheduler")
# First words of the options that packages of Hydra add to its launchers and sweepers.
_PLUGINS = ("ax", "joblib", "nevergrad", "optuna", "ray", "rq", "submitit")
# Functions of Hydra that make folders: of a run or of a job, and of a sweep.
_RUN_FOLDER = "hydra.core.utils.run_job"
_SWEEP_FOLDER = "hydra._internal.core_plugins.basic_sweeper.sweep"


@contextmanager
def explained(folders: Sequence[Path] = ()) -> Iterator[None]:
    """Turn errors of Hydra in the block into one message each.

    Args:
        folders: The folders with configurations, as for `main`. Default: none, while Hydra runs.

    Raises:
        ConfigurationError: In place of an error of Hydra.
    """
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigurationError(explain(error, folders)) from error
    except (AssertionError, OSError) as error:
        message = _explain_by_place(error)
        if message is None:
            raise
        raise ConfigurationError(message) from error


def explain(error: BaseException, folders: Sequence[Path] = ()) -> str:
    """Return one message for one of Hydra's errors: what is wrong, and the nearest right key or option.

    Args:
        error: The error; its causes are examined as well.
        folders: The folders with configurations, as for `main`. Default: none, while Hydra runs.
    """
    text = str(error)

    # 1. Errors of YAML have a position.
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        way_out = ""
        if "'\\t'" in str(error.problem):
            way_out = " Indent with spaces."
        return f"Cannot read {mark.name}, line {mark.line + 1}: {error.problem}.{way_out}"

    # 2. The class of the error or of one of its causes may say what is wrong.
    file = re.match(r"In '([^']+)': Config\w+Error", text)
    start = ""
    if file is not None:
        name = file[1]
        start = f"In {name}.yaml: "
    for link in _causes(error):
        message = _explain_link(link, start, folders)
        if message is not None:
            return message

    # 3. Else the text does.
    return _explain_text(text, folders)


def _explain_by_place(error: AssertionError | OSError) -> str | None:
    """Return the message for an error that says nothing of Hydra, which raised it; None for any other."""
    # Code that was made by `exec` belongs to no module.
    places = [(frame, str(frame.f_globals.get("__name__"))) for frame, _ in walk_tb(error.__traceback__)]
    frame, module = [place for place in places if place[1].partition(".")[0] != "pathlib"][-1]
    place = f"{module}.{frame.f_code.co_name}"
    if isinstance(error, OSError) and place in (_RUN_FOLDER, _SWEEP_FOLDER):
        is_sweep = place == _SWEEP_FOLDER or is_job_of_sweep()
        return cannot_be_made(error, "hydra.sweep.dir" if is_sweep else "hydra.run.dir")
    if place == "hydra.core.default_element.get_name":
        return _early_override(frame.f_locals["self"].group, "the groups that follow")
    return None


def _early_override(group: str, later: str) -> str:
    return f"A defaults list ends with its overrides: move `override {group}` below {later}."


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error, its cause, the cause of that, and so on."""
    causes: list[BaseException] = []
    link: BaseException | None = error
    # An error that a handler raises again may be among its own causes.
    while link is not None and all(link is not known for known in causes):
        causes.append(link)
        link = link.__cause__ or link.__context__
    return causes


def _explain_link(error: BaseException, start: str, folders: Sequence[Path]) -> str | None:
    """Return the message for one error in a chain of causes; None if its class does not say what is wrong."""
    # 1. Errors of Hydra.
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _explain_missing_file(error, folders)
    if isinstance(error, OverrideParseException):
        return f"Cannot read {error.override!r}: {_way_to_write(error.override or '')}"

    # 2. Errors of OmegaConf that name a key.
    if not isinstance(error, OmegaConfBaseException):
        return None
    if not error.full_key:
        return None
    key = error.full_key
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return f"{start}{unknown_key(key, error.parent_node or {}, folders)}"
    problem = str(error).splitlines()[0].rstrip(".")
    return f"{start}{key}: {problem}."


def _way_to_write(argument: str) -> str:
    """Return how to write an argument that cannot be read."""
    file = re.search(rf"({'|'.join(GROUPS)})/(\w+)\.yaml$", argument)
    if file is not None:
        return f"a file is chosen by its group and name, as {file[1]}={file[2]}."
    if argument == "help":
        return "did you mean --help?"
    if argument.count("[") != argument.count("]") or argument.count("{") != argument.count("}"):
        return "the shell divides arguments at spaces: put the whole argument in quotes, as in 'key=[a, b]'."
    if len(re.findall(r"(?:^|\s)[\w.]+=", argument)) > 1:
        return "give each key=value as an argument of its own."
    return "write key=value without spaces, special characters in quotes, as in key='\"a=b\"'."


def _explain_missing_file(error: MissingConfigException, folders: Sequence[Path]) -> str:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    present = error.options or options(group, folders)
    if not group:
        meant = ["_self_"] if option.strip("_") == "self" else []
        return f"The defaults list names {option!r}, for which there is no file {option}.yaml" + did_you_mean(
            option, present, meant=meant
        )
    if group == "trainer":
        return f"There is no {option!r} in the group 'trainer': its keys are given one by one, as in trainer.KEY=VALUE."
    hint = did_you_mean(option, present, meant=meant_options(group, option, present))
    # Users add files to these groups alone.
    way_out = ""
    plugin, _, kind = option.partition("_")[0], *group.rpartition("/")[1:]
    if group in (*_GROUPS_OF_MAPPINGS, "module", "data", "experiment"):
        way_out = f" A file conf/{group}/{option}.yaml adds one."
    elif plugin in _PLUGINS:
        way_out = f" A plugin of Hydra adds it: pip install hydra-{plugin}-{kind}."
    return f"There is no {option!r} in the group {group!r}{hint}{way_out}"


def _explain_text(text: str, folders: Sequence[Path]) -> str:
    """Return the message for an error that Hydra describes by its text alone."""
    # 1. A group without an option.
    match = re.match(r"You must specify '([\w/]+)'", text)
    if match:
        group = match[1]
        hint = _hint_of_options(group, folders)
        return f"No {group} is chosen: give {group}=NAME{hint}"

    # 2. A file that chooses an option of an unknown group.
    match = re.match(r"(In '.*): Could not override '([\w/@.]+)'.*\s+No match", text)
    if match:
        file, group = match.groups()
        group, _, package = group.partition("@")
        if package.startswith("experiment."):
            return f"{file} the first line is missing, which is `# @package _global_`: the file would set {package}."
        if group in GROUPS:
            return (
                f"{file} {group} is overridden, but nothing before has chosen it: put equipoise first in the defaults"
                " list of config.yaml."
            )
        hint = did_you_mean(group, GROUPS)
        return f"{file} there is no group {group!r} to override{hint}"

    # 3. A key to be left out that does not exist.
    match = re.match(r"Could not delete from config. '([\w.]+)' does not exist", text)
    if match:
        key = match[1]
        hint = did_you_mean(key, KEYS)
        return f"There is no key {key!r} to leave out{hint}"

    # 4. A list where a mapping belongs.
    match = re.match(r"(In '.*): .*\s+Cannot merge \w+ with \w+", text)
    if match:
        file = match[1]
        return f"{file} a list and a mapping meet; callbacks and logger are mappings, from names to what to build."

    # 5. Several values without a sweep.
    match = re.match(r"Ambiguous value for argument '(([^=]+)=(.*))'", text)
    if match:
        argument, key, several = match.groups()
        return f"{argument} gives several values: --multirun runs each of them, {key}=[{several}] is one list."

    # 6. Any other text, without the list of folders after it.
    message, _, _ = text.partition("\nConfig search path")
    return _explain_order(text) or message.strip()


def _explain_order(text: str) -> str | None:
    """Return the message for what comes too early in a list of defaults, or twice; None for any other text."""
    match = re.match(r"(In \S+): Override '(\S+) : .*' is defined before '(\S+): ", text)
    if match:
        file, group, later = match.groups()
        return f"{file}: {_early_override(group, later)}"
    match = re.match(r"(\S+) appears more than once in the final defaults list", text)
    if match:
        return f"{match[1]} is chosen twice: write {match[1]}=NAME, without a plus, to choose another option."
    match = re.match(
        r"Could not append to config. An item is already at '(.*)'.\s+Either remove \+ prefix: '(.*)'", text
    )
    if match:
        return f"The configuration has the key {match[1]!r}: write {match[2]}, without a plus, to change it."
    return None


def _hint_of_options(group: str, folders: Sequence[Path]) -> str:
    """Return the end of a message that lists the options of a group."""
    return did_you_mean("", options(group, folders))


def unknown_key(key: str, mapping: Mapping[Any, Any], folders: Sequence[Path] = ()) -> str:
    """Return the message for a key that its mapping does not have.

    Args:
        key: The whole key, such as "trainer.max_epoch".
        mapping: The part of the configuration that lacks it.
        folders: The folders with configurations, as for `main`. Default: none, while Hydra runs.
    """
    names = [str(name) for name in mapping]
    parent, _, name = key.rpartition(".")
    if parent:
        return _unknown_key_in(parent, name, mapping, folders)
    names += GROUPS
    if name in _OPTIMISERS:
        return (
            f"There is no key {key!r} in the configuration: `configure_optimizers` of the module makes optimisers and"
            " schedulers, from arguments of the module, such as module.lr."
        )
    path = _path_below(name, mapping, names)
    meant = [] if path is None else [path]
    return f"There is no key {key!r} in the configuration{did_you_mean(name, names, meant=meant)}"


def _unknown_key_in(parent: str, name: str, mapping: Mapping[Any, Any], folders: Sequence[Path]) -> str:
    """Return the message for a key that its mapping, which is not the outermost one, does not have."""
    key = f"{parent}.{name}"
    names = [str(present) for present in mapping]
    # 1. An option that is not chosen.
    if parent in _GROUPS_OF_MAPPINGS and name in options(parent, folders):
        return f"{key!r} is not part of the configuration: choose it first, by {parent}=[{name}]."

    # 2. An option without arguments.
    if parent in GROUPS and not names:
        hint = _hint_of_options(parent, folders)
        return f"There is no key {key!r}: the present {parent} takes no arguments{hint}"

    # 3. A group within the trainer's.
    if parent == "trainer" and name in GROUPS:
        return f"{key!r} is not a key of the trainer: {name} is a group of its own, given by {name}=NAME."

    # 4. Any other key of the trainer.
    if parent == "trainer":
        return unknown_trainer_key(name, names)

    # 5. An argument that the file leaves at its default.
    target = mapping.get("_target_")
    with import_paths(folders):
        is_argument = isinstance(target, str) and takes_argument(target, name)
    if is_argument:
        return f"{key!r} is not part of the configuration, but {target} takes it: add it by +{key}=VALUE."

    # 6. Any other key.
    meant = [path for path in meant_keys(name) if path.rpartition(".")[::2] in [(parent, there) for there in names]]
    hint = did_you_mean(name, names, f"{parent}.", meant)
    return f"There is no key {key!r} in the configuration{hint}"


def _path_below(name: str, mapping: Mapping[Any, Any], names: Sequence[str]) -> str | None:
    """Return the path that a name stands for, such as an argument without its group; None if there is none."""
    # 1. An argument of the module or the data.
    for part in ("module", "data"):
        if part not in mapping:
            continue
        arguments = mapping[part]
        # A part that is not a mapping has no arguments.
        if not OmegaConf.is_dict(arguments):
            continue
        if name in arguments:
            return f"{part}.{name}"

    # 2. What the name means elsewhere. Arguments of the module and the data differ from project to project.
    for path in meant_keys(name):
        part, _, argument = path.partition(".")
        if part not in ("module", "data") or not argument or argument in (mapping.get(part) or {}):
            return path

    # 3. An argument of the trainer. An outermost key that is as near is more likely.
    matches = get_close_matches(name, inspect.signature(equipoise.Trainer).parameters, n=1)
    if not matches or get_close_matches(name, names):
        return None
    return f"trainer.{matches[0]}"


def options(group: str, folders: Sequence[Path]) -> list[str]:
    """Return the names that can be chosen in a group.

    Args:
        group: The group, such as "callbacks".
        folders: The folders with configurations, used unless Hydra runs. If there are none, no names are returned.
    """
    hydra_instance = GlobalHydra.instance()
    # 1. Ask the running Hydra.
    if hydra_instance.is_initialized():
        loader = hydra_instance.config_loader()
        return loader.get_group_options(group)
    # 2. Start it with the first folder.
    if not folders:
        return []
    folder = str(folders[0])
    with hydra.initialize_config_dir(folder, version_base="1.3"):
        hydra_instance = GlobalHydra.instance()
        loader = hydra_instance.config_loader()
        return loader.get_group_options(group)
