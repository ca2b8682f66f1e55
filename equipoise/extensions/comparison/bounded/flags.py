"""Flags of commands that run trials."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from equipoise.errors import ConfigurationError

__all__ = ["list_of_names", "present", "read_flags", "seconds", "whole_number"]

# Reads the value of a flag: receives its name and its text, None for a flag without a value.
Reader = Callable[[str, str | None], Any]


def read_flags(arguments: Sequence[str], readers: Mapping[str, Reader], takes: str) -> tuple[list[str], dict[str, Any]]:
    """Return the overrides among arguments, and the values of flags by their names.

    Args:
        arguments: Arguments of the command.
        readers: By the name of each flag, the function that reads its value.
        takes: What the command takes, for the message about any other flag.

    Raises:
        ConfigurationError: If there is no such flag, or its value is wrong.

    Example:
        >>> read_flags(["a=1", "--timeout=5"], {"--timeout": seconds}, "equipoise x takes --timeout=SECONDS")
        (['a=1'], {'--timeout': 5.0})
    """
    overrides = []
    flags = {}
    for argument in arguments:
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        name, equals, text = argument.partition("=")
        if name not in readers:
            raise ConfigurationError(f"{takes}, not {argument}.")
        read = readers[name]
        value = None
        if equals:
            value = text
        flags[name] = read(name, value)
    return overrides, flags


def present(name: str, text: str | None) -> bool:
    """Read a flag that takes no value."""
    if text is not None:
        raise ConfigurationError(f"{name} takes no value, but {text!r} was given.")
    return True


def seconds(name: str, text: str | None) -> float:
    """Read a positive number of seconds."""
    try:
        value = float(text or "")
    except ValueError:
        # A text is as wrong as zero seconds.
        value = 0.0
    if not 0 < value < 1e6:
        raise ConfigurationError(f"{name} takes seconds above 0, such as {name}=300, not {text!r}.")
    return value


def whole_number(name: str, text: str | None) -> int:
    """Read a whole number from 1."""
    number = 0
    if text is not None and text.isdecimal():
        number = int(text)
    if number == 0:
        raise ConfigurationError(f"{name} takes a whole number from 1, such as {name}=10, not {text!r}.")
    return number


def list_of_names(name: str, text: str | None) -> list[str]:
    """Read names that are separated by commas."""
    parts = (text or "").split(",")
    names = [part.strip() for part in parts]
    if not all(names):
        raise ConfigurationError(f"{name} takes names, separated by commas, such as {name}=dp,ddp, not {text!r}.")
    return names
