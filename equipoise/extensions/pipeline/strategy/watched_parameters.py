"""Parameters and gradients that a training step may not change, since it runs once for each micro-batch."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from equipoise.errors import StepError
from equipoise.extensions.pipeline.messaging.remote_parameters import is_elsewhere
from equipoise.parallel.divergence.changes import changed, marks_of

__all__ = ["WatchedParameters"]


class WatchedParameters:
    """Parameters as they are before the steps of a batch.

    Args:
        parameters: The parameters by their names.
        contents: Whether changes by `data` are seen as well; see `marks_of`.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, contents: bool) -> None:
        self._parameters = parameters
        self._contents = contents
        self._values = self._marks_of_values()
        self._gradients = self._marks_of_gradients()

    def check_values(self) -> None:
        """Raise a StepError if a parameter was changed."""
        self._check("", self._values, self._marks_of_values())

    def check_gradients(self) -> None:
        """Raise a StepError if a gradient was changed."""
        self._check("the gradient of ", self._gradients, self._marks_of_gradients())

    def _marks_of_values(self) -> dict[str, Any]:
        # Those of stages in other processes have no values here, and refuse to be changed.
        present = {name: parameter for name, parameter in self._parameters.items() if not is_elsewhere(parameter)}
        return marks_of(present, contents=self._contents)

    def _marks_of_gradients(self) -> dict[str, Any]:
        gradients = {name: parameter.grad for name, parameter in self._parameters.items()}
        return marks_of({name: gradient for name, gradient in gradients.items() if gradient is not None})

    def _check(self, what: str, noted: Mapping[str, Any], present: Mapping[str, Any]) -> None:
        name = changed(noted, present)
        if name is not None:
            raise StepError(
                f"`training_step` changes {what}{name!r}, but under strategy='pipeline' it runs once for each"
                " micro-batch. Change it in a hook, such as `on_train_batch_start`."
            )
