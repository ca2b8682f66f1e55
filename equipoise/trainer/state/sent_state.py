"""State that other processes of a run receive, and whose results the caller's process receives back."""

from dataclasses import MISSING, Field, fields
from typing import Any, ClassVar

__all__ = ["LOCAL", "LOCAL_RESULT", "RESULT", "SentState"]

# Marks of a field. Local: other processes of the run begin with the field's default. Result: if the run took place in
# other processes, the caller's object receives the value.
LOCAL = {"local": True}
RESULT = {"result": True}
LOCAL_RESULT = {"local": True, "result": True}


class SentState:
    """Base of a data class whose fields say which of them leave this process, and which come back.

    Example:
        >>> from dataclasses import dataclass, field
        >>> @dataclass
        ... class Reading(SentState):
        ...     file: object = field(default=None, metadata=LOCAL)
        ...     lines: int = field(default=0, metadata=RESULT)
        >>> reading = Reading(file=open("/dev/null"), lines=3)
        >>> reading.results()
        {'lines': 3}
        >>> reading.__getstate__()
        {'file': None, 'lines': 3}
        >>> reading.file.close()
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def results(self) -> dict[str, Any]:
        """Return the fields that the caller's object receives from a run in other processes."""
        names = [declared.name for declared in fields(self) if "result" in declared.metadata]
        return {name: getattr(self, name) for name in names}

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields for another process, without the objects that belong to this one."""
        state = {}
        for declared in fields(self):
            state[declared.name] = getattr(self, declared.name)
            if "local" in declared.metadata:
                state[declared.name] = _default_of(declared)
        return state


def _default_of(declared: "Field[Any]") -> Any:
    if declared.default_factory is not MISSING:
        return declared.default_factory()
    return declared.default
