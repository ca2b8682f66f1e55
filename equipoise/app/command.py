"""Commands of the `equipoise` program, which other packages can add by entry points.

[project.entry-points."equipoise.commands"]
explain = "my_package.command:COMMAND"
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from equipoise.errors import ConfigurationError
from equipoise.names.extensions import load_extension, names_of_extensions

__all__ = ["Command", "added_commands", "find_command"]

_GROUP = "commands"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command that works with the configuration that `fit` would run.

    Attributes:
        summary: What it does, for a line of the help.
        run: Function `run(overrides, folders)`: the arguments, and the folders with configurations, the one with the
            primary `config.yaml` first. `equipoise.app.compose_values` composes them.
        flags: Its flags; those with a value end with "=". Default: none.
        usage: Its arguments in the help. Default: "[key=value ...]".
        examples: Further lines of the help, each with arguments and their meaning. Default: none.

    Example:
        >>> COMMAND = Command(summary="print the overrides", run=lambda overrides, folders: print(overrides))
    """

    summary: str
    run: Callable[[Sequence[str], Sequence[Path]], None]
    flags: Sequence[str] = ()
    usage: str = "[key=value ...]"
    examples: Sequence[tuple[str, str]] = ()


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
