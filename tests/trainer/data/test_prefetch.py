"""Prefetch where there is no CUDA device: it is off, and costs nothing. `tests/simulated` tests it where it is on."""

import logging
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from equipoise import SingleDeviceStrategy, Trainer
from equipoise.precision import make_precision
from equipoise.trainer.data import prefetch
from equipoise.trainer.data.prefetch import Prefetch, copy_batch
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.runtime.run_data import RunData
from equipoise.trainer.state.run_state import RunState
from equipoise.tree import tensors_in
from tests.support.nested import Pair, Sample
from tests.support.trainer_runs import Small, loader, refuses, trainer

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("wrong", ["on", None, 1])
def test_other_choices_of_prefetch_are_refused(wrong: Any) -> None:
    refuses(lambda: Trainer(prefetch=wrong), 'prefetch must be "auto", True or False, not ' + repr(wrong))


@pytest.mark.parametrize(("choice", "device"), [("auto", CPU), (False, CPU), (False, CUDA)])
def test_without_prefetch_the_plain_copy_stays(
    choice: Any, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """On the CPU, and where prefetch is off."""
    state = RunState(root_dir="")
    state.prefetch = choice
    strategy = SingleDeviceStrategy()
    strategy.devices = [device, device]
    hooks = Hooks(trainer=None, state=state, module=Small(), datamodule=None, strategy_name="any")
    with caplog.at_level(logging.INFO):
        copier = RunData(state, strategy, hooks, make_precision(None, "cpu"), {}).make_transfer()
    assert copier is copy_batch
    assert not caplog.records


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


def test_plain_containers_are_made_once_and_without_lightning(
    copies: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(prefetch, "apply_to_collection")
    result = Prefetch(True).copier([CUDA])({"x": tensor(), "pair": Pair(["name", 1], (tensor(2),))}, CUDA)
    assert result["x"] is copies[0]
    assert result["pair"].second[0] is copies[1]


@pytest.mark.parametrize("value", [nn.Parameter(tensor()), tensor().requires_grad_(), tensor().to_sparse()])
def test_tensors_whose_copy_is_more_than_their_values_are_copied_plainly(
    value: Tensor, copies: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "to_device", lambda moved, device: moved)
    result = Prefetch(True).copier([CUDA])([value, tensor(3)], CUDA)
    assert result[0] is value
    assert result[1] is copies[0]


@pytest.mark.parametrize("batch", [ONE, (ONE, ONE), [ONE], []], ids=["tensor", "tuple", "list", "empty"])
def test_batches_on_their_device_stay_as_they_are(batch: Any) -> None:
    assert copy_batch(batch, CPU) is batch


def test_other_batches_are_copied_as_lightning_does() -> None:
    meta = torch.device("meta")
    batch = copy_batch({"x": ONE, "y": ["name", (ONE,)]}, meta)
    assert batch["x"].device == batch["y"][1][0].device == meta
    assert batch["y"][0] == "name"
