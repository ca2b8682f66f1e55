"""Copies to the CPU are complete when they are read."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise.to_device import ArrivingValue, to_device
from tests.support.sources import FILES, nodes_of, relative

# The progress bar copies into pinned memory and reads it after an event, and so do offloaded activations.
MAY_COPY_ASYNCHRONOUSLY = {"to_device.py", "callbacks/progress/latest_values.py", "extensions/savers/offloading.py"}


class Recorded(Tensor):
    """Records how it is copied to another device."""

    copies: list[tuple[torch.device, bool]] = []

    def to(self, device: torch.device, *, non_blocking: bool) -> Tensor:  # type: ignore[override]
        self.copies.append((device, non_blocking))
        return self


@pytest.mark.parametrize(("destination", "asynchronous"), [("cpu", False), ("cuda:0", True), ("mps:0", False)])
def test_only_copies_to_a_cuda_device_are_asynchronous(destination: str, asynchronous: bool) -> None:
    tensor = torch.empty(2, device="meta").as_subclass(Recorded)
    tensor.copies.clear()
    to_device(tensor, torch.device(destination))
    assert tensor.copies == [(torch.device(destination), asynchronous)]


def test_a_tensor_on_its_device_is_not_copied() -> None:
    tensor = torch.ones(2)
    assert to_device(tensor, torch.device("cpu")) is tensor


def test_a_value_that_arrives_is_the_one_of_the_beginning() -> None:
    tensor = torch.tensor([0.25], requires_grad=True)
    value = ArrivingValue(tensor)
    with torch.no_grad():
        tensor.fill_(7.0)
    assert value.read() == 0.25
    assert value.read(wait=True) == 0.25


def asynchronous_copies(path: Path) -> Iterator[int]:
    for node in nodes_of(path):
        if isinstance(node, ast.keyword) and node.arg == "non_blocking":
            yield node.lineno


@pytest.mark.whole_package
def test_no_other_file_copies_asynchronously() -> None:
    found: dict[str, Any] = {}
    for path in FILES:
        lines = list(asynchronous_copies(path))
        if lines:
            found[relative(path)] = lines
    assert set(found) == MAY_COPY_ASYNCHRONOUSLY, found
