"""Checks of single entries of a checkpoint: each takes a value and its place, and raises a `CheckpointError`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from equipoise.errors import CheckpointError, ConfigurationError
from equipoise.parallel.snapshot.random_state import RandomState
from equipoise.validation import is_number

__all__ = [
    "LARGEST_COUNT",
    "Check",
    "any_list",
    "count",
    "damaged",
    "fields",
    "filled",
    "flag",
    "gradient",
    "list_of",
    "loading",
    "mapping",
    "named_entries",
    "number_of_steps",
    "optional",
    "positive_count",
    "random_state",
    "text",
    "texts",
    "unless_empty",
]

Check = Callable[[Any, str], None]

# Integers of torch have 64 bits.
LARGEST_COUNT = 2**63

# Errors that damaged entries cause.
_FROM_DAMAGE = (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)

# Packages whose classes raise an error only if the entry is damaged.
_NOT_OF_THE_USER = ("equipoise.", "lightning.", "pytorch_lightning.", "torch.")


@contextmanager
def loading(place: str, owner: object = None) -> Iterator[None]:
    """Turn errors while an entry is loaded into a `CheckpointError` that names it.

    Args:
        place: The entry.
        owner: The object that loads it. Errors of a class of the user are raised as they are, with a note.

    Raises:
        CheckpointError: In place of errors that a damaged entry causes.
    """
    try:
        yield
    except (CheckpointError, ConfigurationError):
        raise
    except _FROM_DAMAGE as error:
        if owner is not None and not type(owner).__module__.startswith(_NOT_OF_THE_USER):
            error.add_note(f"This happened while {place} of the checkpoint was loaded.")
            raise
        # In one line: messages of torch have several.
        words = f"{type(error).__name__}: {error}".split()
        reason = " ".join(words).rstrip(".")
        raise CheckpointError(
            f"The checkpoint's entry {place} cannot be loaded ({reason}). Take another one."
        ) from error


def damaged(place: str, expected: str, value: Any) -> CheckpointError:
    """Return the error for a value that is not of the expected kind."""
    from equipoise.safe_loading.stand_in import StandIn

    found = f"a {type(value).__name__}"
    # Only these are short for certain.
    if isinstance(value, str | int | float | StandIn | None):
        found = f"{value!r:.60}"
    return CheckpointError(f"The checkpoint is damaged: {place} must be {expected}, not {found}. Take another one.")


# Checks of one value


def _value(expected: str, fits: Callable[[Any], bool]) -> Check:
    """Return a check of one value, by a function that tells whether it is what is expected."""

    def check(value: Any, place: str) -> None:
        if not fits(value):
            raise damaged(place, expected, value)

    return check


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < LARGEST_COUNT


def _is_number_of_steps(value: Any) -> bool:
    # Torch's optimisers count in a tensor, others in a number.
    if isinstance(value, Tensor):
        return value.numel() == 1
    return is_number(value) and 0 <= value < LARGEST_COUNT


count = _value("a non-negative integer", lambda value: _is_count(value, 0))
positive_count = _value("a positive integer", lambda value: _is_count(value, 1))
number_of_steps = _value("a number of steps", _is_number_of_steps)
flag = _value("True or False", lambda value: type(value) is bool)
text = _value("a text", lambda value: isinstance(value, str))
mapping = _value("a dictionary", lambda value: isinstance(value, dict))
any_list = _value("a list", lambda value: isinstance(value, list | tuple))
gradient = _value("a tensor", lambda value: value is None or isinstance(value, Tensor))


def named_entries(value: Any, place: str) -> None:
    """Check a dictionary whose keys are texts."""
    mapping(value, place)
    for key in value:
        text(key, f"a key of {place}")


# Checks that contain other checks


def list_of(check: Check) -> Check:
    """Return a check of a list, with a check of its items."""

    def check_all(value: Any, place: str) -> None:
        any_list(value, place)
        for index, item in enumerate(value):
            check(item, f"{place}[{index}]")

    return check_all


texts = list_of(text)


def optional(check: Check) -> Check:
    """Return a check that accepts None as well."""

    def check_unless_none(value: Any, place: str) -> None:
        if value is not None:
            check(value, place)

    return check_unless_none


def filled(check: Check) -> Check:
    """Return a check that refuses an empty value as well."""

    def check_filled(value: Any, place: str) -> None:
        check(value, place)
        if not value:
            raise damaged(place, "a filled list", value)

    return check_filled


def unless_empty(check: Check) -> Check:
    """Return a check that accepts an empty dictionary as well."""

    def check_if_filled(value: Any, place: str) -> None:
        mapping(value, place)
        if value:
            check(value, place)

    return check_if_filled


def random_state(value: Any, place: str) -> None:
    """Check the state of random generators."""
    named_entries(value, place)
    with loading(place):
        RandomState.from_state_dict(value)


def fields(checks: dict[str, Check], *, required: bool = False) -> Check:
    """Return a check of a dictionary.

    Args:
        checks: A check for each entry. Other entries may be of any type.
        required: Whether all these entries must exist. Default: False.
    """

    def check_fields(value: Any, place: str) -> None:
        mapping(value, place)
        for name, check in checks.items():
            if name in value:
                # The outermost entries have no place before them.
                entry_place = name
                if place:
                    entry_place = f"{place}[{name!r}]"
                check(value[name], entry_place)
            elif required:
                raise CheckpointError(f"The checkpoint is damaged: {place} lacks {name!r}. Take another one.")

    return check_fields
