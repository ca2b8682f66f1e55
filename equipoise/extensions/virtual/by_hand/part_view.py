"""State of a module as one part sees it, which is put aside while other parts run."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.extensions.virtual.parts.gradient_tree import Gradients, give_gradients
from equipoise.extensions.virtual.parts.refusals import checking_part
from equipoise.interop.torch.modules import buffers_of
from equipoise.parallel.snapshot.attributes import Attributes
from equipoise.parallel.snapshot.random_state import RandomState, capture

__all__ = ["PartView", "give_own_buffers"]


class PartView:
    """Attributes, buffers, gradients, which parameters need a gradient, groups of optimisers, switches, and generators.

    Objects that attributes name are not copied.

    Args:
        module: The module.
        parameters: Its parameters.
        optimizers: Its optimisers.
        contents: Whether `check` compares all values of the parameters. Default: False.

    Attributes:
        numbers: The states of the random generators.
    """

    numbers: RandomState

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        optimizers: Sequence[Optimizer],
        *,
        contents: bool = False,
    ) -> None:
        modules = list(module.modules())
        self._module = module
        self._contents = contents
        self._parameters = parameters
        self._attributes = Attributes(modules)
        self._buffers = Attributes(modules, buffers_of)
        groups: list[dict[str, Any]] = []
        for optimizer in optimizers:
            groups += optimizer.param_groups
        self._groups = Attributes(groups, _itself)
        self._switches: list[Any] = []
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
        self._groups.mark()
        self._switches = [read() for read, _ in _SWITCHES]
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self._gradients = [parameter.grad for parameter in self._parameters]
        self.numbers = capture()

    def enter(self) -> None:
        """Restore the state."""
        self._attributes.restore()
        self._buffers.restore()
        self._groups.restore()
        pairs = zip(_SWITCHES, self._switches, strict=True)
        for (read, switch), value in pairs:
            # Some warn when they are set.
            if read() != value:
                switch(value)
        trained = zip(self._parameters, self._trained, strict=True)
        for parameter, is_trained in trained:
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)
        give_gradients(self._parameters, self._gradients)
        self.numbers.restore()

    def check(self) -> None:
        """Watch what the part does until `leave`."""
        self._checks.enter_context(checking_part(self._module, "`training_step`", contents=self._contents))


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
    # Attributes may name buffers, too.
    for submodule in module.modules():
        attributes = vars(submodule)
        for name, value in attributes.items():
            if isinstance(value, Tensor) and value in copies:
                attributes[name] = copies[value]


def _itself(group: dict[str, Any]) -> dict[str, Any]:
    return group


def _detects_anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _detect_anomaly(switches: tuple[bool, bool]) -> None:
    # Takes effect without a `with` block.
    torch.autograd.set_detect_anomaly(*switches)


# Switches of the process, as context managers of a step set them: what reads each, and what sets it.
_ATTENTION = torch.backends.cuda
_SWITCHES: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (_ATTENTION.flash_sdp_enabled, _ATTENTION.enable_flash_sdp),
    (_ATTENTION.mem_efficient_sdp_enabled, _ATTENTION.enable_mem_efficient_sdp),
    (_ATTENTION.math_sdp_enabled, _ATTENTION.enable_math_sdp),
    (_ATTENTION.cudnn_sdp_enabled, _ATTENTION.enable_cudnn_sdp),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (_detects_anomaly, _detect_anomaly),
]
