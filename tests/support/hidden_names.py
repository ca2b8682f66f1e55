"""Private names of another package, hidden from Equipoise alone, as if a version of the package had others."""

import sys
from typing import Any

import pytest

__all__ = ["hide"]


def hide(monkeypatch: pytest.MonkeyPatch, kind: type, *names: str) -> set[str]:
    """Hide attributes of the objects of a class.

    Args:
        monkeypatch: Undoes it.
        kind: The class.
        names: The attributes. What Equipoise sets under such a name, nobody sees.

    Returns:
        The names that Equipoise has looked for, as they are when the test ends.
    """
    looked_for: set[str] = set()

    def is_hidden(name: str) -> bool:
        caller = sys._getframe(2).f_globals["__name__"]
        if name not in names or not caller.startswith("equipoise."):
            return False
        looked_for.add(name)
        return True

    def read(self: Any, name: str) -> Any:
        if is_hidden(name):
            raise AttributeError(name)
        return plain_read(self, name)

    def write(self: Any, name: str, value: Any) -> None:
        if not is_hidden(name):
            plain_write(self, name, value)

    plain_read, plain_write = kind.__getattribute__, kind.__setattr__
    monkeypatch.setattr(kind, "__getattribute__", read)
    monkeypatch.setattr(kind, "__setattr__", write)
    return looked_for
