"""The interface of strategies: few members, neutral defaults, and copies without the state of a run."""

import pickle

import pytest
import torch
from torch import nn

from equipoise.precision import Precision
from equipoise.strategies.by_name import make_strategy, strategy_names
from equipoise.strategies.single_device import SingleDeviceStrategy
from equipoise.strategies.strategy import Strategy

# What every strategy can override or set. A duty that only one family of strategies has belongs to a collaborator:
# `processes`, `recovery`, `portable`, `Shard` or `StrategyOptimizer`.
MEMBERS = {
    *("name", "devices", "keeps_batches_whole"),
    # What a user checks a strategy by: against one device, and its replicas against one another.
    *("on_one_device", "replicated_tensors"),
    *("processes", "recovery", "portable"),
    *(
        "default_devices",
        "root_device",
        "connect",
        "check_module",
        "setup",
        "share_batch_statistics",
        "teardown",
    ),
    *("shard", "sync_buffers", "batch_to_devices"),
    *("forward_backward", "evaluate", "await_others", "backward", "collect_gradients"),
    *("setup_optimizer", "finish_gradients", "clip_gradients"),
}


def test_a_strategy_has_no_other_members_than_the_listed_ones() -> None:
    assert {name for name in dir(Strategy) if not name.startswith("_")} == MEMBERS
    assert len(MEMBERS) <= 26


def test_copies_of_a_strategy_have_its_options_alone() -> None:
    strategy = SingleDeviceStrategy()
    strategy.connect([torch.device("cpu")])
    strategy.setup(nn.Linear(1, 1), Precision("32-true"))
    copy = pickle.loads(pickle.dumps(strategy))
    assert copy.devices == strategy.devices
    assert copy._module is None
    assert strategy._module is not None


class WithRun(Strategy):
    """Has a method whose name is that of a field for the state of a run."""

    def _run(self) -> str:
        return "called"


def test_copies_of_a_subclass_keep_its_methods() -> None:
    copy = pickle.loads(pickle.dumps(WithRun()))
    assert copy._run() == "called"


@pytest.mark.whole_package
def test_built_in_strategies_are_found_by_their_names() -> None:
    built_in = ["single_device", "dp", "balanced", "ddp", "fsdp", "pipeline", "ensemble", "hogwild", "virtual"]
    assert strategy_names()[: len(built_in)] == built_in
    assert all(make_strategy(name).name == name for name in built_in)
