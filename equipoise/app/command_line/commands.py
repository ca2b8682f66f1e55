"""The commands beside the run stages: those of the program itself, and those that packages add."""

from collections.abc import Sequence

from equipoise.app.command import Command, find_command
from equipoise.app.command_line.folders import take_folders
from equipoise.app.command_line.hydra_calls import import_compose, quoted
from equipoise.names.extensions import names_of_extensions

__all__ = ["OWN_COMMANDS", "command_named", "names_of_commands", "run_command"]

# Functions by their places: help imports none of them, and packages that another command needs may be missing.
OWN_COMMANDS = {
    "devices": Command(
        summary="what devices there are, their memory, and under which index",
        run="equipoise.app.machine.devices:show_devices",
        flags={"--watch": "print them anew each second until Ctrl-C", "--watch=": "the same, each so many seconds"},
        usage="[--watch[=SECONDS]]",
        reads_configuration=False,
    ),
    "doctor": Command(
        summary="what to paste into a bug report: versions, devices, limits",
        run="equipoise.app.machine.doctor:show_doctor",
        flags={"--json": "print the facts as JSON"},
        usage="[--json]",
        reads_configuration=False,
    ),
    "init": Command(
        summary="write a starter project that runs immediately",
        run="equipoise.app.command_line.starter:write_project",
        usage="FOLDER",
        reads_configuration=False,
    ),
    "completion": Command(
        summary="print what to eval so that the shell completes commands and keys",
        run="equipoise.app.command_line.completion:print_completion",
        usage="bash|zsh|fish",
        reads_configuration=False,
    ),
}


def names_of_commands() -> tuple[str, ...]:
    """Return the names of all commands that are no run stages."""
    return (*names_of_extensions("commands"), *OWN_COMMANDS)


def command_named(name: str) -> Command:
    """Return a command.

    Raises:
        ConfigurationError: If there is none, or it cannot be loaded.
    """
    return OWN_COMMANDS.get(name) or find_command(name)


def run_command(name: str, arguments: Sequence[str]) -> int:
    """Run a command, with the configuration that `fit` would run if it reads one; return its exit code."""
    command = command_named(name)
    if not command.reads_configuration:
        return command(arguments, [])
    overrides, folders = take_folders(arguments)
    # Hydra may be missing, which is reported before the command is imported.
    import_compose()
    return command([quoted(argument) for argument in overrides], folders)
