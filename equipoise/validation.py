"""Checks of numbers that users give: arguments, and return values of their methods.

Python counts True and False among the integers; nothing here does.
"""

from typing import Any, TypeGuard

from equipoise.errors import ConfigurationError

__all__ = ["check_whole", "describe_value", "is_number", "is_whole"]

# Values of a longer text are not shown in messages.
_LONGEST_TEXT = 60


def is_whole(value: Any, *, least: int | None = None) -> TypeGuard[int]:
    """Return True for an integer.

    Args:
        value: Any value.
        least: The smallest allowed value. Default: none.

    Example:
        >>> is_whole(1, least=1), is_whole(0, least=1), is_whole(True), is_whole(1.0)
        (True, False, False, False)
    """
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return least is None or value >= least


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return True for an integer or a floating-point number, infinity and NaN among them.

    Example:
        >>> is_number(0.5), is_number(False), is_number("1")
        (True, False, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_whole(name: str, value: Any, *, least: int, optional: bool = False) -> None:
    """Check that an argument is a whole number.

    Args:
        name: The argument's name.
        value: Its value.
        least: The smallest allowed value.
        optional: True if None is allowed. Default: False.

    Raises:
        ConfigurationError: If it is not.
    """
    if is_whole(value, least=least):
        return
    alternative = ""
    if optional:
        if value is None:
            return
        alternative = ", or None"
    raise ConfigurationError(f"{name} must be an integer of at least {least}{alternative}, not {value!r}.")


def describe_value(value: Any) -> str:
    """Return a value and its type, on one short line."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}, not an object of it"
    text = repr(value)
    if len(text) > _LONGEST_TEXT or "\n" in text:
        text = "something"
    return f"{text} of type {type(value).__name__}"
