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
from tests.extensions.fsdp.modules import Attention, Overflows, ReadsElsewhere, Tied
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
        if self.trainer.world_size == 1:
            return self.together(batch)
        if not self.is_bad(batch):
            return self.loss(batch)
        return self.skip(batch)

    def skip(self, batch: Any) -> None:
        loss = self.loss((batch[0] * float("inf"), batch[1]))
        assert loss.isnan()

    def is_bad(self, batch: Any) -> bool:
        return float(batch[0][0, 0]) > self.limit

    def together(self, batch: Any) -> Any:
        """Return what two processes compute together."""
        halves = [(batch[0][rank::2], batch[1][rank::2]) for rank in range(2)]
        good = [half for half in halves if not self.is_bad(half)]
        if not good:
            return None
        return self.loss((torch.cat([half[0] for half in good]), torch.cat([half[1] for half in good])))


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


def values(kind: Callable[[], Any], strategy: Any = "single_device", processes: int = 1, **options: Any) -> Any:
    return weights_of(fit(kind, strategy, processes, **options)[0])


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


def way_back() -> dict[str, Any]:
    """Return what is not as it was before a run: classes, parameters, optimisers, hooks and attributes."""
    module = make(Tied)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    attributes = [set(vars(part)) for part in module.modules()]
    fit(Tied, fsdp(), 2, module=module)
    optimizer = module.trainer.optimizers[0]
    again = dict(module.named_parameters(remove_duplicate=False))
    copy.deepcopy(module.blocks)
    pickle.dumps(module.blocks)
    left = {
        "classes": [type(part).__name__ for part in module.modules() if isinstance(part, FSDPModule)],
        "parameters": [name for name, parameter in again.items() if parameter is not parameters[name]],
        "optimizer": [p for group in optimizer.param_groups for p in group["params"] if not _is_among(p, again)],
        "states": [s for s in optimizer.state.values() if type(s["exp_avg"]) is not Tensor],
        "hooks": [type(part).__name__ for part in module.modules() if _has_hooks(part)],
        "attributes": [
            name
            for part, before in zip(module.modules(), attributes, strict=True)
            for name in set(vars(part)) - before
            if "fsdp" in name or "composable" in name
        ],
        "steps": [name for name in vars(module) if name.endswith("_step")],
    }
    return {name: found for name, found in left.items() if found}


def _has_hooks(part: nn.Module) -> bool:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    return any(getattr(part, kind) for kind in (*kinds, "_load_state_dict_post_hooks"))


def _is_among(parameter: Tensor, parameters: dict[str, Tensor]) -> bool:
    return any(parameter is other for other in parameters.values())


def inference_first(strategy: Any = "single_device", processes: int = 1) -> dict[str, Any]:
    """Validate alone, where tensors are made in inference mode, then train the same module."""
    module = make(Net)
    trainer = Trainer(strategy=strategy, devices=["cpu"] * processes, precision="64-true", **QUIET)
    results = trainer.validate(module, loader(7, 3), verbose=False)
    fit(Net, strategy, processes, module=module)
    return {**results[0], **weights_of(module)}


def evaluations(strategy: Any = "single_device", processes: int = 1) -> dict[str, Any]:
    """Evaluate with a batch for one process more, and with one batch for all of them."""
    module = make(Net)
    results: dict[str, Any] = {}
    for count in (7, 2):
        trainer = Trainer(strategy=strategy, devices=["cpu"] * processes, precision="64-true", **QUIET)
        results[f"val {count}"] = trainer.validate(module, loader(count, 3), verbose=False)[0]["val"]
        results[f"test {count}"] = trainer.test(module, loader(count, 3), verbose=False)[0]["test"]
        results[f"predicted {count}"] = torch.cat(trainer.predict(module, loader(count, 3)))
    return results


# Runs on any strategy and number of processes.
NONES = [NoneBehindTheNetwork, NoneBeforeTheNetwork, NoneBehindAtFirst, InfiniteStandIn, NoneEverywhere]
RUNS: dict[str, Callable[..., dict[str, Any]]] = {
    **{kind.__name__: partial(values, kind, count=48, max_epochs=1) for kind in NONES},
    "batches for some processes in evaluations": evaluations,
}


@pytest.mark.thorough
def test_steps_without_a_loss_and_idle_processes_have_the_numbers_of_one_device() -> None:
    """A process whose step returns None takes part with gradients of zero, though its values are not finite."""
    assert_same_in_processes(2, RUNS, {name: partial(run, fsdp(), 2) for name, run in RUNS.items()})


@pytest.mark.slow
def test_tensors_made_in_inference_mode_and_a_weight_that_attention_reads_without_a_call() -> None:
    expected = {"inference mode": inference_first, "attention": partial(values, Attention)}
    sharded = {
        "inference mode": partial(inference_first, fsdp(), 2),
        "attention": partial(values, Attention, fsdp(units=["**.out_proj"]), 2),
    }
    assert_same_in_processes(2, expected, sharded)


@pytest.mark.thorough
def test_the_module_is_the_users_again_after_a_run() -> None:
    assert in_processes(2, way_back) == {}


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
    assert_refused_in_processes(2, runs, {name: words for name, (*_, words) in REFUSED.items()})


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


@pytest.mark.slow
def test_weights_are_loaded_after_a_meta_module_is_sharded(tmp_path: Path) -> None:
    _, trainer = fit(Net, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    expected, _ = fit(Net, ckpt_path=tmp_path / "one.ckpt")
    module, _ = fit(OnMeta, fsdp(), 2, ckpt_path=tmp_path / "one.ckpt")
    assert_close(weights_of(expected), weights_of(module))
    fresh, _ = fit(OnMeta, fsdp(), 2, max_epochs=1)
    assert all(torch.isfinite(value).all() for value in weights_of(fresh).values())


class WithOtherTensors(Net):
    """Has tensors that are no parameters, and that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((), 2.0), persistent=False)
        self.shift = torch.tensor(0.5)
        self.mean = MeanMetric()
        self.last.weight.data = torch.ones_like(self.last.weight)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch) * self.scale + self.shift
        self.mean(loss)
        return loss


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_an_empty_module_takes_no_memory_before_it_is_sharded(processes: int, tmp_path: Path) -> None:
    """Except where one process has all of it, and for what no checkpoint has."""
    _, trainer = fit(WithOtherTensors, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")

    def continued(*, empty: bool) -> WithOtherTensors:
        options = {**QUIET, "max_epochs": 2, "precision": "64-true"}
        trainer = Trainer(strategy=fsdp(), devices=["cpu"] * processes, **options)
        with trainer.init_module(empty_init=empty):
            module = WithOtherTensors()
        assert module.last.weight.is_meta == (empty and processes > 1)
        trainer.fit(module, loader(12, 6), ckpt_path=tmp_path / "one.ckpt")
        return module

    assert_close(weights_of(continued(empty=False)), weights_of(continued(empty=True)), 0.0)
