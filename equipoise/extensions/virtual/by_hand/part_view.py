"""State of a module as one part sees it, which is put aside while other parts run."""

from collections.abc import Sequence
from contextlib import ExitStack

from torch import Tensor, nn

from equipoise.extensions.virtual.parts.gradient_tree import Gradients, give_gradients
from equipoise.extensions.virtual.parts.refusals import checking_part
from equipoise.interop.torch.modules import buffers_of, versions
from equipoise.parallel.snapshot.attributes import Attributes
from equipoise.parallel.snapshot.random_state import RandomState, capture

__all__ = ["PartView", "SharedGradients", "give_own_buffers"]


class PartView:
    """Attributes, buffers, gradients, which parameters need a gradient, and random generators.

    Objects that attributes name are not copied.

    Args:
        module: The user's module.
        parameters: Its parameters.

    Attributes:
        numbers: The states of the random generators.
    """

    numbers: RandomState

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        modules = list(module.modules())
        self._module = module
        self._parameters = parameters
        self._attributes = Attributes(modules)
        self._buffers = Attributes(modules, buffers_of)
        self._trained: list[bool] = []
        self._gradients: Gradients = []
        # What is checked when the part waits again.
        self._checks = ExitStack()

    def leave(self) -> None:
        """Put the state aside.

        Raises:
            StepError: If the part has changed parameters since `check`, or communicated.
        """
        self._checks.close()
        self._attributes.mark()
        self._buffers.mark()
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self._gradients = [parameter.grad for parameter in self._parameters]
        self.numbers = capture()

    def enter(self) -> None:
        """Restore the state."""
        self._attributes.restore()
        self._buffers.restore()
        for parameter, is_trained in zip(self._parameters, self._trained, strict=True):
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)
        give_gradients(self._parameters, self._gradients)
        self.numbers.restore()

    def check(self) -> None:
        """Watch what the part does until `leave`."""
        self._checks.enter_context(checking_part(self._module, "`training_step`", buffers=False))


def give_own_buffers(module: nn.Module) -> None:
    """Put copies in the place of buffers, since a graph of another part may hold them.

    Args:
        module: The module. A buffer that several of its submodules have remains one.
    """
    copies: dict[Tensor, Tensor] = {}
    for submodule in module.modules():
        buffers = buffers_of(submodule)
        for name, buffer in buffers.items():
            if buffer is None:
                continue
            if buffer not in copies:
                copies[buffer] = buffer.detach().clone()
            buffers[name] = copies[buffer]


class SharedGradients:
    """Gradients that all parts of a process have. Copies serve parts after one that changes them in place.

    Args:
        parameters: The parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._gradients: Gradients = []
        self._copies: Gradients = []
        self._versions: list[int] | None = None

    def share(self) -> None:
        """Note the present gradients as those of all parts."""
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._copies = _copied(self._gradients)
        self._versions = self._present_versions()

    def give(self) -> None:
        """Give a part the gradients."""
        gradients = self._gradients
        present = self._present_versions()
        # Without versions they count as changed.
        if present is None or present != self._versions:
            gradients = _copied(self._copies)
        give_gradients(self._parameters, gradients)

    def _present_versions(self) -> list[int] | None:
        return versions(gradient for gradient in self._gradients if gradient is not None)


def _copied(gradients: Gradients) -> Gradients:
    copies: Gradients = []
    for gradient in gradients:
        if gradient is not None:
            gradient = gradient.detach().clone()
        copies.append(gradient)
    return copies
