"""Side effects of a forward, which a symbolic trace would lose."""

import random
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from equipoise.interop.torch.modules import buffers_of, versions

__all__ = ["ForwardEffects"]


class ForwardEffects:
    """What a forward must not change by itself while it is followed: attributes, buffers, and random generators.

    Args:
        module: The module; its buffers are copied.

    Example:
        >>> module = nn.BatchNorm1d(2)
        >>> effects = ForwardEffects(module)
        >>> module.num_batches_tracked += 1
        >>> effects.moved()
        "changes the buffer 'num_batches_tracked' of BatchNorm1d"
        >>> effects.restore()
        >>> module.num_batches_tracked
        tensor(0)
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes = [(part, dict(vars(part))) for part in module.modules()]
        self._buffers = [(part, dict(buffers_of(part))) for part in module.modules()]
        self._tensors = [(tensor, versions([tensor]), tensor.detach().clone()) for _, _, tensor in self._held()]
        self._python, self._torch = random.getstate(), torch.get_rng_state()
        numpy = sys.modules.get("numpy.random")
        self._numpy = None if numpy is None else (numpy, numpy.get_state())

    def _held(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for part, before in self._buffers:
            yield from ((part, name, buffer) for name, buffer in before.items() if buffer is not None)

    def moved(self) -> str:
        """What has changed; empty if nothing has."""
        for part, before in self._attributes:
            now = vars(part)
            changed = [name for name in now if name not in before or now[name] is not before[name]]
            if changed:
                return f"sets the attribute {changed[0]!r} of {type(part).__name__}"
        for part, held in self._buffers:
            own = buffers_of(part)
            changed = [name for name in own if name not in held or own[name] is not held[name]]
            if changed:
                return f"sets the buffer {changed[0]!r} of {type(part).__name__}"
        for (part, name, _), (tensor, version, _) in zip(self._held(), self._tensors, strict=True):
            if versions([tensor]) != version:
                return f"changes the buffer {name!r} of {type(part).__name__}"
        same = random.getstate() == self._python and torch.equal(torch.get_rng_state(), self._torch)
        if same and self._numpy is not None:
            state = self._numpy[0].get_state()
            same = state[2] == self._numpy[1][2] and bool((state[1] == self._numpy[1][1]).all())
        return "" if same else "draws random numbers that decide what it does"

    def restore(self) -> None:
        """Brings it back."""
        for part, before in self._attributes:
            vars(part).clear()
            vars(part).update(before)
        for part, held in self._buffers:
            buffers_of(part).clear()
            buffers_of(part).update(held)
        for tensor, version, copied in self._tensors:
            if versions([tensor]) != version:
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():  # as nothing else may write to it
                    tensor.copy_(copied)
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._numpy is not None:
            self._numpy[0].set_state(self._numpy[1])

    def overlook(self, inner: "ForwardEffects") -> None:
        """Does not take for a change what was changed within a submodule and has been brought back there."""
        begun = {id(tensor): version for tensor, version, _ in inner._tensors}
        self._tensors = [
            (tensor, versions([tensor]) if begun.get(id(tensor)) == version else version, copied)
            for tensor, version, copied in self._tensors
        ]
