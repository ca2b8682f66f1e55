"""The `equipoise` command: passes `fit`, `validate`, `test` and `predict` to Hydra and runs or finds other commands.

Hydra is imported when it is needed, so the other commands, and the library, work without it.
"""

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence

import equipoise
from equipoise.app.command_line.commands import command_named, names_of_commands, run_command
from equipoise.app.command_line.overview import command_help, overview
from equipoise.app.config.keys import STAGES
from equipoise.app.config.suggestions import did_you_mean
from equipoise.errors import CheckpointError, ConfigurationError, StepError, SweepError
from equipoise.names.synonyms import meant_commands
from equipoise.names.tracebacks import FULL, shortened
from equipoise.tables.width import on_terminal

__all__ = ["main"]

# 128 and the number of SIGPIPE.
_READER_ENDED = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The command and its arguments. Default: those of this process.

    Returns:
        The exit code: 0, or that of an added command; 1 if jobs of a sweep failed; 2 after an error in the user's
        input, with one message; 130 after an interrupt; 141, as after SIGPIPE, if the reader of the output has ended.
        Any other error is raised if `arguments` are given; else it is printed, and the exit code is 1.
    """
    try:
        try:
            return _main(arguments)
        finally:
            # The output of a pipe waits in a buffer. It is written here, where its errors are caught.
            sys.stdout.flush()
    except BrokenPipeError:
        return _leave_silently()


def _leave_silently() -> int:
    """Return the exit code for an output whose reader, such as `head`, has ended. Other commands print nothing, too."""
    # Python flushes the output once more when it ends.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _READER_ENDED


def _main(arguments: Sequence[str] | None) -> int:
    """Take out the flag that is none of Hydra's, and run one command; return its exit code."""
    prints_errors = arguments is None
    if arguments is None:
        arguments = sys.argv[1:]
        # A name with characters that the output lacks, in a pipe under Windows, must not end a run.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
    debug = "--debug" in arguments or os.environ.get("HYDRA_FULL_ERROR") == "1"
    with _plain_warnings(), _full_tracebacks(debug):
        command_line = [argument for argument in arguments if argument != "--debug"]
        return _exit_code(command_line, debug, prints_errors)


def _exit_code(command_line: Sequence[str], debug: bool, prints_errors: bool) -> int:
    """Run one command; return its exit code. An error in the user's input becomes one message.

    Args:
        command_line: The command and its arguments.
        debug: Whether errors in the user's input are raised.
        prints_errors: Whether any other error is printed here, without the frames of the command itself, or raised.
    """
    try:
        return _run(command_line)
    except KeyboardInterrupt as error:
        _report("interrupted.", error)
        return 130
    except SweepError as error:
        _report(str(error), error)
        return 1
    except (ConfigurationError, CheckpointError, StepError) as error:
        if debug:
            raise
        _report(str(error), error)
        return 2
    except BrokenPipeError:
        raise
    except Exception as error:
        shortened(error)
        if not prints_errors:
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        return 1


def _report(message: str, error: BaseException) -> None:
    """Print a message, and the notes of the error that it is about."""
    text = "\n".join([f"equipoise: {message}", *getattr(error, "__notes__", [])])
    print(on_terminal(text), file=sys.stderr)


# A program may call `main` as well, so both of these put back what they change.


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show warnings without the line of Equipoise's code that raised them, which does not help a user."""
    before = warnings.formatwarning
    warnings.formatwarning = _without_line
    try:
        yield
    finally:
        warnings.formatwarning = before


def _without_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return the text of a warning; worker processes of a run receive this function, too."""
    return f"{category.__name__}: {message}\n"


@contextlib.contextmanager
def _full_tracebacks(debug: bool) -> Iterator[None]:
    """Keep all frames of tracebacks with `--debug`, in worker processes, too."""
    if not debug or os.environ.get(FULL):
        yield
        return
    os.environ[FULL] = "1"
    try:
        yield
    finally:
        os.environ.pop(FULL, None)


def _run(command_line: Sequence[str]) -> int:
    """Run one command; return its exit code. Stages and completion are imported when they run: help stays quick."""
    if "--version" in command_line:
        print(f"equipoise {equipoise.__version__}")
        return 0
    name, *arguments = command_line or ["--help"]
    # Run stages print help of their own.
    is_other = name not in STAGES and name in names_of_commands()
    if name in ("--help", "-h", "help"):
        print(overview())
    elif is_other and not {"--help", "-h"}.isdisjoint(arguments):
        print(command_help(name, command_named(name)))
    elif is_other:
        return run_command(name, arguments)
    elif name in STAGES:
        from equipoise.app.command_line.stages import run_stage

        run_stage(name, arguments)
    elif name in ("-sc", "--shell-completion"):
        from equipoise.app.command_line.completion import complete

        complete(arguments)
    elif name.startswith("-"):
        from equipoise.app.command_line.flags import STAGE_FLAGS

        flag = name if name in STAGE_FLAGS else "--help"
        raise ConfigurationError(f"Flags follow the command, as in equipoise fit {flag}.")
    else:
        commands = (*STAGES, *names_of_commands())
        hint = did_you_mean(name, commands, meant=meant_commands(name, commands))
        raise ConfigurationError(f"There is no command {name!r}{hint}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
