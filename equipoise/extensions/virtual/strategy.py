"""VirtualDevicesStrategy: the same weights to the bit, whatever the number of devices."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from equipoise.errors import ConfigurationError
from equipoise.extensions.virtual.evaluation_rounds import EvaluationRounds
from equipoise.extensions.virtual.metric_exchange import MetricExchange
from equipoise.extensions.virtual.part_steps import PartSteps
from equipoise.interop.torch.loaders import with_sampler
from equipoise.parallel.batches.sampling import NO_BATCH, SameOrder, seed_of_order
from equipoise.parallel.batches.shard import Shard
from equipoise.parallel.batches.shares import even_sizes
from equipoise.parallel.batches.splitting import Splitter
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.batches.whole_steps import WholeSteps
from equipoise.parallel.communication.tensor_copies import copy_from_first
from equipoise.parallel.step_protocols import EvaluationStep, StepResult, TrainingStep
from equipoise.parallel.workers.preloading import preload
from equipoise.precision import Precision
from equipoise.strategies.distributed.loaders import has_distributed_sampler, order_of_processes, share_loader
from equipoise.strategies.distributed.module_sync import check_same_modules
from equipoise.strategies.distributed.process_strategy import ProcessRun, ProcessStrategy
from equipoise.strategies.distributed.window_totals import average_gradients
from equipoise.strategies.portable_state import PortableState
from equipoise.strategies.strategy import Transfer
from equipoise.validation import is_whole

__all__ = ["VirtualDevicesStrategy"]

preload(__name__)


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
        threads: The number of threads with which a process computes on a CPU. Matrix products of another number of
            threads differ in their last bits. Default: 1.
        timeout: Seconds for which processes wait for one another before a missing one counts as hung. Default: 1800.
        backend: Torch's backend. Default: "nccl" on CUDA, else "gloo".

    Raises:
        ConfigurationError: If an argument is out of range or does not fit the devices.

    Source: the idea of parts that keep their identity is that of EasyScale (Li et al., SC 2023).

    Example:
        >>> from equipoise import Trainer, VirtualDevicesStrategy
        >>> trainer = Trainer(strategy=VirtualDevicesStrategy(count=4), devices=["cpu"], logger=False)
    """

    name: ClassVar[str] = "virtual"
    has_one_state: ClassVar[bool] = True

    def __init__(
        self, *, count: int = 8, threads: int = 1, timeout: float = 1800.0, backend: str | None = None
    ) -> None:
        super().__init__(timeout=timeout, backend=backend)
        if not is_whole(count, least=1):
            raise ConfigurationError(f"count must be a number of virtual devices, from 1, not {count!r}.")
        if not is_whole(threads, least=1):
            raise ConfigurationError(f"threads must be a number from 1, not {threads!r}.")
        self.count = count
        self.threads = threads
        # The weights of the parts of the present window, of all processes, in their order.
        self._weights: list[int | float] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return the options. State of a run stays in its process."""
        state = super().__getstate__()
        for name in ("_steps", "_rounds", "_metrics", "_splitter", "_threads_before"):
            state.pop(name, None)
        return state

    # Where it runs.

    def default_devices(self, available: Sequence[torch.device]) -> Sequence[torch.device]:
        """Return as many devices as can have a part; see `Strategy.default_devices`."""
        return available[: self.count]

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Use one device for each process of this machine; see `Strategy.connect`."""
        super().connect(devices, num_nodes)
        if self.processes.world_size > self.count:
            raise ConfigurationError(
                f"VirtualDevicesStrategy(count={self.count}) has fewer virtual devices than the"
                f" {self.processes.world_size} real ones. Raise `count`, or take fewer devices."
            )

    def check_module(self, module: nn.Module, *, training: bool) -> None:
        """Refuse manual optimisation; see `Strategy.check_module`."""
        if training and not getattr(module, "automatic_optimization", True):
            raise ConfigurationError(
                f"{type(module).__name__} optimises by hand, but under strategy={self.name!r} `training_step` runs once"
                " for every virtual device. Take automatic optimisation, or strategy='ddp'."
            )

    def setup(self, module: nn.Module, precision: Precision) -> None:
        """Place the module, the same in all processes; see `Strategy.setup`."""
        super().setup(module, precision)
        processes = self.processes
        splitter = Splitter(module)
        self._splitter = splitter
        device = self.root_device
        metrics = MetricExchange(module)
        self._metrics = metrics
        self._steps = PartSteps(module, self._weights, self.count, self._ranges(), processes, device, metrics)
        self._rounds = EvaluationRounds(processes, device, splitter.size, metrics)
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(self.threads)

    def _begin_run(self, module: nn.Module) -> ProcessRun:
        check_same_modules(module)
        copy_from_first((*module.parameters(), *module.buffers()))
        return ProcessRun()

    def teardown(self, error: BaseException | None = None) -> None:
        """Use as many threads as before; see `Strategy.teardown`."""
        if self._module is not None:
            torch.set_num_threads(self._threads_before)
            self._metrics.close()
        super().teardown(error)

    def _ranges(self) -> list[tuple[int, int]]:
        """Return the first part of each process and the part after its last one, by rank."""
        ranges = []
        first = 0
        for number in even_sizes(self.count, self.processes.world_size):
            ranges.append((first, first + number))
            first += number
        return ranges

    # Data.

    def shard(self, loader: Any, stage: str) -> Shard:
        """Return this process's part of a loader; see `Strategy.shard`."""
        if stage != "train":
            return super().shard(loader, stage)
        seed = seed_of_order()
        rank = self.processes.rank
        steps = _with_order_of_all(loader, seed)
        part = share_loader(steps, rank, self.processes.world_size, seed, training=True, sizes=self._sizes)
        return Shard(part, rank, self.processes.world_size, in_turn=False)

    def _sizes(self, size: int, step: int) -> list[int]:
        """Return the samples of each process in a step; see `share_loader`."""
        sizes = even_sizes(size, self.count)
        return [sum(sizes[first:end]) for first, end in self._ranges()]

    def batch_to_devices(self, batch: Any, transfer: Transfer) -> Sequence[Any]:
        """Divide a batch of this process into its parts; see `Strategy.batch_to_devices`."""
        if not self._module or not self._module.training:
            return super().batch_to_devices(batch, transfer)
        if batch is NO_BATCH:
            return ()
        first, end = self._ranges()[self.processes.rank]
        # Parts of a step differ by one sample at most, larger ones first; so do those of each process.
        sizes = [size for size in even_sizes(self._splitter.size_to_cut(batch), end - first) if size]
        parts = [batch] if len(sizes) == 1 else self._splitter.parts(batch, sizes)
        return [transfer(part, self.devices[0]) for part in parts]

    # Computation.

    def forward_backward(self, step: TrainingStep, parts: Sequence[Any], last: bool) -> StepResult:
        """Compute the parts of this process, one after another, and add the gradients of all."""
        return self._steps.run(step, parts)

    def finish_gradients(self, window: AccumulationWindow, optimizer: Optimizer) -> bool | None:
        """Turn the summed gradients of a window into their weighted mean; see `Strategy.finish_gradients`."""
        return average_gradients(window, optimizer, sum(self._weights), 1)

    @property
    def portable(self) -> PortableState:
        """Full states, and the weights of an open window; see `Strategy.portable`."""
        return PortableState(self._own_state, self._load_own_state)

    def _own_state(self) -> dict[str, Any]:
        return {"count": self.count, "weights": list(self._weights)}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        self._weights[:] = state.get("weights", ())

    def evaluate(self, step: EvaluationStep, parts: Sequence[Any]) -> Any:
        """Run an evaluation step, and log what all processes log; see `Strategy.evaluate`."""
        return self._rounds.run(step, parts[0])

    def await_others(self, step: EvaluationStep) -> None:
        """Log what other processes still evaluate; see `Strategy.await_others`."""
        self._rounds.finish(step)


def _with_order_of_all(loader: Any, seed: int) -> DataLoader[Any]:
    """Return a loader whose batches are whole steps, in an order that depends on the seed and the epoch alone."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            f"strategy='virtual' needs a DataLoader over a data set of known length, to which {type(loader).__name__}"
            " does not give access. Take such a loader, or strategy='ddp'."
        )
    if has_distributed_sampler(loader) or loader.batch_sampler is None:
        raise ConfigurationError(
            "strategy='virtual' divides batches itself, so a loader has a batch size, and no DistributedSampler."
        )
    batches: Any = loader.batch_sampler
    if isinstance(batches, WholeSteps):
        return loader
    if loader.batch_size is None:
        steps = WholeSteps(SameOrder(batches, seed))
    else:
        order = BatchSampler(order_of_processes(loader, seed), loader.batch_size, loader.drop_last)
        steps = WholeSteps(order, size=loader.batch_size)
    return with_sampler(loader, steps, batches=True)
