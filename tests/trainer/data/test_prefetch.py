"""Prefetch where there is no CUDA device: it is off, and costs nothing. `tests/simulated` tests it where it is on."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from equipoise import Trainer
from equipoise.trainer.data import prefetch
from equipoise.trainer.data.prefetch import Prefetch, copy_batch
from equipoise.tree import tensors_in
from tests.support.nested import Pair, Sample
from tests.support.trainer_runs import Small, loader, refuses, trainer

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("wrong", ["on", 1])
def test_other_choices_of_prefetch_are_refused(wrong: Any) -> None:
    refuses(lambda: Trainer(prefetch=wrong), 'prefetch must be "auto", True or False, not ' + repr(wrong))


def test_prefetch_on_the_cpu_warns_once() -> None:
    run = trainer(prefetch=True, max_epochs=3)
    with pytest.warns(UserWarning, match="prefetch=True has no effect here: .* CUDA devices alone") as caught:
        run.fit(Small(), loader())
    assert len([warning for warning in caught if "prefetch" in str(warning.message)]) == 1


def test_a_batch_for_the_cpu_among_cuda_devices_is_copied_plainly() -> None:
    batch = [torch.ones(2)]
    copier = Prefetch(True).copier([CUDA])
    assert copier is not copy_batch
    assert copier(batch, CPU) is batch


def tensor(value: float = 1.0) -> Tensor:
    return torch.full((2,), value)


ONE = tensor()
BATCHES = {
    "tensor": tensor(),
    "one tensor twice": [ONE, ONE],
    "nested": [tensor(), {"x": tensor(2), "y": (tensor(3), "name")}, 4, None],
    "named tuple": Pair(tensor(), [tensor(2)]),
    "other containers": OrderedDict(x=Sample(tensor())),
    "no tensor between": (tensor(), {"text": "abc", "array": np.ones(2), "size": torch.Size([2])}),
}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Copies that stay on the CPU."""
    made: list[Tensor] = []

    def copy(self: Prefetch, tensors: list[Tensor], device: torch.device) -> list[Tensor]:
        made.extend(each.clone() for each in tensors)
        return made

    monkeypatch.setattr(Prefetch, "_copies", copy)
    return made


@pytest.mark.parametrize("name", BATCHES)
def test_containers_are_those_of_the_plain_copy(name: str, copies: list[Tensor]) -> None:
    result = Prefetch(True).copier([CUDA])(BATCHES[name], CUDA)
    expected = move_data_to_device(BATCHES[name], CPU)
    assert repr(result) == repr(expected)
    assert type(result) is type(expected)
    assert [id(each) for each in tensors_in(result)] == [id(each) for each in copies]
    assert len(copies) == len(list(tensors_in(expected)))


class Points(list[Tensor]):
    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self.total = sum(len(each) for each in items)


class Counted(dict[str, Tensor]):
    """A mapping with a constructor of its own."""


@pytest.mark.parametrize("own", [Points([tensor()]), Counted(x=tensor())], ids=["sequence", "mapping"])
def test_containers_with_classes_of_the_user_are_copied_plainly(
    own: Any, copies: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "copy_batch", lambda batch, device: batch)
    batch = {"own": own, "x": tensor()}
    with pytest.warns(UserWarning, match=f"the copy of a .*{type(own).__name__} in a batch is a matter of its class"):
        assert Prefetch(True).copier([CUDA])(batch, CUDA) is batch
    assert not copies


def test_a_batch_that_gains_nothing_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def rebuild(*_: Any) -> None:
        raise AssertionError("The batch is made again.")

    monkeypatch.setattr(prefetch, "apply_to_collection", rebuild)
    monkeypatch.setattr(prefetch, "copy_batch", lambda batch, device: batch)
    batch = OrderedDict(x=Sample(tensor()), y="name")
    assert Prefetch("auto").copier([CUDA])(batch, CUDA) is batch


@pytest.mark.parametrize("value", [tensor().requires_grad_(), tensor().to_sparse()])
def test_tensors_whose_copy_is_more_than_their_values_are_copied_plainly(
    value: Tensor, copies: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "to_device", lambda moved, device: moved)
    result = Prefetch(True).copier([CUDA])([value, tensor(3)], CUDA)
    assert result[0] is value
    assert result[1] is copies[0]


@pytest.mark.parametrize("batch", [ONE, [ONE]], ids=["tensor", "list"])
def test_batches_on_their_device_stay_as_they_are(batch: Any) -> None:
    assert copy_batch(batch, CPU) is batch
