"""Copies of layers that stages of one process share (tied parameters): values are copied, gradients added.

Tied parameters, and layers that several stages call, lie with the first stage that uses them. Later stages on another
device compute with one copy there. The copy receives the values before each step; its gradients are added to those of
the layer after the backward.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from equipoise.errors import ConfigurationError
from equipoise.interop.torch.modules import has_gradient_hooks
from equipoise.parallel.replicas.replica import Replica

__all__ = ["SingleTensor", "TiedCopies", "TiedCopy"]


class SingleTensor(nn.Module):
    """Module around a parameter or buffer that is used by itself.

    Args:
        value: The parameter or buffer.
    """

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        if isinstance(value, nn.Parameter):
            self.value = value
        else:
            self.register_buffer("value", value)


class TiedCopy:
    """Copy of a layer on another device.

    Args:
        layer: The layer.
        device: Device of the copy.
        name: The layer's name.

    Attributes:
        device: Device of the copy.
        module: The copy.

    Raises:
        ConfigurationError: If a copy would not compute the same as the layer.
    """

    def __init__(self, layer: nn.Module, device: torch.device, name: str) -> None:
        _check_layer(layer, name)
        self.device = device
        self._replica = Replica(layer, device)
        self.module = self._replica.module

    def refresh(self, *, always: bool) -> None:
        """Copy what has changed in the layer.

        Args:
            always: Whether to copy parameters that seem unchanged, too.
        """
        replica = self._replica
        replica.refresh_attributes()
        with torch.inference_mode(False), torch.no_grad():
            if replica.has_stale_parameters() or always:
                replica.load_parameters([source for source, _ in replica.parameters])
                replica.trust()
            replica.load_buffers(replica.buffers())
        # A failed step may have left gradients.
        replica.discard_gradients()

    def distrust(self) -> None:
        """Note that the layer's parameters may change from now on without a new version."""
        self._replica.distrust()

    def add_gradients(self) -> None:
        """Add the copy's gradients to those of the layer."""
        with torch.no_grad():
            for source, copied in self._replica.parameters:
                if copied.grad is None:
                    continue
                gradient = copied.grad.to(source.device)
                if source.grad is None:
                    source.grad = gradient
                else:
                    source.grad.add_(gradient)
        self._replica.discard_gradients()

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Let the copy compute with the layer's parameters, moved to its device, so that these get gradients."""
        pairs = self._replica.parameters
        self._replica.use([source.to(self.device) for source, _ in pairs])
        try:
            yield
        finally:
            self._replica.use([copied for _, copied in pairs])


def _check_layer(layer: nn.Module, name: str) -> None:
    """Check that a copy of a layer would compute the same."""
    for submodule in layer.modules():
        if getattr(submodule, "track_running_stats", False):
            raise ConfigurationError(
                f"{name!r} is used by two stages on different devices, but keeps running statistics"
                f" ({type(submodule).__name__}), of which there would be two. Cut with cut_before=[...] so that one"
                " stage has both uses."
            )
    if any(has_gradient_hooks(parameter) for parameter in layer.parameters()):
        raise ConfigurationError(
            f"A parameter of {name!r}, which two stages on different devices use, has a hook, which would see the"
            " gradient of one of them. Change gradients in `on_before_optimizer_step`, where they are complete."
        )


class TiedCopies:
    """All copies of a network."""

    def __init__(self) -> None:
        # By the identity of a layer and the index of a device. The layer is kept so that its identity stays unique.
        self._copies: dict[tuple[int, int], tuple[object, TiedCopy]] = {}

    def copy_of(
        self,
        part: nn.Module | Tensor,
        index: int,
        device: torch.device,
        name: str,
    ) -> nn.Module:
        """Return the copy of a layer, parameter or buffer for the stages of a device.

        Args:
            part: The layer, parameter or buffer.
            index: Index of the device among all; several may be the same device.
            device: The device.
            name: Name of the part.
        """
        key = (id(part), index)
        if key not in self._copies:
            layer = part if isinstance(part, nn.Module) else SingleTensor(part)
            self._copies[key] = (part, TiedCopy(layer, device, name))
        _, tied_copy = self._copies[key]
        return tied_copy.module

    def _all(self) -> list[TiedCopy]:
        return [tied_copy for _, tied_copy in self._copies.values()]

    def begin_step(self) -> None:
        """Refresh all copies before the micro-batches of a step."""
        for tied_copy in self._all():
            tied_copy.refresh(always=True)

    def end_step(self) -> None:
        """Add the gradients of all copies after the backwards of a step."""
        for tied_copy in self._all():
            tied_copy.add_gradients()
            tied_copy.distrust()

    @contextmanager
    def refreshed(self) -> Iterator[None]:
        """Run one forward outside of steps with refreshed copies."""
        copies = self._all()
        with torch.no_grad():
            for tied_copy in copies:
                tied_copy.refresh(always=False)
        if not torch.is_grad_enabled():
            yield
            return
        with ExitStack() as stack:
            for tied_copy in copies:
                stack.enter_context(tied_copy.connected())
            yield
