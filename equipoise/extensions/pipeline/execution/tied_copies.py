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

__all__ = ["SingleTensor", "TiedCopies"]


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
        self._copies: dict[tuple[int, int], tuple[object, Replica]] = {}

    def copy_of(self, part: nn.Module | Tensor, index: int, device: torch.device, name: str) -> nn.Module:
        """Return the copy of a layer, parameter or buffer for the stages of a device.

        Args:
            part: The layer, parameter or buffer.
            index: Index of the device among all; several may be the same device.
            device: The device.
            name: Name of the part.

        Raises:
            ConfigurationError: If a copy would not compute the same.
        """
        key = (id(part), index)
        if key not in self._copies:
            layer = part if isinstance(part, nn.Module) else SingleTensor(part)
            _check_layer(layer, name)
            self._copies[key] = (part, Replica(layer, device))
        _, replica = self._copies[key]
        return replica.module

    def _all(self) -> list[Replica]:
        return [replica for _, replica in self._copies.values()]

    def begin_step(self) -> None:
        """Refresh all copies before the micro-batches of a step."""
        for replica in self._all():
            _refresh(replica, always=True)

    @torch.no_grad()
    def end_step(self) -> None:
        """Add the gradients of all copies after the backwards of a step."""
        for replica in self._all():
            for source, copied in replica.parameters:
                if copied.grad is None:
                    continue
                gradient = copied.grad.to(source.device)
                if source.grad is None:
                    source.grad = gradient
                else:
                    source.grad.add_(gradient)
            replica.discard_gradients()
            # From now on the layer's parameters may change without a new version.
            replica.distrust()

    @contextmanager
    def refreshed(self) -> Iterator[None]:
        """Run one forward outside of steps with refreshed copies."""
        with torch.no_grad():
            for replica in self._all():
                _refresh(replica, always=False)
        if not torch.is_grad_enabled():
            yield
            return
        with ExitStack() as stack:
            for replica in self._all():
                stack.enter_context(_connected(replica))
            yield


def _refresh(replica: Replica, *, always: bool) -> None:
    """Copy what has changed in the layer, and parameters that seem unchanged if `always`."""
    replica.refresh_attributes()
    with torch.inference_mode(False), torch.no_grad():
        if replica.has_stale_parameters() or always:
            replica.load_parameters([source for source, _ in replica.parameters])
            replica.trust()
        replica.load_buffers(replica.buffers())
    # A failed step may have left gradients.
    replica.discard_gradients()


@contextmanager
def _connected(replica: Replica) -> Iterator[None]:
    """Let a copy compute with the layer's parameters, moved to its device, so that these get gradients."""
    pairs = replica.parameters
    replica.use([source.to(replica.device) for source, _ in pairs])
    try:
        yield
    finally:
        replica.use([copied for _, copied in pairs])
