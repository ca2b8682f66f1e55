"""Commands of the `equipoise` program, which other packages can add by entry points, and how they read their flags.

[project.entry-points."equipoise.commands"]
explain = "my_package.command:COMMAND"
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from equipoise.errors import ConfigurationError
from equipoise.names.extensions import load_extension, names_of_extensions

__all__ = [
    "PROGRESS",
    "Command",
    "Reader",
    "added_commands",
    "find_command",
    "list_of_names",
    "present",
    "read_flags",
    "report",
    "seconds",
    "whole_number",
]

_GROUP = "commands"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command, most often one that works with the configuration that `fit` would run.

    Attributes:
        summary: A description of what it does, for a line of the help.
        run: Function `run(overrides, folders)`: the arguments, and the folders with configurations, the one with the
            primary `config.yaml` first. `equipoise.app.compose_values` composes them. It may return an exit code. Or
            the place of the function, as "my_package.command:run", which is imported when the command runs, so that
            help and completion stay quick.
        flags: The meaning of each of its flags; those with a value end with "=". Names alone will do. Default: none.
        usage: Its arguments in the help. Default: "[key=value ...]".
        examples: Further lines of its help, each with arguments and their meaning. Default: none.
        reads_configuration: False for a command that needs none: it receives all arguments, and no folders, and works
            without Hydra. Default: True.

    Example:
        >>> COMMAND = Command(summary="print the overrides", run=lambda overrides, folders: print(overrides))
    """

    summary: str
    run: Callable[[Sequence[str], Sequence[Path]], int | None] | str
    flags: Mapping[str, str] | Sequence[str] = ()
    usage: str = "[key=value ...]"
    examples: Sequence[tuple[str, str]] = ()
    reads_configuration: bool = True

    def __call__(self, arguments: Sequence[str], folders: Sequence[Path]) -> int:
        """Run the command, and return its exit code."""
        run: Any = self.run
        if isinstance(run, str):
            run = resolve_name(run)
        return run(arguments, folders) or 0


def find_command(name: str) -> Command:
    """Return an added command.

    Raises:
        ConfigurationError: If no package adds it, or it cannot be loaded.
    """
    command = load_extension(_GROUP, name)
    if not isinstance(command, Command):
        raise ConfigurationError(f"The command {name!r} must be an equipoise.app.Command, not {command!r}.")
    return command


def added_commands() -> Iterator[tuple[str, Command | ConfigurationError]]:
    """Yield the names of all added commands, each with the command, or the error of one that cannot be loaded."""
    for name in names_of_extensions(_GROUP):
        try:
            yield name, find_command(name)
        except ConfigurationError as error:
            yield name, error


# How a line begins that says what a command does now.
PROGRESS = "equipoise: "


def report(activity: str) -> None:
    """Print what a command does now: to the error output, as the output is that of the command."""
    print(f"{PROGRESS}{activity} ...", file=sys.stderr, flush=True)


# Flags.

# Reads the value of a flag: receives its name and its text, None for a flag without a value.
Reader = Callable[[str, str | None], Any]


def read_flags(arguments: Sequence[str], readers: Mapping[str, Reader], takes: str) -> tuple[list[str], dict[str, Any]]:
    """Return the overrides among arguments, and the values of flags by their names.

    Args:
        arguments: Arguments of the command.
        readers: By the name of each flag, the function that reads its value.
        takes: A phrase that says what the command takes, for the message about any other flag.

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
        raise _refusal(f"{name} takes seconds above 0, such as {name}=300", text)
    return value


def whole_number(name: str, text: str | None) -> int:
    """Read a whole number from 1."""
    number = 0
    if text is not None and text.isdecimal():
        number = int(text)
    if number == 0:
        raise _refusal(f"{name} takes a whole number from 1, such as {name}=10", text)
    return number


def list_of_names(name: str, text: str | None) -> list[str]:
    """Read names that are separated by commas."""
    names = [part.strip() for part in (text or "").split(",")]
    if not all(names):
        raise ConfigurationError(f"{name} takes names, separated by commas, such as {name}=dp,ddp, not {text!r}.")
    return names


def _refusal(rule: str, text: str | None) -> ConfigurationError:
    return ConfigurationError(f"{rule}." if text is None else f"{rule}, not {text!r}.")
