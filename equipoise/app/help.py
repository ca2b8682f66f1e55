"""`equipoise fit --help KEY`: type, default, present value and meaning of a key."""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from equipoise.app.config.checks import GROUPS, did_you_mean, locate
from equipoise.errors import ConfigurationError

__all__ = ["arguments_in", "describe_key"]

_MEANINGS = {
    "trainer": "The group of the trainer's arguments.",
    "strategy": "How a step is computed on the devices: strategy=NAME.",
    "precision": "The number format: precision=NAME sets trainer.precision.",
    "callbacks": "What runs at the hooks of a run: callbacks=[NAME,...], each with its options below its name.",
    "logger": "Where logged values are written: logger=[NAME,...].",
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
        Several lines: the key with type, default and present value, then its meaning. For a part, what it builds and
        the meaning of every argument.

    Raises:
        ConfigurationError: If there is no such key; it names the nearest one.
    """
    if key in GROUPS and key not in config:  # precision and experiment leave no key of their own
        return f"{key}\n  {_MEANINGS[key]}"
    parent, _, name = key.rpartition(".")
    holder = OmegaConf.select(config, parent) if parent else config
    if not OmegaConf.is_dict(holder) or (name not in holder and _parameter(holder, name) is None):
        names = [str(each) for each in holder] if OmegaConf.is_dict(holder) else []
        hint = did_you_mean(name, [*names, *([] if parent else GROUPS)], parent and parent + ".")
        raise ConfigurationError(f"There is no key {key!r} in the configuration{hint}")
    lines = [_headline(holder, key, name)]
    meaning = _meanings_of(holder).get(name) or (_MEANINGS.get(key) if not parent else None)
    if meaning:
        lines.append(textwrap.fill(meaning, 100, initial_indent="  ", subsequent_indent="  "))
    value = holder.get(name) if name in holder else None
    if isinstance(value, DictConfig):
        lines += _describe_part(value, key)
    return "\n".join(lines)


def _headline(holder: DictConfig, key: str, name: str) -> str:
    parameter = _parameter(holder, name)
    facts = []
    if parameter is not None:
        if parameter.annotation is not parameter.empty:
            facts.append(f"type {_shown_type(parameter.annotation)}")
        if parameter.default is not parameter.empty:
            facts.append(f"default {_shown(parameter.default)}")
    value = OmegaConf.to_container(holder).get(name) if name in holder else None  # type: ignore[union-attr]
    if name in holder and not isinstance(value, dict):
        facts.append(f"here {_shown(value)}")
    return f"{key}: {', '.join(facts)}" if facts else key


def _describe_part(part: DictConfig, key: str) -> Iterator[str]:
    """Yield what a part builds and the lines of its arguments."""
    target = _target(part)
    if target is None:
        yield f"  holds: {', '.join(map(str, part)) or 'nothing'}"
        return
    yield f"  builds {part['_target_']}"
    summary = (inspect.getdoc(target) or "").partition("\n\n")[0]
    if summary:
        yield textwrap.fill(" ".join(summary.split()), 100, initial_indent="  ", subsequent_indent="  ")
    meanings = _meanings_of(part)
    for name in inspect.signature(target).parameters:
        if name in part or name in meanings:
            yield ""
            yield _headline(part, f"{key}.{name}", name)
            if name in meanings:
                yield textwrap.fill(meanings[name], 100, initial_indent="  ", subsequent_indent="  ")


def _target(part: DictConfig) -> Callable[..., Any] | None:
    return locate(part["_target_"], "_target_") if "_target_" in part else None


def _parameter(holder: DictConfig, name: str) -> inspect.Parameter | None:
    target = _target(holder)
    if target is None:
        return None
    try:
        return inspect.signature(target).parameters.get(name)
    except ValueError:  # a builtin without a signature
        return None


def _meanings_of(part: DictConfig) -> dict[str, str]:
    """Return the meaning of each argument, as the docstring of the class or of its constructor gives it."""
    target = _target(part)
    if target is None:
        return {}
    meanings = arguments_in(inspect.getdoc(target) or "")
    if isinstance(target, type):
        constructor = vars(target).get("__init__")
        meanings = {**arguments_in(inspect.getdoc(constructor) or ""), **meanings}
    return meanings


def arguments_in(docstring: str) -> dict[str, str]:
    """Return the entries below "Args:" in a docstring.

    Args:
        docstring: The text, without a common indentation.

    Returns:
        The text of each name, in one line.
    """
    match = re.search(r"^(?:Args|Arguments|Parameters):\n((?:[ \t]+.*\n|\s*\n)*)", f"{docstring}\n", flags=re.MULTILINE)
    meanings: dict[str, str] = {}
    names: list[str] = []
    for line in textwrap.dedent(match[1]).splitlines() if match else ():
        entry = re.match(r"([\w*, ]+?)(?: \([^)]*\))?:(?: (.*))?$", line)
        if entry and not line.startswith(" "):
            names = [name.strip(" *") for name in entry[1].split(",")]
            meanings.update(dict.fromkeys(names, entry[2] or ""))
        else:
            meanings.update({name: f"{meanings[name]} {line.strip()}".strip() for name in names})
    return meanings


def _shown_type(annotation: Any) -> str:
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        return annotation.__name__
    return re.sub(r"\b(?:[a-zA-Z_]\w*\.)+(?=\w)", "", str(annotation))


def _shown(value: Any) -> str:
    """Return a value as a configuration writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
