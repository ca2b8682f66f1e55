"""Averages of the weights in shards: those of one device, in evaluations, in checkpoints and after a resumption."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from equipoise import Trainer
from tests.extensions.fsdp.modules import ByHand, Overflows
from tests.extensions.fsdp.programs import (
    FEATURES,
    QUIET,
    Net,
    assert_close,
    assert_same_in_processes,
    fit,
    fsdp,
    in_processes,
    loader,
    make,
    weights_of,
)
from tests.support.equality import assert_equal
from tests.support.own_average import Own

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:The checkpoint holds states of callbacks",
        "ignore:You're using the WeightAveraging callback",
        "ignore:SWA is initializing after",
    ),
]


class Mixed(Net):
    """Has a weight in two blocks, frozen ones, and buffers of both kinds, which each step changes."""

    level: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        first, second, third = self.blocks
        second.up.weight = first.up.weight
        third.norm.requires_grad_(False)
        self.register_buffer("level", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.level.mul_(0.5).add_(self.global_step)
        self.count += 1
        return super().training_step(batch, batch_idx)


class Normed(Net):
    """Has statistics of batches, for which StochasticWeightAveraging adds an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(FEATURES, 7, bias=False), nn.BatchNorm1d(7))  # type: ignore[assignment]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        mean = self.first[1].running_mean.sum()  # type: ignore[index, union-attr]
        self.log("most", mean, reduce_fx="max", sync_dist=True)
        self.log("least", mean, reduce_fx="min", sync_dist=True)

    def on_validation_end(self) -> None:
        values = self.trainer.callback_metrics
        assert values["most"] == values["least"]


class Late(Net):
    """Has its blocks from `configure_model` on, which callbacks of Lightning call on one device alone."""

    def __init__(self) -> None:
        super().__init__()
        self.late = (self.blocks.double(),)
        del self.blocks

    def configure_model(self) -> None:
        assert self.trainer.world_size == 1 or not hasattr(self, "blocks")
        (self.blocks,) = self.late


class FromEpochs(WeightAveraging):
    """Averages at the ends of epochs."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


class Watch(Callback):
    """Notes the bytes of the average in this process, and the values of validations."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.values: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        for callback in trainer.callbacks:
            for value in vars(callback).values():
                if isinstance(value, AveragedModel):
                    tensors = [getattr(parameter, "to_local", parameter.detach)() for parameter in value.parameters()]
                    self.held.append(sum(tensor.nbytes for tensor in tensors))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.values.append(float(trainer.callback_metrics["val"]))


class Repeats(Callback):
    """Averages whole weights as EMAWeightAveraging does."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        weights = trainer.strategy.module_state(module)
        if not self.average:
            self.average = {name: weight.float() for name, weight in weights.items()}
        else:
            self.average = {name: 0.7 * self.average[name] + (1 - 0.7) * weight for name, weight in weights.items()}


AVERAGES: dict[str, Callable[[], Callback]] = {
    "exponential": lambda: EMAWeightAveraging(decay=0.7),
    "without buffers": lambda: EMAWeightAveraging(decay=0.7, use_buffers=False),
    "rarely, on the host": lambda: EMAWeightAveraging(decay=0.7, device="cpu", update_every_n_steps=3),
    "all at once": lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.7)),
    "equal weights": WeightAveraging,
    "of epochs": FromEpochs,
    "stochastic": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2),
    "of the user": Own,
}


def averaged(
    name: str, strategy: Any = "single_device", processes: int = 1, kind: Any = Mixed, **options: Any
) -> dict[str, Any]:
    """Train 10 steps, and return the weights at the end, the values of validations, and the bytes of the average."""
    watch = Watch()
    callbacks = [AVERAGES[name](), watch, *options.pop("callbacks", ())]
    options = {"max_epochs": 5, "count": 24, **options}
    module, _ = fit(kind, strategy, processes, callbacks=callbacks, **options)
    return {"weights": weights_of(module), "values": watch.values, "held": watch.held}


def numbers(*arguments: Any, **options: Any) -> dict[str, Any]:
    """Return the same without the bytes, of which each process has some."""
    return {**averaged(*arguments, **options), "held": None}


# Each changes what is averaged, or when.
OPTIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 2, "max_epochs": 10},
    "evaluations between": {"val_check_interval": 1},
    # Its last step leaves the weights of the root whole.
    "by hand": {"kind": ByHand},
    "blocks that come late": {"kind": Late},
    "a process without a batch": {"kind": Net, "count": 25, "max_epochs": 4},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in AVERAGES},
    **{name: ("exponential", options) for name, options in OPTIONS.items()},
}


@cache
def on_one_device(case: str) -> dict[str, Any]:
    average, options = CASES[case]
    return numbers(average, **options)


@pytest.mark.parametrize(
    ("processes", "cases"),
    # Shards are others in three processes, and a last step leaves two of them without a batch.
    [(2, [*CASES]), (3, ["exponential", "stochastic", "of the user", "a process without a batch"])],
    ids=["2 processes", "3 processes"],
)
def test_an_average_of_weights_is_that_of_one_device(processes: int, cases: list[str]) -> None:
    expected = {case: partial(on_one_device, case) for case in cases}
    calls = {case: partial(numbers, CASES[case][0], fsdp(), processes, **CASES[case][1]) for case in cases}
    assert_same_in_processes(processes, expected, calls)


def compare_with_replicas() -> None:
    """Compare averages with those of ddp; called in each of two processes."""
    # Its averages are whole: a sum of two has one order, so the bits are the same.
    options: dict[str, Any] = {"precision": "16-mixed", "count": 48}
    skipped = [averaged("exponential", name, 2, Overflows, **options)["weights"] for name in ("ddp", "fsdp")]
    assert_equal(*skipped, title="A step that the scaler skips")
    # The epoch that StochasticWeightAveraging adds for statistics of batches.
    assert_equal(*(numbers("stochastic", name, 2, Normed) for name in ("ddp", "fsdp")), 1e-12, title="Statistics")
    # The module compares its own.
    assert len(averaged("exponential", fsdp(), 2, Normed)["values"]) == 5


def test_skipped_steps_and_statistics_of_batches_are_those_of_ddp() -> None:
    in_processes(2, compare_with_replicas)


def in_half_precision() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what a callback has averaged, and the weights at the end; the first process alone has whole weights."""
    repeats = Repeats()
    # A validation would round the average.
    options: dict[str, Any] = {"precision": "bf16-true", "limit_val_batches": 0, "callbacks": [repeats]}
    weights = averaged("exponential", fsdp(), 2, Net, **options)["weights"]
    return {name: value.bfloat16() for name, value in repeats.average.items()}, weights


def test_weights_in_half_precision_have_an_average_in_float32() -> None:
    assert_equal(*in_processes(2, in_half_precision))


def held_by_all() -> list[list[int]]:
    held: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(held, averaged("exponential", fsdp(), len(held))["held"])
    return held


@pytest.mark.parametrize("processes", [2, 3])
def test_each_process_holds_its_shard_of_the_average_alone(processes: int) -> None:
    """All together hold the bytes of one device: shards are uneven, but no part is in two processes."""
    on_one, held = averaged("exponential")["held"], in_processes(processes, held_by_all)
    assert [sum(of_all) for of_all in zip(*held, strict=True)] == on_one
    assert all(part[0] < 1.5 * on_one[0] / processes for part in held)


# Resumption


class Killed(Exception):
    """Ends a run."""


class SavesAndDies(Callback):
    """Saves a checkpoint within an epoch, and ends the run a step later."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)
        if trainer.global_step == 4:
            raise Killed


def resumed(name: str, folder: Path, **strategy: Any) -> dict[str, Any]:
    """Return the result of a run that was killed and resumed; called in several processes."""
    path = folder / f"{name}.ckpt"
    with pytest.raises(Killed):
        averaged(name, fsdp(**strategy), 2, callbacks=[SavesAndDies(path)])
    return numbers(name, fsdp(**strategy), 2, ckpt_path=path)


def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    """Its values are those of all validations: that of the first epoch was noted before the checkpoint."""
    expected, calls = {}, {}
    for name, checkpoints in (("exponential", "sharded"), ("equal weights", "full"), ("stochastic", "sharded")):
        expected[name] = partial(on_one_device, name)
        calls[name] = partial(resumed, name, tmp_path, checkpoints=checkpoints)
    assert_same_in_processes(2, expected, calls)


def saves_epochs(folder: Path) -> Callback:
    return ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)


WAYS = {
    "one device": ("single_device", 1),
    "2 of fsdp": (fsdp(), 2),
    "3 of fsdp": (fsdp(), 3),
    "2 of fsdp, in folders": (fsdp(checkpoints="sharded"), 2),
}


@pytest.mark.parametrize(
    ("name", "writer", "reader"),
    [
        ("exponential", "2 of fsdp", "one device"),
        ("stochastic", "one device", "3 of fsdp"),
        ("stochastic", "3 of fsdp", "2 of fsdp, in folders"),
        ("exponential", "2 of fsdp, in folders", "3 of fsdp"),
    ],
)
def test_an_average_is_continued_under_another_strategy(name: str, writer: str, reader: str, tmp_path: Path) -> None:
    """Both the average and the weights with which training continues come along."""
    options: dict[str, Any] = {"callbacks": [saves_epochs(tmp_path)], "enable_checkpointing": True}
    averaged(name, *WAYS[writer], Net, **{**options, "max_epochs": 3})
    continued = averaged(name, *WAYS[reader], Net, ckpt_path=tmp_path / "epoch=2.ckpt")
    assert_close(averaged(name, kind=Net)["weights"], continued["weights"])


def test_a_checkpoint_is_that_of_one_device_and_is_evaluated_with_the_average(tmp_path: Path) -> None:
    content, results = [], []
    for way, (strategy, processes) in (("one", WAYS["one device"]), ("two", WAYS["2 of fsdp"])):
        saves = saves_epochs(tmp_path / way)
        averaged("exponential", strategy, processes, callbacks=[saves], enable_checkpointing=True)
        path = tmp_path / way / "epoch=2.ckpt"
        content.append(torch.load(path, weights_only=False))
        options: dict[str, Any] = {"callbacks": [AVERAGES["exponential"]()], "precision": "64-true"}
        trainer = Trainer(strategy=strategy, devices=["cpu"] * processes, **QUIET, **options)
        data = loader(7, 3)
        predictions = torch.cat(trainer.predict(make(Mixed), data, ckpt_path=path) or [])  # type: ignore[arg-type]
        (validated,) = trainer.validate(make(Mixed), data, ckpt_path=path)
        (tested,) = trainer.test(make(Mixed), data, ckpt_path=path)
        results.append({**validated, **tested, "predictions": predictions})
    one, two = content
    assert list(one) == list(two)
    for entry in ("state_dict", "current_model_state", "averaging_state"):
        assert list(one[entry]) == list(two[entry])
        assert_close(one[entry], two[entry])
    assert not torch.equal(two["state_dict"]["first.weight"], two["current_model_state"]["first.weight"])
    assert_close(*results)


def test_no_average_is_left_after_the_run_and_a_further_run_begins_anew() -> None:
    average = EMAWeightAveraging(decay=0.7)
    module, _ = fit(Net, fsdp(), 2, callbacks=[average])
    assert not any(isinstance(value, AveragedModel) for value in vars(average).values())
    again, _ = fit(Net, fsdp(), 2, callbacks=[average], module=module)
    assert not any(isinstance(value, DTensor) for value in again.state_dict().values())
