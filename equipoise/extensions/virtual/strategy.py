"""VirtualDevicesStrategy: the same weights to the bit, whatever the number of devices."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from equipoise.errors import ConfigurationError
from equipoise.extensions.virtual.parts.evaluation_rounds import EvaluationRounds
from equipoise.extensions.virtual.parts.metric_exchange import MetricExchange
from equipoise.extensions.virtual.parts.part_batches import Part, Parts, evaluation_loader, part_loader, seed_generators
from equipoise.extensions.virtual.parts.part_modules import PartModules
from equipoise.extensions.virtual.parts.part_shares import PartShares
from equipoise.extensions.virtual.parts.part_steps import PartSteps
from equipoise.parallel.batches.sampling import seed_of_order
from equipoise.parallel.batches.shard import Shard
from equipoise.parallel.batches.splitting import Splitter
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.communication.rank import find_rank
from equipoise.parallel.communication.tensor_copies import copy_from_first
from equipoise.parallel.divergence.replicated import Replicated, whole_module
from equipoise.parallel.replicas.replicable import check_replicable
from equipoise.parallel.snapshot.random_state import isolated
from equipoise.parallel.step_protocols import EvaluationStep, StepResult, TrainingStep
from equipoise.parallel.workers.preloading import preload
from equipoise.precision import Precision
from equipoise.strategies.distributed.loaders import has_distributed_sampler
from equipoise.strategies.distributed.module_sync import check_same_modules
from equipoise.strategies.distributed.process_strategy import ProcessRun, ProcessStrategy
from equipoise.strategies.distributed.window_totals import average_gradients
from equipoise.strategies.partial_gradients import refuse_partial_gradients
from equipoise.strategies.portable_state import LoadState, PortableState, SaveState
from equipoise.strategies.recovery_support import RecoverySupport
from equipoise.strategies.strategy import Strategy, Transfer
from equipoise.validation import check_whole

__all__ = ["VirtualDevicesStrategy"]

preload(__name__)


class _NoRecovery(RecoverySupport):
    """Leaves an error of memory as it is."""

    def why_not(self, *, training: bool, leave_out: bool) -> str:
        """Return how a step takes less memory."""
        return "strategy='virtual' computes a step in parts already. Raise its `count`, so that parts are smaller."


_NO_RECOVERY = _NoRecovery()


class _WholeWindow(PortableState):
    """Full states, with the gradients of a window that all processes have.

    Args:
        is_open: Whether a part of any process has a weight in the window.
        own_state: See `PortableState`.
        load_own_state: See `PortableState`.
    """

    def __init__(self, is_open: bool, own_state: SaveState, load_own_state: LoadState) -> None:
        super().__init__(own_state, load_own_state)
        self._is_open = is_open

    def gradients(self, optimizers: Sequence[Optimizer], *, window_is_open: bool) -> list[Tensor | None]:
        """Return the gradients of an unfinished window; see `PortableState`."""
        return super().gradients(optimizers, window_is_open=self._is_open)


class _PlacedParts(tuple[Any]):
    """The batch of the first part, which hooks receive, and all parts of this process.

    Args:
        parts: The parts, on the device.
    """

    parts: Sequence[Part]

    def __new__(cls, parts: Sequence[Part]) -> "_PlacedParts":
        """Return the batch with all parts."""
        placed = super().__new__(cls, (parts[0].batch,))
        placed.parts = parts
        return placed


class VirtualDevicesStrategy(ProcessStrategy):
    """A run whose weights do not depend on the number of devices, to the bit.

    Each step's batch is divided into the same parts, one for each virtual device. A real device computes several of
    them, one after another. The order of samples depends on the seed and the epoch alone, each part draws random
    numbers of its own, and gradients are added in the order of a fixed tree. So a run on one device, one on three
    processes and one that continues on another number of them end with the same weights.

    The batch size of the loader is that of the whole step. Layers that couple samples, such as BatchNorm, compute over
    a part; their statistics are those of the first part, as DistributedDataParallel has those of its first process.

    Args:
        count: The number of virtual devices, at least as many as there are real ones. Default: 8.
        shares: A number for each device, relative to one another, by which the virtual devices are shared out; each
            device has at least one. They change nothing in the results. With `one_process` they may be set at any time,
            also while training, or be "auto": measured in the first steps, so that all devices finish together.
            Default: None, evenly.
        one_process: Whether one process computes on all devices, with a copy of the module on each, as under
            `strategy="dp"`. Default: False, a process for each device.
        threads: The number of threads with which a process computes on a CPU. Matrix products of another number of
            threads differ in their last bits. Default: 1.
        timeout: Seconds for which processes wait for one another before a missing one counts as hung. Default: 1800.
        backend: Torch's backend. Default: "nccl" on CUDA, else "gloo".

    Attributes:
        step_batches: The batches of the parts that this process computed in the last training step.

    Raises:
        ConfigurationError: If an argument is out of range or does not fit the devices.

    Source: the idea of parts that keep their identity is that of EasyScale (Li et al., SC 2023).

    Example:
        >>> from equipoise import Trainer, VirtualDevicesStrategy
        >>> trainer = Trainer(strategy=VirtualDevicesStrategy(count=4), devices=["cpu"], logger=False)
    """

    name: ClassVar[str] = "virtual"
    has_one_state: ClassVar[bool] = True
    step_batches: Sequence[Any] = ()

    # State of a run, once it is set up.
    _metrics: MetricExchange | None = None
    _threads_before: int | None = None
    _modules: PartModules | None = None
    _allow_gradients: Callable[[], None] | None = None

    def __init__(
        self,
        *,
        count: int = 8,
        shares: Sequence[float] | Literal["auto"] | None = None,
        one_process: bool = False,
        threads: int = 1,
        timeout: float = 1800.0,
        backend: str | None = None,
    ) -> None:
        super().__init__(timeout=timeout, backend=backend)
        check_whole("count", count, least=1)
        check_whole("threads", threads, least=1)
        # Options, as the user gave them.
        self.count = count
        self.one_process = one_process
        if not isinstance(one_process, bool):
            raise ConfigurationError(f"one_process must be True or False, not {one_process!r}.")
        if shares == "auto" and not one_process:
            raise ConfigurationError("shares='auto' measures the devices of one process: give one_process=True, too.")
        self._part_shares = PartShares(count, shares)
        self.threads = threads
        # The weights of the parts of the present window, of all processes, in their order.
        self._weights: list[int | float] = []
        # Whether gradients of a window wait for more.
        self._window_is_open = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the options. State of a run stays in its process."""
        state = super().__getstate__()
        for name in (
            "_steps",
            "_rounds",
            "_metrics",
            "_modules",
            "_threads_before",
            "_allow_gradients",
            "step_batches",
        ):
            state.pop(name, None)
        return state

    # Where it runs.

    def on_one_device(self) -> Strategy:
        """Return a strategy that computes the same bits; see `Strategy.on_one_device`."""
        return VirtualDevicesStrategy(count=self.count, threads=self.threads)

    def default_devices(self, available: Sequence[torch.device]) -> Sequence[torch.device]:
        """Return as many devices as can have a part; see `Strategy.default_devices`."""
        return available[: self.count]

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Use one device for each process of this machine, or all in this process; see `Strategy.connect`."""
        if self.one_process:
            rank = find_rank()
            if rank is not None and rank.world_size > 1:
                raise ConfigurationError(
                    f"one_process=True computes on all devices in one process, but a launcher has started"
                    f" {rank.world_size}. Start one, or leave `one_process` out."
                )
            super().connect(devices[:1], num_nodes)
            self.devices = tuple(devices)
        else:
            super().connect(devices, num_nodes)
        self._part_shares.connect(self.processes.world_size * len(self.devices))

    @property
    def shares(self) -> Sequence[float] | None:
        """The numbers by which the virtual devices are shared out; None: evenly, or not measured yet."""
        return self._part_shares.numbers

    @shares.setter
    def shares(self, shares: Any) -> None:
        if self._module is not None and not self.one_process:
            raise ConfigurationError(
                "The loaders of several processes read ahead for the shares at the beginning of a run. Set `shares`"
                " between two runs, or take VirtualDevicesStrategy(one_process=True)."
            )
        self._part_shares.use(shares)

    def measure_again(self) -> None:
        """Measure the devices in the next steps, for instance because other programs use them now.

        Raises:
            ConfigurationError: If there is no run, or shares are not "auto".
        """
        if not self._part_shares.measures or self._modules is None:
            raise ConfigurationError("Devices are measured in a run, if shares are 'auto'.")
        self._modules.measure()

    def check_module(self, module: nn.Module, *, training: bool) -> None:
        """Refuse modules that optimise by hand, or that cannot be copied; see `Strategy.check_module`."""
        if len(self.devices) > 1:
            check_replicable(module, self.devices)
        # The first call of a run in its process: layers that the module creates in it are initialised alike.
        if self._threads_before is None:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(self.threads)
        if training and not getattr(module, "automatic_optimization", True):
            raise ConfigurationError(
                f"{type(module).__name__} optimises by hand (automatic_optimization=False), but under"
                f" strategy={self.name!r} a process runs `training_step` once for each of its virtual devices, and each"
                " of them would step the optimisers. Take automatic optimisation, or strategy='ddp'."
            )

    def setup(self, module: nn.Module, precision: Precision) -> None:
        """Place the module, the same in all processes; see `Strategy.setup`."""
        super().setup(module, precision)
        processes = self.processes
        splitter = Splitter(module)
        modules = PartModules(module, self.devices)
        self._modules = modules
        if self._part_shares.measures and self.shares is None:
            modules.measure()
        metrics = MetricExchange(module, modules)
        self._metrics = metrics
        size_of = splitter.size if splitter.asks_module else None
        self._allow_gradients = refuse_partial_gradients(module, self.name)
        ranges = self._ranges_of_processes()
        self._steps = PartSteps(module, modules, size_of, self._weights, self.count, ranges, processes, metrics)
        self._rounds = EvaluationRounds(module, processes, self.root_device, metrics)

    def share_batch_statistics(self, module: nn.Module) -> None:
        """Refuse statistics over all processes; see `Strategy.share_batch_statistics`."""
        raise ConfigurationError(
            "sync_batchnorm=True computes over the samples of all processes at the same time, but under"
            " strategy='virtual' a process computes its virtual devices one after another. Leave it out: statistics are"
            " those of a part."
        )

    @property
    def recovery(self) -> RecoverySupport:
        """Refuses to repeat a step, whose parts can be smaller; see `Strategy.recovery`."""
        return _NO_RECOVERY

    def _begin_run(self, module: nn.Module) -> ProcessRun:
        check_same_modules(module)
        copy_from_first((*module.parameters(), *module.buffers()))
        return ProcessRun()

    def replicated_tensors(self) -> Replicated:
        """Return the parameters; buffers change in the process of the first part. See the interface."""
        if self._run is None:
            return super().replicated_tensors()
        assert self._module is not None
        return Replicated(whole_module(self._module))

    def teardown(self, error: BaseException | None = None) -> None:
        """Use as many threads as before; see `Strategy.teardown`."""
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None
        self.step_batches = ()
        if self._allow_gradients is not None:
            self._allow_gradients()
            self._allow_gradients = None
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        # Both hold the module.
        vars(self).pop("_rounds", None)
        vars(self).pop("_steps", None)
        self._modules = None
        super().teardown(error)

    def _ranges_of_processes(self) -> list[tuple[int, int]]:
        """Return the first part of each process and the part after its last one, by rank."""
        if self.one_process:
            return [(0, self.count)]
        return self._part_shares.ranges()

    # Data.

    def shard(self, loader: Any, stage: str) -> Shard:
        """Return this process's part of a loader; see `Strategy.shard`."""
        processes = self.processes
        rank = processes.rank
        if stage == "train":
            part = part_loader(loader, self.count, self._ranges_of_processes(), rank, seed_of_order())
            return Shard(part, rank, processes.world_size, in_turn=False)
        is_known = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if not is_known or loader.batch_sampler is None or has_distributed_sampler(loader):
            if processes.world_size == 1:
                return super().shard(loader, stage)
            raise ConfigurationError(
                "strategy='virtual' deals the batches of an evaluation to several processes, so each loader must be a"
                " DataLoader over a data set of known length, with a batch size and no DistributedSampler. Take such a"
                " loader, or one device."
            )
        return Shard(evaluation_loader(loader, rank, processes.world_size), rank, processes.world_size)

    def batch_to_devices(self, batch: Any, transfer: Transfer) -> Sequence[Any]:
        """Copy a batch, or the parts of a step; see `Strategy.batch_to_devices`."""
        if isinstance(batch, Parts):
            # Hooks of the transfer may draw, too.
            with isolated():
                return self._placed_parts(batch, transfer)
        return super().batch_to_devices(batch, self._rounds.drawing_alike(transfer))

    def _placed_parts(self, parts: Parts, transfer: Transfer) -> _PlacedParts:
        # Shares of devices may have changed since the last step, those of processes not.
        places = [0] * len(parts)
        if self.one_process:
            places = self._part_shares.places()
        placed = []
        # A step with few samples may have fewer parts.
        for part, place in zip(parts, places, strict=False):
            seed_generators("transfer", *part.key)
            placed.append(part._replace(batch=transfer(part.batch, self.devices[place]), place=place))
        return _PlacedParts(placed)

    # Computation.

    def forward_backward(self, step: TrainingStep, parts: Sequence[Any], last: bool) -> StepResult:
        """Compute the parts of this process, one after another, and add the gradients of all.

        Raises:
            ConfigurationError: If several training loaders are read together.
        """
        if parts and not isinstance(parts, _PlacedParts):
            raise ConfigurationError(
                "strategy='virtual' divides the batches of one training loader, but several are read together. Take one"
                " loader over a data set that returns what belongs together, or strategy='ddp'."
            )
        own_parts = parts.parts if isinstance(parts, _PlacedParts) else ()
        self.step_batches = [part.batch for part in own_parts]
        result = self._steps.run(step, own_parts)
        self._window_is_open = True
        self._use_measured_shares()
        return result

    def _use_measured_shares(self) -> None:
        assert self._modules is not None
        shares = self._modules.measured_shares(self.count)
        if shares is not None:
            self._part_shares.use(shares)
            devices = ", ".join(map(str, self.devices))
            rank_zero_info(f"Measured shares of {devices}: shares={shares} pins them.")

    def finish_gradients(self, window: AccumulationWindow, optimizer: Optimizer) -> bool | None:
        """Turn the summed gradients of a window into their weighted mean; see `Strategy.finish_gradients`."""
        self._window_is_open = False
        return average_gradients(window, optimizer, sum(self._weights), 1)

    @property
    def portable(self) -> PortableState:
        """Full states, and the weights of an open window; see `Strategy.portable`."""
        is_open = self._window_is_open and sum(self._weights) != 0
        return _WholeWindow(is_open, self._own_state, self._load_own_state)

    def _own_state(self) -> dict[str, Any]:
        # Those of the last window have done their work.
        weights: list[int | float] = []
        if self._window_is_open:
            weights = list(self._weights)
        return {"virtual_devices": self.count, "seed": seed_of_order(), "weights": weights}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        # Other strategies have states of their own.
        count = state.get("virtual_devices", self.count)
        if count != self.count:
            raise ConfigurationError(
                f"The checkpoint is of a run with {count} virtual devices, and this one has"
                f" VirtualDevicesStrategy(count={self.count}), which would continue with other numbers. Take"
                f" count={count}, or load the weights alone for another run."
            )
        seed = state.get("seed", seed_of_order())
        if seed != seed_of_order():
            raise ConfigurationError(
                f"The checkpoint is of a run with the seed {seed}, from which the order of samples and the numbers that"
                f" parts draw follow, and this one has {seed_of_order()}. Call `seed_everything({seed})` before, or"
                " load the weights alone for another run."
            )
        self._weights[:] = state.get("weights", ())
        self._window_is_open = bool(self._weights)

    def evaluate(self, step: EvaluationStep, parts: Sequence[Any]) -> Any:
        """Run an evaluation step, and log what all processes log; see `Strategy.evaluate`."""
        return self._rounds.run(step, parts[0])

    def await_others(self, step: EvaluationStep) -> None:
        """Log what other processes still evaluate; see `Strategy.await_others`."""
        self._rounds.finish(step)
