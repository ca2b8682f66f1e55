"""DDPStrategy: a process for each device, with its share of the data and a replica of the module."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.errors import ConfigurationError
from equipoise.parallel.batches.calibration import SimulatedDevice
from equipoise.parallel.batches.sampling import NO_BATCH
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.step_protocols import EvaluationStep, StepResult, TrainingStep
from equipoise.parallel.workers.preloading import preload
from equipoise.precision import Precision
from equipoise.strategies.ddp.gradient_exchange import (
    Engine,
    NativeEngine,
    check_engine_options,
    make_engine,
    trainable_parameters_differ,
)
from equipoise.strategies.ddp.loaders import count_of_rank, is_dealt, refuse_missing_batch, share_loader
from equipoise.strategies.ddp.metric_sync import synchronise_metrics
from equipoise.strategies.ddp.module_sync import check_same_modules, copy_from_first, share_batch_statistics
from equipoise.strategies.ddp.processes import ProcessGroup
from equipoise.strategies.ddp.recovery import CollectiveGuard
from equipoise.strategies.ddp.sample_shares import ProcessShares, check_shares, check_shares_count
from equipoise.strategies.strategy import Strategy, Transfer

__all__ = ["DDPStrategy"]

preload(__name__)
# Fields that belong to a run and stay in its process; all of them are None outside a run.
_RUN_FIELDS = ("_engine", "_guard", "_placed", "_restore_layers", "_restore_metrics")


class DDPStrategy(Strategy):
    """A process for each device; gradients are those of one device on all samples of a step.

    The trainer starts the processes, once and without running the script again. Under torchrun or Slurm, or inside a
    process group that exists already, each process joins instead. In training every process receives `batch_size`
    samples of a step. An epoch trains on each sample once, in a new random order. Evaluations compute what one device
    computes.

    Args:
        engine: "torch": torch's DistributedDataParallel. "native": our own reducer, which exchanges gradients once per
            window in every case. Manual optimisation always uses the native one. Default: "torch".
        shares: A number from 0 for each process, relative to one another, by which the samples of a step are shared
            out. "auto": measured in the first steps, so that all processes finish together and none exceeds its
            memory; then logged, to be pinned, and saved in checkpoints. Default: None, evenly.
        bucket_megabytes: The size of a bucket of gradients in MiB. Default: 25.
        find_unused_parameters: Allow steps that do not use all parameters. Default: False, where that is an error.
        static_graph: Promise that every step uses the same parameters in the same way. Default: False.
        gradient_as_bucket_view: Let gradients be views of the buckets, which saves their memory. Default: True.
        forward_sync_buffers: Copy rank 0's buffers to all processes before each forward (torch engine). Default: True.
        comm_hook: Function that torch's `register_comm_hook` accepts; for the torch engine. Default: None.
        timeout: Seconds for which processes wait for one another before a missing one counts as hung. Default: 1800.
        backend: Torch's backend. Default: "nccl" on CUDA, else "gloo".
        simulated: Processes, by rank, whose devices are to be slower or smaller than they are; for experiments.

    Raises:
        ConfigurationError: If an argument is out of range or does not fit the devices.

    Example:
        >>> from equipoise import DDPStrategy, Trainer
        >>> trainer = Trainer(strategy=DDPStrategy(engine="native"), devices=2, accelerator="cpu")  # doctest: +SKIP
    """

    name: ClassVar[str] = "ddp"
    joins_processes = True

    def __init__(
        self,
        *,
        engine: Literal["torch", "native"] = "torch",
        shares: Sequence[float] | Literal["auto"] | None = None,
        bucket_megabytes: float = 25.0,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        forward_sync_buffers: bool = True,
        comm_hook: Callable[..., Any] | None = None,
        timeout: float = 1800.0,
        backend: str | None = None,
        simulated: Mapping[int, SimulatedDevice] | None = None,
    ) -> None:
        if not timeout > 0:
            raise ConfigurationError(f"timeout is a positive number of seconds, not {timeout!r}.")
        check_engine_options(engine, bucket_megabytes, comm_hook)
        check_shares(shares)
        self.engine = engine
        self.timeout = timeout
        self.backend = backend
        self.simulated = dict(simulated or {})
        self._user_shares = shares
        self._engine_options: dict[str, Any] = {
            "bucket_cap_mb": bucket_megabytes,
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "forward_sync_buffers": forward_sync_buffers,
            "comm_hook": comm_hook,
        }
        # The processes, once the devices are known.
        self._group: ProcessGroup | None = None
        self._shares: ProcessShares | None = None
        self._engine: Engine | None = None
        # The parameters for which the engine was constructed, and whether each was trainable then.
        self._parameters: list[nn.Parameter] = []
        self._trainable: list[bool] = []
        # Set where steps may be repeated.
        self._guard: CollectiveGuard | None = None
        self._restore_metrics: Callable[[], None] | None = None
        self._restore_layers: Callable[[], None] | None = None

    # Where it runs.

    def default_devices(self, available: Sequence[torch.device]) -> Sequence[torch.device]:
        """Return all devices; see `Strategy.default_devices`."""
        return available

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Use one device for each process of this machine; see `Strategy.connect`."""
        group = ProcessGroup(
            devices, num_nodes, timeout=self.timeout, backend=self.backend, on_joined=self._use_device_of_process
        )
        self._group = group
        self.processes = group
        self._use_device_of_process()
        check_shares_count(self._user_shares, group.world_size)
        self._create_shares()

    def _use_device_of_process(self) -> None:
        assert self._group is not None
        self.devices = (self._group.device,)

    def _create_shares(self) -> None:
        """Create the shares for the rank of this process; measured ones are kept."""
        shares_before = self.shares
        self._shares = ProcessShares(
            self._user_shares, self.processes.world_size, self.processes.rank, self.root_device, self.simulated
        )
        self._shares.restore(shares_before)

    @property
    def shares(self) -> list[float] | None:
        """The shares in use; None where they are even, or not measured yet."""
        if self._shares is not None:
            return self._shares.shares
        if self._user_shares is None or isinstance(self._user_shares, str):
            return None
        return list(self._user_shares)

    def setup(self, module: nn.Module, precision: Precision) -> None:
        """Place the module, the same in all processes; see `Strategy.setup`."""
        super().setup(module, precision)
        if self.processes.world_size == 1:
            return
        check_same_modules(module)
        copy_from_first((*module.parameters(), *module.buffers()))
        self._restore_metrics = synchronise_metrics(module)
        # A process that the trainer has started did not have its rank in `connect`.
        self._create_shares()

    def share_batch_statistics(self, module: nn.Module) -> None:
        """Replace BatchNorm layers while the run lasts; see `Strategy.share_batch_statistics`."""
        if self.processes.world_size > 1:
            self._restore_layers = share_batch_statistics(module, self.root_device)

    def teardown(self, error: BaseException | None = None) -> None:
        """Release hooks and buckets; see `Strategy.teardown`."""
        # The fields are reset first, so that an error below leaves none of a run behind.
        engine = self._engine
        restores = (self._restore_metrics, self._restore_layers)
        self._engine = None
        self._restore_metrics = None
        self._restore_layers = None
        self._guard = None
        if self._group is not None:
            self._group.forget_failure()
        if engine is not None:
            engine.close()
        for restore in restores:
            if restore is not None:
                restore()
        super().teardown(error)

    # Data.

    def shard(self, loader: Any, stage: str) -> Any:
        """Return this process's part of a loader; see `Strategy.shard`."""
        if self.processes.world_size == 1:
            return loader
        # `seed_everything` sets this variable.
        seed = int(os.environ.get("PL_GLOBAL_SEED") or 0)
        training = stage == "train"
        sizes = None
        if training:
            assert self._shares is not None
            sizes = self._shares.sizes_for(loader)
        rank, world_size = self.processes.rank, self.processes.world_size
        return share_loader(loader, rank, world_size, seed, training=training, sizes=sizes)

    def part_of(self, batches: float, part: Any) -> float | None:
        """Return the number of batches that this process evaluates; see `Strategy.part_of`."""
        if self.processes.world_size == 1 or batches == float("inf"):
            return batches
        if is_dealt(part):
            return count_of_rank(int(batches), self.processes.rank, self.processes.world_size)
        return None

    def place(self, batch: Any, transfer: Transfer) -> Sequence[Any]:
        """Copy a batch to the device; see `Strategy.place`."""
        refuse_missing_batch(batch, shares_statistics=self._restore_layers is not None)
        if batch is NO_BATCH:
            return ()
        return (transfer(batch, self.devices[0]),)

    def begin_evaluation(self) -> None:
        """Copy the buffers of rank 0, which checkpoints hold, to all processes; see `Strategy.begin_evaluation`."""
        if self._group is not None and self._group.is_connected and self._placed is not None:
            copy_from_first(self._placed.buffers())

    # Computation.

    def forward_backward(self, step: TrainingStep, parts: Sequence[Any], last: bool) -> StepResult:
        """Compute the gradients of a batch, or join the exchange without one; see `Strategy.forward_backward`."""
        if self.processes.world_size == 1:
            return super().forward_backward(step, parts, last)
        assert self._shares is not None
        if self._guard is not None:
            step = self._guard.watched(step, training=True)
        if self._user_shares is not None or self.simulated:
            self._shares.begin_step(step.batch_idx, self.processes.gather_objects)
            step = self._shares.timed(step)
        return self._current_engine().forward_backward(step, parts, last)

    def arm_recovery(self) -> None:
        """Exchange gradients by the native engine from now on, which can repeat a step; see the interface."""
        if self._guard is None and self.processes.world_size > 1 and self._placed is not None:
            self._guard = CollectiveGuard(self._placed)

    def evaluate(self, step: EvaluationStep, parts: Sequence[Any]) -> Any:
        """Run an evaluation step; see `Strategy.evaluate`."""
        if self._guard is None:
            return step(parts[0])
        return self._guard.run(step, parts[0], training=False)

    def obstacle(self, *, training: bool, leave_out: bool) -> str:
        """Return why a step cannot be repeated: it communicates in its forward; see `Strategy.obstacle`."""
        if self._guard is None:
            return ""
        return self._guard.obstacle(training=training, leave_out=leave_out)

    def discard_gradients(self) -> bool:
        """Interrupt an exchange, which the next attempt completes; see `Strategy.discard_gradients`."""
        if self._shares is not None:
            self._shares.begin_again()
        return isinstance(self._engine, NativeEngine) and self._engine.break_off()

    def _current_engine(self) -> Engine:
        """Return the engine, another one if parameters were frozen or unfrozen since the last step."""
        module = self._placed
        assert module is not None
        if self._engine is not None and trainable_parameters_differ(module, self._parameters, self._trainable):
            self._engine.close()
            self._engine = None
        if self._engine is None:
            self._parameters = list(module.parameters())
            self._trainable = [parameter.requires_grad for parameter in self._parameters]
            repeats = self._guard is not None
            options = self._engine_options
            self._engine = make_engine(self.engine, module, self.root_device, options, repeats_steps=repeats)
        return self._engine

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run one backward; see `Strategy.backward`."""
        if self.processes.world_size > 1 and not getattr(self._placed, "automatic_optimization", True):
            engine = self._current_engine()
            # The other engine is for automatic optimisation.
            assert isinstance(engine, NativeEngine)
            engine.manual_backward(loss, *args, **kwargs)
        else:
            super().backward(loss, *args, **kwargs)

    def collect_gradients(self) -> None:
        """Complete the exchange of a window's last backward; see `Strategy.collect_gradients`."""
        if self._engine is not None:
            self._engine.collect()

    def finish_gradients(self, window: AccumulationWindow, optimizer: Optimizer) -> bool | None:
        """Turn the gradients of a window into their weighted mean over all processes; see the interface."""
        if self.processes.world_size == 1:
            return super().finish_gradients(window, optimizer)
        assert self._engine is not None
        return self._engine.finish(window, optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the measured shares."""
        if self._user_shares == "auto" and self.shares is not None:
            return {"shares": self.shares}
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore measured shares, if they are for as many processes; otherwise they are measured."""
        if self._shares is not None:
            self._shares.restore(state.get("shares"))

    def __getstate__(self) -> Mapping[str, Any]:
        """Return the options, and nothing that belongs to a run."""
        return {**vars(self), **dict.fromkeys(_RUN_FIELDS)}
