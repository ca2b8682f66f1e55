"""Gradients that the processes have yet to exchange or to weigh: hooks read them, and do not change them."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.interop.distributed.backward_calls import BackwardCall, intercept_backwards
from equipoise.interop.torch.dispatch import OperationWatch, tensor_in_memory, tensors_in
from equipoise.notices import rank_zero_warn
from equipoise.parallel.divergence.changes import changed, marks_of

__all__ = ["UnfinishedGradients"]


class UnfinishedGradients:
    """Watches what the user's methods do with gradients; a change is refused, as it would differ from one device's.

    Args:
        module: The module that has the gradients.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._has_warned = False
        self._gradients: dict[str, Tensor] = {}
        self._marks: dict[str, Any] = {}
        self._memories: set[int] = set()

    def read_by(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a method that is watched but for the backwards that it runs.

        Args:
            method: The method.
            name: Its name, for the error.
        """
        watch = OperationWatch(partial(self._follow, name))

        def run_backward(call: BackwardCall) -> Any:
            watch.stop()
            try:
                return call.run()
            finally:
                self._note()
                watch.start()

        @wraps(method)
        def watched(*args: Any, **kwargs: Any) -> None:
            self._note()
            end = intercept_backwards(run_backward)
            watch.start()
            try:
                method(*args, **kwargs)
            finally:
                watch.stop()
                end()
            # Others in their place, and changes that are no operations on them.
            if changed(self._marks, marks_of(self._present())) is not None:
                raise _changed_early(name)
            self._gradients = {}

        return watched

    def _present(self) -> dict[str, Tensor]:
        gradients = {name: parameter.grad for name, parameter in self._module.named_parameters()}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def _note(self) -> None:
        # They are kept, as others may get the address of one that is freed.
        self._gradients = self._present()
        self._marks = marks_of(self._gradients)
        self._memories = set(map(_memory, self._gradients.values()))

    def _follow(self, name: str, operation: str, result: Any, args: Any) -> None:
        if operation.endswith("_") and self._is_gradient(args[:1]):
            raise _changed_early(name)
        if not self._has_warned and self._is_gradient(args):
            self._has_warned = True
            rank_zero_warn(
                f"`{name}` reads gradients that are not yet those of all processes. {_REMEDY.format('Read')}"
            )

    def _is_gradient(self, args: Any) -> bool:
        return any(_memory(tensor) in self._memories for tensor in tensors_in(args) if tensor.numel())


def _memory(tensor: Tensor) -> int:
    return tensor_in_memory(tensor).untyped_storage().data_ptr()


_REMEDY = (
    "They are exchanged or weighed when `backward` has ended, in the last batch of an accumulation window. {} them in"
    " `on_before_optimizer_step`, where they are those of the whole window."
)


def _changed_early(name: str) -> StepError:
    return StepError(
        f"`{name}` changes gradients that are not yet those of all processes, so the step would not be that of one"
        f" device. {_REMEDY.format('Change')}"
    )
