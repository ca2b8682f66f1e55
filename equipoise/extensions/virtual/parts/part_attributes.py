"""Attributes of the module that a step changes: each part begins with the same, and those of the first part remain."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torchmetrics import Metric

from equipoise.errors import StepError
from equipoise.interop.torch.modules import versions
from equipoise.parallel.snapshot.attributes import Attributes

__all__ = ["PartAttributes"]

# Values that other processes receive, beside tensors of at most so many elements.
_PLAIN = (bool, int, float, complex, str, type(None))
_MOST_ELEMENTS = 1 << 16


class PartAttributes:
    """Attributes of a module and its submodules at the beginning of a step.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules: list[nn.Module] = []
        for part in module.modules():
            # Metrics are merged, and lazy modules become others.
            if not isinstance(part, (Metric, LazyModuleMixin)):
                self._modules.append(part)
        self._before = Attributes(self._modules)
        self._before.mark()
        self._after_first = Attributes(())
        self._tensors: list[tuple[str, Tensor]] = []
        for part in self._modules:
            for name, value in vars(part).items():
                if isinstance(value, Tensor):
                    self._tensors.append((name, value))
        self._versions = self._present_versions()

    def _present_versions(self) -> list[int] | None:
        return versions(tensor for _, tensor in self._tensors)

    def end_part(self, *, is_first: bool) -> None:
        """Set back what a part has changed.

        Args:
            is_first: Whether it is the first part of the process.

        Raises:
            StepError: If it has changed a tensor in place that is no buffer.
        """
        present = self._present_versions()
        if present is not None and self._versions is not None:
            changes = zip(self._tensors, present, self._versions, strict=True)
            changed = [name for (name, _), now, before in changes if now != before]
            if changed:
                raise StepError(
                    f"`training_step` changes the tensor {changed[0]!r} in place, which is no buffer, but under"
                    " strategy='virtual' a process runs it once for each of its virtual devices. Register it as a"
                    " buffer, of which each part begins with the same."
                )
        if is_first:
            self._after_first = Attributes(self._modules)
            self._after_first.mark()
        self._before.restore()

    def end_step(self) -> dict[tuple[int, str], Any]:
        """Keep what the first part of the process has changed.

        Returns:
            Numbers, texts and small tensors among it, by the index of a module and the name, for other processes.
        """
        self._after_first.restore()
        indices = {id(part): index for index, part in enumerate(self._modules)}
        sent = {}
        for holder, name in self._before.changes():
            value = vars(holder)[name]
            is_small = type(value) is Tensor and value.numel() <= _MOST_ELEMENTS
            if is_small:
                value = value.detach().cpu()
            if is_small or isinstance(value, _PLAIN):
                sent[indices[id(holder)], name] = value
        return sent

    def receive(self, sent: dict[tuple[int, str], Any], device: torch.device) -> None:
        """Set what the first part of all processes has changed.

        Args:
            sent: Values that `end_step` of its process has returned.
            device: The device of their tensors.
        """
        for (index, name), value in sent.items():
            if isinstance(value, Tensor):
                value = value.to(device)
            vars(self._modules[index])[name] = value
