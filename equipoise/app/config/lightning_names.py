"""Short names and Lightning's names on the command line, with the meaning they have in the Trainer."""

from collections.abc import Sequence
from pathlib import Path

from equipoise.precision import SHORT_NAMES
from equipoise.trainer.settings.from_lightning.strategy_names import lightning_strategy

__all__ = ["translate"]


def translate(arguments: Sequence[str], folders: Sequence[Path] = ()) -> list[str]:
    """Replace Lightning's names of strategies and short names of precisions by the options that are available.

    Args:
        arguments: The arguments of the command.
        folders: Folders of the user's configurations. Names of options in them are not replaced. Default: none.

    Returns:
        The arguments; several may replace one.

    Raises:
        ConfigurationError: If Lightning's strategy has no counterpart here. The message names an alternative.

    Example:
        >>> translate(["precision=bf16,32", "strategy=ddp_find_unused_parameters_true"])
        ['precision=bf16-mixed,32-true', 'strategy=ddp', 'strategy.find_unused_parameters=true']
    """
    translated: list[str] = []
    for argument in arguments:
        group, _, value = argument.partition("=")
        if not value:
            translated.append(argument)
        elif group == "precision":
            # A sweep names several precisions, with commas between them.
            joined = ",".join(_precision(name, folders) for name in value.split(","))
            translated.append(f"precision={joined}")
        elif group == "strategy" and not _is_option(group, value, folders):
            translated += _strategy(value)
        else:
            translated.append(argument)
    return translated


def _precision(name: str, folders: Sequence[Path]) -> str:
    if _is_option("precision", name, folders):
        return name
    return SHORT_NAMES.get(name, name)


def _strategy(name: str) -> list[str]:
    counterpart = lightning_strategy(name)
    if counterpart is None:
        return [f"strategy={name}"]
    strategy, options = counterpart
    arguments = [f"strategy={strategy}"]
    for option, value in options.items():
        # Hydra writes true and false in lower case.
        arguments.append(f"strategy.{option}={str(value).lower()}")
    return arguments


def _is_option(group: str, name: str, folders: Sequence[Path]) -> bool:
    for folder in folders:
        file = folder / group / f"{name}.yaml"
        if file.is_file():
            return True
    return False
