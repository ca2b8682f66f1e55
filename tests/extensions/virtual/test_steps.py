"""Steps in parts: their gradients and memory, what hooks see of them, and what is counted."""

import gc
import pickle
import weakref
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import Efficiency, VirtualDevicesStrategy
from equipoise.errors import StepError
from equipoise.extensions.virtual.parts.gradient_tree import take_gradients
from equipoise.extensions.virtual.parts.part_batches import part_loader
from tests.extensions.virtual.modules import SAMPLES, Noisy, Plain
from tests.extensions.virtual.runs import rows, run, small_trainer
from tests.support.equality import assert_equal
from tests.support.trainer_runs import Small, loader, trainer


def test_gradients_are_laid_out_as_their_parameters() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = torch.arange(6.0).view(3, 2).t()
    (taken,) = take_gradients([parameter])
    assert taken is not None
    assert taken.is_contiguous()
    assert taken[1, 0] == 1


def test_each_part_has_memory_of_its_own() -> None:
    data = TensorDataset(torch.arange(138.0).view(23, 6), torch.arange(23))
    found = []
    for ranges in ([(0, 8)], [(0, 3), (3, 8)]):
        loaders = [part_loader(DataLoader(data, batch_size=23), 8, ranges, rank, 0) for rank in range(len(ranges))]
        found.append([part for loader in loaders for step in loader for part in step])
    for parts in zip(*found, strict=True):
        assert_equal(*((part.key, list(part.batch)) for part in parts))
        assert not any(tensor.storage_offset() for part in parts for tensor in part.batch)


class Failing(Noisy):
    """Fails in the fifth part of the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.parts_seen: list[None] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.parts_seen.append(None)
        if len(self.parts_seen) == 8 + 5:
            raise ArithmeticError("in a part")
        return loss


def test_an_error_in_a_part_leaves_the_state_before_the_batch() -> None:
    module = Failing()
    kept: list[Any] = []

    def state() -> Any:
        gradients = [None if each.grad is None else each.grad.clone() for each in module.parameters()]
        return gradients, [buffer.clone() for buffer in module.buffers()]

    class Keep(L.Callback):
        def on_train_batch_start(self, *arguments: Any) -> None:
            kept[:] = [state()]

    with pytest.raises(ArithmeticError):
        small_trainer(accumulate_grad_batches=4, callbacks=[Keep()]).fit(module, rows(64))
    assert any(gradient is not None for gradient in kept[0][0])
    assert_equal(kept[0], state())


class Returning(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "size": len(batch[0])}


def test_hooks_receive_the_first_part_and_the_loss_of_the_whole_step() -> None:
    class Look(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert outputs["size"] == len(batch[0]) == 3
            assert float(outputs["loss"]) == pytest.approx(float(trainer.callback_metrics["loss"]))
            steps.append(trainer.global_step)

    steps: list[int] = []
    run(Returning, 1, callbacks=[Look()])
    assert steps == list(range(1, 11))


def test_tokens_of_all_parts_are_counted() -> None:
    efficiency = Efficiency(tokens=lambda batch: 10 * len(batch[0]))
    run(Plain, 1, callbacks=[efficiency])
    # Three steps of 24 samples are first steps.
    assert efficiency.usage is not None
    assert efficiency.usage.tokens == 10 * efficiency.usage.samples == 10 * (2 * SAMPLES - 3 * 24)


class Threads(Noisy):
    """Notes the number of threads while it makes a layer."""

    def configure_model(self) -> None:
        self.threads = torch.get_num_threads()


def test_a_run_has_one_thread_from_its_beginning() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    module = Threads()
    try:
        small_trainer().fit(module, rows(16))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert module.threads == 1


class ByLbfgs(Plain):
    """An optimiser that computes a batch several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def test_a_batch_is_computed_again_in_a_window_of_one_batch_alone() -> None:
    small_trainer().fit(ByLbfgs(), rows(32))
    with pytest.raises(StepError, match="computes a batch again"):
        small_trainer(accumulate_grad_batches=2).fit(ByLbfgs(), rows(32))


def test_the_strategy_keeps_no_module_and_can_be_sent() -> None:
    strategy, module = VirtualDevicesStrategy(count=4), Small()
    trainer(strategy=strategy).fit(module, loader(2, 8))
    reference = weakref.ref(module)
    del module
    gc.collect()
    assert reference() is None
    assert pickle.loads(pickle.dumps(strategy)).count == 4
