"""Averages of the weights of a pipeline, in threads and in processes, where they lie with the stages."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from equipoise import ConfigurationError
from equipoise.extensions.pipeline.messaging.remote_parameters import is_elsewhere
from tests.extensions.pipeline.processes.language import STEP, Counted, samples
from tests.support.batches import Batches
from tests.support.equality import assert_equal
from tests.support.own_average import Own
from tests.support.pipelines import EachStep, Tokens, pipelined, processes, quiet

pytestmark = [
    pytest.mark.filterwarnings("ignore:The checkpoint holds states of callbacks"),
    pytest.mark.usefixtures("quick_collections"),
]


def data() -> DataLoader[Any]:
    return DataLoader(Batches([11, 11, 3]), batch_size=None)


class Remembering(nn.Linear):
    """Keeps the weights with which it has computed, whatever the number of micro-batches."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("former", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.former.copy_(self.bias.detach())
        return super().forward(x)


class Averaged(Tokens):
    """Has weights at both ends of the network, frozen ones, and a buffer in each block."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.net.blocks = nn.ModuleList(Remembering() for _ in range(4))
        self.net.norm.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Rows(nn.BatchNorm1d):
    """Normalises tokens by the statistics of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).view(x.shape)


class Normed(Averaged):
    """Has statistics of batches, for which StochasticWeightAveraging adds an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[1] = Rows(6)


AVERAGES: dict[str, Callable[[], Callback]] = {
    "exponential": lambda: EMAWeightAveraging(decay=0.7),
    "without buffers, rarely": lambda: EMAWeightAveraging(decay=0.7, use_buffers=False, update_every_n_steps=3),
    "all at once": lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.7)),
    "equal weights": WeightAveraging,
    "stochastic": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2),
    "of the user": Own,
}


class CountedAverage(Counted):
    """Logs what the other modules log."""

    validation_step = Tokens.validation_step


PLANS: dict[str, dict[str, Any]] = {
    "one device": {"devices": 1},
    "threads": pipelined(2, micro_batches=3),
    "processes": processes(2, micro_batches=3),
    "3 processes": processes(3, micro_batches=3),
    "replicas": processes(4, micro_batches=3, replicas=2),
    "a stage of a tied weight alone": processes(2, micro_batches=3, cut_before=["net.blocks.0"]),
}


class Watch(Callback):
    """Notes the values of validations, and the bytes of the average in this process."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.held = 0

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        for callback in trainer.callbacks:
            for value in vars(callback).values():
                if isinstance(value, AveragedModel):
                    self.held = sum(p.nbytes for p in value.parameters() if not is_elsewhere(p))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.values.append(float(trainer.callback_metrics["val_loss"]))


def averaged(
    average: Callback,
    plan: dict[str, Any],
    kind: Any = Averaged,
    loader: Any = None,
    *,
    callbacks: Sequence[Callback] = (),
    ckpt_path: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Train 12 steps, and return the weights at the end, the values of validations, and the bytes held here."""
    watch = Watch()
    options = {"max_epochs": 4, "num_sanity_val_steps": 2, **options}
    trainer = quiet(callbacks=[average, watch, *callbacks], **plan, **options)
    module = kind()
    trainer.fit(module, loader or data(), data(), ckpt_path=ckpt_path)
    return {"weights": module.state_dict(), "values": watch.values, "held": watch.held}


@cache
def on_one_device(name: str, **options: Any) -> dict[str, Any]:
    return averaged(AVERAGES[name](), PLANS["one device"], **options)


def assert_same(expected: dict[str, Any], actual: dict[str, Any], epochs: int = 0) -> None:
    """Compare the weights, and the values of the last validations, which may differ in number."""
    assert_equal(expected["weights"], actual["weights"], 1e-12)
    assert_equal(expected["values"][-epochs:], actual["values"][-epochs:], 1e-12)


@pytest.mark.quick_cases(1)
@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_is_that_of_one_device(name: str, engine: str) -> None:
    assert_same(on_one_device(name), averaged(AVERAGES[name](), PLANS[engine]))


@pytest.mark.slow
def test_averages_with_accumulation_and_evaluations_between() -> None:
    """They lie with the stages."""
    options = {"accumulate_grad_batches": 2, "val_check_interval": 1}
    expected = on_one_device("exponential", **options)
    actual = averaged(AVERAGES["exponential"](), PLANS["3 processes"], **options)
    assert_same(expected, actual)
    assert 0 < actual["held"] < 0.6 * expected["held"]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "replicas"), [("replicas", 2), ("a stage of a tied weight alone", 1)])
def test_averages_of_weights_that_lie_in_several_processes(engine: str, replicas: int) -> None:
    runs = []
    for plan, count in ((PLANS["one device"], 1), (PLANS[engine], replicas)):
        loader = DataLoader(samples(24), STEP // count)
        torch.manual_seed(3)
        runs.append(averaged(AVERAGES["exponential"](), plan, CountedAverage, loader, num_sanity_val_steps=0))
    assert_same(*runs)


@pytest.mark.slow
def test_statistics_of_batches_are_those_of_one_device_in_threads() -> None:
    """With one micro-batch, which has the statistics of the batch."""
    expected = on_one_device("stochastic", kind=Normed)
    assert_same(expected, averaged(AVERAGES["stochastic"](), pipelined(2, micro_batches=1), Normed))


@pytest.mark.slow
def test_statistics_of_batches_are_refused_in_processes() -> None:
    with pytest.raises(ConfigurationError, match=r"StochasticWeightAveraging .*engine='threads'"):
        averaged(AVERAGES["stochastic"](), PLANS["processes"], Normed)


# Checkpoints


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "writer", "reader"),
    [
        ("equal weights", "processes", "processes"),
        ("exponential", "3 processes", "one device"),
        ("stochastic", "3 processes", "threads"),
    ],
)
def test_a_run_goes_on_within_an_epoch(name: str, writer: str, reader: str, tmp_path: Path) -> None:
    """And ends as an undisturbed one."""
    saves = {"callbacks": [EachStep(tmp_path)]}
    averaged(AVERAGES[name](), PLANS[writer], max_steps=8, **saves)
    actual = averaged(AVERAGES[name](), PLANS[reader], ckpt_path=tmp_path / "step=7.ckpt")
    assert_same(on_one_device(name), actual, epochs=2)  # the first two were validated before


@pytest.mark.slow
def test_a_checkpoint_is_that_of_one_device(tmp_path: Path) -> None:
    contents = []
    for engine in ("one device", "processes"):
        saves = {"callbacks": [EachStep(tmp_path / engine)]}
        averaged(AVERAGES["exponential"](), PLANS[engine], max_epochs=3, **saves)
        contents.append(torch.load(tmp_path / engine / "step=9.ckpt", weights_only=False))
    one, other = contents
    assert list(one) == list(other)
    for entry in ("state_dict", "current_model_state", "averaging_state"):
        assert list(one[entry]) == list(other[entry])
        assert_equal(one[entry], other[entry], 1e-12)
    assert not torch.equal(other["state_dict"]["net.output.weight"], other["current_model_state"]["net.output.weight"])


@pytest.mark.slow
def test_an_average_is_whole_after_the_run_and_serves_an_evaluation() -> None:
    """As on one device, a validation after the run uses it."""
    values = []
    for engine in ("one device", "processes"):
        average = EMAWeightAveraging(decay=0.7)
        trainer = quiet(max_epochs=2, callbacks=[average], **PLANS[engine])
        module = Averaged()
        trainer.fit(module, data(), data())
        with torch.no_grad():
            module.net.output.weight.mul_(0)
        (results,) = trainer.validate(module, data())
        values.append(results["val_loss"])
    assert values[0] == pytest.approx(values[1], rel=0, abs=1e-12)
