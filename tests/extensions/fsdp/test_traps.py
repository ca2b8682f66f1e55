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

from equipoise import ConfigurationError, FSDPStrategy, MemoryLogger, NoGradEvaluation, OOMRecovery, Trainer
from equipoise.extensions.fsdp.units import choose_units
from tests.extensions.fsdp.programs import (
    QUIET,
    Net,
    assert_close,
    fit,
    fsdp,
    in_processes,
    loader,
    make,
    weights_of,
)
from tests.extensions.fsdp.test_transparency import Attention, Tied, Unused

pytestmark = pytest.mark.filterwarnings(r"ignore:`fit\(ckpt_path='last'\)`")


def rank_of(module: Any) -> int:
    return module.trainer.global_rank


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
            if not (number == self.left_out and rank_of(self) == 1):
                hidden = block(hidden)
        return self.last(hidden)

    left_out = 1


class LeavesLastUnitOut(LeavesUnitOut):
    left_out = 2


class UsesWeightElsewhere(Net):
    """Reads the weight of a block outside of its forward."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.penalty(batch[0])

    def penalty(self, features: Tensor) -> Tensor:
        return nn.functional.linear(self.first(features), self.blocks[1].up.weight).mean()


class UsesWeightInHook(UsesWeightElsewhere):
    """Does so outside of the steps."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        nn.functional.linear(torch.ones(7, dtype=torch.float64), self.blocks[1].up.weight)


def error_of(kind: Callable[[], Any], **options: Any) -> str:
    strategy = options.pop("strategy", None) or fsdp(**options.pop("strategy_options", {}))
    try:
        fit(kind, strategy, 2, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def values(kind: Callable[[], Any], strategy: Any, processes: int, **options: Any) -> dict[str, Any]:
    return weights_of(fit(kind, strategy, processes, **options)[0])


NONES = [NoneBehindTheNetwork, NoneBeforeTheNetwork, NoneBehindAtFirst, InfiniteStandIn, NoneEverywhere]
PRECISIONS = ["32-true", "bf16-mixed", "16-mixed"]
MISTAKES = [LeavesUnitOut, LeavesLastUnitOut, UsesWeightInHook]


def run_often() -> dict[str, Any]:
    """Return the results of those runs that are repeated at every change; called in two processes."""
    results: dict[str, Any] = {}
    for kind in NONES:
        results[kind.__name__] = values(kind, fsdp(), 2, count=48, max_epochs=1)
    results["way back"] = way_back()
    results["evaluations"] = evaluations(fsdp(), 2)
    for kind in MISTAKES:
        results[kind.__name__] = error_of(kind)
    results["early optimizer"] = error_of(EarlyOptimizer)
    results["no loss before"] = error_of(NoneWithoutLossBefore)
    return results


def run_rarely() -> dict[str, Any]:
    """Return the results of the other runs; called in two processes."""
    results: dict[str, Any] = {}
    for name, run in RUNS.items():
        results[name] = run(fsdp(), 2)
    for precision in PRECISIONS:
        for name, strategy in (("fsdp", fsdp()), ("ddp", "ddp")):
            results[f"{name} {precision}"] = values(Net, strategy, 2, precision=precision)
    results["overflow"] = values(Overflows, fsdp(), 2, precision="16-mixed")
    results["overflow under ddp"] = values(Overflows, "ddp", 2, precision="16-mixed")
    results["weight in attention"] = values(Attention, fsdp(units=["**.out_proj"]), 2)
    results["running out of memory"] = error_of(RunsOut, callbacks=[OOMRecovery("raise")])
    results["recovery from running out"] = error_of(Net, callbacks=[OOMRecovery()])
    evaluation = NoGradEvaluation(
        loader(7, 3), every_n_epochs=1, collect=True, forward=lambda module, batch: module(batch[0])
    )
    results["another evaluation"] = error_of(Net, callbacks=[evaluation])
    return results


@pytest.fixture(scope="module")
def often() -> dict[str, Any]:
    """Results of a launch, which costs more than a run; an error in one run is raised by each test."""
    return in_processes(2, run_often)


@pytest.fixture(scope="module")
def rarely() -> dict[str, Any]:
    """Results of another launch."""
    return in_processes(2, run_rarely)


# Runs


class Overflows(Net):
    """The gradient of a part of one weight overflows in float16, in one step: one process has that part."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            loss = loss + self.last.bias.sum() * 0 + self.first.weight[0, 0] * 1e38
        return loss


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
    """Return what is not as it was before a run."""
    module = make(Tied)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    attributes = [set(vars(part)) for part in module.modules()]
    fit(Tied, fsdp(), 2, module=module)
    optimizer = module.trainer.optimizers[0]
    again = dict(module.named_parameters(remove_duplicate=False))
    copy.deepcopy(module.blocks)
    pickle.dumps(module.blocks)
    return {
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


def _has_hooks(part: nn.Module) -> bool:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    return any(getattr(part, kind) for kind in (*kinds, "_load_state_dict_post_hooks"))


def _is_among(parameter: Tensor, parameters: dict[str, Tensor]) -> bool:
    return any(parameter is other for other in parameters.values())


def inference_first(strategy: Any, processes: int) -> dict[str, Any]:
    """Validate alone, where tensors are made in inference mode, then train the same module."""
    module = make(Net)
    trainer = Trainer(strategy=strategy, devices=["cpu"] * processes, precision="64-true", **QUIET)
    results = trainer.validate(module, loader(7, 3), verbose=False)
    fit(Net, strategy, processes, module=module)
    return {**results[0], **weights_of(module)}


class LogsShards(Net):
    """Logs values of weights and gradients outside of the steps, where they are in shards."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [parameter.grad.norm() for parameter in self.parameters()]
        self.log("gradient", torch.stack(norms).norm(), on_step=False, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("weight", self.last.weight.sum())


def logged(strategy: Any, processes: int) -> dict[str, Any]:
    _, trainer = fit(LogsShards, strategy, processes, count=48)
    return dict(trainer.callback_metrics)


def evaluations(strategy: Any, processes: int) -> dict[str, Any]:
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
RUNS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "an unused weight": partial(values, Unused),
    "a weight that is used outside of its unit": partial(values, UsesWeightElsewhere),
    "evaluated in inference mode before": inference_first,
    "values of shards that are logged": logged,
    "a fused optimiser": partial(values, Net, fused_optimizer=True),
    "validations between steps": partial(values, Net, val_check_interval=2),
}


# What they show


@pytest.mark.parametrize("kind", NONES, ids=lambda kind: kind.__name__)
def test_a_process_whose_step_returns_none_takes_part(kind: Any, often: dict[str, Any]) -> None:
    """Its gradients count as zero, exactly, though its values are not finite, and it has no weight."""
    assert_close(values(kind, "single_device", 1, count=48, max_epochs=1), often[kind.__name__])


def test_an_idle_process_goes_through_the_network_in_evaluations(often: dict[str, Any]) -> None:
    """Also in predictions, and where a process never has a batch."""
    assert_close(evaluations("single_device", 1), often["evaluations"])


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_same_as_on_one_device(name: str, rarely: dict[str, Any]) -> None:
    assert_close(RUNS[name]("single_device", 1), rarely[name])


@pytest.mark.slow
def test_a_unit_whose_weight_another_layer_reads(rarely: dict[str, Any]) -> None:
    """Attention reads the weight of its last layer without calling it."""
    assert_close(values(Attention, "single_device", 1), rarely["weight in attention"])


@pytest.mark.slow
def test_an_unused_weight_does_not_decay(rarely: dict[str, Any]) -> None:
    """Torch could make gradients of zero where nobody has one, by which AdamW would let the weight decay."""
    before = weights_of(make(Unused).double())
    assert torch.equal(rarely["an unused weight"]["unused.weight"], before["unused.weight"])


def test_there_is_a_way_back(often: dict[str, Any]) -> None:
    """Classes, hooks, attributes, parameters and optimisers are the user's again, so a module can be copied."""
    assert not [name for name, left in often["way back"].items() if left]


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_lower_precisions_have_the_bits_of_ddp(precision: str, rarely: dict[str, Any]) -> None:
    """Gloo has no PREMUL_SUM, which torch would take for float32."""
    results = rarely
    assert_close(results[f"ddp {precision}"], results[f"fsdp {precision}"], 0.0)


@pytest.mark.slow
def test_an_overflow_in_one_shard_skips_the_step_everywhere(rarely: dict[str, Any]) -> None:
    results = rarely
    assert_close(results["overflow under ddp"], results["overflow"], 0.0)
    assert all(torch.isfinite(value).all() for value in results["overflow"].values())


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (
            LeavesUnitOut,
            [
                "Rank 0 is about to compute blocks.1, while rank 1 is about to compute blocks.2",
                "same order",
                "common seed",
            ],
        ),
        (LeavesLastUnitOut, ["Rank 0 is about to compute blocks.2, while rank 1 has ended"]),
        (UsesWeightInHook, ["mixed torch.Tensor and DTensor"]),
    ],
)
def test_mistakes_are_named(kind: Any, parts: list[str], often: dict[str, Any]) -> None:
    error = often[kind.__name__]
    assert all(part in error for part in parts), error


def test_a_step_without_loss_that_nothing_can_stand_in_for_is_refused(often: dict[str, Any]) -> None:
    error = often["no loss before"]
    assert error.startswith("StepError")
    assert "`training_step` returns a loss for no earlier batch either" in error
    assert "Return the loss multiplied by 0 instead of None." in error


def test_an_optimizer_that_would_train_nothing_is_refused(often: dict[str, Any]) -> None:
    error = often["early optimizer"]
    assert error.startswith("ConfigurationError")
    assert "SGD has no parameter of the sharded module" in error
    assert "Create it in `configure_optimizers`" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("running out of memory", ["OutOfMemoryError", "cannot do its step again alone"]),
        ("recovery from running out", ["ConfigurationError", "policy='split'", "cannot do its step again alone"]),
        ("another evaluation", ["ConfigurationError", "NoGradEvaluation deals batches out unevenly", "equally often"]),
    ],
)
def test_refused_with_the_reason(case: str, parts: list[str], rarely: dict[str, Any]) -> None:
    error = rarely[case]
    assert all(part in error for part in parts), error


# Units


def test_patterns_name_parts_between_dots() -> None:
    """Inner units come first, as torch shards them from the inside out."""
    titles = [unit.title for unit in choose_units(Net(), ["blocks.*", "blocks.1.*", "**.norm"])]
    inner = ["blocks.2.norm", "blocks.1.down", "blocks.1.up", "blocks.1.norm", "blocks.0.norm"]
    assert titles == [*inner, "blocks.2", "blocks.1", "blocks.0", "(root)"]


def test_classes_name_their_submodules() -> None:
    """The layer that attention reads without a call is none, and a class of which there is no submodule names none."""
    net = nn.Sequential(nn.MultiheadAttention(4, 1), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))
    assert [unit.title for unit in choose_units(net, [nn.Linear, nn.Conv1d])] == ["1.0", "2", "(root)"]


def test_large_layers_are_units() -> None:
    net = nn.Sequential(nn.Embedding(2**18, 5, device="meta"), nn.Linear(5, 5), nn.Linear(5, 2**18, device="meta"))
    assert [unit.title for unit in choose_units(net)] == ["0", "2", "(root)"]


def test_tied_weights_stay_with_the_root() -> None:
    assert [unit.title for unit in choose_units(Tied())] == ["blocks.0", "(root)"]
    with pytest.raises(ConfigurationError, match=r"blocks\.2\.up\.weight and blocks\.1\.up\.weight are the same"):
        choose_units(Tied(), ["blocks.0", "blocks.2"])


def test_a_weight_that_its_layer_does_not_use_itself_is_no_unit() -> None:
    """The last layer of torch's attention is large enough for a unit, but nobody calls it."""
    attention = nn.MultiheadAttention(1100, 2, device="meta")
    assert [unit.title for unit in choose_units(nn.Sequential(attention))] == ["(root)"]


# Runs that the trainer launches


class Fails(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        raise ValueError("mine")


@pytest.mark.slow
def test_after_a_failure_there_is_no_full_state(tmp_path: Path) -> None:
    """The first error remains the first, and says why the checkpoint was not written."""
    callback = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(ValueError, match="mine") as caught:
        fit(Fails, fsdp(), 2, callbacks=[callback], enable_checkpointing=True)
    assert "each process has only its shards" in "".join(caught.value.__notes__)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_memory_readings_of_shards(tmp_path: Path) -> None:
    """Shards count with the bytes that they have in this process."""
    logger = MemoryLogger(detail="modules")
    fit(Net, fsdp(), 2, callbacks=[logger], default_root_dir=tmp_path, logger=True, log_every_n_steps=1)


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


def test_arguments() -> None:
    with pytest.raises(ConfigurationError, match="units must be 'auto' or a list"):
        FSDPStrategy(units="blocks.*")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="replicas must be a whole number from 1, not 0"):
        FSDPStrategy(replicas=0)
    with pytest.raises(ConfigurationError, match="replicas=2 do not divide 3 processes"):
        Trainer(strategy=FSDPStrategy(replicas=2), devices=["cpu"] * 3, **QUIET)
    for processes in (1, 2):
        with pytest.raises(ConfigurationError, match="cpu_offload=True moves shards from GPUs"):
            Trainer(strategy=FSDPStrategy(cpu_offload=True), devices=["cpu"] * processes, **QUIET)
    # Lightning's default.
    for size in ("tensor", "context"):
        assert not FSDPStrategy(**{size: 2, "cpu_offload": None}).cpu_offload
    with pytest.raises(ConfigurationError, match=r"units='layers\.\*' matches no submodule"):
        choose_units(Net(), ["layers.*"])
    with pytest.raises(ConfigurationError, match="a unit needs parameters and a forward"):
        choose_units(Net(), ["blocks"])
