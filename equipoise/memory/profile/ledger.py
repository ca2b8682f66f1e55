"""All storages that live during a step, to the byte: by module and phase, and at the peak.

The ledger enters a storage when an operation first returns a tensor of it, and removes it when it is freed. The purpose
of a storage shows later. A storage that a forward created and that is alive at its end is an activation, the storage of
a parameter's `grad` is a gradient, that of an optimiser's tensor is its state. So the ledger records allocations and
releases in their order, and replays them to compose a peak.

Memory that an operation allocates and frees by itself, such as the workspace of a convolution, is not included.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.interop.torch.dispatch import OperationWatch, tensor_in_memory, tensors_in
from equipoise.memory.profile.attribution import Attribution
from equipoise.memory.profile.entries import Entry
from equipoise.memory.profile.places import DevicePlaces
from equipoise.memory.records import Category, Composition, TensorRecord

__all__ = ["Ledger", "LedgerEvent"]


class LedgerEvent(NamedTuple):
    """Allocation or release of a storage.

    Attributes:
        holder: Index of the storage among the records of `Ledger.history`.
        is_allocation: True for an allocation, False for a release.
        phase: The phase in which it happened.
    """

    holder: int
    is_allocation: bool
    phase: str


class _Live(NamedTuple):
    """A live storage.

    Attributes:
        reference: Reference to the storage, which removes the entry when it is freed.
        entry: Its entry.
    """

    reference: weakref.ref[Any]
    entry: Entry


class _Peak(NamedTuple):
    """Peak of a phase on a device.

    Attributes:
        nbytes: Its bytes.
        history_length: Number of allocations and releases up to it.
    """

    nbytes: int
    history_length: int


class Ledger:
    """Account of all storages, from `start` to `stop`.

    It includes parameters, buffers, gradients and the optimisers' states from the start, but no other tensors that were
    created before.

    Args:
        module: The module.
        optimizers: Optimisers whose state counts. Default: none.
        places: Tells devices of one name apart. Default: a device is known by the name that torch gives it.
        names_modules: Whether the module of each tensor is noted, by hooks on all modules. A pipeline cannot record a
            forward with such hooks. Default: True.
        watches_sizes: Whether storages may change their size without an operation, as those of sharded weights do. All
            sizes are read at each operation then. Default: False.

    Attributes:
        phase: The present phase, "forward" at first.

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

    def __init__(
        self,
        module: nn.Module,
        optimizers: Iterable[Optimizer] = (),
        places: DevicePlaces | None = None,
        *,
        names_modules: bool = True,
        watches_sizes: bool = False,
    ) -> None:
        self._module = module
        self._places = places
        self._names_modules = names_modules
        self._watches_sizes = watches_sizes
        self._optimizers = list(optimizers)
        # Live storages by their ids, and those that were created before the start.
        self._entries: dict[int, _Live] = {}
        self._outside: dict[int, weakref.ref[Any]] = {}
        # Allocations (True) and releases (False) in their order, with their phases.
        self._history: list[tuple[Entry, bool, str]] = []
        # Live bytes by device.
        self._live_bytes: dict[str, int] = defaultdict(int)
        self._peaks: dict[tuple[str, str], _Peak] = {}
        names = {id(submodule): name for name, submodule in module.named_modules()}
        self._attribution = Attribution(names, self._on_forward)
        self._watch = OperationWatch(self._on_operation)
        self._is_running = False
        self.phase = "forward"

    # Control.

    def start(self) -> None:
        """Begin to record, with the storages of the module and the optimisers."""
        self._enter_module()
        self._enter_optimizers()
        if self._names_modules:
            self._attribution.start()
        self._watch.start()
        self._is_running = True
        self._update_peaks()

    def stop(self) -> None:
        """Stop recording; may be called twice."""
        if self._is_running:
            self._is_running = False
            self._categorise()
            self._watch.stop()
            self._attribution.stop()
            self._entries.clear()
            self._outside.clear()

    def begin(self, phase: str) -> None:
        """Begin a phase.

        Args:
            phase: "forward", "backward" or "optimizer step"; see `MemoryPoint`.
        """
        self._categorise()
        self.phase = phase
        self._attribution.reset()
        self._update_peaks()

    def forget_peaks(self) -> None:
        """Forget the peaks until now; what is live stays."""
        self._peaks.clear()
        self._update_peaks()

    @contextmanager
    def in_other_thread(self) -> Iterator[None]:
        """Record the operations of another thread in a `with` block, while the thread of the ledger waits for it."""
        if not self._is_running:
            yield
            return
        watch = OperationWatch(self._on_operation)
        watch.start()
        try:
            yield
        finally:
            watch.stop()

    def move(self, tensor: Tensor, device: str) -> None:
        """Note that a tensor lies on another device of the same name in torch.

        Args:
            tensor: The tensor.
            device: Name of the device.
        """
        storage = tensor.untyped_storage()
        live = self._entries.get(id(storage))
        if live is None or live.entry.device == device:
            return
        self._remove(id(storage))
        self._add(storage, live.entry.moved(device, live.entry.nbytes))

    def add_batch(self, batch: Any) -> None:
        """Enter the tensors of a batch.

        Args:
            batch: The batch, of any structure.
        """
        for index, tensor in enumerate(tensors_in(batch)):
            entry = self._enter(tensor, "", f"batch[{index}]")
            if entry is not None:
                entry.set_default_category("batch")
        self._update_peaks()

    def add_gathered(self, weights: Iterable[Tensor]) -> None:
        """Enter whole weights of a sharded module, which have memory only while they are gathered.

        Args:
            weights: The weights. A ledger that watches sizes sees their memory come and go.
        """
        for weight in weights:
            entry = self._enter(weight, "", "gathered weight")
            if entry is not None:
                entry.set_default_category("parameter")
        self._update_peaks()

    # Results.

    def devices(self) -> list[str]:
        """Return the names of the devices with any storage."""
        return sorted({device for _, device in self._peaks})

    def phases(self) -> list[str]:
        """Return the recorded phases, in order."""
        # Every phase once, in the order of its first peak.
        return list(dict.fromkeys(phase for phase, _ in self._peaks))

    def peak(self, device: str, phase: str | None = None, *, step: int = 0) -> Composition:
        """Return the live tensors at a peak.

        Args:
            device: Name of the device in torch.
            phase: Phase of the peak. Default: that of the largest peak.
            step: Step that the composition states. Default: 0.

        Raises:
            KeyError: If nothing was recorded on the device in the phase.
        """
        # 1. Choose the peak.
        peaks = self._peaks_on(device, phase)
        if not peaks:
            place = device
            if phase:
                place += f" in {phase}"
            raise KeyError(f"Nothing was seen on {place}.")
        name = max(peaks, key=lambda name: peaks[name].nbytes)
        peak = peaks[name]
        # 2. Describe the storages that were live at it, the largest first.
        records = [entry.record() for entry in self._live_at(peak, device)]
        records.sort(key=lambda record: -record.nbytes)
        return Composition(
            step=step,
            phase=name,
            device=device,
            nbytes=peak.nbytes,
            holders=tuple(records),
        )

    @property
    def num_events(self) -> int:
        """Number of allocations and releases so far, on all devices."""
        return len(self._history)

    def history(self, device: str) -> tuple[list[TensorRecord], list[LedgerEvent]]:
        """Return all storages of a device in the order of their allocation, and the events of their lives.

        The records say what the storages are only after `stop`.

        Args:
            device: Name of the device in torch.
        """
        records: list[TensorRecord] = []
        events: list[LedgerEvent] = []
        indices: dict[int, int] = {}
        for entry, is_allocation, phase in self._history:
            if entry.device != device:
                continue
            if is_allocation:
                indices[id(entry)] = len(records)
                records.append(entry.record())
            # The history keeps the entries, so that their ids stay theirs.
            events.append(LedgerEvent(indices[id(entry)], is_allocation, phase))
        return records, events

    def _peaks_on(self, device: str, phase: str | None) -> dict[str, _Peak]:
        """Return the peaks of a device by phase, or that of one phase."""
        return {
            peak_phase: peak
            for (peak_phase, peak_device), peak in self._peaks.items()
            if peak_device == device and phase in (None, peak_phase)
        }

    def _live_at(self, peak: _Peak, device: str) -> list[Entry]:
        """Replay allocations and releases up to a peak, and return the live entries of a device."""
        live: dict[int, Entry] = {}
        for entry, is_allocation, _ in self._history[: peak.history_length]:
            if entry.device != device:
                continue
            if is_allocation:
                live[id(entry)] = entry
            else:
                del live[id(entry)]
        return list(live.values())

    # Recording.

    def _on_operation(self, name: str, result: Any, args: Any) -> None:
        if self._watches_sizes:
            self._note_sizes()
        # `torch.tensor` ends with this operation: its argument is new.
        if name != "lift_fresh":
            for tensor in tensors_in(args):
                self._exclude_older(tensor)
        module = self._attribution.module
        sources = self._sources(result, args)
        for tensor, source in zip_longest(tensors_in(result), sources):
            self._enter(tensor, module, name, source)
        self._update_peaks()

    def _note_sizes(self) -> None:
        """Record the present sizes of all storages."""
        for key, live in list(self._entries.items()):
            storage = live.reference()
            if storage is None:
                continue
            nbytes = storage.nbytes()
            if nbytes != live.entry.nbytes:
                self._remove(key)
                self._add(storage, live.entry.moved(live.entry.device, nbytes))

    def _sources(self, result: Any, args: Any) -> list[str | None]:
        """Return for each result of an operation the device of what it is computed from, where devices share a name."""
        if self._places is None or not args:
            return []
        # Operations on lists compute each result from the entry at the same position.
        results = len(list(tensors_in(result)))
        first = list(tensors_in(args[:1]))
        if len(first) != results:
            first = list(tensors_in(args))[:1] * results
        return [self._device_of(tensor) for tensor in first]

    def _device_of(self, tensor: Tensor) -> str | None:
        """Return the device of a recorded tensor; None of any other one."""
        live = self._entries.get(id(_storage_of(tensor)))
        return None if live is None else live.entry.device

    def _on_forward(self) -> None:
        """Begin the phase of the forward, if a module's forward follows an optimiser step."""
        if self.phase == "optimizer step":
            self.begin("forward")

    def _enter(self, tensor: Tensor, module: str, name: str, source: str | None = None) -> Entry | None:
        """Return the entry of a tensor's storage, a new one if need be; None for a storage from before the start."""
        tensor = tensor_in_memory(tensor)
        storage = _storage_of(tensor)
        if storage is None or id(storage) in self._outside:
            return None
        nbytes = storage.nbytes()
        live = self._entries.get(id(storage))
        if live is None:
            device = str(tensor.device)
            if self._places is not None:
                device = self._places.place_of(source)
            entry = Entry(tensor, nbytes, device, module, name, self.phase)
        elif live.entry.nbytes == nbytes:
            return live.entry
        else:
            # The storage has another size: record a release and an allocation.
            self._remove(id(storage))
            entry = live.entry.successor(tensor, nbytes, self.phase)
        self._add(storage, entry)
        return entry

    def _add(self, storage: Any, entry: Entry) -> None:
        """Record the allocation of a storage."""
        key = id(storage)
        reference = weakref.ref(storage, lambda _: self._remove(key))
        self._entries[key] = _Live(reference, entry)
        self._history.append((entry, True, self.phase))
        self._live_bytes[entry.device] += entry.nbytes

    def _exclude_older(self, tensor: Tensor) -> None:
        """Exclude the storage of an operation's argument that no recorded operation has created."""
        storage = _storage_of(tensor)
        key = id(storage)
        if storage is not None and key not in self._entries and key not in self._outside:
            # The id may belong to another storage later.
            self._outside[key] = weakref.ref(storage, lambda _: self._outside.pop(key, None))

    def _remove(self, key: int) -> None:
        """Record the release of a storage."""
        live = self._entries.pop(key, None)
        if live is not None:
            entry = live.entry
            self._live_bytes[entry.device] -= entry.nbytes
            self._history.append((entry, False, self.phase))

    def _update_peaks(self) -> None:
        for device, nbytes in self._live_bytes.items():
            key = (self.phase, device)
            peak = self._peaks.get(key)
            if peak is None or nbytes > peak.nbytes:
                self._peaks[key] = _Peak(nbytes, len(self._history))

    def _categorise(self) -> None:
        """Set the categories of the live storages at the end of a phase."""
        if self.phase == "forward":
            # The weak references may remove entries meanwhile, so the loop runs over a copy.
            for live in list(self._entries.values()):
                if live.entry.phase == "forward":
                    live.entry.set_default_category("activation")
        self._enter_module()
        self._enter_optimizers()

    def _enter_module(self) -> None:
        for module_name, submodule in self._module.named_modules():
            for name, parameter in submodule.named_parameters(recurse=False):
                self._identify(parameter, "parameter", module_name, name)
                if parameter.grad is not None:
                    self._identify(parameter.grad, "gradient", module_name, f"gradient of {name}")
            for name, buffer in submodule.named_buffers(recurse=False):
                self._identify(buffer, "buffer", module_name, name)

    def _enter_optimizers(self) -> None:
        parameter_names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        for optimizer in self._optimizers:
            for owner, state in optimizer.state.items():
                # Some optimisers have states of another form beside those of the parameters.
                if isinstance(state, Mapping):
                    self._enter_state(state, parameter_names.get(id(owner), ""))

    def _enter_state(self, state: Mapping[Any, Any], parameter_name: str) -> None:
        """Enter an optimiser's state of one parameter."""
        module_name, _, name = parameter_name.rpartition(".")
        for key, value in state.items():
            state_name = str(key)
            if name:
                state_name += f" of {name}"
            for tensor in tensors_in(value):
                self._identify(tensor, "optimizer state", module_name, state_name)

    def _identify(self, tensor: Tensor, category: Category, module: str, name: str) -> None:
        entry = self._enter(tensor, module, name)
        if entry is not None:
            entry.identify(tensor, category, module, name)


def _storage_of(tensor: Tensor) -> Any:
    """Return the storage of a tensor; None of one that is sparse, or of a class from another library."""
    try:
        return tensor_in_memory(tensor).untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
