"""Averages of the weights in shards: those of one device, in evaluations, in checkpoints and after a resumption."""

from collections.abc import Callable
from itertools import pairwise
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
from tests.extensions.fsdp.programs import FEATURES, QUIET, Net, assert_close, fit, fsdp, in_processes, loader, make
from tests.extensions.fsdp.test_transparency import ByHand
from tests.extensions.fsdp.test_traps import Overflows
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
    """Notes bytes of the average in this process, and values of each validation."""

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


def averaged(name: str, strategy: Any = "single_device", processes: int = 1, **options: Any) -> dict[str, Any]:
    """Train 20 steps, and return the weights at the end and what validations have shown."""
    watch = Watch()
    callbacks = [AVERAGES[name](), watch, *options.pop("callbacks", ())]
    options = {"kind": Mixed, "max_epochs": 5, "count": 48, **options}
    module, trainer = fit(strategy=strategy, processes=processes, callbacks=callbacks, **options)
    held = trainer.strategy.processes.gather_objects(watch.held) if trainer.world_size > 1 else [watch.held]
    return {"weights": module.state_dict(), "values": dict(enumerate(watch.values)), "held": held}


def assert_same(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    assert_close(expected["weights"], actual["weights"])
    assert_close(expected["values"], actual["values"])


# Each changes what is averaged, or when.
OPTIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 2, "max_epochs": 10},
    "evaluations between": {"val_check_interval": 1},
    # Its last step leaves the weights of the root whole.
    "by hand": {"kind": ByHand},
    "blocks that come late": {"kind": Late},
    "a process without a batch": {"kind": Net, "count": 49, "max_epochs": 4},
}


def run_all() -> dict[str, Any]:
    """Return the results of all undisturbed runs; called in several processes."""
    processes = torch.distributed.get_world_size()
    results = {name: averaged(name, fsdp(), processes) for name in AVERAGES}
    results |= {name: averaged("exponential", fsdp(), processes, **options) for name, options in OPTIONS.items()}
    results["statistics of batches"] = averaged("exponential", fsdp(), processes, kind=Normed)
    repeats = Repeats()
    # A validation would round the average.
    options: dict[str, Any] = {"precision": "bf16-true", "limit_val_batches": 0, "callbacks": [repeats]}
    half = averaged("exponential", fsdp(), processes, kind=Net, **options)
    results["half precision"] = {"actual": half["weights"], "expected": repeats.average}
    for strategy in ("fsdp", "ddp"):
        name = f"skipped under {strategy}"
        results[name] = averaged("exponential", strategy, processes, kind=Overflows, precision="16-mixed")
        name = f"an epoch for statistics under {strategy}"
        results[name] = averaged("stochastic", strategy, processes, kind=Normed)
    return results


@pytest.fixture(scope="module", params=[2, 3])
def undisturbed(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Results of a launch, which costs more than a run."""
    return in_processes(request.param, run_all)


@pytest.mark.parametrize("name", [*AVERAGES, *OPTIONS])
def test_an_average_is_that_of_one_device(name: str, undisturbed: dict[str, Any]) -> None:
    average = name if name in AVERAGES else "exponential"
    assert_same(averaged(average, **OPTIONS.get(name, {})), undisturbed[name])


@pytest.mark.parametrize("undisturbed", [2], indirect=True)
def test_a_step_that_the_scaler_skips_is_not_averaged(undisturbed: dict[str, Any]) -> None:
    """With the bits of replicas, whose averages are whole: a sum of two has one order."""
    expected, actual = undisturbed["skipped under ddp"], undisturbed["skipped under fsdp"]
    assert_close(expected["weights"], actual["weights"], tolerance=0.0)


def test_weights_in_half_precision_have_an_average_in_float32(undisturbed: dict[str, Any]) -> None:
    expected, actual = undisturbed["half precision"]["expected"], undisturbed["half precision"]["actual"]
    assert_close({name: value.bfloat16() for name, value in expected.items()}, actual, tolerance=0.0)


def test_all_processes_evaluate_the_same_statistics_of_batches(undisturbed: dict[str, Any]) -> None:
    """The module compares them; the epoch that StochasticWeightAveraging adds for them is that of replicas."""
    assert len(undisturbed["statistics of batches"]["values"]) == 5
    assert_same(*(undisturbed[f"an epoch for statistics under {strategy}"] for strategy in ("ddp", "fsdp")))


def test_each_process_holds_its_part_alone(undisturbed: dict[str, Any]) -> None:
    """All together hold the bytes of one device: shards are uneven, but no part is in two processes."""
    (on_one,) = averaged("exponential")["held"]
    held = undisturbed["exponential"]["held"]
    assert [sum(of_all) for of_all in zip(*held, strict=True)] == on_one
    assert all(part[0] < 1.5 * on_one[0] / len(held) for part in held)


# Resumption


class Killed(Exception):
    """Ends a run."""


class SavesAndDies(Callback):
    """Saves a checkpoint within an epoch, and ends the run a step later."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 6:
            trainer.save_checkpoint(self.path)
        if trainer.global_step == 7:
            raise Killed


def resumed(name: str, folder: Path, **strategy: Any) -> dict[str, Any]:
    """Return the result of a run that was killed and resumed; called in several processes."""
    processes = torch.distributed.get_world_size()
    path = folder / f"{name}.ckpt"
    with pytest.raises(Killed):
        averaged(name, fsdp(**strategy), processes, callbacks=[SavesAndDies(path)])
    return averaged(name, fsdp(**strategy), processes, ckpt_path=path)


KILLED = ["exponential", "equal weights", "stochastic"]


def resume_all(folder: Path) -> dict[str, Any]:
    results = {}
    for checkpoints in ("full", "sharded"):
        place = folder / checkpoints
        results |= {(name, checkpoints): resumed(name, place, checkpoints=checkpoints) for name in KILLED}
    return results


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """Results of runs that were killed and resumed."""
    folder = tmp_path_factory.mktemp("killed")
    results: dict[Any, Any] = in_processes(2, lambda: resume_all(folder))
    return results


@pytest.mark.parametrize("checkpoints", ["full", "sharded"])
@pytest.mark.parametrize("name", KILLED)
def test_a_killed_run_ends_as_an_undisturbed_one(name: str, checkpoints: str, continued: dict[Any, Any]) -> None:
    """Its values are those of all validations: that of the first epoch was noted before the checkpoint."""
    assert_same(averaged(name), continued[name, checkpoints])


def saves_epochs(folder: Path) -> Callback:
    return ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)


WAYS = {
    "one device": ("single_device", 1),
    "2 of fsdp": (fsdp(), 2),
    "3 of fsdp": (fsdp(), 3),
    "2 of fsdp, in folders": (fsdp(checkpoints="sharded"), 2),
}


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        *pairwise(("2 of fsdp", "one device", "3 of fsdp", "2 of fsdp, in folders", "one device")),
        ("2 of fsdp, in folders", "3 of fsdp"),
    ],
)
@pytest.mark.parametrize("name", ["exponential", "stochastic"])
def test_a_run_goes_on_elsewhere(name: str, writer: str, reader: str, tmp_path: Path) -> None:
    """Both the average and the weights with which training continues come along."""
    options: dict[str, Any] = {"callbacks": [saves_epochs(tmp_path)], "enable_checkpointing": True, "kind": Net}
    averaged(name, *WAYS[writer], **{**options, "max_epochs": 3})
    average, path = averaged(name, kind=Net), tmp_path / "epoch=2.ckpt"
    assert_close(average["weights"], averaged(name, *WAYS[reader], ckpt_path=path, kind=Net)["weights"])


def test_a_checkpoint_is_that_of_one_device_and_is_evaluated_with_the_average(tmp_path: Path) -> None:
    content, results = [], []
    for way, (strategy, processes) in (("one", WAYS["one device"]), ("two", WAYS["2 of fsdp"])):
        saves = saves_epochs(tmp_path / way)
        averaged("exponential", strategy, processes, callbacks=[saves], enable_checkpointing=True)
        path = tmp_path / way / "epoch=2.ckpt"
        content.append(torch.load(path, weights_only=False))
        trainer = Trainer(strategy=strategy, devices=["cpu"] * processes, precision="64-true", **QUIET)
        trainer.callbacks.append(AVERAGES["exponential"]())  # type: ignore[arg-type]
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


def test_it_is_whole_nowhere_after_the_run() -> None:
    """A further run begins anew."""
    average = EMAWeightAveraging(decay=0.7)
    module, _ = fit(Net, fsdp(), 2, callbacks=[average])
    assert not any(isinstance(value, AveragedModel) for value in vars(average).values())
    again, _ = fit(Net, fsdp(), 2, callbacks=[average], module=module)
    assert not any(isinstance(value, DTensor) for value in again.state_dict().values())
