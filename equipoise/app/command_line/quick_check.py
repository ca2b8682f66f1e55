"""Refuse the frequent mistakes in keys before torch, Lightning and Hydra are imported, which takes seconds."""

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import equipoise
from equipoise.app.config.keys import KEYS
from equipoise.app.config.suggestions import did_you_mean, unknown_trainer_key
from equipoise.errors import ConfigurationError
from equipoise.names.synonyms import meant_keys

__all__ = ["refuse_unknown_keys", "trainer_arguments"]

# An override of a value, whose key has one part or several.
_OVERRIDE = re.compile(r"(\w+)(?:\.(\w+))?[.\w]*=")
# A class for the trainer, in a file of a configuration.
_OWN_TRAINER = re.compile(r"^trainer:.*\n(?:[ \t].*\n|\s*\n)*?[ \t]+_target_:", flags=re.MULTILINE)


def refuse_unknown_keys(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Refuse a key that no configuration can have. Any other mistake is found when the configuration is composed.

    Args:
        arguments: The overrides of a command line.
        folders: The folders with the user's configurations.

    Raises:
        ConfigurationError: If there is no such key; it names the nearest one.
    """
    for argument in arguments:
        match = _OVERRIDE.match(argument)
        if match is None:
            continue
        first, name = match.groups()
        if first == "trainer" and name is not None:
            is_known = name in trainer_arguments() or name in KEYS
            if not is_known and not _has_own_trainer(arguments, folders):
                raise ConfigurationError(unknown_trainer_key(name, trainer_arguments()))
        elif first not in KEYS and not _is_users(first, folders):
            meant = [key for key in meant_keys(first) if not key.startswith(("module.", "data."))]
            if first in trainer_arguments():
                meant.append(f"trainer.{first}")
            if meant:
                hint = did_you_mean(first, KEYS, meant=meant)
                raise ConfigurationError(f"There is no key {first!r} in the configuration{hint}")


@cache
def trainer_arguments() -> tuple[str, ...]:
    """Return the arguments of the trainer that a configuration gives, read from its source."""
    file = Path(equipoise.__file__).parent / "trainer" / "trainer.py"
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            names = [argument.arg for argument in node.args.kwonlyargs]
            return tuple(name for name in names if name not in KEYS or name == "precision")
    return ()


def _has_own_trainer(arguments: Sequence[str], folders: Sequence[Path]) -> bool:
    """Return whether the trainer may be of a class of the user's, which has other arguments."""
    if any(argument.lstrip("+").startswith("trainer._target_=") for argument in arguments):
        return True
    return _has_group("trainer", folders) or any(map(_OWN_TRAINER.search, _texts(folders)))


def _is_users(key: str, folders: Sequence[Path]) -> bool:
    """Return whether the user's configurations may have a key in their outermost level, or a group of that name."""
    is_key = re.compile(rf"^{re.escape(key)}\s*:", flags=re.MULTILINE)
    return _has_group(key, folders) or any(map(is_key.search, _texts(folders)))


def _has_group(name: str, folders: Sequence[Path]) -> bool:
    """Return whether there is a group, or may be one in folders that only Hydra finds."""
    return any((folder / name).is_dir() for folder in folders) or any("searchpath" in text for text in _texts(folders))


def _texts(folders: Sequence[Path]) -> Iterator[str]:
    """Yield the texts of the user's configurations."""
    for folder in folders:
        for file in folder.rglob("*.yaml"):
            yield file.read_text(encoding="utf-8", errors="replace")
