"""A communication hook of torch's wrapper and its state, which may need the process group of each process."""

from collections.abc import Callable
from typing import Any

__all__ = ["CommHook"]

# The attribute under which states of torch's hooks keep their process group; None means that of the run.
_GROUP = "process_group"


class CommHook:
    """A hook and its state, which can be sent to processes whose group does not exist yet.

    Torch's PowerSGDState cannot: a copy looks for the group immediately. So the values of a state are sent, without a
    group.

    Args:
        function: The hook.
        state: Its state, or a function that makes it.
    """

    def __init__(self, function: Callable[..., Any], state: Any) -> None:
        self.function = function
        self._state = state

    def state(self) -> Any:
        """Return the state; made here if the user has given a function for it."""
        if callable(self._state):
            return self._state()
        return self._state

    def __getstate__(self) -> dict[str, Any]:
        state = self._state
        if not hasattr(state, _GROUP):
            return {"function": self.function, "state": state}
        values = {name: getattr(state, name) for name in _names_of_values(state)}
        values[_GROUP] = None
        return {"function": self.function, "class": type(state), "values": values}

    def __setstate__(self, sent: dict[str, Any]) -> None:
        self.function = sent["function"]
        if "class" not in sent:
            self._state = sent["state"]
            return
        kind = sent["class"]
        self._state = kind.__new__(kind)
        for name, value in sent["values"].items():
            setattr(self._state, name, value)


def _names_of_values(state: Any) -> list[str]:
    names = list(getattr(state, "__dict__", ()))
    for kind in type(state).__mro__:
        slots = getattr(kind, "__slots__", ())
        # One slot may stand alone.
        if isinstance(slots, str):
            slots = (slots,)
        names += slots
    return [name for name in names if hasattr(state, name)]
