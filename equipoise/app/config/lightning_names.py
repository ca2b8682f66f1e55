"""Short names and Lightning's names on the command line, with the meaning they have in the Trainer."""

from collections.abc import Sequence
from pathlib import Path

from equipoise.precision import SHORT_NAMES
from equipoise.trainer.settings.strategy_names import lightning_strategy

__all__ = ["translate"]


def translate(arguments: Sequence[str], folders: Sequence[Path] = ()) -> list[str]:
    """Replace Lightning's names of strategies and short names of precisions by the options that there are.

    Args:
        arguments: Those of the command.
        folders: Folders of configurations, whose own options of such names are left alone. Default: none.

    Returns:
        The arguments; one may have become several.

    Raises:
        ConfigurationError: If there is no such strategy here; it names what to take instead.

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
            names = [_precision(name, folders) for name in value.split(",")]
            translated.append(f"precision={','.join(names)}")
        elif group == "strategy" and not _is_option(group, value, folders):
            translated += _strategy(value)
        else:
            translated.append(argument)
    return translated


def _precision(name: str, folders: Sequence[Path]) -> str:
    return name if _is_option("precision", name, folders) else SHORT_NAMES.get(name, name)


def _strategy(name: str) -> list[str]:
    found = lightning_strategy(name)
    if found is None:
        return [f"strategy={name}"]
    ours, options = found
    return [f"strategy={ours}", *(f"strategy.{option}={str(value).lower()}" for option, value in options.items())]


def _is_option(group: str, name: str, folders: Sequence[Path]) -> bool:
    return any((folder / group / f"{name}.yaml").is_file() for folder in folders)
