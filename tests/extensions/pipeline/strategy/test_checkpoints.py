"""Checkpoints of a pipeline are everybody's: other stages, other cuts, one device, and the other way round."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from equipoise import ConfigurationError, OOMRecovery, PipelineStrategy
from equipoise.extensions.pipeline.execution.placement import Placement
from equipoise.extensions.pipeline.graph.call_structure import CallStructure
from equipoise.extensions.pipeline.network import StagedNetwork
from equipoise.extensions.pipeline.planning.cut import CutOptions
from equipoise.extensions.report.collect_record import pipeline_step
from tests.extensions.pipeline.strategy.networks import dropping
from tests.support.batches import Batches
from tests.support.equality import assert_equal
from tests.support.networks.layers import WIDTH, layers
from tests.support.one_device import Run, on_one_device
from tests.support.pipelines import EachStep, Tokens, assert_same, fit, pipelined, quiet

pytestmark = pytest.mark.filterwarnings("ignore:The (dataloader|'train_dataloader')")


def moved(stages: int, **options: Any) -> dict[str, Any]:
    return pipelined(stages, micro_batches=3, **options)


def interleaved(stages: int, **options: Any) -> dict[str, Any]:
    return moved(stages, **{"schedule": "interleaved_1f1b", **options})


def state_of(run: Run) -> Any:
    return run.trainer.connected_strategy.portable.strategy_state()


@pytest.mark.quick_cases(3)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("before", "after", "accumulate"),
    [
        ({}, moved(3), 1),
        (moved(2), {}, 2),
        (moved(2), moved(4), 1),
        (moved(3), moved(3, cut_before=["net.blocks.1", "net.output"]), 2),
        (interleaved(2), interleaved(3), 1),
    ],
    ids=["to stages", "to one device", "to more stages", "to other cuts", "to more stages on each device"],
)
def test_a_run_goes_on_elsewhere_in_the_midst_of_an_epoch(before, after, accumulate, tmp_path):
    """And in the midst of a window."""
    options = {"accumulate_grad_batches": accumulate}
    fit(Tokens, callbacks=[EachStep(tmp_path)], **options, **before)
    again = fit(Tokens, ckpt_path=tmp_path / "step=4.ckpt", **options, **after)
    assert_equal(on_one_device(Tokens, **options).module, again.module, 1e-11)


@pytest.mark.thorough
def test_cuts_go_from_any_schedule_to_any_other(tmp_path):
    """The same number of stages, so the cut is kept: on four devices, and on two with two stages each."""
    for before, after in ((interleaved(2), moved(4)), (moved(4), interleaved(2, schedule="looped_bfs"))):
        run = fit(Tokens, callbacks=[EachStep(tmp_path)], **before)
        again = fit(Tokens, ckpt_path=tmp_path / "step=8.ckpt", **after)
        assert_equal(on_one_device(Tokens).module, again.module, 1e-11)
        assert state_of(run) == state_of(again)
        assert len(state_of(run)["cut_before"]) == 3


def test_a_run_goes_on_with_the_same_cut_to_the_bit(tmp_path):
    """With dropout, whose masks depend on the cut; the cut is the checkpoint's, though it would be measured anew."""
    cut = ["net.2", "net.4.1"]
    whole = fit(dropping, callbacks=[EachStep(tmp_path)], **moved(3, cut_before=cut))
    again = fit(dropping, ckpt_path=tmp_path / "step=8.ckpt", **moved(3))
    assert state_of(again)["cut_before"] == cut
    assert_equal(whole.module, again.module)


@pytest.mark.thorough
def test_a_cut_is_kept_for_the_next_run_and_given_up_where_it_does_not_fit():
    """Functions between layers have names, too."""
    loader = DataLoader(Batches([4]), batch_size=None)

    def after_a_fit(module: Tokens, state: dict[str, Any]) -> dict[str, Any]:
        strategy = PipelineStrategy(micro_batches=2)
        strategy.portable.load_strategy_state(state)
        quiet(strategy=strategy, devices=["cpu", "cpu"]).fit(module.double(), loader)
        return strategy.portable.strategy_state()

    strategy = PipelineStrategy(micro_batches=2)
    quiet(strategy=strategy, devices=["cpu", "cpu"]).validate(Tokens().double(), loader, verbose=False)
    state = strategy.portable.strategy_state()
    assert after_a_fit(Tokens(by_self=True), state) == state
    for strange in ({"cut_before": 3}, {"cut_before": ["a"], "calls": ["b"]}, {}):
        assert after_a_fit(Tokens(), strange)["cut_before"]


def test_the_table_of_the_cut_and_the_recorded_step(caplog):
    plan = pipelined(2, schedule="interleaved_1f1b", stages_per_device=3, micro_batches=4)
    with caplog.at_level("INFO"):
        strategy = fit(Tokens, (13,), max_epochs=1, **plan).trainer.connected_strategy
    (told,) = (record.message for record in caplog.records if "is cut into stages" in record.message)
    assert len(told.splitlines()) == 1 + 1 + 6 + 2
    assert "with 4 of them under 'interleaved_1f1b' devices idle" in told
    assert sum(told.count(f"{device} ") for device in set(strategy.devices)) >= 8
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


# Where things lie. There is one kind of device here that computes, so what would be moved is noted.


class Moves(list[tuple[str, torch.device]]):
    """Notes what is moved where."""

    def __init__(self, module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        names = {id(tensor): name for name, tensor in module.state_dict(keep_vars=True).items()}
        monkeypatch.setattr(
            "equipoise.extensions.pipeline.execution.placement.move",
            lambda tensor, device: self.append((names[id(tensor)], device)),
        )


CPU, OTHER = torch.device("cpu"), torch.device("cuda", 3)


def test_every_part_goes_to_the_device_of_its_stage(monkeypatch):
    module = nn.ModuleDict(
        {"net": nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)), "head": nn.Linear(3, 3)}
    )
    moves = Moves(module, monkeypatch)
    options = CutOptions(devices=[OTHER, CPU], schedule="1f1b", micro_batches=1)
    staged = StagedNetwork(module, options, ["net.1"], threads=None, training=False)
    staged.cover()
    staged.pipeline("net", CallStructure((torch.rand(4, 3),), {}))
    staged.release()
    assert dict(moves) == {name: OTHER if name.startswith("net.0") else CPU for name in module.state_dict()}


def test_a_layer_before_the_network_is_placed_when_it_is_called(monkeypatch):
    module = nn.ModuleDict({"net": nn.Linear(9, 9), "head": nn.Linear(3, 3)})
    moves = Moves(module, monkeypatch)
    placement = Placement(module, [CPU, OTHER])
    placement.place_outside(module["net"])
    assert moves == []
    module["head"](torch.rand(2, 3))
    assert moves == [("head.weight", OTHER), ("head.bias", OTHER)]
    placement.stop_waiting()
    module["head"](torch.rand(2, 3))
    assert len(moves) == 2


def test_the_optimizers_state_follows_the_parameters():
    """It was loaded, or made, before they were placed."""
    placed, resting = nn.Linear(3, 3, device="meta"), nn.Linear(3, 3)
    module = nn.ModuleList([placed, resting])
    optimizer = torch.optim.Adam(module.parameters())
    for parameter in module.parameters():
        state = {key: torch.zeros(parameter.shape) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(3.0), **state}
    placement = Placement(module, [CPU, OTHER])
    placement.settle_optimizer(optimizer)
    assert all(value.device == CPU for state in optimizer.state.values() for value in state.values())
    placement.placed = True
    placement.settle_optimizer(optimizer)
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].device == state["exp_avg_sq"].device == parameter.device
        assert state["step"].device == CPU
    with pytest.raises(ConfigurationError, match="LBFGS computes with all parameters as one vector"):
        placement.settle_optimizer(torch.optim.LBFGS(module.parameters()))


def normed() -> Any:
    return layers(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def test_a_recovery_from_the_first_step_on_notes_buffers():
    """Before the network is placed."""
    plan = pipelined(2, micro_batches=2)
    assert_same(fit(normed, [12, 8], **plan), fit(normed, [12, 8], callbacks=[OOMRecovery()], **plan), 0.0)
