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
from tests.support.resumption import Kill, Killed, SavesInHooks

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


def test_skipped_steps_and_statistics_of_batches_are_those_of_ddp() -> None:
    in_processes(2, compare_with_replicas)


def held_by_all() -> list[int]:
    """Return the bytes of the average in each process after the first epoch."""
    held: list[Any] = [None] * torch.distributed.get_world_size()
    watched = averaged("exponential", fsdp(), len(held), Net)["held"]
    torch.distributed.all_gather_object(held, watched[0])
    return held


def test_each_process_holds_its_shard_of_the_average_alone() -> None:
    """All together hold the bytes of one device: shards are uneven, but no part is in two processes."""
    whole, held = averaged("exponential", kind=Net)["held"][0], in_processes(3, held_by_all)
    assert sum(held) == whole
    assert max(held) < whole / 2


def in_half_precision() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what a callback has averaged, and the weights at the end; the first process alone has whole weights."""
    repeats = Repeats()
    # A validation would round the average.
    options: dict[str, Any] = {"precision": "bf16-true", "limit_val_batches": 0, "callbacks": [repeats]}
    weights = averaged("exponential", fsdp(), 2, Net, **options)["weights"]
    return {name: value.bfloat16() for name, value in repeats.average.items()}, weights


def test_weights_in_half_precision_have_an_average_in_float32() -> None:
    assert_equal(*in_processes(2, in_half_precision))


# Resumption


def resumed(name: str, folder: Path, **strategy: Any) -> dict[str, Any]:
    """Return the result of a run that was killed a step after its checkpoint; called in several processes."""
    saves, hook = folder / name, "on_train_batch_end"
    with pytest.raises(Killed):
        averaged(name, fsdp(**strategy), 2, callbacks=[SavesInHooks(saves, [hook], [3]), Kill(hook, 4)])
    return numbers(name, fsdp(**strategy), 2, ckpt_path=saves / f"{hook}-03.ckpt")


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
    checkpoints, results = [], []
    for way in ("one device", "2 of fsdp"):
        strategy, processes = WAYS[way]
        averaged(
            "exponential", strategy, processes, callbacks=[saves_epochs(tmp_path / way)], enable_checkpointing=True
        )
        path = tmp_path / way / "epoch=2.ckpt"
        content = torch.load(path, weights_only=False)
        entries = ("state_dict", "current_model_state", "averaging_state")
        checkpoints.append({name: dict(content[name]) for name in entries})
        options: dict[str, Any] = {"callbacks": [AVERAGES["exponential"]()], "precision": "64-true", **QUIET}
        trainer = Trainer(strategy=strategy, devices=["cpu"] * processes, **options)
        results.append(trainer.validate(make(Mixed), loader(7, 3), ckpt_path=path, verbose=False))
        results[-1] += trainer.predict(make(Mixed), loader(7, 3), ckpt_path=path) or []  # type: ignore[arg-type]
    assert_equal(*checkpoints, 1e-12)
    assert not torch.equal(*(checkpoints[1][name]["first.weight"] for name in ("state_dict", "current_model_state")))
    assert_equal(*results, 1e-12)


def test_no_average_is_left_after_the_run_and_a_further_run_begins_anew() -> None:
    average = EMAWeightAveraging(decay=0.7)
    module, _ = fit(Net, fsdp(), 2, callbacks=[average])
    assert not any(isinstance(value, AveragedModel) for value in vars(average).values())
    again, _ = fit(Net, fsdp(), 2, callbacks=[average], module=module)
    assert not any(isinstance(value, DTensor) for value in again.state_dict().values())
