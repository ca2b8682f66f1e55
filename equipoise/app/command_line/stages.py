"""The run stages `fit`, `validate`, `test` and `predict`: their flags, keys to explain, and their run by Hydra."""

import importlib.util
import re
import sys
from collections.abc import Sequence

from equipoise.app.command_line.flags import STAGE_FLAGS
from equipoise.app.command_line.folders import starter_folder, take_folders
from equipoise.app.command_line.hydra_calls import import_compose, is_override, quoted
from equipoise.app.command_line.quick_check import refuse_unknown_keys
from equipoise.app.config.keys import KEYS
from equipoise.app.config.suggestions import did_you_mean
from equipoise.errors import ConfigurationError
from equipoise.names.synonyms import keys_named, meant_keys

__all__ = ["run_stage"]


def run_stage(stage: str, arguments: Sequence[str]) -> None:
    """Run a stage, or explain keys.

    Raises:
        ConfigurationError: If an argument is wrong.
    """
    # 1. Check the flags, and find the user's folders.
    for argument in arguments:
        _check_argument(argument, stage)
    long_arguments = ["--help" if argument == "-h" else argument for argument in arguments]
    overrides, folders = take_folders(long_arguments)

    # 2. Explain the keys after `--help`.
    keys = _keys_to_explain(overrides)
    if keys:
        rest = [quoted(argument) for argument in overrides if argument != "--help" and argument not in keys]
        import_compose().explain_keys(keys, rest, folders)
        return

    if "--help" in overrides:
        given = [quoted(argument) for argument in overrides if is_override(argument)]
        import_compose().show_help(given, folders, STAGE_FLAGS)
        return

    # 3. Refuse what is wrong at a glance.
    refuse_unknown_keys(overrides, folders)

    # 4. Run. Hydra takes overrides only before its flags, and the value of a flag stays after the flag.
    overrides.sort(key=is_override, reverse=True)
    if folders[0] == starter_folder() / "conf":
        _announce_example()
    import_compose().main(stage, [quoted(argument) for argument in overrides], folders)


def _check_argument(argument: str, stage: str) -> None:
    flag, equals, _ = argument.partition("=")
    # Flags of one dash are Hydra's; the value of -cp, -cn and -cd may follow without a space.
    is_known = flag in STAGE_FLAGS if flag.startswith("--") else re.fullmatch("-([hmpric]|sc|c[pnd].*)", flag)
    if flag == "--debug" and equals:
        raise ConfigurationError("--debug takes no value.")
    if flag.startswith("-") and not is_known:
        raise ConfigurationError(f"There is no flag {flag!r}{_hint(argument)}")
    if argument.startswith("stage="):
        raise ConfigurationError(
            f"The command itself is the stage: equipoise {argument[6:]}, not equipoise {stage} {argument}."
        )


def _hint(argument: str) -> str:
    """Return the end of the message about an unknown flag: it is a key with dashes, or near to another flag."""
    word, equals, value = argument.lstrip("-").partition("=")
    name = word.replace("-", "_")
    meant = meant_keys(name) or [key for key in (name, *keys_named(name)) if key in KEYS or "." in key]
    if meant or equals or "." in word:
        key = [*meant, word][0]
        # A key may be meant with its value, as in precision=16-mixed.
        if "=" not in key:
            key += f"={value or 'VALUE'}"
        return f"; a key is given without dashes, as {key}"
    return did_you_mean(f"--{word}", STAGE_FLAGS)


def _keys_to_explain(arguments: Sequence[str]) -> list[str]:
    """Return the keys that follow `--help`, which the user wants to be explained."""
    if "--help" not in arguments:
        return []
    start = arguments.index("--help") + 1
    return [argument for argument in arguments[start:] if not argument.startswith("-") and not is_override(argument)]


def _announce_example() -> None:
    """Report that there is nothing to run here but the example."""
    print("equipoise: there is no folder conf here, so this is the digits example.", file=sys.stderr)
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigurationError("The digits example needs scikit-learn: pip install scikit-learn.")
