"""Places in objects: what is at the end of a path, and what is put there.

A step of a path is the name of an attribute, or a list with the key of an item.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from equipoise.interop.torch.modules import STRUCTURE
from equipoise.notices import rank_zero_warn
from equipoise.parallel.snapshot.plain.paths import Path, Root, Step, slots_of

__all__ = ["delete", "deleted", "find", "put", "text_of"]


def find(roots: Mapping[str, Root], path: Sequence[Step]) -> Any:
    """Return the object at a path; None if there is none."""
    name, *steps = path
    if name not in roots:
        return None
    value = roots[name].value
    for step in steps:
        try:
            container, key = _entry_of(value, step)
            value = container[key]
        # Objects without attributes and values without items raise a TypeError.
        except (LookupError, TypeError):
            return None
    return value


def deleted(roots: Mapping[str, Root], lacking: Iterable[Path], replaced: set[str]) -> list[list[Any]]:
    """Return a path for each object that has been deleted, as the only item of a list.

    Args:
        roots: The objects.
        lacking: Paths at whose ends something was, and may still be.
        replaced: Paths of objects whose class is another one now, as texts: these never had it.
    """
    entries: list[list[Any]] = []
    for path in lacking:
        part = _lacking_part(roots, path)
        if part is None or repr(part[:-1]) in replaced:
            continue
        # An object that was deleted with all that it held lacks once.
        if [list(part)] not in entries:
            entries.append([list(part)])
    return entries


def _lacking_part(roots: Mapping[str, Root], path: Path) -> Path | None:
    """Return the beginning of a path up to the first step that leads nowhere; None if its owner has no such steps."""
    value = roots[path[0]].value
    for count, step in enumerate(path[1:], start=2):
        try:
            container, key = _entry_of(value, step)
            value = container[key]
        except LookupError:
            return path[:count]
        except TypeError:
            return None
    return None


def _place(roots: Mapping[str, Root], path: Sequence[Step]) -> tuple[Any, Any]:
    """Return the container into which a path leads, and the key there; None for both if there is none."""
    *path_of_owner, step = path
    owner = find(roots, path_of_owner)
    if owner is None:
        return None, None
    try:
        return _entry_of(owner, step)
    except TypeError:
        # The object has no attributes.
        return owner, step


def put(roots: Mapping[str, Root], path: Sequence[Step], value: Any) -> None:
    """Set an attribute or item, unless its owner lacks; warn if the owner has no place for it."""
    container, key = _place(roots, path)
    if container is None:
        return
    try:
        if isinstance(container, tuple):
            items = list(container)
            items[key] = value
            # A named tuple takes its items one by one.
            put(roots, path[:-1], getattr(container, "_make", tuple)(items))
        else:
            container[key] = value
    except (LookupError, TypeError):
        _warn_of_another(path)


def delete(roots: Mapping[str, Root], path: Sequence[Step]) -> None:
    """Delete an attribute or item, if it is there."""
    container, key = _place(roots, path)
    if container is None:
        return
    try:
        del container[key]
    except LookupError:
        # Nothing is there.
        pass
    except TypeError:
        _warn_of_another(path)


def _warn_of_another(path: Sequence[Step]) -> None:
    rank_zero_warn(
        f"The resumed run has another object than the checkpoint's run at {text_of(path)}, so what had been"
        " set there is left out. Construct the same objects before `fit`."
    )


class _Slots:
    """The attributes in the slots of an object, as items of a dictionary. Runs no code of its class."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._slots = slots_of(owner)

    def __getitem__(self, name: str) -> Any:
        try:
            return self._slots[name].__get__(self._owner)
        except AttributeError as error:
            raise KeyError(name) from error

    def __setitem__(self, name: str, value: Any) -> None:
        try:
            self._slots[name].__set__(self._owner, value)
        # The object of a method stays.
        except AttributeError as error:
            raise TypeError from error

    def __delitem__(self, name: str) -> None:
        try:
            self._slots[name].__delete__(self._owner)
        except AttributeError as error:
            raise KeyError(name) from error


def _entry_of(owner: Any, step: Step) -> tuple[Any, Any]:
    """Return the container into which a step from an object leads, and the key there."""
    if isinstance(step, list):
        return owner, step[0]
    if step in slots_of(owner):
        return _Slots(owner), step
    return vars(owner), step


def text_of(path: Sequence[Step]) -> str:
    """Return a path as the user would write it."""
    name, *steps = path
    text = str(name)
    for previous, step in zip(path, steps, strict=False):
        if step in STRUCTURE:
            continue
        if not isinstance(step, list):
            text += f".{step}"
        elif previous in STRUCTURE:
            text += f".{step[0]}"
        else:
            text += f"[{step[0]!r}]"
    return text
