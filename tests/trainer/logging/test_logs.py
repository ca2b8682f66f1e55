"""Values of `self.log` without a trainer: what is refused, and several processes; for the rest see `tests/parity`."""

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torchmetrics import MeanMetric, MetricCollection

from equipoise.interop.lightning.self_log import LogOptions
from equipoise.trainer.logging.collection import Collection
from equipoise.trainer.logging.cross_process import LogReduction
from equipoise.trainer.logging.logs import Logs

CPU = torch.device("cpu")


def logs_of(**arguments: Any) -> Logs:
    """Return logs in a loop, before its first batch."""
    logs = Logs()
    logs.connect_run(lambda batch, drawn: len(batch), **arguments)
    logs.enter(Collection(training=True))
    return logs


def log(logs: Logs, name: str, value: Any, *, hook: str | None = None, size: int | None = None, **options: Any) -> None:
    if hook is None:
        hook = "training_step"
    logs.add(hook, name, value, tuple(LogOptions(**options)), size)


def both(logs: Logs, name: str, value: Any, **options: Any) -> None:
    log(logs, name, value, on_step=True, on_epoch=True, **options)


def run(logs: Logs, values: list[tuple[float, int]], **options: Any) -> None:
    """Log a value and the size of the batch, in batch after batch."""
    for value, size in values:
        logs.begin_batch(torch.zeros(size))
        both(logs, "loss", torch.tensor(value, dtype=torch.float64), **options)
        logs.end_batch()


def plain(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def test_values_of_one_name_in_two_hooks_are_apart() -> None:
    logs = logs_of()
    logs.begin_batch([0])
    log(logs, "x", 1.0, hook="on_train_batch_start", on_step=False, on_epoch=True)
    log(logs, "x", 2.0, on_step=True)
    assert plain(logs.metrics()) == {"x": 2.0}


def test_a_parameter_is_logged_as_its_value() -> None:
    logs = logs_of()
    logs.begin_batch([0])
    log(logs, "scale", nn.Parameter(torch.tensor(2.0)), on_step=True)
    assert plain(logs.metrics()) == {"scale": 2.0}


def test_metrics_that_callbacks_read_are_computed_when_read() -> None:
    class Counting(Collection):
        reads = 0

        def values_of_step(self, dataloader_idx: int | None) -> Any:
            self.reads += 1
            return super().values_of_step(dataloader_idx)

    logs, counting = logs_of(), Counting(training=True)
    logs.enter(counting)
    run(logs, [(1.0, 1), (2.0, 1), (3.0, 1)])
    assert counting.reads == 0
    assert plain(logs.callback_metrics)["loss_step"] == plain(logs.callback_metrics)["loss"] == 3.0
    assert counting.reads == 1


# Values


class Square(MeanMetric):
    """A metric that computes no tensor."""

    def compute(self) -> Any:
        return {"square": super().compute() ** 2}


def test_a_metric_must_compute_a_tensor() -> None:
    logs, metric = logs_of(), Square()
    logs.begin_batch([0])
    metric.update(2.0)
    log(logs, "square", metric, on_step=False, on_epoch=True)
    logs.end_batch()
    with pytest.raises(ValueError, match=r"'square' computes .* must compute a tensor"):
        logs.end_batches()


@pytest.mark.parametrize(
    ("value", "options", "error", "message"),
    [
        (MetricCollection([MeanMetric()]), {}, ValueError, "not MetricCollection"),
        (1.0, {"reduce_fx": "median"}, MisconfigurationException, "only mean, sum, min and max"),
        (1.0, {"name": "x/dataloader_idx_0"}, MisconfigurationException, "holds a loader's index"),
    ],
    ids=["collection", "reduction", "name"],
)
def test_wrong_arguments_are_refused(value: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    logs = logs_of()
    logs.begin_batch([0])
    with pytest.raises(error, match=message):
        log(logs, **{"name": "x", "value": value, **options})


def test_one_name_has_the_same_arguments_in_every_call() -> None:
    logs = logs_of()
    log(logs, "x", 1.0, on_epoch=True)
    both(logs, "x", 1.0)  # these are the defaults
    with pytest.raises(MisconfigurationException, match=r"'x', \.\.\.\)` was called twice in `training_step`"):
        log(logs, "x", 1.0, on_step=False, on_epoch=True)


def test_add_dataloader_idx_false_under_one_name_is_refused_with_the_loaders() -> None:
    logs = logs_of()
    logs.begin_batch([0], dataloader_idx=0)
    log(logs, "x", 1.0, add_dataloader_idx=False)
    logs.begin_batch([0], dataloader_idx=1)
    with pytest.raises(MisconfigurationException, match="one name for the values of loaders 0 and 1"):
        log(logs, "x", 1.0, add_dataloader_idx=False)


def test_logging_needs_a_loop_and_a_hook() -> None:
    logs = Logs()
    with pytest.raises(MisconfigurationException, match="inside a loop"):
        log(logs, "x", 1.0)
    logs.enter(Collection(training=True))
    with pytest.raises(MisconfigurationException, match="outside of the hooks and steps"):
        logs.add(None, "x", 1.0, tuple(LogOptions()), None)


# Several processes


class Peers:
    """Processes that run one after the other: what one passes to `gather` waits there for the others.

    Args:
        reports: What the other processes pass, call by call.
    """

    def __init__(self, *reports: list[Any]) -> None:
        self.reports = list(reports)
        self.sent: list[Any] = []

    def gather(self, value: Any) -> list[Any]:
        self.sent.append(value)
        return [value, *self.reports.pop(0)]

    def reduction(self, module: nn.Module | None = None) -> LogReduction:
        return LogReduction(self.gather, module or nn.Module(), CPU)


def report_of(values: list[tuple[float, int]], **options: Any) -> list[Any]:
    """Return what a process reports at the end of an epoch."""
    peers = Peers([])
    logs = logs_of(reduction=peers.reduction())
    run(logs, values, **options)
    logs.end_batches()
    (report,) = peers.sent
    return report  # type: ignore[no-any-return]


HERE, ELSEWHERE = [(1.0, 2), (4.0, 1)], [(10.0, 3)]


@pytest.mark.parametrize(
    ("reduce_fx", "expected", "here"),
    [
        ("mean", (2.0 + 4.0 + 30.0) / 6, True),
        ("mean", 6.0, False),
        ("sum", 15.0, False),
        ("min", 1.0, True),
        ("max", 10.0, False),
    ],
)
def test_values_of_an_epoch_are_reduced_over_processes_with_means_weighted_by_samples(
    reduce_fx: str, expected: float, here: bool
) -> None:
    """Also in a process that had no batch."""
    reports = [report_of(ELSEWHERE, reduce_fx=reduce_fx)]
    if not here:
        reports.append(report_of(HERE, reduce_fx=reduce_fx))
    logs = logs_of(reduction=Peers(reports).reduction())
    run(logs, HERE if here else [], reduce_fx=reduce_fx)
    logs.end_batches()
    assert logs.metrics()["loss_epoch"].item() == pytest.approx(expected, rel=1e-6)
    assert set(logs.callback_metrics) >= {"loss", "loss_epoch"}


def test_a_value_of_the_epochs_end_read_in_a_hook_is_that_of_this_process_and_reduced_for_loggers() -> None:
    """A hook of the main process may print what it has logged."""
    peers = Peers([[]], [[]])
    logs = logs_of(reduction=peers.reduction())
    logs.end_batches()
    log(logs, "x", 1.0, hook="on_train_epoch_end", on_step=False, on_epoch=True)
    assert plain(logs.callback_metrics) == {"x": 1.0}
    assert len(peers.sent) == 1
    (report,) = peers.reports[0]
    report.append(
        {**logs.collection.entries["on_train_epoch_end", "x", None].state_dict({}), "total": torch.tensor(3.0)}
    )
    logs.share_values()
    assert plain(logs.metrics()) == {"x": 2.0}


def test_a_value_of_rank_zero_only_stays_in_its_process() -> None:
    reports = [report_of(ELSEWHERE, rank_zero_only=True)]
    logs = logs_of(reduction=Peers(reports).reduction())
    run(logs, HERE, rank_zero_only=True)
    logs.end_batches()
    assert logs.metrics()["loss_epoch"].item() == 2.0


def with_metric() -> nn.Module:
    return nn.ModuleDict({"mean": MeanMetric()})


def test_a_metric_that_the_module_has_not_is_refused() -> None:
    logs, module = logs_of(), with_metric()
    logs.begin_batch([0])
    arguments = tuple(LogOptions())
    logs.add("training_step", "known", module["mean"], arguments, None, module)  # type: ignore[index]
    with pytest.raises(MisconfigurationException, match="logged as 'mean' is no attribute of the module"):
        logs.add("training_step", "mean", MeanMetric(), arguments, None, module)


KEY = ("training_step", "loss", None)


@pytest.mark.parametrize(("reduce_fx", "expected"), [("mean", 4.0), ("sum", 8.0), ("min", 2.0), ("max", 6.0)])
def test_values_of_a_step_with_sync_dist_are_reduced_when_loggers_receive_them(reduce_fx: str, expected: float) -> None:
    peers = Peers([{KEY: torch.tensor(6.0)}, {}])
    logs = logs_of(reduction=peers.reduction())
    run(logs, [(2.0, 1)], reduce_fx=reduce_fx, sync_dist=True)
    assert plain(logs.callback_metrics)["loss_step"] == 2.0  # callbacks read their own until loggers receive the other
    log(logs, "here", 1.0)
    logs.end_batch()
    assert plain(logs.step_metrics()) == {"loss_step": expected, "here": 1.0}
    assert plain(logs.callback_metrics)["loss_step"] == expected
    assert [list(sent) for sent in peers.sent] == [[KEY]]


def test_a_run_ends_its_connection_to_other_processes() -> None:
    peers = Peers()
    logs = logs_of(reduction=peers.reduction())
    logs.close(failed=False)
    logs.enter(Collection(training=True))
    run(logs, HERE)
    logs.end_batches()
    assert peers.sent == []
