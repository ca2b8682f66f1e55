"""The `equipoise` command: passes `fit`, `validate`, `test` and `predict` to Hydra and runs the other commands itself.

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
from equipoise.app.config.checks import STAGES, did_you_mean
from equipoise.app.devices import show_devices
from equipoise.errors import CheckpointError, ConfigurationError, StepError

__all__ = ["main"]

_USAGE = """\
equipoise trains PyTorch models on the devices you have.

  equipoise fit [experiment=NAME] [key=value ...]    train
  equipoise validate|test|predict [key=value ...]    evaluate; name a checkpoint by ckpt_path=PATH, best or last
  equipoise devices [--watch[=SECONDS]]              what devices there are, their memory, and under which index
  equipoise init FOLDER                              write a starter project that runs at once
  equipoise completion bash|zsh|fish                 print what to eval so that the shell completes commands and keys

fit, validate, test and predict read the configuration in ./conf; --config-dir FOLDER names another folder; without
either they run the digits example. Each run writes to a folder of its own, outputs/DATE/TIME.

  equipoise fit --help       the groups, keys and flags of a run
  equipoise fit --help KEY   the type, default and meaning of a key, such as trainer.max_epochs
  equipoise --version        the version
  --debug                    show the traceback of an error
"""
_OTHERS = ("devices", "init", "completion")
_SHELLS = ("bash", "zsh", "fish")
_FLAGS = (
    *("--cfg", "--config-dir", "--config-name", "--config-path", "--debug", "--help", "--hydra-help", "--info"),
    *("--multirun", "--package", "--resolve", "--run", "--version"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: The command and what follows it. Default: the command line.

    Returns:
        The exit code: 0; 2 after an error in what the user gave, told in one message; 130 after an interrupt.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given or os.environ.get("HYDRA_FULL_ERROR") == "1"
    try:
        with _plain_warnings():
            _command([argument for argument in given if argument != "--debug"])
    except KeyboardInterrupt:
        print("equipoise: interrupted.", file=sys.stderr)
        return 130
    except (ConfigurationError, CheckpointError, StepError) as error:
        if debug:
            raise
        print("\n".join([f"equipoise: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return 2
    return 0


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Shows warnings without the line of our own code that gave them, which says nothing to a user."""
    before = warnings.formatwarning
    warnings.formatwarning = _without_line
    try:
        yield
    finally:
        warnings.formatwarning = before


def _without_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return the text of a warning; worker processes of a run are given this function, too."""
    return f"{category.__name__}: {message}\n"


def _command(given: Sequence[str]) -> None:
    command, *rest = given or ["--help"]
    if "--version" in given:
        print(f"equipoise {equipoise.__version__}")
    elif command in STAGES:
        _stage(command, rest)
    elif command in ("-sc", "--shell-completion"):  # how the functions that Hydra gives a shell ask
        _complete(rest)
    elif command in ("--help", "-h", "help") or (command in _OTHERS and {"--help", "-h"} & {*rest}):
        print(_USAGE)
    elif command in _OTHERS:
        {"devices": show_devices, "init": _init, "completion": _completion}[command](rest)
    else:
        raise ConfigurationError(f"There is no command {command!r}{did_you_mean(command, [*STAGES, *_OTHERS])}")


# Training and evaluating.


def _stage(stage: str, rest: Sequence[str]) -> None:
    """Looks for the user's folders, checks the flags, hands on."""
    for argument in rest:
        flag = argument.partition("=")[0]
        if flag.startswith("--") and flag not in _FLAGS:
            is_key = "=" in argument or "." in flag
            hint = f"; a key is given without dashes, as {argument[2:]}" if is_key else did_you_mean(flag, _FLAGS)
            raise ConfigurationError(f"There is no flag {flag!r}{hint}")
        if argument.startswith("stage="):
            raise ConfigurationError(
                f"The command itself is the stage: equipoise {argument[6:]}, not equipoise {stage} {argument}."
            )
    # Hydra takes overrides on one side of its flags only; what belongs to a flag stays behind it.
    overrides, folders = _folders(["--help" if argument == "-h" else argument for argument in rest])
    keys = _keys_to_explain(overrides)
    if keys:
        others = [argument for argument in overrides if argument != "--help" and argument not in keys]
        _app().explain_keys(keys, [_quoted(argument) for argument in others], folders)
        return
    overrides.sort(key=lambda argument: argument[:1] == "-" or ("=" not in argument and argument[:1] not in "~+"))
    if folders[0] == _starter() / "conf":
        _announce_example()
    _app().main(stage, [_quoted(argument) for argument in overrides], folders)


def _keys_to_explain(arguments: Sequence[str]) -> list[str]:
    """Return the keys that follow `--help`, of which the meaning is asked."""
    if "--help" not in arguments:
        return []
    following = arguments[arguments.index("--help") + 1 :]
    return [argument for argument in following if "=" not in argument and argument[:1] not in ("-", "~", "+")]


def _announce_example() -> None:
    """Says that there is nothing to run here but the example."""
    print("equipoise: there is no folder conf here, so this is the digits example.", file=sys.stderr)
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigurationError("The digits example needs scikit-learn: pip install 'equipoise[examples]'.")


def _app() -> ModuleType:
    try:
        from equipoise.app import compose
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("hydra", "omegaconf"):
            raise
        raise ConfigurationError(
            f"This command needs Hydra, but {error.name} is not installed: pip install hydra-core."
            " `from equipoise import Trainer` works without it."
        ) from None
    return compose


def _folders(arguments: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Takes `--config-dir` out of the arguments; the folders of configurations, the first to be looked in first."""
    rest, folders, waiting = [], [], False
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if waiting or (flag == "--config-dir" and equals):
            folders.append(Path(argument if waiting else value))
            waiting = False
        elif flag in ("--config-dir", "-cd"):
            waiting = True
        else:
            rest.append(argument)
    for folder in folders:
        if not folder.is_dir():
            raise ConfigurationError(
                f"--config-dir must name a folder of configurations, but there is no folder {str(folder)!r}."
            )
    if waiting:
        raise ConfigurationError("--config-dir must be followed by a folder of configurations.")
    if Path("conf").is_dir() and Path("conf").resolve() not in [folder.resolve() for folder in folders]:
        folders.append(Path("conf"))
    return rest, [folder.resolve() for folder in folders or [_starter() / "conf"]]


def _quoted(argument: str) -> str:
    """Quotes a path with an equals sign, which names of checkpoints have and Hydra's grammar does not allow."""
    key, _, value = argument.partition("=")
    return f"{key}='{value}'" if key == "ckpt_path" and "=" in value and value[0] not in "'\"" else argument


# Completion.


def _completion(rest: Sequence[str]) -> None:
    if len(rest) != 1 or rest[0] not in _SHELLS:
        raise ConfigurationError(
            f"equipoise completion takes one of {', '.join(_SHELLS)}; it was given {' '.join(rest) or 'nothing'}."
        )
    _app().complete([f"install={rest[0]}"], [_starter() / "conf"])


def _complete(rest: Sequence[str]) -> None:
    """Answers a shell: commands and flags by itself, keys by way of Hydra, which knows nothing of commands."""
    if not (rest and rest[0].startswith("query=")):
        _app().complete(rest, [_starter() / "conf"])
        return
    line = os.environ.get("COMP_LINE", "")[: int(os.environ.get("COMP_POINT") or sys.maxsize)]
    words = line.split()
    word = "" if line.endswith(" ") or not words else words[-1]
    if len(words) - bool(word) < 2:
        print("\n".join(name for name in (*STAGES, *_OTHERS) if name.startswith(word)))
    elif word.startswith("-"):
        print("\n".join(flag for flag in _FLAGS if flag.startswith(word)))
    elif words[1] in STAGES:
        # Half a line may be wrong in any way, and a message would land in the middle of it.
        with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(Exception, SystemExit):
            overrides, folders = _folders(words[2:])
            os.environ["COMP_LINE"] = " ".join(["equipoise", *overrides]) + " " * (not word)
            _app().complete(rest, folders)


# The starter project.


def _starter() -> Path:
    """The digits example: inside the package where it is installed, beside it in a checkout."""
    package = Path(equipoise.__file__).parent
    places = (package / "starter", package.parent / "examples" / "digits")
    return next(folder for folder in places if folder.is_dir()).resolve()


def _init(rest: Sequence[str]) -> None:
    if len(rest) != 1 or rest[0].startswith("-"):
        raise ConfigurationError(f"equipoise init takes one folder; it was given {' '.join(rest) or 'nothing'}.")
    folder = Path(rest[0])
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(
            f"equipoise init writes into a new or empty folder, but {rest[0]!r} is there and not empty. Name another."
        )
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "outputs", "multirun", ".*_cache", ".hypothesis")
    try:
        shutil.copytree(_starter(), folder, ignore=ignore, dirs_exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"equipoise init cannot write into {rest[0]!r}: {error}. Name another.") from error
    print(f"A project is in {folder}. Train it:\n\n  cd {folder} && equipoise fit")


if __name__ == "__main__":
    sys.exit(main())
