"""`trainer.strategy` answers to every name of Lightning's strategies, by a meaning or by a clear error."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import strategies
from lightning.pytorch.plugins import TorchCheckpointIO

from equipoise import SingleDeviceStrategy, Trainer
from equipoise.errors import ConfigurationTypeError
from equipoise.trainer.surface.strategy_view import _OF_LIGHTNINGS_LOOPS, StrategyView
from tests.support.trainer_runs import Small, Validated, loader, refuses, trainer

LIGHTNINGS = (strategies.Strategy, strategies.SingleDeviceStrategy, strategies.ParallelStrategy, strategies.DDPStrategy)
NAMES = {name for kind in LIGHTNINGS for name in dir(kind) if not name.startswith("_")}
# The same name, the same arguments, the same meaning on both sides.
SHARED = {"root_device", "teardown"}


def test_trainer_strategy_has_every_public_name_of_lightnings_strategies() -> None:
    view = trainer().strategy
    for name in NAMES - {"process_group_backend"}:
        getattr(view, name)


def test_no_name_reaches_a_method_of_another_meaning() -> None:
    ours = {name for name in NAMES - SHARED if hasattr(SingleDeviceStrategy, name)}
    assert not ours - vars(StrategyView).keys(), "These are our strategy's, not Lightning's."


def test_steps_of_lightnings_loops_are_refused() -> None:
    view = trainer().strategy
    for name in _OF_LIGHTNINGS_LOOPS:
        refuses(lambda name=name: getattr(view, name)(None), f"`trainer.strategy.{name}`", "Lightning's own loops")


def test_hooks_of_lightnings_strategies_do_nothing() -> None:
    view = trainer().strategy
    assert view.on_train_start() is None
    assert view.on_train_batch_start("batch", 0) is None
    assert view.pre_backward(torch.zeros(())) is None


# The module


@pytest.mark.parametrize("cls", [L.Trainer, Trainer], ids=["lightning", "ours"])
def test_a_model_that_needs_no_training_is_connected_and_saved(cls: Any, tmp_path: Path) -> None:
    """As libraries of baseline models do it."""
    run = trainer(cls)
    run.strategy.connect(module := Small())
    assert run.lightning_module is module
    assert run.model is module
    run.save_checkpoint(tmp_path / "x.ckpt")
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert torch.equal(saved["state_dict"]["layer.weight"], module.layer.weight)
    assert len(run.predict(module, loader())) == 3


def test_connecting_the_module_of_the_last_run_keeps_its_state() -> None:
    run = trainer()
    run.fit(module := Small(), loader())
    run.strategy.connect(module)
    assert (run.global_step, run.train_dataloader is not None) == (3, True)


def test_only_a_module_can_be_connected() -> None:
    refuses(
        lambda: trainer().strategy.connect(torch.nn.Linear(2, 1)),
        "takes a LightningModule",
        error=ConfigurationTypeError,
    )
    refuses(trainer().strategy.lightning_module_state_dict, "needs a module", "`trainer.strategy.connect(module)`")


def test_weights_are_given_and_loaded_by_the_strategy() -> None:
    run = trainer()
    run.strategy.connect(module := Small())
    state = {name: value.clone() for name, value in run.strategy.lightning_module_state_dict().items()}
    module.layer.weight.data.zero_()
    run.strategy.load_model_state_dict({"state_dict": state})
    assert torch.equal(module.layer.weight, state["layer.weight"])


class Asking(Validated):
    """Uses the strategy in its step, as programs do that call other loops' methods."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        strategy = self.trainer.strategy
        moved = strategy.batch_to_device([torch.ones(2)], dataloader_idx=0)
        assert moved[0].device == strategy.root_device
        with strategy.block_backward_sync():
            strategy.validation_step(batch, batch_idx)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("cls", [L.Trainer, Trainer], ids=["lightning", "ours"])
def test_a_step_may_use_the_strategy(cls: Any) -> None:
    options = {} if cls is Trainer else {"strategy": _with_blocks()}
    run = trainer(cls, limit_val_batches=0, **options)
    run.fit(module := Asking(), loader())
    assert module.ran == ["validation", "training"] * 3


def _with_blocks() -> Any:
    """Return Lightning's strategy for one device, with the method that its strategies for several have."""
    kind = type("Strategy", (strategies.SingleDeviceStrategy,), {"block_backward_sync": lambda self: nullcontext()})
    return kind("cpu")


def test_states_of_optimizers_are_given_and_loaded_by_the_strategy() -> None:
    run = trainer()
    module = Small()
    module.configure_optimizers = lambda: torch.optim.Adam(module.parameters())
    run.fit(module, loader())
    (optimizer,) = run.optimizers
    state = run.strategy.optimizer_state(run.lightning_optimizers[0])
    assert state["state"][0]["step"] == 3
    optimizer.state.clear()
    run.strategy.load_optimizer_state_dict({"optimizer_states": [state]})
    assert optimizer.state_dict()["state"][0]["step"] == 3
    run.strategy.optimizers = []
    assert run.optimizers == []


# Devices and processes


def test_devices_and_processes_of_the_strategy_in_one_process() -> None:
    view = trainer().strategy
    assert view.parallel_devices == [torch.device("cpu")]
    assert (view.num_nodes, view.num_processes, view.is_distributed) == (1, 1, False)
    assert view.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
    assert view.broadcast(obj="value") == "value"
    assert view.strategy_name == "single_device"
    with trainer(precision="64-true").strategy.tensor_init_context():
        assert torch.nn.Linear(1, 1).weight.dtype == torch.float64


# Checkpoints


def test_checkpoints_are_written_and_removed_by_the_strategy(tmp_path: Path) -> None:
    run = trainer()
    view = run.strategy
    view.save_checkpoint({"state_dict": {"x": torch.ones(1)}}, tmp_path / "x.ckpt")
    assert torch.equal(view.load_checkpoint(tmp_path / "x.ckpt")["state_dict"]["x"], torch.ones(1))
    view.checkpoint_io.remove_checkpoint(tmp_path / "x.ckpt")
    assert list(tmp_path.iterdir()) == []
    view.checkpoint_io = plugin = TorchCheckpointIO()
    assert run.checkpoint_io is plugin
    assert view.checkpoint_io is plugin
