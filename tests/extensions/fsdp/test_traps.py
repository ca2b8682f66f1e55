"""Traps of sharding: each is solved, or refused with its reason."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchmetrics import MeanMetric

from equipoise import NoGradEvaluation, OOMRecovery, Trainer
from tests.extensions.fsdp.modules import Overflows, ReadsElsewhere, Tied
from tests.extensions.fsdp.programs import (
    QUIET,
    Net,
    assert_close,
    assert_refused_in_processes,
    assert_same_in_processes,
    fit,
    fsdp,
    in_processes,
    loader,
    make,
    weights_of,
)
from tests.support.equality import assert_equal

pytestmark = pytest.mark.filterwarnings(r"ignore:`fit\(ckpt_path='last'\)`")


# Processes that have nothing to learn from


class NoneBehindTheNetwork(Net):
    """Returns None for some batches, after it has computed a loss which is not a number."""

    limit = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = [batch]
        if self.trainer.world_size == 1:
            # What two processes compute together.
            parts = [[tensor[rank::2] for tensor in batch] for rank in range(2)]
        good = [part for part in parts if not self.is_bad(part)]
        if good:
            return self.loss([torch.cat(tensors) for tensors in zip(*good, strict=True)])
        return self.skip(batch)

    def skip(self, batch: Any) -> None:
        loss = self.loss((batch[0] * float("inf"), batch[1]))
        assert loss.isnan()

    def is_bad(self, batch: Any) -> bool:
        return float(batch[0][0, 0]) > self.limit


class NoneBeforeTheNetwork(NoneBehindTheNetwork):
    """Returns None for some batches without computing anything."""

    def skip(self, batch: Any) -> None:
        pass


class NoneBehindAtFirst(NoneBehindTheNetwork):
    """Returns None for the first batch of a process."""

    def is_bad(self, batch: Any) -> bool:
        return float(batch[0][0, 0]) < -0.3


class InfiniteStandIn(NoneBeforeTheNetwork):
    """Has a first batch whose loss is infinite once weights have changed, so that its gradients are not a number."""

    def loss(self, batch: Any) -> Tensor:
        is_first_batch = -0.32 < float(batch[0][0, 0]) < -0.3
        if is_first_batch and self.trainer.global_step > 0:
            return super().loss(batch) * float("inf")
        return super().loss(batch)


class NoneEverywhere(Net):
    """Returns None in every process, in one step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class NoneWithoutLossBefore(Net):
    """Returns None for its first batch without computing anything, so that nothing can stand in for it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx else None


# Different calls


class LeavesUnitOut(Net):
    """One process leaves a block out, which is as large as the next."""

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        for number, block in enumerate(self.blocks):
            if not (number == self.left_out and self.global_rank == 1):
                hidden = block(hidden)
        return self.last(hidden)

    left_out = 1


class LeavesLastUnitOut(LeavesUnitOut):
    left_out = 2


class UsesWeightInHook(ReadsElsewhere):
    """Does so outside of the steps."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        nn.functional.linear(torch.ones(7, dtype=torch.float64), self.blocks[1].up.weight)


class UsesWeightBeforeBackward(Net):
    """Uses the weight of a block between `training_step` and the backward."""

    def on_before_backward(self, loss: Tensor) -> None:
        nn.functional.linear(torch.ones(7, dtype=torch.float64), self.blocks[1].up.weight)


def values(kind: Callable[[], Any], strategy: Any = "single_device", processes: int = 1, **options: Any) -> Any:
    return weights_of(fit(kind, strategy, processes, **options)[0])


def evaluated_first(strategy: Any = "single_device", processes: int = 1) -> dict[str, Any]:
    """Evaluate with one batch for all processes, where tensors are made in inference mode, then train the module."""
    module, data = make(Net), loader(2, 3)
    trainer = Trainer(strategy=strategy, devices=["cpu"] * processes, precision="64-true", **QUIET)
    (results,) = trainer.validate(module, data, verbose=False)
    predictions = torch.cat(trainer.predict(module, data))  # type: ignore[arg-type]
    fit(Net, strategy, processes, module=module)
    return {**results, **weights_of(module), "predictions": predictions}


class EarlyOptimizer(Net):
    """Its optimiser knows the parameters that the shards replace."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.optimizer


class RunsOut(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")


NONES = [NoneBehindTheNetwork, NoneBeforeTheNetwork, NoneBehindAtFirst, InfiniteStandIn, NoneEverywhere]
# Runs on any strategy and number of processes.
RUNS: dict[str, Callable[..., dict[str, Any]]] = {
    **{kind.__name__: partial(values, kind, count=48, max_epochs=1) for kind in NONES},
    "evaluated first": evaluated_first,
}


def way_back() -> None:
    """See that module and optimiser have their own whole parameters after a run."""
    module = make(Tied)
    before = list(module.parameters())
    fit(Tied, fsdp(), 2, module=module)
    after, (optimizer,) = list(module.parameters()), module.trainer.optimizers
    assert all(one is other for one, other in zip(before, after, strict=True))
    trained = optimizer.param_groups[0]["params"]
    assert all(one is other for one, other in zip(trained, after, strict=True))
    assert all(type(state["exp_avg"]) is Tensor for state in optimizer.state.values())
    assert not any(isinstance(part, FSDPModule) for part in module.modules())
    assert not {"training_step", "validation_step"} & vars(module).keys()
    pickle.dumps(copy.deepcopy(module.blocks))


@pytest.mark.thorough
def test_the_module_is_the_users_again_after_a_run() -> None:
    in_processes(2, way_back)


@pytest.mark.thorough
def test_steps_without_a_loss_and_idle_processes_have_the_numbers_of_one_device() -> None:
    """A process whose step returns None takes part with gradients of zero, though its values are not finite."""
    assert_same_in_processes(2, RUNS, {name: partial(run, fsdp(), 2) for name, run in RUNS.items()})


def compare_with_ddp() -> None:
    """Compare the bits of fsdp with those of ddp; called in each process."""
    for kind, precision in ((Net, "32-true"), (Net, "bf16-mixed"), (Net, "16-mixed"), (Overflows, "16-mixed")):
        of_ddp, of_fsdp = (values(kind, name, 2, precision=precision) for name in ("ddp", "fsdp"))
        assert_equal(of_ddp, of_fsdp, title=f"{kind.__name__} in {precision}")
        assert all(torch.isfinite(value).all() for value in of_fsdp.values())


@pytest.mark.slow
def test_lower_precisions_and_skipped_steps_have_the_bits_of_ddp() -> None:
    """Gloo has no PREMUL_SUM, which torch would take for float32. An overflow in a shard skips the step everywhere."""
    in_processes(2, compare_with_ddp)


# What is refused

EVALUATION = NoGradEvaluation(
    loader(7, 3), every_n_epochs=1, collect=True, forward=lambda module, batch: module(batch[0])
)
REFUSED: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "leaves a unit out": (
        LeavesUnitOut,
        {},
        ["Rank 0 is about to compute blocks.1, while rank 1 is about to compute blocks.2", "same order", "common seed"],
    ),
    "leaves the last one out": (LeavesLastUnitOut, {}, ["Rank 0 is about to compute blocks.2, while rank 1 has ended"]),
    "uses a weight in a hook": (UsesWeightInHook, {}, ["mixed torch.Tensor and DTensor"]),
    "uses a weight behind its step": (
        UsesWeightBeforeBackward,
        {},
        ["StepError: blocks.1.up.weight was used outside of the forward of its unit blocks.1", "FSDPStrategy("],
    ),
    "an early optimiser": (
        EarlyOptimizer,
        {},
        [
            *("ConfigurationError: ", "SGD has no parameter of the sharded module"),
            "Create it in `configure_optimizers`",
        ],
    ),
    "no loss before": (
        NoneWithoutLossBefore,
        {},
        [
            *("StepError: ", "`training_step` returns a loss for no earlier batch either"),
            "Return the loss multiplied by 0 instead of None.",
        ],
    ),
    "out of memory": (
        RunsOut,
        {"callbacks": [OOMRecovery("raise")]},
        ["OutOfMemoryError: ", "cannot do its step again alone"],
    ),
    "recovery": (
        Net,
        {"callbacks": [OOMRecovery()]},
        ["ConfigurationError: ", "policy='split'", "cannot do its step again alone"],
    ),
    "another evaluation": (
        Net,
        {"callbacks": [EVALUATION]},
        ["ConfigurationError: ", "NoGradEvaluation deals batches out unevenly", "equally often"],
    ),
}


@pytest.mark.thorough
def test_what_cannot_be_computed_in_shards_is_refused_with_the_reason() -> None:
    runs = {name: partial(fit, kind, fsdp(), 2, **options) for name, (kind, options, _) in REFUSED.items()}
    assert_refused_in_processes(2, runs, REFUSED)


# Runs that the trainer launches


class Fails(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        raise ValueError("mine")


@pytest.mark.slow
def test_after_a_failure_no_checkpoint_is_written_and_the_first_error_stays(tmp_path: Path) -> None:
    """The first error remains the first, and says why the checkpoint was not written."""
    callback = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(ValueError, match="mine") as caught:
        fit(Fails, fsdp(), 2, callbacks=[callback], enable_checkpointing=True)
    assert "each process has only its shards" in "".join(caught.value.__notes__)
    assert not list(tmp_path.iterdir())


class OnMeta(Net):
    """Has no weights until it is configured, and then only shapes."""

    def __init__(self) -> None:
        super().__init__()
        del self.first, self.blocks, self.last

    def configure_model(self) -> None:
        if not hasattr(self, "first"):
            with torch.device("meta"):
                net = Net()
            self.first, self.blocks, self.last = net.first, net.blocks, net.last


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of the first epoch on one device."""
    fit(Net, max_epochs=1)[1].save_checkpoint(tmp_path / "one.ckpt")
    return tmp_path / "one.ckpt"


@pytest.mark.slow
def test_weights_are_loaded_after_a_meta_module_is_sharded(checkpoint: Path) -> None:
    """Without a checkpoint, layers have first values of their own."""
    expected, _ = fit(Net, ckpt_path=checkpoint)
    module, _ = fit(OnMeta, fsdp(), 2, ckpt_path=checkpoint)
    assert_close(weights_of(expected), weights_of(module))
    fresh, _ = fit(OnMeta, fsdp(), 2, max_epochs=1)
    assert all(torch.isfinite(value).all() for value in weights_of(fresh).values())


class WithOtherTensors(Net):
    """Has tensors that are no parameters, and that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((), 2.0), persistent=False)
        self.mean = MeanMetric()
        self.last.weight.data = torch.ones_like(self.last.weight)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch) * self.scale
        self.mean(loss)
        return loss


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_an_empty_module_takes_no_memory_before_it_is_sharded(processes: int, checkpoint: Path) -> None:
    """Except where one process has all of it, and for what no checkpoint has."""
    found = []
    for empty in (False, True):
        trainer = Trainer(strategy=fsdp(), devices=["cpu"] * processes, precision="64-true", max_epochs=2, **QUIET)
        with trainer.init_module(empty_init=empty):
            module = WithOtherTensors()
        assert module.last.weight.is_meta == (empty and processes > 1)
        trainer.fit(module, loader(12, 6), ckpt_path=checkpoint)
        found.append(weights_of(module))
    assert_close(*found, 0.0)
