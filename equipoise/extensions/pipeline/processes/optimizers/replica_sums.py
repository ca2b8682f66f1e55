"""Sums of gradients over the same stages of all replicas."""

from collections.abc import Sequence

from torch import nn

from equipoise.parallel.communication.gradient_reducer import GradientReducer

__all__ = ["ReplicaSums"]


class ReplicaSums:
    """Sums the gradients of parameters over the processes of torch's default group, once per window.

    The buckets of a sum stay in memory until the parameters change.
    """

    def __init__(self) -> None:
        self._reducer: GradientReducer | None = None
        self._parameters: list[nn.Parameter] = []

    def sum(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let the gradients be the sums over all processes; a parameter without a gradient in any of them gets none.

        Args:
            parameters: Parameters in the same order in all processes. Those that require no gradient are left out.
        """
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        if not trainable:
            # No process has any: all have the same parameters.
            return
        if self._reducer is None or not _are_same(trainable, self._parameters):
            self._reducer = GradientReducer(trainable, at_end=True)
            self._parameters = trainable
        self._reducer.begin(eager=False)
        self._reducer.finish()


def _are_same(parameters: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> bool:
    if len(parameters) != len(others):
        return False
    return all(parameter is other for parameter, other in zip(parameters, others, strict=True))
