"""Values that are logged, measured and predicted in several processes: of all samples, the same in every process."""

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, SumMetric

from equipoise import DDPStrategy
from tests.strategies.runs import fit, trainer
from tests.support.networks.numbered import Numbered, Samples, numbered

pytestmark = pytest.mark.filterwarnings("ignore:No (positive|negative) samples")

# Evaluations and predictions


@pytest.mark.quick_cases(2)
@pytest.mark.thorough
@pytest.mark.parametrize(("count", "processes"), [(1, 3), (3, 2), (11, 2)])
def test_evaluations_are_those_of_one_device(count: int, processes: int) -> None:
    module, loader = numbered(), DataLoader(Samples(count), batch_size=2)
    (expected,) = trainer("single_device", 1).validate(module, loader, verbose=False)
    run = trainer("ddp", processes)
    (actual,) = run.validate(module, loader, verbose=False)
    assert actual.keys() == expected.keys() == {"val_loss", "accuracy", "auroc"}
    assert actual == pytest.approx(expected, rel=1e-6)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("count", [1, 9])
def test_predictions_come_in_the_order_of_the_data(count: int) -> None:
    predicted = trainer("ddp", 3).predict(numbered(), DataLoader(Samples(count), batch_size=2))
    assert predicted is not None
    assert torch.cat(predicted).tolist() == list(range(count))


def test_a_distributed_sampler_of_the_users_own_in_an_evaluation() -> None:
    class Divides(Numbered):
        def val_dataloader(self) -> Any:
            sampler: Any = DistributedSampler(range(8), 2, self.trainer.global_rank, shuffle=False)
            return DataLoader(Samples(8), batch_size=2, sampler=sampler)

    module = numbered(Divides)
    expected = trainer("single_device", 1).validate(module, DataLoader(Samples(8), batch_size=2), verbose=False)
    assert trainer().validate(module, verbose=False)[0] == pytest.approx(expected[0], rel=1e-6)


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


@pytest.mark.few_cases(2)
@pytest.mark.filterwarnings("ignore:The val loader shuffles")
@pytest.mark.parametrize(("devices", "samples", "shuffle"), [(2, 5, True), (3, 4, False)])
def test_an_evaluation_with_fewer_batches_than_processes_repeats_no_sample(
    devices: int, samples: int, shuffle: bool
) -> None:
    data = torch.arange(samples, dtype=torch.float64).square()
    loader = DataLoader(data, batch_size=10, shuffle=shuffle)
    (values,) = trainer("ddp", devices).validate(Collects(), loader, verbose=False)
    assert values == pytest.approx({"value": float(data.mean()), "metric": float(data.mean())}, rel=1e-12)


@pytest.mark.thorough
def test_limits_of_evaluations_are_of_all_processes_together_and_batches_stay_whole() -> None:
    class Keeps(Collects):
        def on_validation_epoch_end(self) -> None:
            pass

        test_step = Collects.validation_step

    data, run = torch.arange(8, dtype=torch.float64), trainer(limit_val_batches=1, limit_test_batches=1)
    for evaluate in (run.validate, run.test):
        (values,) = evaluate(Keeps(), DataLoader(data, batch_size=4), verbose=False)
        assert values["value"] == pytest.approx(1.5, rel=1e-12)
    for size in (4, 8):
        predictions = trainer(limit_predict_batches=1).predict(Keeps(), DataLoader(data, batch_size=size))
        assert [len(batch) for batch in predictions or []] == [size]


def test_all_gather_in_an_evaluation_step_receives_whole_batches() -> None:
    """As many are dealt to each process, since their number is a multiple of the processes."""

    class Gathers(Collects):
        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            self.kept.append(self.all_gather(batch.sum()))

    module = Gathers()
    trainer().test(module, DataLoader(torch.arange(11.0), batch_size=3), verbose=False)
    assert [sums.tolist() for sums in module.kept] == [[0 + 1 + 2, 3 + 4 + 5], [6 + 7 + 8, 9 + 10]]


# Batch statistics


class Normalised(Numbered):
    """With batch statistics, which are each process's own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    def on_train_end(self) -> None:
        self.means_of_all = self.trainer.strategy.gather_objects(self.net[1].running_mean.tolist())


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["torch", "native"])
def test_batch_statistics_are_the_same_in_all_processes_and_in_the_module_that_comes_home(engine: Any) -> None:
    module, run, data = numbered(Normalised), trainer(DDPStrategy(engine=engine)), DataLoader(Samples(10), batch_size=3)
    run.fit(module, DataLoader(Samples(16), batch_size=2), data)
    first, second = module.means_of_all
    assert first == second == module.net[1].running_mean.tolist()
    within = float(run.callback_metrics["val_loss"])
    after = trainer("single_device", 1).validate(module, data, verbose=False)[0]["val_loss"]
    assert within == pytest.approx(after, rel=1e-12)


# Logged values


class LogsSums(Numbered):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("synced", float(batch[2].sum()), sync_dist=True, reduce_fx="sum", on_epoch=False)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("checked", batch[2].double().mean(), on_step=True, on_epoch=True, sync_dist=True)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["torch", "native"])
def test_a_process_without_a_batch_saves_stops_and_logs_with_the_others(engine: Any, tmp_path: Path) -> None:
    options = {"callbacks": [ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)], "max_epochs": 1}
    options |= {"enable_checkpointing": True, "max_time": "00:01:00:00", "log_every_n_steps": 1}
    run = trainer(DDPStrategy(engine=engine), logger=CSVLogger(tmp_path, version=0), **options)
    run.fit(LogsSums(), DataLoader(Samples(9), batch_size=2), DataLoader(Samples(5), batch_size=2))
    assert run.global_step == len(list(tmp_path.glob("*.ckpt"))) == 3
    assert run.callback_metrics["checked"] == 2
    with open(Path(run.log_dir) / "metrics.csv") as file:
        rows = [row["synced"] for row in csv.DictReader(file) if row["synced"]]
    assert [float(row) for row in rows] == [0 + 1 + 2 + 3, 4 + 5 + 6 + 7, 8]


@pytest.mark.thorough
def test_an_average_of_the_weights_is_updated_in_a_process_without_a_batch() -> None:
    values = []
    for strategy, processes, batch_size in (("single_device", 1, 4), ("ddp", 2, 2)):
        run = trainer(strategy, processes, callbacks=[EMAWeightAveraging(decay=0.5)], max_epochs=2)
        # The second process has no sample of the last batch, and half of the validation.
        run.fit(numbered(), DataLoader(Samples(9), batch_size=batch_size), DataLoader(Samples(4), batch_size=2))
        values.append(float(run.callback_metrics["val_loss"]))
    assert values[0] == pytest.approx(values[1], rel=1e-6)


class AveragesStatistics(Normalised):
    """Notes the averaged statistics of each process, and those with which it validates."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        (average,) = self.trainer.callbacks
        self.own = average._average_model.module.net[1].running_mean.tolist()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        statistics = (self.own, self.net[1].running_mean.tolist())
        self.own_means, self.validated_means = zip(*self.trainer.strategy.gather_objects(statistics), strict=True)


@pytest.mark.thorough
def test_buffers_of_an_average_are_those_of_the_first_process() -> None:
    module, average = numbered(AveragesStatistics), EMAWeightAveraging(decay=0.5, use_buffers=True)
    run = trainer(callbacks=[average], max_epochs=1, num_sanity_val_steps=0)
    run.fit(module, DataLoader(Samples(16), batch_size=2), DataLoader(Samples(4), batch_size=2))
    assert module.own_means[0] != module.own_means[1]
    assert module.validated_means == (module.own_means[0],) * 2


class LogsApart(Numbered):
    """Logs other names in each process when an epoch ends."""

    def on_train_epoch_end(self) -> None:
        self.log(f"trained_by_{self.global_rank}", 2.0 + self.global_rank, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if self.global_rank == 1:
            self.log("validated", 5.0)
        self.log("both", float(self.global_rank))


@pytest.mark.thorough
def test_names_that_differ_have_the_values_of_the_processes_that_logged_each() -> None:
    run = trainer(DDPStrategy(timeout=60.0))
    run.fit(numbered(LogsApart), DataLoader(Samples(16), batch_size=2), DataLoader(Samples(10), batch_size=3))
    expected = {"trained_by_0": 2.0, "trained_by_1": 3.0, "validated": 5.0, "both": 0.5}
    assert {name: float(run.callback_metrics[name]) for name in expected} == expected


class LowersItsRate(Numbered):
    """By the loss of single steps, which differs between processes."""

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
        self.rates = self.trainer.strategy.gather_objects(self.trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.thorough
def test_a_scheduler_that_watches_a_value_has_the_same_rate_in_all_processes() -> None:
    fit(module := numbered(LowersItsRate))
    assert module.same
    assert module.rates[0] == module.rates[1] < 0.1


# Metrics


class Unregistered(L.LightningModule):
    """Logs metrics that are no attributes of it. Rank 0 has a batch more than rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = [SumMetric()]
        self.by_stage = {"val": {"all": CatMetric()}}
        self.collections = (MetricCollection([MeanMetric(), SumMetric()]),)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        for metric in (self.sums[0], self.by_stage["val"]["all"], self.collections[0]):
            metric.update(batch)
        self.log("sum", self.sums[0])
        self.log_dict(self.collections[0])

    def on_test_epoch_end(self) -> None:
        self.log("spread", self.by_stage["val"]["all"].compute().float().std())
        self.log("sum again", self.sums[0])
        self.log("read", self.trainer.callback_metrics["sum again"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_metrics_in_a_list_tuple_or_dictionary_are_those_of_all_samples(strategy: str) -> None:
    data = DataLoader(torch.arange(5.0, dtype=torch.float64), batch_size=1)
    (values,) = trainer(strategy).test(Unregistered(), data, verbose=False)
    spread = torch.arange(5.0).std().item()
    sums = dict.fromkeys(("sum", "SumMetric", "sum again", "read"), 10.0)
    assert values == pytest.approx({**sums, "MeanMetric": 2.0, "spread": spread})


class Gathered(Metric):
    """A list of values, which is exchanged entry by entry."""

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


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("count", "processes"), [(5, 2), (1, 3)])
def test_lists_of_a_metric_are_of_unequal_lengths(count: int, processes: int) -> None:
    """Batches of two: the processes have unequal numbers of them."""
    data = DataLoader(Samples(count), batch_size=2)
    (one,) = trainer("single_device", 1).validate(numbered(Listed), data, verbose=False)
    (many,) = trainer("ddp", processes).validate(numbered(Listed), data, verbose=False)
    assert many["of_all"] == pytest.approx(one["of_all"], rel=1e-12)
