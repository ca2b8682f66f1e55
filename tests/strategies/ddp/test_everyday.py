"""DDP with what people bring: layers, loaders, metrics, schedulers and logs of their own."""

import logging
import socket
import threading
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, SumMetric

from equipoise import ConfigurationError, DDPStrategy, StepError
from equipoise.parallel.communication.process_group import joined
from equipoise.parallel.communication.rank import Rank
from tests.strategies.ddp.test_ddp import Numbered, Samples, assert_same_weights, numbered, trainer
from tests.support.waiting import wait_briefly

pytestmark = pytest.mark.filterwarnings(
    "ignore:No (positive|negative) samples", "ignore:The checkpoint holds states of callbacks"
)


def fit(module: Any, strategy: Any = "ddp", devices: int = 2, count: int = 16, **options: Any) -> Any:
    """A step has four samples, whatever the number of devices."""
    run = trainer(strategy, devices, **options)
    run.fit(module, DataLoader(Samples(count), batch_size=4 // devices))
    return run


def alone(module: Any, **options: Any) -> Any:
    return fit(module, "single_device", 1, **options)


def made(kind: type[Numbered], *arguments: Any) -> Any:
    torch.manual_seed(3)
    return kind(*arguments)


# Gradients


class Twice(Numbered):
    """Goes backward twice."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss / 2).backward(retain_graph=True)
        (loss / 2).backward()


class Thaws(Numbered):
    """Begins to train a layer in the middle of an epoch."""

    def on_train_start(self) -> None:
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 1:
            self.net[0].requires_grad_(True)


class Masked(Numbered):
    """Keeps half of a layer as it is, by a hook on its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient * torch.tensor([0.0, 1.0, 0.0, 1.0]))


class FrozenForAStep(Numbered):
    """Leaves a weight out of some steps."""

    def on_after_backward(self) -> None:
        if self.global_step % 2:
            self.net[0].weight.grad = None


class DecidesByLoss(Numbered):
    """Searches along a line by the loss, which is that of all samples."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=2, line_search_fn="strong_wolfe")


class Grows(Numbered):
    """Adds a layer in the middle of an epoch, and replaces a weight."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 1:
            self.grow()

    def grow(self) -> None:
        torch.manual_seed(5 + self.global_rank)
        self.net.append(nn.Linear(3, 3, dtype=self.dtype))
        self.net[0].weight = nn.Parameter(torch.randn(5, 4, dtype=self.dtype))
        new = [self.net[0].weight, *self.net[-1].parameters()]
        self.optimizers(use_pl_optimizer=False).add_param_group({"params": new})


KINDS = [FrozenForAStep, DecidesByLoss, Grows, Twice, Thaws, Masked]


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("engine", ["torch", "native"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_device(kind: type[Numbered], engine: Any) -> None:
    """The last batch of an epoch has three samples."""
    one, many = made(kind), made(kind)
    before = many.net[0].weight.detach().clone()
    alone(one, count=15)
    fit(many, DDPStrategy(engine=engine), count=15)
    assert_same_weights(one, many)
    assert many.same
    if kind is Masked:
        assert torch.equal(many.net[0].weight[:, 0], before[:, 0].double())


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        ({"engine": "native"}, {}, "exchanges dense gradients only"),
        ({"static_graph": True}, {"accumulate_grad_batches": 2}, "does not go with accumulate_grad_batches"),
    ],
)
def test_what_an_engine_cannot_do(options: dict[str, Any], more: dict[str, Any], message: str) -> None:
    module = numbered()
    if "engine" in options:
        module.net = nn.Sequential(Embedded(), nn.Linear(3, 3))
    with pytest.raises(StepError, match=message):
        fit(module, DDPStrategy(**options), **more)


class GrowsInStep(Numbered):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 1:
            layer = nn.Linear(3, 3, dtype=self.dtype)
            self.net.append(layer)
            self.optimizers(use_pl_optimizer=False).add_param_group({"params": list(layer.parameters())})
        return super().training_step(batch, batch_idx)


class StepsInBackward(Numbered):
    """Steps an optimiser for each weight as soon as its gradient is there."""

    def configure_optimizers(self) -> Any:
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in self.net[0].parameters()}
        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
        return torch.optim.SGD(self.net[2].parameters(), lr=0.1)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("engine", ["torch", "native"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [(GrowsInStep, "gives the module a parameter that it trains"), (StepsInBackward, "is stepped within a backward")],
)
def test_gradients_that_are_not_exchanged_are_refused(kind: type[Numbered], message: str, engine: Any) -> None:
    with pytest.raises(StepError, match=message):
        fit(made(kind), DDPStrategy(engine=engine))


class Embedded(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3, sparse=True)

    def forward(self, features: Tensor) -> Tensor:
        return self.table((features[:, 0] > 0).long())


def test_layers_without_a_shape_are_refused() -> None:
    module = numbered()
    module.net = nn.LazyLinear(3)
    with pytest.raises(ConfigurationError, match=r"net\.weight has no shape yet"):
        fit(module)


# Values


class Normalised(Numbered):
    """With batch statistics, which are each process's own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def test_validation_is_that_of_the_module_that_comes_home() -> None:
    module = made(Normalised)
    run = trainer("ddp", 2)
    data = DataLoader(Samples(10), batch_size=3)
    run.fit(module, DataLoader(Samples(16), batch_size=2), data)
    within = float(run.callback_metrics["val_loss"])
    after = trainer("single_device", 1).validate(module, data, verbose=False)[0]["val_loss"]
    assert within == pytest.approx(after, rel=1e-12)


class LogsApart(Numbered):
    """Logs other values in each process when an epoch ends."""

    def on_train_epoch_end(self) -> None:
        self.log(f"trained_by_{self.global_rank}", 2.0 + self.global_rank)

    def on_validation_epoch_end(self) -> None:
        if self.global_rank == 1:
            self.log("validated", 5.0)
        self.log("both", float(self.global_rank))


def test_values_that_one_process_logs_at_the_end_of_an_epoch() -> None:
    run = trainer(DDPStrategy(timeout=60.0), 2)
    run.fit(made(LogsApart), DataLoader(Samples(16), batch_size=2), DataLoader(Samples(10), batch_size=3))
    expected = {"trained_by_0": 2.0, "trained_by_1": 3.0, "validated": 5.0, "both": 0.5}
    assert {name: float(run.callback_metrics[name]) for name in expected} == expected


class GathersStatistics(Normalised):
    def on_train_end(self) -> None:
        norm = self.net[1]
        self.means_of_all = self.trainer.strategy.gather_objects(norm.running_mean.tolist())


@pytest.mark.parametrize("engine", ["torch", "native"])
def test_buffers_are_the_same_in_all_processes_after_training(engine: Any) -> None:
    module = made(GathersStatistics)
    trainer(DDPStrategy(engine=engine), 2).fit(module, DataLoader(Samples(16), batch_size=2))
    first, second = module.means_of_all
    assert first == second == module.net[1].running_mean.tolist()


class Watches(Numbered):
    """Lowers its rate by the loss of single steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("step", loss * (1 + self.global_rank))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        config = {"scheduler": scheduler, "monitor": "step", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def on_train_end(self) -> None:
        rates = self.trainer.strategy.gather_objects(self.trainer.optimizers[0].param_groups[0]["lr"])
        assert len(set(rates)) == 1, rates
        assert rates[0] < 0.1


def test_rates_are_the_same_in_all_processes() -> None:
    module = made(Watches)
    fit(module)
    assert module.same


class Unregistered(L.LightningModule):
    """Logs metrics that are no attributes of it. Rank 0 has a batch more than rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = [SumMetric()]
        self.by_stage = {"val": {"all": CatMetric()}}
        self.collections = (MetricCollection([MeanMetric(), SumMetric()]),)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.sums[0].update(batch)
        self.by_stage["val"]["all"].update(batch)
        self.collections[0].update(batch)
        self.log("sum", self.sums[0])
        self.log_dict(self.collections[0])

    def on_test_epoch_end(self) -> None:
        self.log("spread", self.by_stage["val"]["all"].compute().float().std())
        self.log("sum again", self.sums[0])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_metrics_in_plain_containers_are_those_of_all_samples(strategy: str) -> None:
    data = DataLoader(torch.arange(5.0, dtype=torch.float64), batch_size=1)
    (values,) = trainer(strategy, 2).test(Unregistered(), data, verbose=False)
    spread = torch.arange(5.0).std().item()
    expected = {"sum": 10.0, "SumMetric": 10.0, "MeanMetric": 2.0, "spread": spread, "sum again": 10.0}
    assert values == pytest.approx(expected)


class ReadsTogether(L.LightningModule):
    """Reads a metric in the hook that logs it, in all processes."""

    def __init__(self) -> None:
        super().__init__()
        self.total = SumMetric()

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.total.update(batch)

    def on_test_epoch_end(self) -> None:
        self.log("total", self.total)
        self.log("read", self.trainer.callback_metrics["total"])


def test_a_metric_that_is_read_where_it_is_logged_is_that_of_all_samples() -> None:
    data = DataLoader(torch.arange(5.0), batch_size=1)
    assert trainer("ddp", 2).test(ReadsTogether(), data, verbose=False) == [{"total": 10.0, "read": 10.0}]


class Gathered(Metric):
    """The largest of all values; its list is exchanged entry by entry."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__(dist_sync_on_step=True)
        self.add_state("values", default=[], dist_reduce_fx=None)

    def update(self, values: Tensor) -> None:
        self.values.append(values)

    def compute(self) -> Tensor:
        return torch.cat(list(self.values)).sort().values.cumsum(0).sum()


class Listed(Numbered):
    def __init__(self) -> None:
        super().__init__()
        self.gathered = Gathered()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("gathered", self.gathered(batch[0][:, 0]) * 0, on_step=True)
        self.log("of_all", self.gathered)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("count", [1, 5, 9])
def test_lists_of_unequal_lengths(count: int) -> None:
    """Batches of two: the processes have unequal numbers of them."""
    found = []
    for strategy, devices in (("single_device", 1), ("ddp", 2), ("ddp", 3)):
        data = DataLoader(Samples(count), batch_size=2)
        found.append(trainer(strategy, devices).validate(made(Listed), data, verbose=False)[0]["of_all"])
    assert found[1:] == pytest.approx(found[:1] * 2, rel=1e-12)


# What travels


def test_loaders_with_workers_start_them_as_in_the_parent() -> None:
    """Which takes a collate function that cannot be pickled."""
    one, many = numbered(), numbered()
    alone(one, max_epochs=1)
    data = DataLoader(Samples(16), batch_size=2, num_workers=1, collate_fn=lambda samples: default_collate(samples))
    trainer("ddp", 2, max_epochs=1).fit(many, data)
    assert_same_weights(one, many)


class Locked(nn.Module):
    """Cannot be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, features: Tensor) -> Tensor:
        return features


class MadeInTheRun(Numbered):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(3)
            self.net = nn.Sequential(Locked(), nn.Linear(4, 3))


class MadeAndSent(MadeInTheRun):
    def __init__(self) -> None:
        super().__init__()
        # An attribute of the object, not a layer that is None.
        del self.net
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(4, 3))


@pytest.mark.parametrize("kind", [MadeInTheRun, MadeAndSent])
def test_layers_made_in_the_run_come_home(kind: type[MadeInTheRun]) -> None:
    one, many = kind(), kind()
    alone(one)
    fit(many)
    assert_same_weights(one, many)
    assert len(list(many.parameters())) == 2
    # Else the next run would make them anew.
    assert many.net is dict(many.named_children())["net"]


class Talks(Numbered):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logging.getLogger("mine").info("step %d of rank %d", batch_idx, self.global_rank)
        return super().training_step(batch, batch_idx)


def test_the_first_process_logs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mine"):
        fit(made(Talks), max_epochs=1)
    told = [record.getMessage() for record in caplog.records if record.name == "mine"]
    assert told == [f"step {index} of rank 0" for index in range(4)]


# Where processes do not agree


class StopsAlone(Numbered):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        wait_briefly()
        if self.global_rank == 1:
            self.trainer.strategy.barrier()


def test_processes_that_wait_in_different_places() -> None:
    with pytest.raises(Exception, match=r"waited for others|hung, while others waited"):
        fit(made(StopsAlone), DDPStrategy(timeout=300))


def test_where_to_meet_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    group = joined(Rank(0, 0, 0, 2), torch.device("cpu"), timeout=timedelta(seconds=300))
    with pytest.raises(ConfigurationError, match="but not MASTER_ADDR and MASTER_PORT"), group:
        pass


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", port)
        group = joined(Rank(0, 0, 0, 2), torch.device("cpu"), timeout=timedelta(seconds=300))
        with pytest.raises(ConfigurationError, match=f"MASTER_PORT={port} is taken by another program"), group:
            pass


# Evaluations with fewer batches than processes


class Collects(L.LightningModule):
    """Stacks at the end what its steps have kept, as a process without a batch cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.mean = MeanMetric().double()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.kept.append(batch.mean())
        self.mean.update(batch)
        self.log("value", batch.mean(), sync_dist=True)
        self.log("metric", self.mean)

    def on_validation_epoch_end(self) -> None:
        torch.stack(self.kept)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch


@pytest.mark.parametrize(("devices", "samples"), [(2, 2), (2, 5), (3, 10), (3, 4)])
@pytest.mark.filterwarnings("ignore:The val loader shuffles")
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_process_has_samples_of_an_evaluation_of_one_batch(devices: int, samples: int, shuffle: bool) -> None:
    data = torch.arange(samples, dtype=torch.float64).square()
    run = trainer("ddp", devices)
    values = run.validate(Collects(), DataLoader(data, batch_size=10, shuffle=shuffle), verbose=False)[0]
    assert values["value"] == pytest.approx(float(data.mean()), rel=1e-12)
    assert values["metric"] == pytest.approx(float(data.mean()), rel=1e-12)


def test_predictions_and_limited_evaluations_keep_their_batches() -> None:
    data = torch.arange(8, dtype=torch.float64)
    run = trainer("ddp", 2, limit_val_batches=1)
    module = Collects()
    module.on_validation_epoch_end = lambda: None  # type: ignore[method-assign]
    values = run.validate(module, DataLoader(data, batch_size=4), verbose=False)[0]
    assert values["value"] == pytest.approx(1.5, rel=1e-12)
    predictions = run.predict(module, DataLoader(data, batch_size=8))
    assert predictions is not None
    assert [len(batch) for batch in predictions] == [8]


# Losses without a graph


class Constant(L.LightningModule):
    """Its loss is a constant where a batch holds the sixth sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(2)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if 6.0 in batch.tolist():
            return torch.zeros((), dtype=torch.float64, requires_grad=True)
        return sum(self.weights) * batch.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("options", [{}, {"engine": "native"}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("window", [1, 2])
def test_a_constant_loss_of_one_process_has_zero_gradients(options: dict[str, Any], window: int) -> None:
    module = Constant()
    data = torch.arange(8, dtype=torch.float64)
    steps = DataLoader(data, batch_size=1, sampler=InOrder(data))
    trainer(DDPStrategy(timeout=60.0, **options), 2, accumulate_grad_batches=window, max_epochs=1).fit(module, steps)
    # The samples of all steps but the sixth, in steps of two.
    expected = 1 - 0.01 * (sum(range(8)) - 6) / (2 * window)
    assert [float(weight.detach()) for weight in module.weights] == pytest.approx([expected] * 2, rel=1e-12)


class InOrder(torch.utils.data.Sampler[int]):
    """Samples in their order, which a sampler of torch's own would not keep."""

    def __init__(self, data: Tensor) -> None:
        self.count = len(data)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        return iter(range(self.count))
