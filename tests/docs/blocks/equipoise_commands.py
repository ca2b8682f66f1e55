"""The `equipoise` command, as far as it goes without a training: its configuration is composed and checked."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from equipoise.__main__ import main
from equipoise.app.command_line.commands import names_of_commands
from equipoise.app.command_line.completion import SHELLS, flags_of
from equipoise.app.command_line.folders import take_folders
from equipoise.app.compose import compose_values
from equipoise.app.config.keys import STAGES
from equipoise.extensions.common.planned_devices import describe_devices
from equipoise.extensions.comparison.measuring.candidates import chosen_candidates
from equipoise.extensions.comparison.options import Options
from equipoise.extensions.planning.command.command import _devices_of

__all__ = ["check_equipoise"]


def check_equipoise(arguments: Sequence[str]) -> None:
    """Check a command line, in the folder where this process stands. `init` and `--help` really run.

    Args:
        arguments: What follows `equipoise`.

    Raises:
        AssertionError: If there is no such command or flag.
        ConfigurationError: If the overrides are wrong.
    """
    command, *rest = arguments
    if command in ("init", "--version") or "--help" in arguments:
        assert _exit_code(arguments) == 0
    elif command in STAGES or command in ("plan", "savings", "compare"):
        _check_configured(command, rest)
    elif command == "completion":
        assert rest[0] in SHELLS
    elif command == "doctor":
        assert set(rest) <= {"--json"}
    else:
        assert command in names_of_commands(), f"there is no command {command}"


def _exit_code(arguments: Sequence[str]) -> int | str | None:
    """Return the exit code of a command that runs in this process; Hydra exits after its help."""
    try:
        return main(arguments)
    except SystemExit as exit_:
        return exit_.code


def _check_configured(command: str, arguments: Sequence[str]) -> None:
    rest, folders = take_folders(arguments)
    flags = [argument for argument in rest if argument.startswith("-")]
    for flag in flags:
        assert flag.startswith(tuple(flags_of(command))), f"equipoise {command} has no flag {flag}"
    if command == "compare":
        options, rest = Options.read(rest)
        chosen_candidates(options.strategies)
    overrides = [argument for argument in rest if argument not in flags]
    with tempfile.TemporaryDirectory() as output:
        values = compose_values(list(_first_of_sweep(overrides)), folders, Path(output, "run"))
    if command == "plan":
        describe_devices(_devices_of(values["trainer"]))


def _first_of_sweep(overrides: Sequence[str]) -> Iterator[str]:
    """Yield the overrides of the first job of a sweep; without a sweep, all as they are."""
    for text in overrides:
        (override,) = OverridesParser.create().parse_overrides([text])
        if text == "data.batch_size=auto":
            # A fit replaces it before it checks the configuration.
            yield "data.batch_size=2"
        elif override.is_sweep_override():
            first = next(iter(override.sweep_string_iterator()))
            yield f"{override.get_key_element()}={first}"
        else:
            yield text
