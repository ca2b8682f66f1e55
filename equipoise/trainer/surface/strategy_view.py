"""`trainer.strategy` as Lightning's objects expect it.

Every public name of Lightning's strategies has a meaning here or raises an error that names the way out. Names that
only our strategies have are forwarded to the strategy itself. No name of Lightning's is forwarded to a method of ours
that happens to have the same name and another meaning.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from equipoise.errors import ConfigurationError
from equipoise.trainer.checkpointing.file import remove_checkpoint, write_checkpoint
from equipoise.trainer.settings.precision import module_init_context
from equipoise.trainer.state.run_state import RunState
from equipoise.trainer.surface.state_fields import Reads, StateField

if TYPE_CHECKING:
    from equipoise.precision import Precision as RunPrecision
    from equipoise.strategies.strategy import Strategy
    from equipoise.trainer.loops.fit_loop import FitLoop
    from equipoise.trainer.runtime.run_data import RunData

__all__ = ["StrategyView"]

# Steps of Lightning's own loops, with what a program does instead.
_OF_LIGHTNINGS_LOOPS = {
    "configure_ddp": "A run prepares the module by itself.",
    "determine_ddp_device_ids": "Read `trainer.device_ids`.",
    "model_to_device": "A run places the module by itself. To place it before a run, call `module.to(device)`.",
    "register_strategies": "Pass an object: Trainer(strategy=MyStrategy()).",
    "set_world_ranks": "Read `trainer.global_rank` and `trainer.world_size`.",
    "setup": "A run sets the strategy up by itself.",
    "setup_distributed": "A run starts and connects its processes by itself.",
    "setup_environment": "A run starts and connects its processes by itself.",
    "setup_optimizers": "A run calls `configure_optimizers` by itself; read `trainer.optimizers`.",
    "setup_precision_plugin": "Pass Trainer(precision=...).",
}
# Hooks of Lightning's strategies that do nothing there, either.
_WITHOUT_EFFECT = {
    *(f"on_{stage}_{end}" for stage in ("train", "validation", "test", "predict") for end in ("start", "end")),
    "on_exception",
    "on_train_batch_start",
    "post_backward",
    "post_training_step",
    "pre_backward",
}
# Steps of the module, which Lightning's loops call by the strategy.
_STEPS = {"training_step", "validation_step", "test_step", "predict_step"}


class _Parts(Protocol):
    """What the view reads of the trainer's parts."""

    trainer: Any
    precision: "RunPrecision"
    fit_loop: "FitLoop"
    data: "RunData | None"

    @property
    def module(self) -> Any: ...

    def lightning_optimizers(self) -> list[LightningOptimizer]: ...


class StrategyView:
    """`trainer.strategy`: the strategy, and beside its own members those of Lightning's strategies."""

    lightning_restore_optimizer = True
    handles_gradient_accumulation = False
    restore_checkpoint_after_setup = False
    launcher = None

    def __init__(self, strategy: "Strategy", state: RunState, parts: _Parts) -> None:
        self._strategy = strategy
        self._parts = parts
        self.run_state = state

    # Only for names that are not defined here.
    def __getattr__(self, name: str) -> Any:
        if name in _OF_LIGHTNINGS_LOOPS:
            return partial(_refuse, name)
        if name in _WITHOUT_EFFECT:
            return _do_nothing
        if name in _STEPS:
            return partial(self._run_step, name)
        return getattr(self._strategy, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a property of the strategy, such as `shares`; other names are the view's own."""
        is_own = name.startswith("_") or hasattr(StrategyView, name)
        if not is_own and isinstance(getattr(type(self._strategy), name, None), property):
            setattr(self._strategy, name, value)
        else:
            object.__setattr__(self, name, value)

    def __reduce__(self) -> Any:
        """Pickle by the arguments: a view without attributes would look for them forever."""
        return StrategyView, (self._strategy, self.run_state, self._parts)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The strategy's class, so that `isinstance(trainer.strategy, SingleDeviceStrategy)` says what it should."""
        return type(self._strategy)

    # The module.

    def connect(self, model: Any) -> None:
        """Set what `trainer.lightning_module` returns, without a run; `trainer.save_checkpoint` can save it then.

        Args:
            model: A LightningModule.

        Raises:
            ConfigurationError: If it is none.
        """
        self._parts.trainer.connect_module(model)

    # Our strategies have a method of this name, with other arguments.
    def setup(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: Lightning's argument is the trainer, ours a module and a precision."""
        _refuse("setup")

    lightning_module = Reads[Any]("_parts.module", "The user's module.")

    model = lightning_module

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole state of the module."""
        return self._strategy.portable.module_state(self._connected_module("lightning_module_state_dict"))

    def load_model_state_dict(self, checkpoint: dict[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint into the module."""
        module = self._connected_module("load_model_state_dict")
        self._strategy.portable.load_module_state(module, checkpoint["state_dict"], strict=strict)

    module_state = Reads[Callable[..., dict[str, Any]]](
        "_strategy.portable.module_state", "Returns the whole state of a module."
    )
    load_module_state = Reads[Callable[..., None]](
        "_strategy.portable.load_module_state", "Loads a state that `module_state` has returned."
    )

    def _connected_module(self, name: str) -> Any:
        module = self._parts.module
        if module is None:
            raise ConfigurationError(
                f"`trainer.strategy.{name}` needs a module, but no run has brought one yet. Call"
                " `trainer.strategy.connect(module)` before."
            )
        return module

    def _run_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        step = getattr(self._connected_module(name), name)
        context = self._parts.precision.forward_context
        with nullcontext() if context is None else context():
            return step(*args, **kwargs)

    # Optimisation.

    optimizers = StateField[list[Optimizer]]()
    lr_scheduler_configs = StateField[list[Any]]()

    @property
    def _lightning_optimizers(self) -> list[Any]:
        return self._parts.lightning_optimizers()

    def backward(self, loss: Tensor, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        """`manual_backward` comes here."""
        self._parts.fit_loop.optimization.backward.manual(loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """`LightningOptimizer.step` comes here."""
        return self._parts.fit_loop.optimization.optimizer_step(optimizer, closure, **kwargs)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the whole state of an optimiser, as `self.optimizers()` or `trainer.optimizers` gives it."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        return self._strategy.portable.optimizer_state(optimizer)

    load_optimizer_state = Reads[Callable[..., None]](
        "_strategy.portable.load_optimizer_state", "Loads a state that `optimizer_state` has returned."
    )

    def load_optimizer_state_dict(self, checkpoint: dict[str, Any]) -> None:
        """Load the states of the optimisers of a checkpoint."""
        for optimizer, state in zip(self.run_state.optimizers, checkpoint["optimizer_states"], strict=True):
            self._strategy.portable.load_optimizer_state(optimizer, state)

    def block_backward_sync(self) -> AbstractContextManager[Any]:
        """Return a context that changes nothing: gradients are exchanged when they are needed."""
        return nullcontext()

    # Data, devices and precision.

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Copy a batch to a device, by the transfer hooks of the module or data module.

        Args:
            batch: A batch of a loader.
            device: The device. Default: the root device of this process.
            dataloader_idx: The number of the loader.
        """
        device = torch.device(device or self._strategy.root_device)
        data = self._parts.data
        # Without a run there is no module whose hooks could be called.
        if data is None:
            return move_data_to_device(batch, device)
        return data.make_transfer(dataloader_idx)(batch, device)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the loader as it is, as Lightning's strategies for CPU and GPU do."""
        return dataloader

    precision_plugin = Reads[Precision]("_parts.trainer.precision_plugin", "Lightning's plugin for the precision.")
    accelerator = Reads[Any]("_parts.trainer.accelerator", "Lightning's accelerator of the root device.")

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices of this process."""
        return list(self._strategy.devices)

    num_nodes = Reads[int]("run_state.num_nodes", "Number of machines.")

    @property
    def num_processes(self) -> int:
        """Number of processes on this machine."""
        return max(1, self._strategy.processes.world_size // self.run_state.num_nodes)

    @property
    def is_distributed(self) -> bool:
        """True if there are several processes."""
        return self._strategy.processes.world_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The arguments of a DistributedSampler for this process."""
        processes = self._strategy.processes.data
        return {"num_replicas": processes.world_size, "rank": processes.rank}

    strategy_name = Reads[str]("_strategy.name", "The name by which `Trainer(strategy=...)` finds the strategy.")

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context in which a module is made on the device and in the precision of the trainer."""
        return module_init_context(self._strategy, self._parts.precision, empty=bool(empty_init))

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        """Return a context that changes nothing: no strategy shards a module while it is made."""
        return nullcontext()

    # Processes.

    global_rank = Reads[int]("_strategy.processes.rank", "Number of this process among all.")
    local_rank = Reads[int]("_strategy.processes.local_rank", "Number of this process on its machine.")
    node_rank = Reads[int]("_strategy.processes.node_rank", "Number of this machine.")
    world_size = Reads[int]("_strategy.processes.world_size", "Number of processes.")
    is_global_zero = Reads[bool]("_strategy.processes.is_main", "True in the main process.")

    reduce = Reads[Callable[..., Any]]("_strategy.processes.reduce", "Reduces a value over all processes.")
    all_gather = Reads[Callable[..., Any]]("_strategy.processes.all_gather", "Gathers a value of every process.")
    gather_objects = Reads[Callable[..., list[Any]]](
        "_strategy.processes.gather_objects", "Returns the values of all processes, in the order of their ranks."
    )
    barrier = Reads[Callable[..., None]]("_strategy.processes.barrier", "Waits until every process has called it.")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of process `src`, in every process."""
        return self._strategy.processes.broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return True if all processes, or any of them, decided for it."""
        processes = self._strategy.processes
        if processes.world_size == 1:
            return decision
        vote = torch.tensor(int(decision), device=self._strategy.root_device)
        votes = int(processes.reduce(vote, reduce_op="sum"))
        if all:
            return votes == processes.world_size
        return votes > 0

    # Checkpoints.

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The CheckpointIO that was passed to the trainer, else one that writes and reads as the trainer does."""
        plugin = self.run_state.checkpoint_io
        if plugin is None:
            return _CheckpointFiles()
        return plugin

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: CheckpointIO | None) -> None:
        # Ours has no state, so None stands for it.
        if isinstance(plugin, _CheckpointFiles):
            plugin = None
        self.run_state.checkpoint_io = plugin

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint in the first process."""
        if self._strategy.processes.is_main:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; code in it runs only with `weights_only=False`."""
        from equipoise.trainer.checkpointing.reading import load_checkpoint

        return load_checkpoint(checkpoint_path, self.run_state.checkpoint_io, weights_only=weights_only)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint file or folder, in the first process, once the one that replaces it is complete."""
        if not self._strategy.processes.is_main:
            return
        remove = partial(self.checkpoint_io.remove_checkpoint, filepath)
        folders = self._strategy.portable.folders
        if folders is None:
            remove()
        else:
            folders.after_saving(remove)


class _CheckpointFiles(CheckpointIO):
    """Checkpoints as the trainer writes and reads them where no CheckpointIO was passed."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        write_checkpoint(checkpoint, path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        from equipoise.trainer.checkpointing.reading import load_checkpoint

        return load_checkpoint(path, weights_only=weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        remove_checkpoint(path)


def _do_nothing(*args: Any, **kwargs: Any) -> None: ...


def _refuse(name: str, *args: Any, **kwargs: Any) -> None:
    raise ConfigurationError(
        f"`trainer.strategy.{name}` is a step of Lightning's own loops, which do not run here."
        f" {_OF_LIGHTNINGS_LOOPS[name]}"
    )
