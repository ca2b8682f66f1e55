"""Averages of the weights of a pipeline, in threads and in processes, where they lie with the stages."""

from collections.abc import Callable
from functools import cache
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
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from equipoise import ConfigurationError, PipelineStrategy, StepError
from equipoise.extensions.pipeline.messaging.remote_parameters import is_elsewhere
from tests.extensions.pipeline.strategy.test_processes import Model, data
from tests.extensions.pipeline.strategy.test_replicas import Counted, samples
from tests.support.own_average import Own
from tests.support.pipelines import quiet

pytestmark = [
    pytest.mark.filterwarnings("ignore:The checkpoint holds states of callbacks"),
    pytest.mark.usefixtures("quick_collections"),
]


class Remembering(nn.Module):
    """Keeps the weights with which it has computed, whatever the number of micro-batches."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("former", torch.zeros_like(inner.linear.bias))  # type: ignore[arg-type, union-attr]

    def forward(self, pair: Any) -> Any:
        if self.training:
            self.former.copy_(self.inner.linear.bias.detach())  # type: ignore[operator, union-attr]
        return self.inner(pair)


class Averaged(Model):
    """Has weights at both ends of the network, frozen ones, and a buffer in each block."""

    def __init__(self) -> None:
        super().__init__()
        blocks = self.net.blocks
        blocks[1].norm.requires_grad_(False)  # type: ignore[union-attr]
        self.net.blocks = nn.Sequential(*(Remembering(block) for block in blocks))


class Normed(Model):
    """Has statistics of batches, for which StochasticWeightAveraging adds an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[1].norm = nn.BatchNorm1d(6)  # type: ignore[index, union-attr]


AVERAGES: dict[str, Callable[[], Callback]] = {
    "exponential": lambda: EMAWeightAveraging(decay=0.7),
    "without buffers, rarely": lambda: EMAWeightAveraging(decay=0.7, use_buffers=False, update_every_n_steps=3),
    "all at once": lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.7)),
    "equal weights": WeightAveraging,
    "stochastic": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2),
    "of the user": Own,
}
ENGINES: dict[str, Any] = {
    "one device": ("single_device", ["cpu"]),
    "threads": (PipelineStrategy(micro_batches=3), ["cpu"] * 2),
    "processes": (PipelineStrategy(micro_batches=3, engine="processes", timeout=120.0), ["cpu"] * 2),
    "3 processes": (PipelineStrategy(micro_batches=3, engine="processes", timeout=120.0), ["cpu"] * 3),
    "replicas": (PipelineStrategy(micro_batches=3, engine="processes", replicas=2, timeout=120.0), ["cpu"] * 4),
    "a stage of a tied weight alone": (
        PipelineStrategy(micro_batches=3, engine="processes", cut_before=["net.blocks.0"], timeout=120.0),
        ["cpu"] * 2,
    ),
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
        self.values.append(float(trainer.callback_metrics["val"]))


def averaged(
    average: Callback, engine: str, kind: Any = Averaged, loader: Any = None, **options: Any
) -> dict[str, Any]:
    """Train 21 steps, and return the weights at the end, the values of validations, and the bytes held here."""
    watch = Watch()
    strategy, devices = ENGINES[engine]
    callbacks = [average, watch, *options.pop("callbacks", ())]
    ckpt_path = options.pop("ckpt_path", None)
    options = {"max_epochs": 7, "num_sanity_val_steps": 2, **options}
    trainer = quiet(strategy=strategy, devices=devices, callbacks=callbacks, **options)
    module = kind()
    trainer.fit(module, loader or data(), data(), ckpt_path=ckpt_path)
    return {**module.state_dict(), "values": torch.tensor(watch.values), "held": watch.held}


@cache
def on_one_device(name: str, **options: Any) -> dict[str, Any]:
    return averaged(AVERAGES[name](), "one device", **options)


def assert_same(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    for name in expected.keys() - {"held"}:
        assert torch.allclose(expected[name], actual[name], rtol=0, atol=1e-12), name


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_is_that_of_one_device(name: str, engine: str) -> None:
    assert_same(on_one_device(name), averaged(AVERAGES[name](), engine))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"val_check_interval": 1}], ids=str)
@pytest.mark.parametrize("engine", ["threads", "3 processes"])
def test_with_accumulation_and_evaluations_between(engine: str, options: dict[str, Any]) -> None:
    expected = on_one_device("exponential", **options)
    actual = averaged(AVERAGES["exponential"](), engine, **options)
    assert_same(expected, actual)
    if engine != "threads":
        assert 0 < actual["held"] < 0.6 * expected["held"]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "replicas"), [("replicas", 2), ("a stage of a tied weight alone", 1)])
def test_weights_in_several_processes(engine: str, replicas: int) -> None:
    average, once_more = AVERAGES["exponential"](), AVERAGES["exponential"]()
    expected = averaged(average, "one device", Counted, DataLoader(samples(24), 12), num_sanity_val_steps=0)
    loader = DataLoader(samples(24), 12 // replicas)
    assert_same(expected, averaged(once_more, engine, Counted, loader, num_sanity_val_steps=0))


@pytest.mark.slow
def test_statistics_of_batches_are_those_of_one_device_in_threads() -> None:
    """With one micro-batch, which has the statistics of the batch."""
    average = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)
    ENGINES["one micro-batch"] = (PipelineStrategy(micro_batches=1), ["cpu"] * 2)
    assert_same(on_one_device("stochastic", kind=Normed), averaged(average, "one micro-batch", Normed))


@pytest.mark.slow
def test_statistics_of_batches_are_refused_in_processes() -> None:
    average = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)
    with pytest.raises(ConfigurationError, match=r"StochasticWeightAveraging .*engine='threads'"):
        averaged(average, "processes", Normed)


# Checkpoints


class Killed(Exception):
    """Ends a run."""


class SavesAndDies(Callback):
    """Saves a checkpoint within an epoch, and ends the run a step later."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 7:
            trainer.save_checkpoint(self.path)
        if trainer.global_step == 8:
            raise Killed


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("name", ["exponential", "equal weights", "stochastic"])
def test_a_killed_run_ends_as_an_undisturbed_one(name: str, engine: str, tmp_path: Path) -> None:
    path = tmp_path / "killed.ckpt"
    with pytest.raises(Killed):
        averaged(AVERAGES[name](), engine, callbacks=[SavesAndDies(path)])
    actual = averaged(AVERAGES[name](), engine, ckpt_path=path)
    expected = on_one_device(name)
    # The first two epochs were validated before.
    assert_same({**expected, "values": expected["values"][-5:]}, {**actual, "values": actual["values"][-5:]})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "reader"), [("3 processes", "one device"), ("one device", "processes"), ("processes", "threads")]
)
@pytest.mark.parametrize("name", ["exponential", "stochastic"])
def test_a_run_goes_on_elsewhere(name: str, writer: str, reader: str, tmp_path: Path) -> None:
    saves = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    averaged(AVERAGES[name](), writer, callbacks=[saves], enable_checkpointing=True, max_epochs=3)
    actual = averaged(AVERAGES[name](), reader, ckpt_path=tmp_path / "epoch=2.ckpt")
    expected = on_one_device(name)
    assert_same({**expected, "values": expected["values"][-4:]}, {**actual, "values": actual["values"][-4:]})


@pytest.mark.slow
def test_a_checkpoint_is_that_of_one_device(tmp_path: Path) -> None:
    contents = []
    for engine in ("one device", "processes"):
        saves = ModelCheckpoint(dirpath=tmp_path / engine, filename="{epoch}", save_top_k=-1)
        averaged(AVERAGES["exponential"](), engine, callbacks=[saves], enable_checkpointing=True, max_epochs=3)
        contents.append(torch.load(tmp_path / engine / "epoch=2.ckpt", weights_only=False))
    one, other = contents
    assert list(one) == list(other)
    for entry in ("state_dict", "current_model_state", "averaging_state"):
        assert list(one[entry]) == list(other[entry])
        for name, value in one[entry].items():
            assert torch.allclose(value.cpu(), other[entry][name].cpu(), rtol=0, atol=1e-12), name
    assert not torch.equal(other["state_dict"]["net.out.weight"], other["current_model_state"]["net.out.weight"])


# What stays refused


class Reads(EMAWeightAveraging):
    """Asks for a value where only a result is known."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        module.net.blocks[0].inner.linear.weight.norm().item()


class Writes(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        with torch.no_grad():
            module.net.blocks[0].inner.linear.weight.mul_(2)


@pytest.mark.slow
@pytest.mark.parametrize("callback", [Reads(), Writes()], ids=lambda callback: type(callback).__name__)
def test_values_of_other_processes_are_refused(callback: Callback) -> None:
    with pytest.raises(StepError, match="its values lie in another process"):
        averaged(callback, "processes")


@pytest.mark.slow
def test_an_average_is_whole_after_the_run_and_serves_an_evaluation() -> None:
    """As on one device, a validation after the run uses it."""
    values = []
    for engine in ("one device", "processes"):
        average = EMAWeightAveraging(decay=0.7)
        strategy, devices = ENGINES[engine]
        trainer = quiet(strategy=strategy, devices=devices, max_epochs=2, callbacks=[average])
        module = Averaged()
        trainer.fit(module, data(), data())
        with torch.no_grad():
            module.net.out.weight.mul_(0)
        (results,) = trainer.validate(module, data())
        values.append(results["val"])
    assert values[0] == pytest.approx(values[1], rel=0, abs=1e-12)
