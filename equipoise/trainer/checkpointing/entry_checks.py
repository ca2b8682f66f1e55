"""Checks of entries of a checkpoint: of what kind each must be, and errors that name the first that is of another."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from equipoise.errors import CheckpointError, ConfigurationError
from equipoise.parallel.snapshot.random_state import RandomState
from equipoise.validation import is_number

__all__ = [
    "LARGEST_COUNT",
    "Filled",
    "Kind",
    "OrEmpty",
    "OrMissing",
    "OrNone",
    "Whole",
    "any_list",
    "anything",
    "check",
    "count",
    "damaged",
    "flag",
    "gradient",
    "loading",
    "mapping",
    "named_entries",
    "number",
    "number_of_steps",
    "positive_count",
    "random_state",
    "text",
]

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


class Kind(NamedTuple):
    """A kind of values.

    Attributes:
        expected: Its name in errors.
        fits: Tells whether a value is of it.
    """

    expected: str
    fits: Callable[[Any], bool]


class Whole(dict[str, Any]):
    """The kinds of entries that a dictionary must have, but for those that are `OrMissing`."""


class OrNone(NamedTuple):
    """A kind, or None."""

    kind: Any


class OrEmpty(NamedTuple):
    """A kind of dictionaries, or an empty one."""

    kind: Any


class OrMissing(NamedTuple):
    """A kind of an entry that a `Whole` may lack."""

    kind: Any


class Filled(NamedTuple):
    """A kind of lists, but not an empty one."""

    kind: Any


def check(kind: Any, value: Any, place: str) -> None:
    """Check that an entry is of a kind.

    Args:
        kind: A `Kind`; a list that holds the kind of the items; a dictionary that holds the kinds of entries, which may
            be missing unless it is a `Whole`, as other entries may be there; or one of these in a class above.
        value: The entry.
        place: Its place, for the error; empty for the whole checkpoint.

    Raises:
        CheckpointError: If the entry, or one within it, is of another kind.
    """
    if isinstance(kind, Kind):
        if not kind.fits(value):
            raise damaged(place, kind.expected, value)
        if kind is named_entries:
            for key in value:
                check(text, key, f"a key of {place}")
    elif isinstance(kind, OrNone):
        if value is not None:
            check(kind.kind, value, place)
    elif isinstance(kind, OrEmpty):
        check(mapping, value, place)
        if value:
            check(kind.kind, value, place)
    elif isinstance(kind, OrMissing):
        check(kind.kind, value, place)
    elif isinstance(kind, Filled):
        check(kind.kind, value, place)
        if not value:
            raise damaged(place, "a filled list", value)
    elif isinstance(kind, list):
        check(any_list, value, place)
        for index, item in enumerate(value):
            check(kind[0], item, f"{place}[{index}]")
    else:
        check(mapping, value, place)
        _check_entries(kind, value, place)


def _check_entries(kinds: dict[str, Any], value: dict[str, Any], place: str) -> None:
    for name, kind in kinds.items():
        if name in value:
            # The outermost entries have no place before them.
            check(kind, value[name], f"{place}[{name!r}]" if place else name)
        elif isinstance(kinds, Whole) and not isinstance(kind, OrMissing):
            raise CheckpointError(f"The checkpoint is damaged: {place} lacks {name!r}. Take another one.")


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < LARGEST_COUNT


def _is_number_of_steps(value: Any) -> bool:
    # Torch's optimisers count in a tensor, others in a number.
    if isinstance(value, Tensor):
        return value.numel() == 1
    return is_number(value) and 0 <= value < LARGEST_COUNT


def _is_random_state(value: Any) -> bool:
    try:
        RandomState.from_state_dict(value)
    except _FROM_DAMAGE:
        return False
    return True


anything = Kind("anything", lambda value: True)
count = Kind("a non-negative integer", _is_count)
positive_count = Kind("a positive integer", lambda value: _is_count(value, 1))
number = Kind("a number", is_number)
number_of_steps = Kind("a number of steps", _is_number_of_steps)
flag = Kind("True or False", lambda value: type(value) is bool)
text = Kind("a text", lambda value: isinstance(value, str))
mapping = Kind("a dictionary", lambda value: isinstance(value, dict))
named_entries = Kind("a dictionary", mapping.fits)  # whose keys are texts
any_list = Kind("a list", lambda value: isinstance(value, list | tuple))
gradient = Kind("a tensor", lambda value: value is None or isinstance(value, Tensor))
random_state = Kind("the states of random generators", _is_random_state)
