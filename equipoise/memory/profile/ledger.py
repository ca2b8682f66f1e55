"""All storages that live during a step, to the byte: by module and phase, and at the peak.

A storage is entered when an operation returns a tensor of it that was not known, and struck out when it dies. What it
was for shows later: what is alive when a forward ends and was made in it is an activation, what a parameter's `grad`
refers to a gradient, what an optimiser keeps its state. So entries are kept in the order in which they came and went,
and a peak is replayed when somebody asks.

What an operation takes and returns within itself, such as the workspace of a convolution, is not seen.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.interop.torch.dispatch import OperationWatch, tensors_in
from equipoise.memory.profile.attribution import Attribution
from equipoise.memory.records import Category, Composition, TensorRecord

__all__ = ["Ledger"]


class _Entry:
    """A storage."""

    __slots__ = ("category", "device", "dtype", "module", "name", "nbytes", "phase", "shape")

    def __init__(self, tensor: Tensor, nbytes: int, module: str, name: str, phase: str) -> None:
        self.device, self.nbytes = str(tensor.device), nbytes
        whole = tensor.nbytes == nbytes  # or a view of more
        self.shape = tuple(tensor.shape) if whole else (nbytes // max(1, tensor.element_size()),)
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.module, self.name, self.phase = module, name, phase
        self.category: Category | None = None

    def holder(self) -> TensorRecord:
        """The entry as it is told."""
        return TensorRecord(
            module=self.module,
            category=self.category or "temporary",
            name=self.name,
            shape=self.shape,
            dtype=self.dtype,
            nbytes=self.nbytes,
        )


class Ledger:
    """Keeps account of all storages, from `start` to `stop`.

    Parameters, buffers, gradients and the optimisers' states are there from the start; other tensors that are made
    before and stay outside of the module are not known.

    Args:
        module: The module.
        optimizers: Those whose state counts. Default: none.

    Example:
        >>> import torch
        >>> model = nn.Linear(1000, 10)
        >>> ledger = Ledger(model)
        >>> ledger.start()
        >>> loss = model(torch.ones(32, 1000)).sum()
        >>> ledger.begin("backward")
        >>> loss.backward()
        >>> ledger.stop()
        >>> ledger.peak("cpu").totals()["gradient"]
        40040
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Optimizer] = ()) -> None:
        self._module, self._optimizers = module, list(optimizers)
        self._known: dict[int, tuple[weakref.ref[Any], _Entry]] = {}
        self._outside: dict[int, weakref.ref[Any]] = {}
        self._history: list[tuple[_Entry, bool]] = []  # what came and what went, in order
        self._live: dict[str, int] = defaultdict(int)
        self._peaks: dict[tuple[str, str], tuple[int, int]] = {}  # phase and device: bytes, and how long history was
        self._attribution = Attribution({id(part): name for name, part in module.named_modules()}, self._forward)
        self._watch = OperationWatch(self._saw)
        self._running = False
        self.phase = "forward"

    # What is told to it.

    def start(self) -> None:
        """Begins to watch, with what the module and the optimisers hold."""
        self._enter_module()
        self._enter_optimizers()
        self._attribution.start()
        self._watch.start()
        self._running = True
        self._see_peaks()

    def stop(self) -> None:
        """Ends it; may be called twice."""
        if self._running:
            self._running = False
            self._settle()
            self._watch.stop()
            self._attribution.stop()
            self._known.clear()
            self._outside.clear()

    def begin(self, phase: str) -> None:
        """A phase begins.

        Args:
            phase: "forward", "backward" or "optimizer step"; see `MemoryPoint`.
        """
        self._settle()
        self.phase = phase
        self._attribution.reset()
        self._see_peaks()

    def add_batch(self, batch: Any) -> None:
        """Enters the tensors of a batch."""
        for index, tensor in enumerate(tensors_in(batch)):
            if (entry := self._enter(tensor, "", f"batch[{index}]")) is not None and entry.category is None:
                entry.category = "batch"
        self._see_peaks()

    # What it tells.

    def devices(self) -> list[str]:
        """The devices on which anything was alive."""
        return sorted({device for _, device in self._peaks})

    def phases(self) -> list[str]:
        """The phases that were seen, in order."""
        return list(dict.fromkeys(phase for phase, _ in self._peaks))

    def peak(self, device: str, phase: str | None = None, *, step: int = 0) -> Composition:
        """What was alive at a peak.

        Args:
            device: As torch names it.
            phase: Within this phase. Default: of all.
            step: What the composition is told to be of.

        Raises:
            KeyError: If nothing was seen there.
        """
        peaks = {name: at for (name, where), at in self._peaks.items() if where == device and phase in (None, name)}
        if not peaks:
            raise KeyError(f"Nothing was seen on {device}{f' in {phase}' if phase else ''}.")
        name = max(peaks, key=lambda name: peaks[name][0])
        nbytes, until = peaks[name]
        alive: dict[int, _Entry] = {}
        for entry, came in self._history[:until]:
            if entry.device == device:
                if came:
                    alive[id(entry)] = entry
                else:
                    del alive[id(entry)]
        holders = sorted((entry.holder() for entry in alive.values()), key=lambda holder: -holder.nbytes)
        return Composition(step=step, phase=name, device=device, nbytes=nbytes, holders=tuple(holders))

    # How it is kept.

    def _saw(self, name: str, result: Any, args: Any) -> None:
        for tensor in tensors_in(args) if name != "lift_fresh" else ():  # which is how `torch.tensor` makes one
            self._pass_over(tensor)
        module = self._attribution.module
        for tensor in tensors_in(result):
            self._enter(tensor, module, name)
        self._see_peaks()

    def _forward(self) -> None:
        """A module's forward begins: what came between a step of the optimiser and this has ended."""
        if self.phase == "optimizer step":
            self.begin("forward")

    def _enter(self, tensor: Tensor, module: str, name: str) -> _Entry | None:
        try:
            storage = tensor.untyped_storage()
            nbytes = storage.nbytes()
        except (NotImplementedError, RuntimeError):  # sparse, or of another library's kind
            return None
        key = id(storage)
        if key in self._outside:
            return None
        known = self._known.get(key)
        if known is not None:
            entry = known[1]
            if entry.nbytes == nbytes:
                return entry
            self._strike(key)  # it was resized: the same tensor anew
            module, name = entry.module, entry.name
        entry = _Entry(tensor, nbytes, module, name, self.phase)
        if known is not None:
            entry.category = known[1].category
        self._known[key] = (weakref.ref(storage, lambda _: self._strike(key)), entry)
        self._history.append((entry, True))
        self._live[entry.device] += nbytes
        return entry

    def _pass_over(self, tensor: Tensor) -> None:
        """What an operation is given and nobody has made since the start was there before, and is not ours."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        key = id(storage)
        if key not in self._known and key not in self._outside:
            self._outside[key] = weakref.ref(storage, lambda _: self._outside.pop(key, None))

    def _strike(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            entry = known[1]
            self._live[entry.device] -= entry.nbytes
            self._history.append((entry, False))

    def _see_peaks(self) -> None:
        for device, nbytes in self._live.items():
            key = (self.phase, device)
            if nbytes > self._peaks.get(key, (-1, 0))[0]:
                self._peaks[key] = (nbytes, len(self._history))

    def _settle(self) -> None:
        """Says of what is alive at the end of a phase what it is."""
        if self.phase == "forward":
            for _, entry in list(self._known.values()):
                if entry.category is None and entry.phase == "forward":
                    entry.category = "activation"
        self._enter_module()
        self._enter_optimizers()

    def _enter_module(self) -> None:
        for name, part in self._module.named_modules():
            for own, parameter in part.named_parameters(recurse=False):
                self._name(parameter, "parameter", name, own)
                if parameter.grad is not None:
                    self._name(parameter.grad, "gradient", name, f"gradient of {own}")
            for own, buffer in part.named_buffers(recurse=False):
                self._name(buffer, "buffer", name, own)

    def _enter_optimizers(self) -> None:
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                module, _, own = names.get(id(parameter), "").rpartition(".")
                for key, value in state.items() if isinstance(state, Mapping) else ():
                    for tensor in tensors_in(value):
                        self._name(tensor, "optimizer state", module, f"{key} of {own}" if own else str(key))

    def _name(self, tensor: Tensor, category: Category, module: str, name: str) -> None:
        entry = self._enter(tensor, module, name)
        if entry is not None and (entry.category is None or entry.category in ("activation", "temporary")):
            entry.category, entry.module, entry.name = category, module, name
            if tensor.untyped_storage().nbytes() == tensor.nbytes:
                entry.shape = tuple(tensor.shape)
