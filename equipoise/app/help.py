"""`equipoise fit --help KEY`: type, default, present value and meaning of a key."""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from equipoise.app.config.annotations import name_of_type, parameters_of
from equipoise.app.config.checks import locate
from equipoise.app.config.keys import GROUPS
from equipoise.app.hydra_errors import unknown_key
from equipoise.errors import ConfigurationError
from equipoise.tables.width import output_width, wrapped

__all__ = ["arguments_in", "describe_all", "describe_key"]

# The indented lines below "Args:".
_SECTION = re.compile(r"^(?:Args|Arguments|Parameters):\n((?:[ \t]+.*\n|\s*\n)*)", flags=re.MULTILINE)

# The first line of an entry: names, a type in parentheses, a text.
_ENTRY = re.compile(r"([\w*, ]+?)(?: \([^)]*\))?:(?: (.*))?$")

# Where the meaning of a value begins.
_COLUMN = 40

_MEANINGS = {
    "trainer": "The group of the trainer's arguments.",
    "strategy": "How a step is computed on the devices: strategy=NAME.",
    "precision": "The number format: precision=NAME sets trainer.precision.",
    "callbacks": "What runs at the hooks of a run: callbacks=[NAME,...], each with its options below its name.",
    "logger": "Where logged values are written: logger=[NAME,...].",
    "launcher": "Where jobs run: launcher=pool gives each job of a sweep a device, launcher=ray uses a Ray cluster.",
    "module": "Your LightningModule: its class is module._target_, its arguments are the other keys.",
    "data": "Your LightningDataModule, in the same form as module.",
    "experiment": "A file that changes any of the other keys, for a run with a name.",
    "seed": "Seeds Python, NumPy, torch and the workers of loaders. null: no seed.",
    "ckpt_path": 'A path, "best" or "last": to resume from in fit, to evaluate otherwise.',
    "test": "After fit, test the best checkpoint.",
    "objective": "The logged value, or a list of them, that a sweeper goes by. null: what a checkpoint monitors.",
    "output_dir": "The folder of the run.",
    "stage": "fit, validate, test or predict; the command sets it.",
}


def describe_key(config: DictConfig, key: str) -> str:
    """Describe a key of a composed configuration.

    Args:
        config: The configuration.
        key: The key, such as "trainer.max_epochs", or a part, such as "module".

    Returns:
        Several lines: the key with type, default and present value, then its meaning. For a part, the class that it
        builds and the meaning of every argument.

    Raises:
        ConfigurationError: If there is no such key; it names the nearest one.
    """
    # 1. Precision and experiment are groups, but leave no key of their own.
    if key in GROUPS and key not in config:
        return f"{key}\n  {_MEANINGS[key]}"

    # 2. Find the mapping that holds the key.
    parent, _, name = key.rpartition(".")
    mapping = config
    if parent:
        mapping = OmegaConf.select(config, parent)
    if not _has_key(mapping, name):
        present = mapping if OmegaConf.is_dict(mapping) else {}
        raise ConfigurationError(unknown_key(key, present))

    # 3. Describe the key, then the part below it, if it has one.
    lines = [_headline(mapping, key, name)]
    meaning = _meanings_of(mapping).get(name)
    if not meaning and not parent:
        meaning = _MEANINGS.get(key)
    if meaning:
        lines.append(_indented(meaning))
    # An interpolation stays unresolved: that of Hydra's own values exists only in a run.
    if isinstance(_written_values(mapping).get(name), dict):
        lines += _describe_part(mapping[name], key)
    return "\n".join(lines)


def describe_all(config: DictConfig) -> str:
    """Return all keys of a composed configuration with their present values, and the first sentence of each meaning."""
    return "\n".join(_lines_of(config, _MEANINGS, ""))


def _lines_of(mapping: DictConfig, meanings: Mapping[str, str], indent: str) -> Iterator[str]:
    for name, value in _written_values(mapping).items():
        head = f"{indent}{name}: "
        if isinstance(value, dict) and value:
            inner = mapping[name]
            yield _beside(head.rstrip(), meanings.get(name, "") if not indent else "")
            yield from _lines_of(inner, _meanings_of(inner), f"{indent}  ")
        elif name != "_target_":
            shown = "''" if value == "" else _format_value(value)
            yield _beside(f"{head}{shown}", meanings.get(name, ""))


def _beside(text: str, meaning: str) -> str:
    """Return a value and its meaning: beside it if there is room, else on the next line."""
    sentence = re.split(r"(?<=\.)\s", meaning, maxsplit=1)[0]
    if not sentence:
        return text
    width = output_width()
    if len(text) < _COLUMN:
        return wrapped(sentence, width, text.ljust(_COLUMN), " " * _COLUMN)
    return "\n".join([text, wrapped(sentence, width, " " * _COLUMN)])


def _has_key(mapping: Any, name: str) -> bool:
    """Return whether a mapping has a key, or the class that it builds takes such an argument."""
    if not OmegaConf.is_dict(mapping):
        return False
    if name in _written_values(mapping):
        return True
    return _parameter(mapping, name) is not None


def _written_values(mapping: DictConfig) -> dict[Any, Any]:
    """Return the values of a mapping as they are written, without resolving interpolations."""
    values: Any = OmegaConf.to_container(mapping)
    return dict(values)


def _indented(text: str) -> str:
    return wrapped(text, output_width(), "  ")


def _headline(mapping: DictConfig, key: str, name: str) -> str:
    """Return one line: the key, the type and default of the argument, and the present value."""
    facts = []
    parameter = _parameter(mapping, name)
    if parameter is not None and parameter.annotation is not parameter.empty:
        facts.append(f"type {name_of_type(parameter.annotation)}")
    if parameter is not None and parameter.default is not parameter.empty:
        facts.append(f"default {_format_value(parameter.default)}")
    values = _written_values(mapping)
    if name in values:
        value = values[name]
        if not isinstance(value, dict):
            facts.append(f"here {_format_value(value)}")
    if not facts:
        return key
    return wrapped(f"{key}: {', '.join(facts)}", output_width(), "", "    ")


def _describe_part(part: DictConfig, key: str) -> Iterator[str]:
    """Yield the class that a part builds, and the lines of its arguments."""
    target = _target(part)
    if target is None:
        names = ", ".join(map(str, part))
        yield f"  holds: {names or 'nothing'}"
        return

    # 1. The class and the first paragraph of its docstring.
    yield f"  builds {part['_target_']}"
    summary = (inspect.getdoc(target) or "").partition("\n\n")[0]
    if summary:
        yield _indented(" ".join(summary.split()))

    # 2. Its arguments, in the order of the signature.
    meanings = _meanings_of(part)
    for name in parameters_of(target):
        if name not in part and name not in meanings:
            continue
        yield ""
        yield _headline(part, f"{key}.{name}", name)
        if name in meanings:
            yield _indented(meanings[name])


def _target(part: DictConfig) -> Callable[..., Any] | None:
    if "_target_" not in part:
        return None
    return locate(part["_target_"], "_target_")


def _parameter(mapping: DictConfig, name: str) -> inspect.Parameter | None:
    target = _target(mapping)
    if target is None:
        return None
    return parameters_of(target).get(name)


def _meanings_of(part: DictConfig) -> dict[str, str]:
    """Return the meaning of each argument, as the docstring of the class or of its constructor gives it."""
    target = _target(part)
    if target is None:
        return {}
    docstrings = [inspect.getdoc(target)]
    if isinstance(target, type):
        docstrings.insert(0, inspect.getdoc(vars(target).get("__init__")))
    meanings: dict[str, str] = {}
    # The docstring of the class comes last, because it counts more.
    for docstring in docstrings:
        meanings.update(arguments_in(docstring or ""))
    return meanings


def arguments_in(docstring: str) -> dict[str, str]:
    """Return the entries below "Args:" in a docstring.

    Returns:
        The text of each name, in one line.
    """
    section = _SECTION.search(f"{docstring}\n")
    if section is None:
        return {}
    meanings: dict[str, str] = {}
    # Names of the present entry, which may describe several.
    names: list[str] = []
    for line in textwrap.dedent(section[1]).splitlines():
        entry = None
        if not line.startswith(" "):
            entry = _ENTRY.match(line)
        if entry is not None:
            names = [name.strip(" *") for name in entry[1].split(",")]
            for name in names:
                meanings[name] = entry[2] or ""
            continue
        for name in names:
            meanings[name] = f"{meanings[name]} {line.strip()}".strip()
    return meanings


def _format_value(value: Any) -> str:
    """Return a value as a configuration writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
