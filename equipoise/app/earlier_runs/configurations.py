"""Configurations as flat tables of texts, and how two of them differ."""

from collections.abc import Iterator, Mapping
from typing import Any

from equipoise.formats import printable

__all__ = ["differences", "flat_configuration"]

# Values of a configuration; one in which parts repeat parts could have any number.
_MOST_VALUES = 10_000
_LONGEST = 200
_FOLDER = "output_dir"


def flat_configuration(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a nested configuration as texts, by keys such as "module.lr".

    The folder of the run is left out of them: it differs always and tells nothing.

    Args:
        values: The configuration in plain values.

    Raises:
        ValueError: If there are more than 10,000 values.

    Example:
        >>> flat_configuration({"module": {"lr": 0.1, "sizes": [1, 2]}, "output_dir": "runs/7"})
        {'module.lr': '0.1', 'module.sizes': '[1, 2]'}
    """
    folder = values.get(_FOLDER)
    flat: dict[str, str] = {}
    for count, (key, value) in enumerate(_leaves(values, ""), start=1):
        if count > _MOST_VALUES:
            raise ValueError(f"it has more than {_MOST_VALUES:,} values")
        if key in ("", _FOLDER):
            continue
        text = _text(value)
        if folder and isinstance(folder, str):
            text = text.replace(folder, "FOLDER")
        flat[printable(key)[:_LONGEST]] = text[:_LONGEST]
    return flat


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        parts = list(value.items())
    elif _holds_containers(value):
        parts = list(enumerate(value))
    # A list of plain values is one value.
    if not parts:
        yield key, value
    for name, part in parts:
        yield from _leaves(part, f"{key}.{name}".lstrip("."))


def _holds_containers(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return any(isinstance(part, (dict, list)) for part in value)


def _text(value: Any) -> str:
    """Return a value as a configuration writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        parts = [_text(part) for part in value[:_LONGEST]]
        return f"[{', '.join(parts)}]"[:_LONGEST]
    return printable(str(value))


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the keys whose values differ between two flat configurations, with both values; "-" for one that lacks.

    Example:
        >>> differences({"module.lr": "0.1"}, {"module.lr": "0.2", "seed": "1"})
        {'module.lr': ('0.1', '0.2'), 'seed': ('-', '1')}
    """
    changes = {}
    for key in dict.fromkeys([*before, *after]):
        values = (before.get(key, "-"), after.get(key, "-"))
        if values[0] != values[1]:
            changes[key] = values
    return changes
