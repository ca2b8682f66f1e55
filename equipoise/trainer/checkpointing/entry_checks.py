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


def count(value: Any, place: str) -> None:
    """Check a non-negative integer."""
    if type(value) is not int or not 0 <= value < LARGEST_COUNT:
        raise damaged(place, "a non-negative integer", value)


def positive_count(value: Any, place: str) -> None:
    """Check an integer from 1."""
    if type(value) is not int or not 1 <= value < LARGEST_COUNT:
        raise damaged(place, "a positive integer", value)


def number_of_steps(value: Any, place: str) -> None:
    """Check the number of steps of an optimiser: a number, or a tensor with one element."""
    # Torch's optimisers count in a tensor, others in a number.
    is_count = False
    if isinstance(value, Tensor):
        is_count = value.numel() == 1
    elif is_number(value):
        is_count = 0 <= value < LARGEST_COUNT
    if not is_count:
        raise damaged(place, "a number of steps", value)


def flag(value: Any, place: str) -> None:
    """Check True or False."""
    if type(value) is not bool:
        raise damaged(place, "True or False", value)


def text(value: Any, place: str) -> None:
    """Check a text."""
    if not isinstance(value, str):
        raise damaged(place, "a text", value)


def mapping(value: Any, place: str) -> None:
    """Check a dictionary."""
    if not isinstance(value, dict):
        raise damaged(place, "a dictionary", value)


def named_entries(value: Any, place: str) -> None:
    """Check a dictionary whose keys are texts."""
    mapping(value, place)
    for key in value:
        text(key, f"a key of {place}")


def any_list(value: Any, place: str) -> None:
    """Check a list or tuple."""
    if not isinstance(value, list | tuple):
        raise damaged(place, "a list", value)


def texts(value: Any, place: str) -> None:
    """Check a list of texts."""
    any_list(value, place)
    for index, item in enumerate(value):
        text(item, f"{place}[{index}]")


# Checks that contain other checks


def list_of(check: Check) -> Check:
    """Return a check of a list, with a check of its items."""

    def check_all(value: Any, place: str) -> None:
        any_list(value, place)
        for index, item in enumerate(value):
            check(item, f"{place}[{index}]")

    return check_all


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


def gradient(value: Any, place: str) -> None:
    """Check a tensor or None."""
    if value is not None and not isinstance(value, Tensor):
        raise damaged(place, "a tensor", value)


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
