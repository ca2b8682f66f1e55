"""State of a callback that is copied or sent to another process."""

from typing import Any

__all__ = ["copied_state"]


def copied_state(callback: Any, **of_run: Any) -> dict[str, Any]:
    """Return the attributes of a callback for a copy of it, for `__getstate__`.

    Args:
        callback: The callback.
        of_run: Attributes that belong to the present run, with their values outside of a run.

    Example:
        >>> class Counter:
        ...     def __init__(self):
        ...         self.every = 2
        ...         self._trainer = "a trainer"
        >>> copied_state(Counter(), _trainer=None)
        {'every': 2, '_trainer': None}
    """
    state = {**vars(callback), **of_run}
    # Trainers set these methods of the module on callbacks while they run.
    state.pop("log", None)
    state.pop("log_dict", None)
    return state
