"""Several stages on each device: gradients, logs and states are those of one device, whatever the schedule."""

import threading
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from equipoise import ConfigurationError, OOMRecovery, PipelineStrategy
from equipoise.extensions.pipeline.planning.cut import CutOptions, table_of
from equipoise.extensions.pipeline.schedule.schedule import actions_of
from equipoise.extensions.report.collect_record import pipeline_step
from tests.conftest import ignoring
from tests.extensions.pipeline.strategy.test_checkpoints import Save, resume, same_weights
from tests.extensions.pipeline.strategy.test_faults import Failing
from tests.extensions.pipeline.strategy.test_pipeline import (
    Before,
    Frozen,
    InPlace,
    SharedLayer,
    Transformer,
    assert_same_logs,
    reference,
)
from tests.support.pairs import pairwise
from tests.support.pipelines import Copying, Tokens, fit, pipelined, quiet
from tests.test_transparency import Batches, Recurrent, Tied, assert_same

pytestmark = [
    *ignoring(
        "Batch \\d+ of \\d+ samples?",
        "cpu ran out",
        "\\w+ has a `validation_step`, but",
        "The (dataloader|'train_dataloader')",
    ),
    pytest.mark.usefixtures("quick_collections"),
]

SIZES = [13, 13, 5, 13, 2]
SCHEDULES = ["interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("equipoise")] == []


def looped(devices: int, each: int = 2, strategy: Any = PipelineStrategy, **options: Any) -> dict[str, Any]:
    given = {"schedule": "interleaved_1f1b", "stages_per_device": each, **options}
    return pipelined(devices, strategy, **given)


PLANS = [(2, 2), (2, 3), (3, 2), (3, 3)]  # devices, and stages on each


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("plan", "micro_batches", "schedule", "threads"), pairwise(PLANS, [1, 2, 4, 5, 13], SCHEDULES, [None, True])
)
def test_gradients_are_those_of_one_device(plan, micro_batches, schedule, threads):
    """Tied weights, skips, containers between stages, masked tokens, batches of fewer samples than micro-batches."""
    devices, each = plan
    expected = reference(Tokens, val=[4, 3])
    options = {"micro_batches": micro_batches, "schedule": schedule, "threads": threads}
    run = fit(Tokens, SIZES, val=[4, 3], **looped(devices, each, **options))
    assert_same(expected, run)
    assert_same_logs(expected[2], run[2])
    timeline = run[2].connected_strategy.timeline
    last = min(micro_batches, SIZES[-1])
    for device in range(devices):
        own = [(span.stage, span.action) for span in timeline.spans if span.stage % devices == device]
        assert own == actions_of(schedule, device, devices, last, each)


NETWORKS = [Recurrent, Tied, Frozen, Before, SharedLayer, InPlace, Transformer]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("make", "strategy", "schedule"), pairwise(NETWORKS, [PipelineStrategy, Copying], SCHEDULES))
def test_networks_of_all_kinds(make, strategy, schedule):
    run = fit(make, SIZES, **looped(1 if make is Recurrent else 2, 2, strategy, micro_batches=4, schedule=schedule))
    assert_same(reference(make), run)


@pytest.mark.parametrize("threads", [None, True])
def test_a_layer_has_one_copy_on_each_device(threads):
    """The shared layer is called in four stages, on two devices."""
    cut = {"cut_before": ["other", "tanh_2", "tanh_3"], "micro_batches": 3, "threads": threads}
    run = fit(SharedLayer, SIZES, accumulate_grad_batches=2, **looped(2, 2, Copying, **cut))
    assert_same(reference(SharedLayer, accumulate_grad_batches=2), run)


def test_evaluations_are_those_of_one_device_to_the_bit():
    loader = DataLoader(Batches([5, 3]), batch_size=None)
    module, _, trainer = fit(Tokens, SIZES, max_epochs=1)
    expected = trainer.validate(module, loader, verbose=False)
    other = quiet(**looped(2, 3))
    assert other.validate(module, loader, verbose=False) == expected
    for one, another in zip(trainer.predict(module, loader), other.predict(module, loader), strict=True):
        assert torch.equal(one, another)


# Cuts, as they are told and kept


def test_cuts_go_from_any_schedule_to_any_other(tmp_path):
    """The same number of stages, so the cut is kept: on four devices, and on two with two stages each."""
    whole, path = fit(Tokens, SIZES), tmp_path / "saved.ckpt"
    one, other = looped(2, micro_batches=3), pipelined(4, micro_batches=3)
    for before, after in ((one, other), (other, looped(2, micro_batches=3, schedule="looped_bfs"))):
        trainer = fit(Tokens, SIZES, callbacks=[Save(path, 3)], **before)[2]
        module, _, again = resume(Tokens, path, **after)
        same_weights(whole[0], module, 1e-11)
        kept = [each.connected_strategy.portable.strategy_state() for each in (trainer, again)]
        assert kept[0] == kept[1]
        assert len(kept[0]["cut_before"]) == 3
    for after in ({}, looped(3, micro_batches=3)):
        same_weights(whole[0], resume(Tokens, path, **after)[0], 1e-11)


def test_the_table_and_the_report():
    strategy = PipelineStrategy(schedule="interleaved_1f1b", stages_per_device=3, micro_batches=4)
    trainer = quiet(strategy=strategy, devices=["cpu", "cpu"])
    tables: list[Any] = []

    class Look(Tokens):
        def on_train_end(self) -> None:
            assert strategy._run is not None
            network = strategy._run.network
            assert network.cut is not None
            tables.append((network.cut, network.options))

    trainer.fit(Look().double(), DataLoader(Batches([13]), batch_size=None))
    ((cut, options),) = tables
    told = table_of(cut, options, [1] * 6)
    assert len(told.splitlines()) == 1 + 6 + 3
    assert "with 4 of them under 'interleaved_1f1b' devices idle" in told
    assert sum(told.count(f"{device} ") for device in set(strategy.devices)) >= 8
    assert all(0 < peak <= sum(stage.memory for stage in cut.stages[at::2]) for at, peak in enumerate(cut.peaks))
    step = pipeline_step(strategy)
    assert step is not None
    assert step.devices == [str(device) for device in strategy.devices]
    assert (step.timeline.stages, len(step.timeline.spans)) == (6, 2 * 6 * 4)


def test_speeds_are_those_of_devices():
    options = CutOptions(
        devices=[torch.device("cpu")] * 4,
        schedule="looped_bfs",
        micro_batches=2,
        stages_per_device=2,
        speeds=[3, 1],
    )
    made = options.stage_devices()
    assert [device.slowness for device in made] == [1, 3, 1, 3]
    assert made[0].memory == made[2].memory


def test_wrong_options():
    with pytest.raises(ConfigurationError, match="cut_before must have 5 entries for 3 devices, 2 on each, but has 2"):
        quiet(**looped(3, cut_before=["net.2", "net.3"]))
    with pytest.raises(ConfigurationError, match="speeds must have 3 entries for 3 devices, 2 on each, but has 6"):
        quiet(**looped(3, speeds=[1] * 6))
    with pytest.raises(ConfigurationError, match=r"not enough for 40 stages. Give fewer devices or stages_per_device"):
        fit(Tied, SIZES, **looped(2, 20))
    with pytest.raises(ConfigurationError, match="one stage on each device"):
        PipelineStrategy(stages_per_device=2)


# Errors


class Hungry(Failing):
    """Runs out of memory where a micro-batch has more than two samples."""

    def __init__(self) -> None:
        super().__init__(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if len(batch["label"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss


def test_a_step_that_does_not_fit_is_done_in_more_micro_batches():
    def make() -> Failing:
        return Failing(-1)

    run = fit(Hungry, [13, 13, 5], callbacks=[OOMRecovery()], **looped(2, micro_batches=1))
    same_weights(fit(make, [13, 13, 5])[0], run[0], 1e-12)


@pytest.mark.parametrize(("stage", "phase", "threads"), [(1, "forward", None), (2, "backward", True)])
def test_errors_name_the_stage(stage, phase, threads):
    module = Failing(stage, phase=phase).double()
    cut = {"cut_before": ["net.2", "net.3", "net.4"], "micro_batches": 4, "threads": threads}
    options = looped(2, **cut)
    with pytest.raises(ValueError, match="injected") as raised:
        quiet(**options).fit(module, DataLoader(Batches([13, 13, 5]), batch_size=None))
    device = options["strategy"].devices[stage % 2]
    assert f"This was stage {stage} of the pipeline, on {device}." in raised.value.__notes__
