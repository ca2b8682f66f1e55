"""Evaluations in real processes: exact whatever the number of batches and processes, and without a trace."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

from equipoise import NoGradEvaluation, StepError, Trainer
from tests.support.equality import assert_equal
from tests.support.fits_with_evaluations import Plain, samples, trained
from tests.support.programs import Program
from tests.support.trainer_runs import trainer as quiet

pytestmark = pytest.mark.filterwarnings("ignore:No (positive|negative) samples", "ignore:.*use_libuv", "ignore:.*fork")


class Normalised(Plain):
    """Its statistics differ between processes, and each draws dropout of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 3))


class Linear(Plain):
    """Draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)


def several() -> MetricCollection:
    return MetricCollection({average: MulticlassAccuracy(3, average=average) for average in ("macro", "micro")})


def evaluate(module: Any, batch: Any) -> Any:
    output = module(batch[0])[:, 0].sigmoid()
    return {"preds": output, "target": (batch[1] > 0).long()}


def fit(evaluations: list[Any], processes: int, epochs: int = 1, count: int = 12, kind: type[Any] = Normalised) -> Any:
    torch.manual_seed(5)
    module = kind()
    options = {"precision": "64-true", "strategy": "ddp", "devices": processes}
    trainer = quiet(**options, max_epochs=epochs, callbacks=evaluations)
    trainer.fit(module, DataLoader(samples(count), batch_size=2))
    return module, trainer


@pytest.mark.thorough
@pytest.mark.parametrize(("count", "processes"), [(23, 2), (4, 3)])
def test_values_are_those_of_one_process(count: int, processes: int) -> None:
    """Batches of five: five over two processes, one over three."""
    data = DataLoader(samples(count), batch_size=5)
    parts = NoGradEvaluation(data, BinaryAUROC(), forward=evaluate, collect=True)
    classes = NoGradEvaluation(data, several(), name="classes", at_end=True)
    module, trainer = fit([parts, classes], processes)
    data.dataset.tensors = tuple(t.double() if t.is_floating_point() else t for t in data.dataset.tensors)
    one = NoGradEvaluation(data, BinaryAUROC(), forward=evaluate, collect=True)
    for here, there in ((one, parts), (NoGradEvaluation(data, several()), classes)):
        (result,) = there.results
        assert result.batches == -(-count // 5)
        assert_equal(here.run(module).values, result.values, 1e-6)
    assert_equal(one.outputs, parts.outputs)
    assert_equal(one.concatenated(), parts.concatenated())
    monitored = float(trainer.callback_metrics["eval/BinaryAUROC"])
    assert monitored == pytest.approx(parts.results[0].values["BinaryAUROC"], rel=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("processes", "inference_mode", "more"), [(3, False, {}), (2, True, {"precision": "bf16-mixed"})]
)
def test_training_goes_on_as_if_nothing_had_happened(
    processes: int, inference_mode: bool, more: dict[str, Any], tmp_path: Path
) -> None:
    """Weights, the optimiser's state, losses and generators, the last of the first process; logs as well."""
    options = {"strategy": "ddp", "devices": ["cpu"] * processes, "accumulate_grad_batches": 2, **more}
    alone, _ = trained(Trainer, None, tmp_path, size=2, **options)
    with_it, evaluation = trained(Trainer, inference_mode, tmp_path, size=2, **options)
    assert_equal(alone, with_it)
    assert len(evaluation.results) >= 3
    assert evaluation.results[-1].batches == 5


def test_a_process_without_a_batch_in_a_step_takes_part() -> None:
    """Five samples over two processes, two at a time: the second one's last step is empty."""
    evaluation = NoGradEvaluation(DataLoader(samples(11), batch_size=5), several(), every_n_steps=1)
    fit([evaluation], 2, epochs=2, count=5, kind=Linear)
    assert [result.step for result in evaluation.results] == [1, 2, 3, 4]
    assert all(result.batches == 3 for result in evaluation.results)


@pytest.mark.thorough
def test_batches_of_all_processes_are_limited_and_of_a_list_divided_but_not_without_shard() -> None:
    loader = DataLoader(samples(23), batch_size=2)
    options: dict[str, Any] = {"metrics": MeanMetric(), "forward": labels, "collect": True}
    limited = NoGradEvaluation(loader, limit_batches=4, name="limited", **options)
    listed = NoGradEvaluation(list(loader)[:5], name="listed", **options)
    whole = NoGradEvaluation(list(loader)[:5], name="whole", shard=False, **options)
    fit([limited, listed, whole], 3)
    assert [evaluation.results[0].batches for evaluation in (limited, listed, whole)] == [4, 5, 15]
    for evaluation, count in ((limited, 8), (listed, 10)):
        assert_equal(evaluation.concatenated()["value"], samples(23).tensors[1][:count].double())


def distributed(count: int, **options: Any) -> DataLoader[Any]:
    """Torch's own sampler, which needs the group of processes."""
    data = TensorDataset(samples(count).tensors[0].double(), torch.arange(count))
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, **options))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("count", "options", "left_out"),
    [(7, {"seed": 3}, 0), (2, {"shuffle": False}, 0), (7, {"drop_last": True}, 1)],
)
def test_torchs_sampler_gives_no_sample_twice(count: int, options: Any, left_out: int) -> None:
    make = partial(distributed, count, **options)
    evaluation = NoGradEvaluation(make, MeanMetric(), forward=labels, collect=True)
    fit([evaluation], 3, kind=Linear)
    seen = evaluation.concatenated()["value"].tolist()
    assert len(set(seen)) == len(seen) == count - left_out
    assert evaluation.results[0].values["MeanMetric"] == pytest.approx(sum(seen) / len(seen))


def labels(module: Any, batch: Any) -> Any:
    return {"value": batch[1].double()}


def test_no_batch_anywhere_is_an_error_everywhere() -> None:
    with pytest.raises(StepError, match="the loader gave no batch"):
        fit([NoGradEvaluation(DataLoader(samples(4), batch_size=5, drop_last=True), several())], 2)


def test_an_evaluation_without_a_trainer_in_a_group_of_processes() -> None:
    """Every process calls it, and the module brings home what it found."""

    class Calling(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.found: Any = None

        def on_train_end(self) -> None:
            data = [(features.double(), labels) for features, labels in DataLoader(samples(13), batch_size=5)]
            evaluation = NoGradEvaluation(data, several(), collect=True)
            self.found = (evaluation.run(self), evaluation.concatenated())

    module, _ = fit([], 2, kind=Calling)
    result, (predictions, labels) = module.found
    assert result.batches == 3
    assert torch.equal(labels, samples(13).tensors[1])
    torch.testing.assert_close(predictions, module.net(samples(13).tensors[0].double()).detach())
    assert result.values["micro"] == float((predictions.argmax(1) == labels).float().mean())


FRESH = """
from tests.callbacks.evaluation.test_no_grad_evaluation_ddp import compare_under_lightning

compare_under_lightning()
"""


@pytest.mark.thorough
def test_values_under_lightnings_own_trainer_are_those_of_one_process() -> None:
    """In another process: one that has run a backward cannot be forked for it."""
    with Program(FRESH) as program:
        complaints = program.finish()[1]
        assert program.returncode == 0, complaints


def compare_under_lightning() -> None:
    found = {}
    for processes, options in ((1, {"devices": 1}), (2, {"strategy": "ddp_fork", "devices": 2})):
        torch.manual_seed(5)
        data = DataLoader(samples(23), batch_size=5)
        sums = NoGradEvaluation(data, SumMetric(), forward=labels, name="sums")  # no batch is read twice
        trainer = quiet(L.Trainer, **options, callbacks=[NoGradEvaluation(data, several()), sums])
        trainer.fit(Linear(), DataLoader(samples(8), batch_size=4 // processes))
        found[processes] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert found[1] == pytest.approx(found[2])
    assert set(found[2]) == {"eval/macro", "eval/micro", "sums/SumMetric"}
