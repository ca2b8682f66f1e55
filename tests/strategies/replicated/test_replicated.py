"""Replicas in one process: what users see of it is what one device shows them."""

from collections import namedtuple
from pathlib import Path
from types import MethodType
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.regression import PearsonCorrCoef
from torchmetrics.wrappers import ClasswiseWrapper

from equipoise import BalancedDataParallelStrategy, ConfigurationError, DataParallelStrategy, StepError, Strategy
from tests.strategies.replicated.classifier import (
    CLASSES,
    STRATEGIES,
    Module,
    Seen,
    assert_trains_alike,
    fitted,
    in_forward,
    loader,
    trainer,
)
from tests.support.equality import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore:first_device_batch_size=1 is too much")
DP: tuple[Any, int] = ("dp", 3)


@pytest.fixture(params=STRATEGIES)
def any_strategy(request: pytest.FixtureRequest) -> tuple[Strategy, int]:
    return STRATEGIES[request.param]()


@pytest.fixture(params=["dp", "forward", "first device left out"])
def strategy(request: pytest.FixtureRequest) -> tuple[Strategy, int]:
    """The whole step or the forward alone, on all devices or without the one that keeps the module."""
    return STRATEGIES[request.param]()


# Values and outputs


@pytest.mark.few_cases(2)
def test_values_and_outputs_are_those_of_one_device(any_strategy: tuple[Strategy, int]) -> None:
    one, many = (fitted(Module, of, validates=True, callbacks=[Seen()]) for of in (("single_device", 1), any_strategy))
    expected, actual = one.trainer.callbacks[0], many.trainer.callbacks[0]
    metrics = [dict(module.trainer.callback_metrics) for module in (one, many)]
    for tolerance, ignored in ((1e-12, ["mean"]), (1e-6, [])):  # MeanMetric computes in float32, whatever its dtype
        assert_equal(*metrics, tolerance, ignore=ignored)
        assert_equal(expected.batches, actual.batches, tolerance, ignore=ignored)
    assert_equal(expected.validated, actual.validated, 1e-12)
    assert one.state_dict().keys() == many.state_dict().keys()
    assert one.accuracy.metric_state.keys() == many.accuracy.metric_state.keys()


Answer = namedtuple("Answer", ["logits", "names"])


class Answers(Module):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"answer": Answer(logits, [f"{label}" for label in batch[1].tolist()]), "pair": [logits, batch[1]]}


class Rows(Module):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return list(self(batch[0]))


def predicted(make: type[Module], of: tuple[Any, int], *sizes: int) -> Any:
    torch.manual_seed(3)
    return trainer(*of).predict(make(), loader(*sizes))


def test_predictions_are_in_the_order_of_the_data(strategy: tuple[Strategy, int]) -> None:
    assert_equal(predicted(Answers, ("single_device", 1)), predicted(Answers, strategy), 1e-12)


def test_a_list_of_predictions_is_one_for_each_sample_if_that_is_certain() -> None:
    assert_equal(predicted(Rows, ("single_device", 1), 7), predicted(Rows, ("dp", 2), 7), 1e-12)
    with pytest.raises(StepError, match="whether there is one for each sample cannot be told"):
        predicted(Rows, ("dp", 2), 6)  # three rows of three classes for each part


class Ragged(Module):
    """Its outputs cannot be put together, so one notices who asks for them."""

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


def test_outputs_are_put_together_only_if_somebody_looks() -> None:
    of, place = (BalancedDataParallelStrategy(shares=[1, 2]), 2), r"part 1: a tensor of shape \[1, 1\]"
    trainer(*of).fit(Ragged(), loader(3, 3), loader(3, 3))
    with pytest.raises(StepError, match=rf"different structures at \['ragged'\]: {place}"):
        fitted(Ragged, of, (3, 3), callbacks=[Looks()])
    with pytest.raises(StepError, match=rf"different structures at \[1\]: {place}"):
        trainer(*of, callbacks=[Looks()]).validate(Ragged(), loader(3))


# State


class Counting(Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.calls = 0
        self.sizes: list[int] = []

    def forward(self, features: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(len(features))  # shared by all parts
        self.total += len(features)
        return super().forward(features)


@pytest.mark.parametrize("parallelize", ["step", "forward"])
@pytest.mark.parametrize(("shares", "kept"), [([1, 2], 2 + 2 + 2 + 2), ([0, 2, 1], 5 + 5 + 3 + 4)])
def test_the_first_replica_with_samples_keeps_buffers_and_attributes(
    parallelize: Any, shares: list[int], kept: int
) -> None:
    of = BalancedDataParallelStrategy(shares=shares, parallelize=parallelize), len(shares)
    module = fitted(Counting, of, (7, 7, 5, 6), max_epochs=1)
    assert module.total == kept
    assert module.calls == 4
    assert sum(module.sizes) == 25


def test_gradients_are_whole_in_every_hook() -> None:
    class Watching(Module):
        def on_after_backward(self) -> None:
            seen.append(self.net[0].weight.grad.clone())

    seen: list[Tensor] = []
    for of in (("single_device", 1), DP):
        fitted(Watching, of, max_epochs=1)
    assert_equal(seen[:4], seen[4:], 1e-12)


def test_weights_exchanged_for_an_evaluation_reach_the_replicas() -> None:
    """Moving averages are often written through `.data`, which leaves no trace."""

    class Exchanges(Module):
        def on_validation_start(self) -> None:
            self.kept = self.net[2].weight.detach().clone()
            self.net[2].weight.data.zero_()

        def on_validation_end(self) -> None:
            self.net[2].weight.data.copy_(self.kept)

    one, many = (fitted(Exchanges, of, validates=True) for of in (("single_device", 1), DP))
    values = (float(module.trainer.callback_metrics["val_loss"]) for module in (one, many))
    assert_equal(*values, 1e-12)
    assert_equal(one.net, many.net, 1e-12)


class Following(Module):
    """A teacher follows by a moving average, and a buffer is changed through `.data`."""

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


class Hooked(Module):
    """A forward of the instance, and a hook that comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = MethodType(lambda self, features: 2 * self.net(features), self)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[1].register_forward_hook(lambda module, inputs, output: 0.5 * output)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).square().mean()


@pytest.mark.parametrize("kind", [Following, Hooked])
def test_what_changes_in_the_module_reaches_the_replicas(kind: type[Module], strategy: tuple[Strategy, int]) -> None:
    assert_trains_alike(kind, strategy)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("of", [("dp", 4), ("single_device", 1)])
def test_a_run_resumes_with_another_number_of_devices(of: tuple[Any, int], tmp_path: Path) -> None:
    whole = fitted(Module, DP, max_epochs=4)
    fitted(Module, DP).trainer.save_checkpoint(tmp_path / "half.ckpt")
    trainer(*of, max_epochs=4).fit(resumed := Module(), loader(), loader(), ckpt_path=tmp_path / "half.ckpt")
    assert_equal(whole.net, resumed.net, 1e-12)


# Batches


def test_a_part_that_returns_none_weighs_nothing() -> None:
    """A batch of which all parts do is left out."""

    class Skipping(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            keep = batch[0][:, 0] > 0
            if not keep.any():
                return None
            return {"loss": self.net(batch[0][keep]).square().sum(1).mean(), "loss_weight": int(keep.sum())}

    one, many = (fitted(Skipping, of, max_epochs=1) for of in (("single_device", 1), ("dp", 7)))
    assert_equal(one.net, many.net, 1e-12)


class Sequences(Module):
    """(time, batch, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []  # shared by all parts

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.shapes.append(tuple(batch.shape))
        loss = self(batch).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch)


def fitted_sequences(of: tuple[Any, int], batches: list[Tensor], **options: Any) -> Sequences:
    torch.manual_seed(3)
    module = Sequences()
    trainer(*of, limit_val_batches=0, max_epochs=1, **options).fit(module, DataLoader(batches, None), loader())
    return module


def test_batches_are_cut_in_the_dimension_of_samples_and_weigh_as_many() -> None:
    """Batches of 4, 1 and 5, accumulated: not their length in time."""
    batches = [torch.randn(6, size, 4, dtype=torch.float64) for size in (4, 1, 5)]
    one = fitted_sequences(("single_device", 1), [torch.cat(batches, 1)])
    many = fitted_sequences((BalancedDataParallelStrategy(shares=[1, 4], dim=1), 2), batches, accumulate_grad_batches=3)
    assert many.shapes[-2:] == [(6, 1, 4), (6, 4, 4)]
    assert_equal(one.net, many.net, 1e-12)
    assert_equal(dict(one.trainer.callback_metrics), dict(many.trainer.callback_metrics), 1e-12)
    data = DataLoader(batches, None)
    assert_equal(trainer().predict(one, data), many.trainer.predict(many, data), 1e-12)


class Detection(Module):
    """Images of unequal size, and boxes of unequal number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pairs = zip(*batch, strict=True)
        losses = [image.mean() * self.net[0].weight.sum() + target["boxes"].sum() for image, target in pairs]
        return torch.stack(losses).mean()


class SplitByItself(Detection):
    def batch_size(self, batch: Any) -> int:
        return len(batch[0])

    def split_batch(self, batch: Any, sizes: list[int]) -> list[Any]:
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        return [(batch[0][end - n : end], batch[1][end - n : end]) for n, end in zip(sizes, ends, strict=True)]


def test_a_batch_that_cannot_be_cut_and_the_way_out() -> None:
    images = [torch.randn(3, 4 + index, 5, dtype=torch.float64) for index in range(5)]
    boxes = [{"boxes": torch.randn(1 + index, 4, dtype=torch.float64)} for index in range(5)]
    data, modules = DataLoader([(images, boxes)], batch_size=None), []
    message = r"batch\[0\]\[0\] is of length 3.*batch_size\(self, batch\).*split_batch"
    with pytest.raises(StepError, match=message):
        trainer("dp", 2, limit_val_batches=0).fit(Detection(), data, loader())
    for of in (("single_device", 1), ("dp", 2)):
        torch.manual_seed(3)
        modules.append(module := SplitByItself())
        trainer(*of, limit_val_batches=0).fit(module, data, loader())
    assert_equal(modules[0].net, modules[1].net, 1e-12)


# Metrics


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
        values = computed.values() if isinstance(computed, dict) else computed.reshape(-1)
        self.values.append(sorted(map(float, values)))
        self.metric.reset()


def composed() -> Any:
    return MulticlassAccuracy(CLASSES) + MulticlassF1Score(CLASSES)


def collected() -> Any:
    classwise = ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None))
    return MetricCollection({"c": classwise, "f": MulticlassF1Score(CLASSES)})


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("metric", "name"),
    [(composed, "forward"), (collected, "first device left out"), (composed, "more devices than samples")],
)
def test_metrics_that_hold_metrics(metric: Any, name: str) -> None:
    kind = type("Wrapped", (WithMetric,), {"make": staticmethod(metric)})
    sizes = (7, 7, 5, 5)
    assert_equal(fitted(kind, sizes=sizes).values, fitted(kind, STRATEGIES[name](), sizes).values, 1e-6)


class Composed(WithMetric):
    make = staticmethod(composed)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.metric(logits, batch[1])
        self.log("both", self.metric, on_step=True, on_epoch=True)
        return nn.functional.cross_entropy(logits, batch[1])

    def on_train_epoch_end(self) -> None:
        pass


def test_a_logged_metric_computed_from_others(strategy: tuple[Strategy, int]) -> None:
    one, many = (fitted(Composed, of, (7, 7, 5, 5), callbacks=[Seen()]) for of in (("single_device", 1), strategy))
    assert_equal(one.trainer.callbacks[0].batches, many.trainer.callbacks[0].batches, 1e-6)


class Correlated(Module):
    def __init__(self) -> None:
        super().__init__()
        self.correlation = PearsonCorrCoef()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.correlation.update(batch[0][:, 0], batch[0][:, 1])
        return self(batch[0]).square().mean()


class CountingAccuracy(MulticlassAccuracy):
    """Counts beside its states."""

    def __init__(self) -> None:
        super().__init__(CLASSES)
        self.seen = 0

    def update(self, *args: Any) -> None:
        super().update(*args)
        self.seen += len(args[1])


class Counted(WithMetric):
    make = CountingAccuracy


def test_a_metric_that_cannot_be_put_together_is_refused_and_works_with_the_forward_alone() -> None:
    with pytest.raises(StepError, match=r"PearsonCorrCoef cannot be put together.*parallelize='forward'"):
        fitted(Correlated, ("dp", 2))
    assert fitted(Correlated, in_forward(2)).correlation.update_count == 8
    with pytest.raises(StepError, match=r"CountingAccuracy cannot be put together.*keeps 'seen'.*add_state"):
        fitted(Counted, ("dp", 2))
    one, many = fitted(Counted), fitted(Counted, in_forward(2))
    assert_equal(one.values, many.values, 1e-6)
    assert one.metric.seen == many.metric.seen


# Errors and refusals


@pytest.mark.parametrize("parallelize", ["step", "forward"])
def test_an_error_in_one_replica_names_the_part_and_leaves_the_run_usable(parallelize: Any) -> None:
    class Failing(Module):
        def forward(self, features: Tensor) -> Tensor:
            if fails and len(features) == 4:
                raise KeyError("in the user's code")
            return super().forward(features)

    fails, module = True, Failing()
    run = trainer(BalancedDataParallelStrategy(shares=[3, 4], parallelize=parallelize), 2, max_epochs=1)
    with pytest.raises(KeyError, match="in the user's code") as caught:
        run.fit(module, loader(), loader())
    second = run.connected_strategy.devices[1]
    assert caught.value.__notes__ == [f"This was part 2 of 2 of the batch, on {second}."]
    assert any(entry.name == "forward" and entry.path == Path(__file__) for entry in caught.traceback)
    fails = False
    run.fit(module, loader(), loader())
    assert run.global_step == 4


def on_two_devices() -> Module:
    module = Module()
    module.net[0].to("meta")
    return module


def by_hand() -> Module:
    module = Module()
    module.automatic_optimization = False
    return module


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (by_hand, r"optimises by hand.*parallelize='forward'"),
        (on_two_devices, r"lie on several devices: net\.0\.weight on meta, net\.2\.weight on cpu"),
    ],
)
def test_modules_are_checked_before_training(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        trainer("dp", 2).fit(make(), loader(), loader())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parallelize": "loss"}, "must be 'step' or 'forward', not 'loss'"),
        ({"dim": -1}, "dim must be the index of a dimension"),
        ({"output_device": 1}, "no effect with parallelize='step'"),
        *(
            ({"parallelize": "forward", "output_device": other}, r"none of the devices (cpu, cpu|cuda:0, cuda:1)")
            for other in (2, "cuda:7", "nowhere")
        ),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        trainer(DataParallelStrategy(**arguments), 2)
