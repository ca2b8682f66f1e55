"""Copies of layers for stages on another device than the one where the parameters lie (tied parameters).

Tied weights, and layers that are called in several stages, are kept once, with the first stage that uses them. Later
stages on another device compute with one copy there, which receives the values before each step; its gradients are
added to the layer's own after the backward.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from equipoise.errors import ConfigurationError
from equipoise.interop.torch.modules import has_hooks
from equipoise.parallel.replicas.replica import Replica

__all__ = ["Single", "TiedCopies", "TiedCopy"]


class Single(nn.Module):
    """A parameter or buffer that is used by itself.

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
    """A copy of a layer.

    Args:
        layer: The layer.
        device: Where the copy is.
        name: The layer's name.

    Attributes:
        module: The copy.

    Raises:
        ConfigurationError: If a copy would not do the same.
    """

    def __init__(self, layer: nn.Module, device: torch.device, name: str) -> None:
        for part in layer.modules():
            if getattr(part, "track_running_stats", False):
                raise ConfigurationError(
                    f"{name!r} is used by two stages on different devices, but keeps running statistics"
                    f" ({type(part).__name__}), of which there would be two. Cut with cut_before=[...] so that one"
                    " stage has both uses."
                )
        if any(has_hooks(parameter) for parameter in layer.parameters()):
            raise ConfigurationError(
                f"A parameter of {name!r}, which two stages on different devices use, has a hook, which would see the"
                " gradient of one of them. Change gradients in `on_before_optimizer_step`, where they are complete."
            )
        self.device = device
        self._replica = Replica(layer, device)
        self.module = self._replica.module

    def refresh(self, *, always: bool) -> None:
        """Takes over what has changed in the layer.

        Args:
            always: Also parameters that seem unchanged.
        """
        replica = self._replica
        replica.refresh_attributes()
        with torch.inference_mode(False), torch.no_grad():
            if replica.has_stale_parameters() or always:
                replica.load_parameters([source for source, _ in replica.parameters])
                replica.trust()
            replica.load_buffers(replica.buffers())
        for _, copied in replica.parameters:
            copied.grad = None  # of a step that failed

    def distrust(self) -> None:
        """The layer's parameters may change now without a trace."""
        self._replica.trusted = False

    def collect(self) -> None:
        """Adds the copy's gradients to the layer's."""
        with torch.no_grad():
            for source, copied in self._replica.parameters:
                if copied.grad is None:
                    continue
                gradient, copied.grad = copied.grad.to(source.device), None
                if source.grad is None:
                    source.grad = gradient
                else:
                    source.grad.add_(gradient)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """The copy computes with the layer's parameters themselves, brought to its device: gradients find back."""
        pairs = self._replica.parameters
        self._replica.use([source.to(self.device) for source, _ in pairs])
        try:
            yield
        finally:
            self._replica.use([copied for _, copied in pairs])


class TiedCopies:
    """All shadows of a network."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], tuple[object, TiedCopy]] = {}

    def of(self, part: nn.Module | Tensor, index: int, device: torch.device, name: str) -> nn.Module:
        """The copy of a layer, parameter or buffer for the stages of a device.

        Args:
            part: Which.
            index: The device's number among all, which may be one and the same.
            device: The device.
            name: The part's name.
        """
        key = (id(part), index)
        if key not in self._made:
            layer = part if isinstance(part, nn.Module) else Single(part)
            self._made[key] = (part, TiedCopy(layer, device, name))
        return self._made[key][1].module

    def __len__(self) -> int:
        return len(self._made)

    def begin_step(self) -> None:
        """Before the micro-batches of a step."""
        for _, shadow in self._made.values():
            shadow.refresh(always=True)

    def end_step(self) -> None:
        """After their backwards."""
        for _, shadow in self._made.values():
            shadow.collect()
            shadow.distrust()

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """Around a forward outside of steps."""
        with torch.no_grad():
            for _, shadow in self._made.values():
                shadow.refresh(always=False)
        if not torch.is_grad_enabled():
            yield
            return
        with ExitStack() as stack:
            for _, shadow in self._made.values():
                stack.enter_context(shadow.connected())
            yield
