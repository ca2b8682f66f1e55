"""The `equipoise` command: passes `fit`, `validate`, `test` and `predict` to Hydra and runs or finds other commands.

Hydra is imported when it is needed, so the other commands, and the library, work without it.
"""

import contextlib
import importlib.util
import io
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import equipoise
from equipoise.app.command import added_commands, find_command
from equipoise.app.config.checks import STAGES
from equipoise.app.config.suggestions import did_you_mean
from equipoise.errors import CheckpointError, ConfigurationError, StepError, SweepError
from equipoise.names.extensions import names_of_extensions
from equipoise.names.imports import collector_paused
from equipoise.parallel.workers.messages.tracebacks import FULL, shortened

__all__ = ["main"]

_HEAD = "equipoise trains PyTorch models on the devices you have."
_STAGE_LINES = (
    ("fit [experiment=NAME] [key=value ...]", "train"),
    ("validate|test|predict [key=value ...]", "evaluate; name a checkpoint by ckpt_path=PATH, best or last"),
)
_OWN_LINES = (
    ("devices [--watch[=SECONDS]]", "what devices there are, their memory, and under which index"),
    ("doctor [--json]", "what to paste into a bug report: versions, devices, limits"),
    ("init FOLDER", "write a starter project that runs immediately"),
    ("completion bash|zsh|fish", "print what to eval so that the shell completes commands and keys"),
)
_CONFIGURATION = """\
Those with key=value read the configuration in ./conf; --config-dir FOLDER names another folder; without either they
run the digits example. Each run writes to a folder of its own, outputs/DATE/TIME.
"""
_FIRST_EXAMPLES = (
    ("fit --help", "the groups, keys and flags of a run"),
    ("fit --help KEY", "the type, default and meaning of a key, such as trainer.max_epochs"),
)
_LAST_LINES = (
    ("equipoise --version", "the version"),
    ("--debug", "show the traceback of an error"),
)
# Columns of the first part of a line of the help.
_WIDTH = 50

# Commands that read no configuration.
_OWN_COMMANDS = ("devices", "doctor", "init", "completion")
_SHELLS = ("bash", "zsh", "fish")
# 128 and the number of SIGPIPE.
_READER_ENDED = 141
_FLAGS = (
    *("--cfg", "--config-dir", "--config-name", "--config-path", "--debug", "--help", "--hydra-help", "--info"),
    *("--multirun", "--package", "--resolve", "--run", "--version"),
)
# Flags of every added command, and of own ones that are not Hydra's.
_COMMON_FLAGS = ("--config-dir", "--debug", "--help")
_OWN_FLAGS = {"doctor": ("--debug", "--help", "--json")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The command and its arguments. Default: those of this process.

    Returns:
        The exit code: 0, or that of an added command; 1 if jobs of a sweep failed; 2 after an error in the user's
        input, with one message; 130 after an interrupt; 141, as after SIGPIPE, if the reader of the output has ended.
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
    """Run one command; return its exit code."""
    # 1. Take out the flag that is none of Hydra's.
    if arguments is None:
        arguments = sys.argv[1:]
        # A name with characters that the output lacks, in a pipe under Windows, must not end a run.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
    debug = "--debug" in arguments or os.environ.get("HYDRA_FULL_ERROR") == "1"
    command_line = [argument for argument in arguments if argument != "--debug"]

    if debug:
        os.environ[FULL] = "1"

    # 2. Run the command. An error in the user's input becomes one message.
    try:
        with _plain_warnings():
            return _run_command(command_line)
    except KeyboardInterrupt as error:
        lines = ["equipoise: interrupted.", *getattr(error, "__notes__", [])]
        print("\n".join(lines), file=sys.stderr)
        return 130
    except SweepError as error:
        print(f"equipoise: {error}", file=sys.stderr)
        return 1
    except (ConfigurationError, CheckpointError, StepError) as error:
        if debug:
            raise
        lines = [f"equipoise: {error}"]
        lines += getattr(error, "__notes__", [])
        print("\n".join(lines), file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise
    except Exception as error:
        raise shortened(error)  # noqa: B904 - it is the same error


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show warnings without the line of Equipoise's code that raised them, which does not help a user."""
    # Restore the function at the end: a program may call `main` as well.
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


def _run_command(command_line: Sequence[str]) -> int:
    """Run one command; return its exit code."""
    if "--version" in command_line:
        print(f"equipoise {equipoise.__version__}")
        return 0
    command, *arguments = command_line or ["--help"]
    asks_for_help = command in ("--help", "-h", "help")
    # Run stages print help of their own.
    if command in other_commands() and not {"--help", "-h"}.isdisjoint(arguments):
        asks_for_help = True
    if asks_for_help:
        print(_usage())
    elif command in STAGES:
        _run_stage(command, arguments)
    elif command in ("-sc", "--shell-completion"):
        # The functions that Hydra has installed in a shell call this.
        _complete(arguments)
    elif command == "devices":
        _devices(arguments)
    elif command == "doctor":
        _doctor(arguments)
    elif command == "init":
        _init(arguments)
    elif command == "completion":
        _completion(arguments)
    elif command in names_of_extensions("commands"):
        return _run_added(command, arguments)
    else:
        hint = did_you_mean(command, (*STAGES, *other_commands()))
        raise ConfigurationError(f"There is no command {command!r}{hint}")
    return 0


def other_commands() -> tuple[str, ...]:
    """Return the commands that are no run stages."""
    return (*names_of_extensions("commands"), *_OWN_COMMANDS)


def flags_of(command: str) -> Sequence[str]:
    """Return the flags of a command. Those with a value that must follow end with "="."""
    if command in STAGES or command in _OWN_COMMANDS:
        return _OWN_FLAGS.get(command, _FLAGS)
    added = find_command(command)
    common_flags = [flag for flag in _COMMON_FLAGS if added.reads_configuration or flag != "--config-dir"]
    return sorted((*added.flags, *common_flags))


def _run_added(name: str, arguments: Sequence[str]) -> int:
    """Run a command of an extension, with the configuration that `fit` would run if it reads one; return its code."""
    command = find_command(name)
    if not command.reads_configuration:
        return command(arguments, [])
    overrides, folders = _take_folders(arguments)
    _app()
    return command([_quoted(argument) for argument in overrides], folders)


def _usage() -> str:
    """Return the help of all commands."""
    commands = list(_STAGE_LINES)
    examples = list(_FIRST_EXAMPLES)
    for name, command in added_commands():
        if isinstance(command, ConfigurationError):
            commands.append((name, f"is broken: {command}"))
            continue
        commands.append((f"{name} {command.usage}", command.summary))
        examples += [(f"{name} {arguments}", meaning) for arguments, meaning in command.examples]
    lines = [_HEAD, ""]
    lines += [_line(f"equipoise {usage}", meaning) for usage, meaning in (*commands, *_OWN_LINES)]
    lines += ["", _CONFIGURATION]
    lines += [_line(f"equipoise {usage}", meaning) for usage, meaning in examples]
    lines += [_line(usage, meaning) for usage, meaning in _LAST_LINES]
    return "\n".join(lines)


def _line(usage: str, meaning: str) -> str:
    """Return a line of the help; a long usage has its meaning on a line of its own."""
    if len(usage) > _WIDTH:
        return f"  {usage}\n  {'':{_WIDTH}} {meaning}"
    return f"  {usage:{_WIDTH}} {meaning}"


# Training and evaluating.


def _run_stage(stage: str, arguments: Sequence[str]) -> None:
    """Run a stage, or explain keys."""
    # 1. Check the flags, and find the user's folders.
    for argument in arguments:
        _check_argument(argument, stage)
    long_arguments = ["--help" if argument == "-h" else argument for argument in arguments]
    overrides, folders = _take_folders(long_arguments)

    # 2. Explain the keys after `--help`.
    keys = _keys_to_explain(overrides)
    if keys:
        rest = [_quoted(argument) for argument in overrides if argument != "--help" and argument not in keys]
        _app().explain_keys(keys, rest, folders)
        return

    # 3. Run. Hydra takes overrides only before its flags, and the value of a flag stays after the flag.
    overrides.sort(key=_is_flag_or_value)
    if folders[0] == _starter() / "conf":
        _announce_example()
    _app().main(stage, [_quoted(argument) for argument in overrides], folders)


def _devices(arguments: Sequence[str]) -> None:
    """List the devices."""
    from equipoise.app.machine.devices import show_devices

    show_devices(arguments)


def _doctor(arguments: Sequence[str]) -> None:
    """Print facts for a bug report. It is imported here: packages of other commands may be missing."""
    from equipoise.app.machine.doctor import show_doctor

    show_doctor(arguments)


def _check_argument(argument: str, stage: str) -> None:
    flag = argument.partition("=")[0]
    if flag.startswith("--") and flag not in _FLAGS:
        hint = did_you_mean(flag, _FLAGS)
        is_key = "=" in argument or "." in flag
        if is_key:
            hint = f"; a key is given without dashes, as {argument[2:]}"
        raise ConfigurationError(f"There is no flag {flag!r}{hint}")
    if argument.startswith("stage="):
        raise ConfigurationError(
            f"The command itself is the stage: equipoise {argument[6:]}, not equipoise {stage} {argument}."
        )


def _is_flag_or_value(argument: str) -> bool:
    """Return whether an argument is a flag or the value of a flag, and no override."""
    if argument.startswith("-"):
        return True
    return argument != "" and "=" not in argument and not argument.startswith(("~", "+"))


def _keys_to_explain(arguments: Sequence[str]) -> list[str]:
    """Return the keys that follow `--help`, which the user wants to be explained."""
    if "--help" not in arguments:
        return []
    start = arguments.index("--help") + 1
    return [
        argument for argument in arguments[start:] if "=" not in argument and not argument.startswith(("-", "~", "+"))
    ]


def _announce_example() -> None:
    """Report that there is nothing to run here but the example."""
    print("equipoise: there is no folder conf here, so this is the digits example.", file=sys.stderr)
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigurationError("The digits example needs scikit-learn: pip install scikit-learn.")


def _app() -> ModuleType:
    try:
        with collector_paused():
            from equipoise.app import compose
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("hydra", "omegaconf"):
            raise
        raise ConfigurationError(
            f"This command needs Hydra, but {error.name} is not installed: pip install hydra-core."
            " `from equipoise import Trainer` works without it."
        ) from None
    return compose


def _take_folders(arguments: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Return the arguments without `--config-dir`, and the folders of configurations, the most important first."""
    # 1. The folders that flags name.
    rest = []
    folders = []
    is_value = False
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if is_value:
            folders.append(Path(argument))
            is_value = False
        elif flag == "--config-dir" and equals:
            folders.append(Path(value))
        elif flag in ("--config-dir", "-cd"):
            is_value = True
        else:
            rest.append(argument)
    for folder in folders:
        if not folder.is_dir():
            raise ConfigurationError(
                f"--config-dir must name a folder of configurations, but there is no folder {str(folder)!r}."
            )
    if is_value:
        raise ConfigurationError("--config-dir must be followed by a folder of configurations.")

    # 2. The folder `conf`, or else that of the example.
    resolved = [folder.resolve() for folder in folders]
    conf = Path("conf").resolve()
    if conf.is_dir() and conf not in resolved:
        resolved.append(conf)
    if not resolved:
        _refuse_subfolder(conf.parent)
        example = _starter() / "conf"
        resolved.append(example.resolve())
    return rest, resolved


def _refuse_subfolder(folder: Path) -> None:
    """Refuse to run the example in a subfolder of a project.

    Raises:
        ConfigurationError: If a folder above this one has a `conf` with a configuration of Equipoise.
    """
    for parent in folder.parents:
        conf = parent / "conf"
        is_project = False
        with contextlib.suppress(OSError, UnicodeDecodeError):
            is_project = "equipoise" in (conf / "config.yaml").read_text(encoding="utf-8")
        if is_project:
            raise ConfigurationError(
                f"There is no folder conf here, but there is {str(conf)!r}: this is a subfolder of a project. Run the"
                f" command there, after `cd {os.path.relpath(parent, folder)}`, or add"
                f" `--config-dir {os.path.relpath(conf, folder)}`."
            )


def _quoted(argument: str) -> str:
    """Quote a path with an equals sign; names of checkpoints have one, but Hydra's grammar does not allow it."""
    key, _, value = argument.partition("=")
    if key != "ckpt_path" or "=" not in value:
        return argument
    if value.startswith(("'", '"')):
        return argument
    return f"{key}='{value}'"


# Completion.


def _completion(arguments: Sequence[str]) -> None:
    if len(arguments) != 1 or arguments[0] not in _SHELLS:
        text = " ".join(arguments) or "nothing"
        raise ConfigurationError(f"equipoise completion takes one of {', '.join(_SHELLS)}; it was given {text}.")
    shell = arguments[0]
    _app().complete([f"install={shell}"], [_starter() / "conf"])


def _complete(arguments: Sequence[str]) -> None:
    """Print completions: commands and flags by itself, keys by Hydra, which does not know commands."""
    if not arguments or not arguments[0].startswith("query="):
        _app().complete(arguments, [_starter() / "conf"])
        return

    # 1. The line up to the cursor, and the word that the user has begun.
    cursor = int(os.environ.get("COMP_POINT") or sys.maxsize)
    line = os.environ.get("COMP_LINE", "")[:cursor]
    complete_words = line.split()
    word = ""
    if complete_words and not line.endswith(" "):
        word = complete_words.pop()

    # 2. A command, a flag, or a key.
    if len(complete_words) < 2:
        _print_beginning_with(word, (*STAGES, *other_commands()))
    elif word.startswith("-"):
        # An unknown or broken command has none.
        with contextlib.suppress(ConfigurationError):
            _print_beginning_with(word, flags_of(complete_words[1]))
    elif complete_words[1] in (*STAGES, *names_of_extensions("commands")):
        # An unfinished line may be wrong in any way, and a message would appear in the middle of it.
        with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(Exception, SystemExit):
            if complete_words[1] in STAGES or find_command(complete_words[1]).reads_configuration:
                _complete_key(arguments, complete_words[2:], word)


def _complete_key(arguments: Sequence[str], words: Sequence[str], word: str) -> None:
    """Let Hydra print completions of a word after others, without the command and `--config-dir`."""
    if word:
        words = [*words, word]
    overrides, folders = _take_folders(words)
    line = " ".join(["equipoise", *overrides])
    if not word:
        line += " "
    os.environ["COMP_LINE"] = line
    _app().complete(arguments, folders)


def _print_beginning_with(word: str, names: Sequence[str]) -> None:
    print("\n".join(name for name in names if name.startswith(word)))


# The starter project.


def _starter() -> Path:
    """Return the folder of the digits example: in the package if it is installed, beside it in a checkout."""
    package = Path(equipoise.__file__).parent
    installed = package / "starter"
    if installed.is_dir():
        return installed.resolve()
    return (package.parent / "examples" / "digits").resolve()


def _init(arguments: Sequence[str]) -> None:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        text = " ".join(arguments) or "nothing"
        raise ConfigurationError(f"equipoise init takes one folder; it was given {text}.")
    name = arguments[0]
    folder = Path(name)
    if folder.exists() and not _is_empty_folder(folder):
        raise ConfigurationError(
            f"equipoise init writes into a new or empty folder, but {name!r} exists and is not empty. Name another."
        )
    # A checkout may hold the files of earlier runs and tests.
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "outputs", "multirun", ".*_cache", ".hypothesis")
    try:
        shutil.copytree(_starter(), folder, ignore=ignore, dirs_exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"equipoise init cannot write into {name!r}: {error}. Name another.") from error
    print(f"A project is in {folder}. Train it:\n\n  cd {folder} && equipoise fit")
    if importlib.util.find_spec("sklearn") is None:
        print("\nIts data come from scikit-learn, which is not installed: pip install scikit-learn")


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


if __name__ == "__main__":
    sys.exit(main())
