"""Two checkpoints of one step compared, entry by entry; their tensors are read piece by piece."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.errors import CheckpointError, ConfigurationError
from equipoise.extensions.equality.findings import Findings, Place
from equipoise.extensions.equality.gaps import Pieces, Tolerance, largest_gap
from equipoise.extensions.equality.nature import entry_differs_by_nature
from equipoise.interop.remote.paths import AnyPath
from equipoise.interop.torch.modules import uncompiled_name
from equipoise.trainer.checkpointing.file import OUR_KEY
from equipoise.trainer.checkpointing.objects import is_plain
from equipoise.trainer.checkpointing.reading import ReadValues, open_any_checkpoint

__all__ = ["compare_checkpoints"]

_Entries = dict[Any, Any]

_WEIGHTS = "weights"

# The parts of a checkpoint, in the order in which they are compared.
_PARTS = {
    "state_dict": _WEIGHTS,
    "optimizer_states": "optimisers",
    "lr_schedulers": "schedulers",
    "loops": "counters",
    "callbacks": "callbacks",
    OUR_KEY: "resumption",
}
_OTHER_PART = "other entries"

# An entry that one run lacks is a difference in these. Elsewhere, as of a callback, it is not compared.
_COMPLETE_PARTS = ("optimisers", "schedulers")

# The keys that lead to the number of processes which wrote a checkpoint.
_NUMBER_OF_PROCESSES = (OUR_KEY, "steps", "processes")

# Whole numbers below it are exact in float64.
_LARGEST = 1 << 53

# Names that a message lists.
_MOST_NAMES = 6


def compare_checkpoints(
    files: tuple[AnyPath, AnyPath],
    runs: tuple[str, str],
    step: int,
    tolerance: Tolerance,
    findings: Findings,
) -> None:
    """Compare two checkpoints of one step.

    Args:
        files: The file or folder of each.
        runs: The paths of the runs, for messages.
        step: The step of both.
        tolerance: The largest difference of equal values.
        findings: Receives what is found.

    Raises:
        CheckpointError: If one cannot be read.
        ConfigurationError: If they are of other modules.
    """
    first, second = files
    with open_any_checkpoint(first) as (left, read_left), open_any_checkpoint(second) as (right, read_right):
        left = _with_uncompiled_names(left, first)
        right = _with_uncompiled_names(right, second)
        _check_modules(left["state_dict"], right["state_dict"], files)
        pair = _Pair(runs, (read_left, read_right), tolerance, findings)
        try:
            pair.compare(left, right, step)
        except RecursionError as error:
            raise CheckpointError("A checkpoint is damaged: its entries are nested too deeply.") from error
    findings.counts["checkpoints"] += 1


@dataclass(frozen=True)
class _Pair:
    """Compares the entries of two checkpoints.

    Attributes:
        runs: The paths of the runs.
        reads: Functions that read the values of a tensor of each.
        tolerance: The largest difference of equal values.
        findings: Receives what is found.
    """

    runs: tuple[str, str]
    reads: tuple[ReadValues, ReadValues]
    tolerance: Tolerance
    findings: Findings

    def compare(self, left: _Entries, right: _Entries, step: int) -> None:
        """Compare all parts."""
        first_number = _entry(left, *_NUMBER_OF_PROCESSES)
        second_number = _entry(right, *_NUMBER_OF_PROCESSES)
        if None not in (first_number, second_number) and first_number != second_number:
            what = "resumption and validated batches"
            self.findings.not_compared(f"{what}: of {first_number} and {second_number} processes")
            for content in (left, right):
                del content[OUR_KEY]
                # Each process validates batches of its own, and the first has written its number.
                counters = _entry(content, "loops", "fit_loop")
                if isinstance(counters, dict):
                    counters.pop("epoch_loop.val_loop.batch_progress", None)
        for key, part in _PARTS.items():
            if key in left or key in right:
                self._compare_entry(left, right, key, Place(step, part))
            left.pop(key, None)
            right.pop(key, None)
        self._compare_items(left, right, Place(step, _OTHER_PART))

    def _compare_items(self, left: _Entries, right: _Entries, place: Place) -> None:
        for key in dict.fromkeys((*left, *right)):
            name = str(key)
            inner = place.below(name)
            if place.part != _WEIGHTS and entry_differs_by_nature(inner.name, name):
                self.findings.leave_out(name)
            else:
                self._compare_entry(left, right, key, inner)

    def _compare_entry(self, left: _Entries, right: _Entries, key: Any, place: Place) -> None:
        """Compare an entry of two dictionaries, or note that one lacks it."""
        in_first = key in left
        if in_first and key in right:
            self._compare_values(left[key], right[key], place)
        elif place.part in _COMPLETE_PARTS:
            words = ("absent", "present")
            self.findings.differs(place, words[in_first], words[not in_first])
        else:
            self.findings.not_compared(f"{place}, which {self.runs[not in_first]} alone has")

    def _compare_values(self, left: Any, right: Any, place: Place) -> None:
        """Compare two values of any kind."""
        tensor = _as_tensor(left)
        other_tensor = _as_tensor(right)
        if tensor is not None and other_tensor is not None:
            self._compare_tensors(tensor, other_tensor, place)
            self.findings.counts["tensors"] += isinstance(left, Tensor)
        elif isinstance(left, dict) and isinstance(right, dict):
            self._compare_items(left, right, place)
        elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
            self._compare_items(dict(enumerate(left)), dict(enumerate(right)), place)
        elif not _has_plain_equality(left) or not _has_plain_equality(right):
            self.findings.not_compared(f"{place}, which is no plain data")
        elif left != right:
            self.findings.differs(place, f"{left!r:.40}", f"{right!r:.40}")

    def _compare_tensors(self, left: Tensor, right: Tensor, place: Place) -> None:
        shape = tuple(left.shape)
        other_shape = tuple(right.shape)
        if shape != other_shape:
            self.findings.differs(place, f"shape {shape}", f"shape {other_shape}")
            return
        pieces = _pieces(left, self.reads[0])
        gap = largest_gap(pieces, _pieces(right, self.reads[1]), left.numel(), self.tolerance)
        if gap is not None:
            index = np.unravel_index(gap.position, shape)
            self.findings.has_gap(place, gap, tuple(map(int, index)))
        elif left.dtype != right.dtype and not any(self.tolerance):
            # Their values are equal.
            self.findings.differs(place, str(left.dtype), str(right.dtype))


def _pieces(tensor: Tensor, read: ReadValues) -> Pieces:
    """Return the values of a tensor, which a file has if it is on the meta device."""
    if tensor.is_meta:
        return read(tensor)
    return [tensor]


def _with_uncompiled_names(content: _Entries, path: AnyPath) -> _Entries:
    """Return a checkpoint with names of weights as they are without `torch.compile`."""
    state = content["state_dict"]
    if not isinstance(state, dict):
        raise CheckpointError(f"{str(path)!r} is no checkpoint of a Trainer: its weights have no names.")
    return {**content, "state_dict": {uncompiled_name(str(name)): value for name, value in state.items()}}


def _check_modules(left: _Entries, right: _Entries, files: tuple[AnyPath, AnyPath]) -> None:
    """Check that weights have the same names and shapes."""
    other = [name for name in dict.fromkeys((*left, *right)) if _shape(left, name) != _shape(right, name)]
    if not other:
        return
    listed = ", ".join(other[:_MOST_NAMES])
    if len(other) > _MOST_NAMES:
        listed += " ..."
    raise ConfigurationError(
        f"{files[0]} and {files[1]} are of other modules: they differ in names or shapes of {listed}."
    )


def _shape(state: _Entries, name: str) -> Any:
    """Return the shape of a weight; None for another object, False if there is none of this name."""
    if name not in state:
        return False
    return getattr(state[name], "shape", None)


def _entry(content: _Entries, *keys: str) -> Any:
    """Return what stands below some keys, one within the other; None if there is no such entry."""
    value: Any = content
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def _has_plain_equality(value: Any) -> bool:
    """Return whether `==` compares a value, and returns True or False."""
    return is_plain(value) and not isinstance(value, Tensor)


def _as_tensor(value: Any) -> Tensor | None:
    """Return a plain tensor, a number, or a list of numbers as a tensor; None for anything else."""
    # 1. Tensors.
    if isinstance(value, Tensor):
        is_dense = value.layout is torch.strided and not value.is_quantized
        if is_dense and type(value) in (Tensor, nn.Parameter):
            return value
        return None

    # 2. Numbers.
    numbers = [value]
    if isinstance(value, list | tuple):
        numbers = list(value)
    if numbers and all(map(_is_exact, numbers)):
        return torch.tensor(value, dtype=torch.float64)
    return None


def _is_exact(value: Any) -> bool:
    """Return whether a value is a number that float64 holds."""
    if type(value) is int:
        return abs(value) < _LARGEST
    return type(value) is float
