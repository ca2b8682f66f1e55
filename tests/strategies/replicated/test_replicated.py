"""Replicas in one process: what users see of it is what one device shows them."""

import math
from collections import namedtuple
from pathlib import Path
from types import MethodType
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.regression import PearsonCorrCoef
from torchmetrics.wrappers import ClasswiseWrapper

from equipoise import (
    BalancedDataParallelStrategy,
    ConfigurationError,
    DataParallelStrategy,
    StepError,
    Strategy,
    Trainer,
)
from tests.support.pipelines import quiet

pytestmark = pytest.mark.filterwarnings("ignore:first_device_batch_size=1 is too much")
CLASSES = 3
Answer = namedtuple("Answer", ["logits", "names"])


class Batches(list[Any]):
    """(features, labels), double."""

    def __init__(self, *sizes: int) -> None:
        draw = torch.Generator().manual_seed(1)
        super().__init__(
            (
                torch.randn(size, 4, dtype=torch.float64, generator=draw),
                torch.randint(CLASSES, (size,), generator=draw),
            )
            for size in sizes or (7, 7, 5, 2)
        )


def loader(*sizes: int) -> DataLoader[Any]:
    return DataLoader(Batches(*sizes), batch_size=None)


class Module(L.LightningModule):
    """Logs in every way, and returns more than the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, CLASSES))
        self.accuracy = MulticlassAccuracy(CLASSES)
        scores = {"f1": MulticlassF1Score(CLASSES), "accuracy": MulticlassAccuracy(CLASSES, average="micro")}
        self.scores = MetricCollection(scores, prefix="val_")
        self.mean = MeanMetric()

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, labels = batch
        logits = self(features)
        loss = nn.functional.cross_entropy(logits, labels)
        self.accuracy(logits, labels)
        self.mean.update(features[:, 0])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("largest", features.max(), reduce_fx="max", on_epoch=True)
        self.log("seen", float(len(features)), reduce_fx="sum", on_epoch=True)
        self.log("sized", labels.double().mean(), batch_size=len(labels), on_epoch=True)
        return {"loss": loss, "logits": logits, "correct": (logits.argmax(1) == labels).sum(), "note": "same"}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.scores.update(logits, batch[1])
        self.log_dict(self.scores)
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]))
        return logits

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"answer": Answer(logits, [f"{label}" for label in batch[1].tolist()]), "pair": [logits, batch[1]]}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Seen(L.Callback):
    """Keeps what callbacks are shown of every training batch."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.metrics: list[dict[str, float]] = []
        self.validated: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        self.validated.append(outputs)


def trainer(strategy: Strategy | str = "single_device", devices: int = 1, **options: Any) -> Trainer:
    run = {"max_epochs": 2, "num_sanity_val_steps": 0, **options}
    return quiet(strategy=strategy, devices=["cpu"] * devices, **run)


def seeded(make: type[Any] = Module) -> Any:
    torch.manual_seed(3)
    return make()


STRATEGIES: dict[str, tuple[Any, int]] = {
    "dp": (DataParallelStrategy, 3),
    "more devices than samples": (DataParallelStrategy, 9),
    "forward": (lambda: DataParallelStrategy(parallelize="forward"), 3),
    "balanced": (lambda: BalancedDataParallelStrategy(shares=[1, 3]), 2),
    "first device left out": (lambda: BalancedDataParallelStrategy(shares=[0, 1, 2]), 3),
    "first device": (lambda: BalancedDataParallelStrategy(first_device_batch_size=1), 3),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> tuple[Strategy, int]:
    make, devices = STRATEGIES[request.param]
    return make(), devices


def close(one: Any, other: Any, tolerance: float = 1e-12) -> bool:
    left, right = (torch.as_tensor(value, dtype=torch.float64) for value in (one, other))
    return bool(torch.allclose(left, right, rtol=tolerance, atol=tolerance / 10))


def tolerance_of(name: str) -> float:
    """MeanMetric computes in float32, whatever its dtype."""
    return 1e-6 if name == "mean" else 1e-12


def assert_trains_alike(
    make: type[Any], of: tuple[Any, int], one_device: tuple[Any, int] = ("single_device", 1)
) -> None:
    """See that a fit ends as that of one device."""
    one, many = seeded(make), seeded(make)
    for module, run_of in ((one, one_device), (many, of)):
        trainer(*run_of, limit_val_batches=0).fit(module, loader(7, 7, 5, 5), loader())
    for name, expected in one.state_dict().items():
        assert close(expected, many.state_dict()[name], tolerance_of(name)), name


# What is seen


def test_values_and_outputs_are_those_of_one_device(strategy: tuple[Strategy, int]) -> None:
    runs = []
    for run in (trainer(callbacks=[Seen()]), trainer(*strategy, callbacks=[Seen()])):
        module = seeded()
        run.fit(module, loader(), loader())
        runs.append((run, run.callbacks[0], module))
    (one, expected, module), (other, actual, parallel) = runs
    assert one.callback_metrics.keys() == other.callback_metrics.keys()
    for name, value in one.callback_metrics.items():
        assert close(value, other.callback_metrics[name], tolerance_of(name)), name
    for step, (theirs, ours) in enumerate(zip(expected.metrics, actual.metrics, strict=True)):
        assert theirs.keys() == ours.keys()
        assert all(close(theirs[name], ours[name], tolerance_of(name)) for name in theirs), (
            f"step {step}: {theirs} became {ours}"
        )
    for theirs, ours in zip(expected.outputs, actual.outputs, strict=True):
        assert theirs.keys() == ours.keys()
        assert ours["note"] == "same"
        assert int(theirs["correct"]) == int(ours["correct"])
        assert close(theirs["logits"], ours["logits"])
        assert close(theirs["loss"], ours["loss"])
    assert all(close(theirs, ours) for theirs, ours in zip(expected.validated, actual.validated, strict=True))
    assert module.state_dict().keys() == parallel.state_dict().keys()
    assert module.accuracy.metric_state.keys() == parallel.accuracy.metric_state.keys()


def test_predictions_are_in_the_order_of_the_data(strategy: tuple[Strategy, int]) -> None:
    expected = trainer().predict(seeded(), loader())
    actual = trainer(*strategy).predict(seeded(), loader())
    assert expected is not None
    assert actual is not None
    for one, other in zip(expected, actual, strict=True):
        assert type(other["answer"]) is Answer
        assert close(one["answer"].logits, other["answer"].logits)
        assert one["answer"].names == other["answer"].names
        assert type(other["pair"]) is list
        assert torch.equal(one["pair"][1], other["pair"][1])


def test_a_metric_that_cannot_be_put_together() -> None:
    class Correlated(Module):
        def __init__(self) -> None:
            super().__init__()
            self.correlation = PearsonCorrCoef()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.correlation.update(batch[0][:, 0], batch[0][:, 1])
            return self(batch[0]).square().mean()

    with pytest.raises(StepError, match=r"PearsonCorrCoef cannot be put together.*parallelize='forward'"):
        trainer("dp", 2, limit_val_batches=0).fit(Correlated(), loader(), loader())
    module = Correlated()
    trainer(DataParallelStrategy(parallelize="forward"), 2, limit_val_batches=0).fit(module, loader(), loader())
    assert module.correlation.update_count == 8


# State


def test_the_first_replica_keeps_buffers_and_attributes() -> None:
    class Counting(Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("total", torch.zeros(()))
            self.steps = 0
            self.sizes: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.steps += 1
            self.sizes.append(len(batch[0]))  # shared by all parts
            self.total += len(batch[0])
            return self.net(self.norm(batch[0])).square().mean()

    for shares, kept in (([1, 2], 2 + 2 + 2 + 2), ([0, 2, 1], 5 + 5 + 3 + 4)):
        module = Counting()
        run = trainer(BalancedDataParallelStrategy(shares=shares), len(shares), max_epochs=1, limit_val_batches=0)
        run.fit(module, loader(7, 7, 5, 6))
        assert module.total == kept
        assert module.steps == 4
        assert module.norm.num_batches_tracked == 4
        assert sum(module.sizes) == 25


def test_nothing_is_left_in_the_module() -> None:
    module = seeded()
    before = set(vars(module))
    for parallelize in ("step", "forward"):
        run = trainer(DataParallelStrategy(parallelize=parallelize), 3)
        run.fit(module, loader(), loader())
        assert set(vars(module)) - before <= {"_trainer"}
        assert module.forward.__func__ is Module.forward
        assert run.connected_strategy._run is None


def test_gradients_are_whole_in_every_hook() -> None:
    class Watching(Module):
        def on_after_backward(self) -> None:
            seen.append(self.net[0].weight.grad.clone())

        def backward(self, loss: Tensor) -> None:
            loss.backward()

    seen: list[Tensor] = []
    for of in (("single_device", 1), ("dp", 3)):
        trainer(*of, max_epochs=1, limit_val_batches=0).fit(seeded(Watching), loader(), loader())
    one, three = seen[:4], seen[4:]
    assert all(close(expected, actual) for expected, actual in zip(one, three, strict=True))


def test_weights_exchanged_for_an_evaluation_reach_the_replicas() -> None:
    """Moving averages are often written through `.data`, which leaves no trace."""

    class Exchange(L.Callback):
        def on_validation_start(self, trainer: Any, module: Any) -> None:
            self.kept = [p.detach().clone() for p in module.parameters()]
            for parameter in module.parameters():
                parameter.data.zero_()

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            for parameter, kept in zip(module.parameters(), self.kept, strict=True):
                parameter.data.copy_(kept)

    results = []
    for of in (("single_device", 1), ("dp", 3)):
        run, module = trainer(*of, callbacks=[Exchange()]), seeded()
        run.fit(module, loader(), loader())
        results.append((float(run.callback_metrics["val_loss"]), module.net[0].weight.detach().clone()))
    assert close(results[1][0], math.log(CLASSES))
    assert close(results[0][1], results[1][1])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_resumed_with_another_number_of_devices(devices: int, tmp_path: Path) -> None:
    whole = seeded()
    trainer("dp", 3, max_epochs=4).fit(whole, loader(), loader())
    first = trainer("dp", 3, max_epochs=2)
    first.fit(seeded(), loader(), loader())
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed = seeded()
    name = "single_device" if devices == 1 else "dp"
    trainer(name, devices, max_epochs=4).fit(resumed, loader(), loader(), ckpt_path=tmp_path / "half.ckpt")
    for expected, actual in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert close(expected.detach(), actual.detach())


# Only some devices


def test_skipped_parts() -> None:
    """A part that returns None weighs nothing; a batch of which all do is left out."""

    class Skipping(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            keep = batch[0][:, 0] > 0
            return self.net(batch[0][keep]).square().sum(1).mean() if keep.any() else None

    class SkippingWeighted(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            keep = batch[0][:, 0] > 0
            if not keep.any():
                return None
            return {"loss": self.net(batch[0][keep]).square().sum(1).mean(), "loss_weight": int(keep.sum())}

    one, many = seeded(Skipping), seeded(SkippingWeighted)
    trainer(max_epochs=1, limit_val_batches=0).fit(one, loader(), loader())
    trainer("dp", 7, max_epochs=1, limit_val_batches=0).fit(many, loader(), loader())
    for expected, actual in zip(one.parameters(), many.parameters(), strict=True):
        assert close(expected.detach(), actual.detach())


def test_dim() -> None:
    class Sequences(L.LightningModule):
        """(time, batch, features)."""

        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(4, 5)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            shapes.append(tuple(batch.shape))
            return self.rnn(batch)[0].square().mean()

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.rnn(batch)[0]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    shapes: list[tuple[int, ...]] = []
    data = DataLoader([torch.randn(6, 5, 4, dtype=torch.float64) for _ in range(3)], batch_size=None)
    modules = [seeded(Sequences), seeded(Sequences)]
    trainer(max_epochs=1).fit(modules[0], data)
    run = trainer(BalancedDataParallelStrategy(shares=[1, 4], dim=1), 2, max_epochs=1)
    run.fit(modules[1], data)
    assert shapes[3:5] == [(6, 1, 4), (6, 4, 4)]
    for expected, actual in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert close(expected.detach(), actual.detach())
    (one, *_), (two, *_) = trainer().predict(modules[0], data), run.predict(modules[1], data)
    assert close(one, two)


# The forward alone


def test_the_step_runs_once_and_forward_in_parts() -> None:
    class Counting(Module):
        def forward(self, features: Tensor) -> Any:
            sizes.append(len(features))
            return {"deep": [(super().forward(features), torch.tensor(1.0))], "name": "net"}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = self(batch[0])
            assert out["name"] == "net"
            assert out["deep"][0][1].shape == (2,)  # as nn.DataParallel gathers
            return nn.functional.cross_entropy(out["deep"][0][0], batch[1])

    sizes: list[int] = []
    run = trainer(DataParallelStrategy(parallelize="forward", output_device=1), 2, max_epochs=1, limit_val_batches=0)
    run.fit(seeded(Counting), loader(), loader())
    assert sizes == [4, 3, 4, 3, 3, 2, 1, 1]


class LossInForward(Module):
    """Computes its loss inside of `forward`, as models of transformers do."""

    reduces = True

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(features)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(*batch)["loss"]
        return loss.mean() if self.reduces else loss


def test_one_loss_for_each_part_of_a_batch_is_refused_with_advice_that_works() -> None:
    module = seeded(LossInForward)
    module.reduces = False
    with pytest.raises(StepError, match=r"one loss for each of 2 parts.*after the call of the module.*'step'"):
        trainer(DataParallelStrategy(parallelize="forward"), 2, limit_val_batches=0).fit(module, loader(), loader())


def test_a_mean_over_the_losses_of_parts_is_noticed_once() -> None:
    run = trainer(DataParallelStrategy(parallelize="forward"), 2, limit_val_batches=0)
    with pytest.warns(UserWarning, match=r"for each part of the batch \(its output\['loss'\]\)") as caught:
        run.fit(seeded(LossInForward), loader(), loader())
    assert len(caught) == 1


def test_scalars_beside_the_loss_are_no_reason_for_a_warning() -> None:
    class Beside(LossInForward):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self(*batch)["logits"], batch[1])

    trainer(DataParallelStrategy(parallelize="forward"), 2, limit_val_batches=0).fit(seeded(Beside), loader(), loader())


def test_a_step_that_calls_no_forward() -> None:
    class Past(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0]).square().mean()

    with pytest.warns(UserWarning, match=r"did not call the module.*parallelize='step'"):
        trainer(DataParallelStrategy(parallelize="forward"), 2, limit_val_batches=0).fit(Past(), loader(), loader())


def test_a_metric_keeps_its_value_when_forward_is_called_again() -> None:
    class Twice(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.accuracy(self(batch[0]), batch[1])
            self(batch[0])
            self.log("accuracy", self.accuracy, on_step=True)
            return loss

    seen = []
    for of in (("single_device", 1), (DataParallelStrategy(parallelize="forward"), 3)):
        run = trainer(*of, callbacks=[Seen()], limit_val_batches=0)
        run.fit(seeded(Twice), loader(), loader())
        seen.append([metrics["accuracy"] for metrics in run.callbacks[0].metrics])
    assert seen[0] == seen[1]


def test_arguments_of_forward_that_cannot_be_cut() -> None:
    class Two(Module):
        def forward(self, features: Tensor, state: Any = None) -> Tensor:
            return super().forward(features)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0], state=torch.zeros(3, len(batch[0]))).square().mean()

    with pytest.raises(StepError, match=r"argument\[1\]\['state'\] is of length 3.*parallelize='step'"):
        trainer(DataParallelStrategy(parallelize="forward"), 2, limit_val_batches=0).fit(Two(), loader(), loader())


# Errors


@pytest.mark.parametrize("parallelize", ["step", "forward"])
def test_an_error_in_one_replica(parallelize: Any) -> None:
    class Failing(Module):
        def forward(self, features: Tensor) -> Tensor:
            if fails and len(features) == 4:
                raise KeyError("in the user's code")
            return super().forward(features)

    fails = True
    module = seeded(Failing)
    run = trainer(BalancedDataParallelStrategy(shares=[3, 4], parallelize=parallelize), 2, max_epochs=1)
    with pytest.raises(KeyError, match="in the user's code") as caught:
        run.fit(module, loader(), loader())
    second = run.connected_strategy.devices[1]
    assert caught.value.__notes__ == [f"This was part 2 of 2 of the batch, on {second}."]
    assert any(entry.name == "forward" and entry.path == Path(__file__) for entry in caught.traceback)
    fails = False
    run.fit(module, loader(), loader())
    assert run.global_step == 4


def test_different_structures() -> None:
    class Different(Module):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return {"a": batch[0]} if len(batch[0]) == 4 else {"b": batch[0]}

    message = r"different structures: part 1: a dict with keys \['a'\]; part 2: a dict with keys \['b'\]"
    with pytest.raises(StepError, match=message):
        trainer("dp", 2).predict(Different(), loader())


class Detection(Module):
    """Images of unequal size, and boxes of unequal number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pairs = zip(*batch, strict=True)
        losses = [image.mean() * self.net[0].weight.sum() + target["boxes"].sum() for image, target in pairs]
        return torch.stack(losses).mean()


IMAGES = [torch.randn(3, 4 + index, 5, dtype=torch.float64) for index in range(5)]
TARGETS = [{"boxes": torch.randn(1 + index, 4, dtype=torch.float64)} for index in range(5)]


def test_a_batch_that_cannot_be_cut_and_the_way_out() -> None:
    class Told(Detection):
        def batch_size(self, batch: Any) -> int:
            return len(batch[0])

        def split_batch(self, batch: Any, sizes: list[int]) -> list[Any]:
            ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
            return [(batch[0][end - n : end], batch[1][end - n : end]) for n, end in zip(sizes, ends, strict=True)]

    data, modules = DataLoader([(IMAGES, TARGETS)], batch_size=None), [seeded(Told), seeded(Told)]
    message = r"batch\[0\]\[0\] is of length 3.*batch_size\(self, batch\).*split_batch"
    with pytest.raises(StepError, match=message):
        trainer("dp", 2, limit_val_batches=0).fit(Detection(), data, loader())
    trainer(limit_val_batches=0).fit(modules[0], data, loader())
    trainer("dp", 2, limit_val_batches=0).fit(modules[1], data, loader())
    assert close(modules[0].net[0].weight.detach(), modules[1].net[0].weight.detach())


class ByHand(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_refused_before_training() -> None:
    with pytest.raises(ConfigurationError, match=r"optimises by hand.*parallelize='forward'"):
        trainer("dp", 2).fit(ByHand(), loader(), loader())
    module = Module()
    module.net[0].to("meta")
    with pytest.raises(
        ConfigurationError, match=r"lie on several devices: net\.0\.weight on meta, net\.2\.weight on cpu"
    ):
        trainer("dp", 2).fit(module, loader(), loader())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parallelize": "loss"}, "must be 'step' or 'forward', not 'loss'"),
        ({"dim": -1}, "dim must be the index of a dimension"),
        ({"output_device": 1}, "no effect with parallelize='step'"),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DataParallelStrategy(**arguments)


@pytest.mark.parametrize("output_device", [2, "cuda:7", "nowhere"])
def test_output_device_must_be_one_of_the_devices(output_device: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"none of the devices (cpu, cpu|cuda:0, cuda:1)"):
        trainer(DataParallelStrategy(parallelize="forward", output_device=output_device), 2)


# What other metrics, hooks and optimisers do


class WithMetric(Module):
    """Updates one metric in every step, in whatever way it is made."""

    make: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.metric = type(self).make()
        self.values: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.metric.update(logits, batch[1])
        return nn.functional.cross_entropy(logits, batch[1])

    def on_train_epoch_end(self) -> None:
        computed = self.metric.compute()
        self.values.append(
            sorted(map(float, computed.values() if isinstance(computed, dict) else computed.reshape(-1)))
        )
        self.metric.reset()


WRAPPED: dict[str, Any] = {
    "classwise": lambda: ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None)),
    "composed": lambda: MulticlassAccuracy(CLASSES) + MulticlassF1Score(CLASSES),
    "collected": lambda: MetricCollection(
        {"c": ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None)), "f": MulticlassF1Score(CLASSES)}
    ),
}


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", WRAPPED)
def test_metrics_that_hold_metrics(name: str, strategy: tuple[Strategy, int]) -> None:
    class Wrapped(WithMetric):
        make = staticmethod(WRAPPED[name])

    one, many = seeded(Wrapped), seeded(Wrapped)
    trainer(limit_val_batches=0).fit(one, loader(7, 7, 5, 5), loader())
    trainer(*strategy, limit_val_batches=0).fit(many, loader(7, 7, 5, 5), loader())
    assert close(one.values, many.values, 1e-6)


def test_a_logged_metric_computed_from_others(strategy: tuple[Strategy, int]) -> None:
    class Composed(Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = MulticlassAccuracy(CLASSES) + MulticlassF1Score(CLASSES)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self(batch[0])
            self.both(logits, batch[1])
            self.log("both", self.both, on_step=True, on_epoch=True)
            return nn.functional.cross_entropy(logits, batch[1])

    logged = []
    for of in (("single_device", 1), strategy):
        run = trainer(*of, limit_val_batches=0, callbacks=[Seen()])
        run.fit(seeded(Composed), loader(7, 7, 5, 5), loader())
        logged.append(run.callbacks[0].metrics)
    for expected, actual in zip(*logged, strict=True):
        assert actual == pytest.approx(expected)


def test_a_metric_that_counts_beside_its_states() -> None:
    class Counting(MulticlassAccuracy):
        def __init__(self) -> None:
            super().__init__(CLASSES)
            self.seen = 0

        def update(self, *args: Any) -> None:
            super().update(*args)
            self.seen += len(args[1])

    class Wrapped(WithMetric):
        make = staticmethod(Counting)

    with pytest.raises(StepError, match=r"Counting cannot be put together.*keeps 'seen'.*add_state"):
        trainer("dp", 2, limit_val_batches=0).fit(seeded(Wrapped), loader(), loader())
    one, many = seeded(Wrapped), seeded(Wrapped)
    trainer(limit_val_batches=0).fit(one, loader(), loader())
    trainer(DataParallelStrategy(parallelize="forward"), 2, limit_val_batches=0).fit(many, loader(), loader())
    assert close(one.values, many.values, 1e-6)
    assert one.metric.seen == many.metric.seen


def test_what_the_step_changes_in_place(strategy: tuple[Strategy, int]) -> None:
    """A teacher that follows by a moving average, and a buffer that a callback changes through `.data`."""

    class Following(Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Linear(4, 8).requires_grad_(False)
            self.register_buffer("scale", torch.ones(()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.no_grad():
                self.teacher.weight.mul_(0.9).add_(self.net[0].weight, alpha=0.1)
            apart = self.net[0](batch[0]) - self.teacher(batch[0])
            return self.scale * (self(batch[0]).square().mean() + apart.square().mean())

        def on_train_batch_end(self, *args: Any) -> None:
            self.scale.data.mul_(1.1)

    assert_trains_alike(Following, strategy)


def test_forward_logs_once() -> None:
    class Logging(Module):
        def forward(self, features: Tensor) -> Tensor:
            logits = super().forward(features)
            if self.training:
                self.log("inner", logits.square().mean(), on_step=True, on_epoch=True)
            return logits

    runs = []
    for of in (("single_device", 1), (DataParallelStrategy(parallelize="forward"), 3)):
        run = trainer(*of, limit_val_batches=0)
        run.fit(seeded(Logging), loader(), loader())
        runs.append(run.callback_metrics)
    assert runs[0].keys() == runs[1].keys()
    assert all(close(value, runs[1][name]) for name, value in runs[0].items() if name.startswith("inner"))


def test_a_forward_of_the_instance_and_hooks_that_come_later(strategy: tuple[Strategy, int]) -> None:
    class Hooked(Module):
        def __init__(self) -> None:
            super().__init__()
            self.forward = MethodType(lambda self, features: 2 * self.net(features), self)
            self.seen: Any = None

        def keep(self, module: Any, inputs: Any, output: Tensor) -> None:
            self.seen = output

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net[1].register_forward_hook(self.keep)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self(batch[0]).square().mean()
            return loss if self.seen is None else loss + self.seen.mean()

    if strategy[0].parallelize == "forward":
        Hooked.on_train_epoch_start = L.LightningModule.on_train_epoch_start  # what forward keeps stays in the copies
    single = BalancedDataParallelStrategy(shares=[1], parallelize=strategy[0].parallelize)
    assert_trains_alike(Hooked, strategy, (single, 1))


def test_lists_of_rows() -> None:
    class Rows(Module):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return list(self(batch[0]))

    one, many = trainer().predict(seeded(Rows), loader(7)), trainer("dp", 2).predict(seeded(Rows), loader(7))
    assert one is not None
    assert many is not None
    assert close(torch.stack(one[0]), torch.stack(many[0]))
    with pytest.raises(StepError, match="whether there is one for each sample cannot be told"):
        trainer("dp", 2).predict(seeded(Rows), loader(6))  # three rows of three classes for each part


# Gradients by hand, under parallelize="forward"


class Penalised(Module):
    """Takes gradients in every way that a step may."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs = batch[0].clone().requires_grad_()
        logits = self(inputs)
        loss = nn.functional.cross_entropy(logits, batch[1])
        (slope,) = torch.autograd.grad(logits.square().sum(), inputs, create_graph=True)
        weights = list(self.net.parameters())
        norms = torch.autograd.grad(loss, weights, create_graph=True)
        return loss + 0.1 * slope.square().mean() + 0.1 * sum(norm.square().sum() for norm in norms)


class PlainBackward(Module):
    """Optimises by hand, and neither asks the trainer for the backward nor for clipping."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        nn.functional.cross_entropy(self(batch[0]), batch[1]).backward()
        nn.utils.clip_grad_norm_(self.parameters(), 0.01)
        optimizer.step()


class Recurrent(Module):
    """Parameters in a flat list of the module's own, one of them frozen, and a hook on another."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, CLASSES)
        self.lstm.bias_hh_l0.requires_grad_(False)
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.lstm(features.unsqueeze(1))[0][:, -1])


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("make", [Penalised, PlainBackward, Recurrent])
@pytest.mark.parametrize("shares", [[1, 3], [0, 1, 2], [2, 1, 1]])
def test_gradients_taken_by_hand(make: type[Module], shares: list[int]) -> None:
    strategy = BalancedDataParallelStrategy(shares=shares, parallelize="forward")
    assert_trains_alike(make, (strategy, len(shares)))


def test_a_graph_that_is_older_than_an_optimiser_step() -> None:
    """As a generator's is when the discriminator, which computes in between, has stepped."""

    class Two(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.critic = nn.Linear(CLASSES, 1)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net, self.critic)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            made = self(batch[0])
            second.zero_grad()
            self.manual_backward(self.critic(made.detach()).square().mean())
            second.step()
            first.zero_grad()
            self.manual_backward((self.critic(made) * self(batch[0]).detach()).mean())
            first.step()

    assert_trains_alike(Two, (DataParallelStrategy(parallelize="forward"), 3))


# What nobody asks for


@pytest.mark.parametrize("asks", [False, True])
def test_outputs_are_put_together_only_if_somebody_looks(asks: bool) -> None:
    """Here they cannot be put together, so one notices."""

    class Ragged(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = self(batch[0])
            return {"loss": out.square().mean(), "ragged": out[:, : batch_idx + len(out)]}

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0]), batch[0][:, : len(batch[0])]

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
            assert outputs["loss"].ndim == 0

        def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
            assert outputs is not None

    def fit(*callbacks: Any, **options: Any) -> None:
        run = trainer(BalancedDataParallelStrategy(shares=[1, 2]), 2, callbacks=list(callbacks), **options)
        run.fit(seeded(Ragged), loader(3, 3), loader(3, 3))

    if not asks:
        fit()
        return
    with pytest.raises(StepError, match=r"different structures at \['ragged'\]: part 1: a tensor of shape \[1, 1\]"):
        fit(Looks(), limit_val_batches=0)
    with pytest.raises(StepError, match=r"different structures at \[1\]: part 1: a tensor of shape \[1, 1\]"):
        trainer(BalancedDataParallelStrategy(shares=[1, 2]), 2, callbacks=[Looks()]).validate(seeded(Ragged), loader(3))


# Samples in another dimension


def test_weights_of_samples_in_another_dimension() -> None:
    """Batches of 4 and of 1, accumulated: they weigh 4 and 1, not their length in time."""

    class Sequences(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self(batch).square().mean((0, 2))
            self.log("loss", loss.mean(), on_step=False, on_epoch=True)
            return loss.mean()

    torch.manual_seed(5)
    batches = [torch.randn(6, size, 4) for size in (4, 1, 3)]
    whole = seeded(Sequences)
    options = {"limit_val_batches": 0, "max_epochs": 1, "accumulate_grad_batches": 3}
    trainer(**options | {"accumulate_grad_batches": 1}).fit(
        whole, DataLoader([torch.cat(batches, 1)], batch_size=None), loader()
    )
    for devices in (1, 2):
        run, module = trainer(DataParallelStrategy(dim=1), devices, **options), seeded(Sequences)
        run.fit(module, DataLoader(batches, batch_size=None), loader())
        expected = whole.trainer.callback_metrics["loss"]
        assert close(expected, run.callback_metrics["loss"])
        for name, weight in whole.state_dict().items():
            assert close(weight, module.state_dict()[name], tolerance_of(name)), name
