"""The state of an optimiser whose parameters lie in several processes: it is whole for the user."""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import Tensor

from equipoise.extensions.pipeline.messaging.remote_parameters import is_read_by_user

__all__ = ["DividedState"]


class DividedState(MutableMapping[Tensor, Any]):
    """The state of each parameter. When the user's code looks at it, the workers' part returns to this process.

    Args:
        here: The state of this process's parameters, as torch keeps it.
        recall: Function that adds the state of all other parameters to `here`.
    """

    def __init__(self, here: dict[Tensor, Any], recall: Callable[[], None]) -> None:
        self.here = here
        self._recall = recall

    def _present(self) -> dict[Tensor, Any]:
        if is_read_by_user():
            self._recall()
        return self.here

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._present()[parameter]

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        self._present()[parameter] = state

    def __delitem__(self, parameter: Tensor) -> None:
        del self._present()[parameter]

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._present()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._present())

    def __len__(self) -> int:
        return len(self._present())

    def __reduce__(self) -> Any:
        # A copy is a plain dictionary.
        return self._present().__reduce__()
