"""DDPStrategy: a process for each device, each with its part of the data and a replica of the module."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.errors import ConfigurationError, StepError
from equipoise.parallel.batches.calibration import SimulatedDevice
from equipoise.parallel.batches.sampling import NO_BATCH
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.communication.agreed_end import agree_to_end
from equipoise.parallel.communication.membership import check_alone, check_count, in_group, place_of_worker
from equipoise.parallel.communication.object_exchange import broadcast_object, gather_objects
from equipoise.parallel.communication.process_group import StoreServer, follows_from_another
from equipoise.parallel.communication.rank import Rank, find_rank
from equipoise.parallel.step_protocols import EvaluationStep, StepResult, TrainingStep
from equipoise.parallel.workers.launch import launch
from equipoise.parallel.workers.preloading import preload
from equipoise.precision import Precision
from equipoise.strategies.ddp.gradient_exchange import Engine, NativeEngine, TorchEngine, goes_backward_once
from equipoise.strategies.ddp.loaders import gather_tensors, is_dealt, reduce_tensor, share_loader, synchronise_metrics
from equipoise.strategies.ddp.module_sync import check_same_modules, copy_from_first, share_batch_statistics
from equipoise.strategies.ddp.recovery import CollectiveGuard
from equipoise.strategies.ddp.sample_shares import ProcessShares, check_shares
from equipoise.strategies.strategy import Strategy, Transfer

__all__ = ["DDPStrategy"]

T = TypeVar("T")
preload(__name__)
_OF_A_RUN = ("_engine", "_guard", "_placed", "_restore_layers", "_restore_metrics")


class DDPStrategy(Strategy):
    """A process for each device; gradients are those of one device on all samples of a step.

    Processes are started by the trainer, once and without running the script again. Under torchrun or Slurm, or inside
    a process group that somebody else began, each process joins instead. In training every process has `batch_size`
    samples of a step, each sample is trained on once an epoch, and shuffled anew in each; evaluations are those of one
    device.

    Args:
        engine: "torch": torch's DistributedDataParallel. "native": our own reducer, which exchanges gradients once per
            window whatever happens before. Manual optimisation always takes the latter. Default: "torch".
        shares: A number from 0 for each process, relative to one another, by which the samples of a step are shared
            out. "auto": measured in the first steps, so that all processes finish together and none exceeds its
            memory; then told, to be pinned, and saved in checkpoints. Default: None, evenly.
        bucket_megabytes: The size of a bucket of gradients in MiB. Default: 25.
        find_unused_parameters: Let parameters take no part in a step. Default: False, where that is an error.
        static_graph: Promise that every step uses the same parameters in the same way. Default: False.
        gradient_as_bucket_view: Let gradients lie in the buckets, which saves their memory. Default: True.
        forward_sync_buffers: Give all processes the first one's buffers before each forward; for the torch engine.
            Default: True.
        comm_hook: Called as torch's `register_comm_hook` has it; for the torch engine.
        timeout: Seconds for which processes wait for one another before a missing one counts as hung. Default: 1800.
        backend: Torch's backend. Default: "nccl" on CUDA, else "gloo".
        simulated: Processes, by rank, whose devices are to be slower or smaller than they are; for trying things out.

    Raises:
        ConfigurationError: If an argument cannot be right, or does not fit the devices.

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
        if engine not in ("torch", "native"):
            raise ConfigurationError(f"engine must be 'torch' or 'native', not {engine!r}.")
        if not timeout > 0:
            raise ConfigurationError(f"timeout is a positive number of seconds, not {timeout!r}.")
        if comm_hook is not None and engine == "native":
            raise ConfigurationError("comm_hook is for torch's wrapper: leave it out, or take engine='torch'.")
        if not bucket_megabytes > 0:
            raise ConfigurationError(f"bucket_megabytes must be positive, not {bucket_megabytes!r}.")
        check_shares(shares)
        self.engine, self.timeout, self.backend = engine, timeout, backend
        self._given_shares, self.simulated = shares, dict(simulated or {})
        self._shares: ProcessShares | None = None
        self._torch_options: dict[str, Any] = {
            "bucket_cap_mb": bucket_megabytes,
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "forward_sync_buffers": forward_sync_buffers,
            "comm_hook": comm_hook,
        }
        self._place: Rank | None = None
        self._all_devices: tuple[torch.device, ...] = ()
        self._engine: Engine | None = None
        self._restore_metrics: Callable[[], None] | None = None
        self._failed = False
        self._parameters: list[nn.Parameter] = []
        self._learned: list[bool] = []
        self._guard: CollectiveGuard | None = None  # where steps may be done again
        self._restore_layers: Callable[[], None] | None = None

    # Where it runs.

    def default_devices(self, available: Sequence[torch.device]) -> Sequence[torch.device]:
        """Return all devices; see `Strategy.default_devices`."""
        return available

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Takes one device for each process of this machine; see `Strategy.connect`."""
        self._all_devices = tuple(devices)
        self._place = find_rank()
        if self._place is None:
            check_alone(num_nodes)
            self.world_size, self.devices = len(devices), tuple(devices[:1])
            self.launches = len(devices) > 1
        else:
            self._take(self._place, num_nodes)
        given = self._given_shares
        if given is not None and given != "auto" and len(given) != self.world_size:
            raise ConfigurationError(
                f"shares={given!r} are {len(given)} numbers, but there are {self.world_size} processes."
                " Give a number for each."
            )
        self._share_out()

    def _share_out(self) -> None:
        """Makes the shares for this process's rank, those known so far taken over."""
        given, known = self._given_shares, self.shares
        self._shares = ProcessShares(given, self.world_size, self.global_rank, self.root_device, self.simulated)
        self._shares.take(known)

    @property
    def shares(self) -> list[float] | None:
        """The shares in use; None where they are even, or not measured yet."""
        if self._shares is not None:
            return self._shares.shares
        given = self._given_shares
        return None if given is None or isinstance(given, str) else list(given)

    def _take(self, place: Rank, num_nodes: int = 1) -> None:
        devices = self._all_devices
        check_count(place, devices, num_nodes)
        self.global_rank, self.local_rank = place.global_rank, place.local_rank
        self.node_rank, self.world_size = place.node_rank, place.world_size
        self.devices = (devices[place.local_rank % len(devices)],)

    def launch(self, function: Callable[[], T], known: Sequence[Any] = ()) -> T:
        """Runs a function in every process; see `Strategy.launch`."""
        if self._place is not None:
            with self._in_group(self._place):
                return function()
        if self.world_size == 1:
            return function()
        with StoreServer() as store:
            answer: T = launch(
                partial(_run_in_process, self, function, store.port),
                self.world_size,
                known=known,
                is_consequence=follows_from_another,
            )
        return answer

    @contextmanager
    def _in_group(self, place: Rank, port: int | None = None) -> Iterator[None]:
        with in_group(place, self.root_device, timeout=self.timeout, port=port, backend=self.backend):
            yield

    def setup(self, module: nn.Module, precision: Precision) -> None:
        """Places the module, the same in all processes; see `Strategy.setup`."""
        super().setup(module, precision)
        if self.world_size == 1:
            return
        check_same_modules(module)
        copy_from_first((*module.parameters(), *module.buffers()))
        self._restore_metrics = synchronise_metrics(module)
        self._share_out()  # this process has its rank now

    def share_batch_statistics(self, module: nn.Module) -> None:
        """Replaces BatchNorm layers while the run lasts; see `Strategy.share_batch_statistics`."""
        if self.world_size > 1:
            self._restore_layers = share_batch_statistics(module, self.root_device)

    def ends_after(self, batch: int, window: int) -> bool:
        """Return whether all processes end after this batch; see `Strategy.ends_after`."""
        return self._is_alone() or agree_to_end(self.global_rank, self.world_size, self.root_device, batch, window)

    def fail(self, error: BaseException) -> None:
        """From now on this process asks nobody: the others do not know yet; see `Strategy.fail`."""
        self._failed = True

    def teardown(self, error: BaseException | None = None) -> None:
        """Lets go of hooks and buckets; see `Strategy.teardown`."""
        engine, self._engine, self._failed, self._guard = self._engine, None, False, None
        if engine is not None:
            engine.close()
        restores = (self._restore_metrics, self._restore_layers)
        self._restore_metrics = self._restore_layers = None
        for restore in restores:
            if restore is not None:
                restore()
        super().teardown(error)

    # Data.

    def shard(self, loader: Any, stage: str) -> Any:
        """This process's part of a loader; see `Strategy.shard`."""
        if self.world_size == 1:
            return loader
        training, seed = stage == "train", int(os.environ.get("PL_GLOBAL_SEED") or 0)  # of `seed_everything`
        assert self._shares is not None
        sizes = self._shares.cut_of(loader) if training else None
        return share_loader(loader, self.global_rank, self.world_size, seed, training=training, sizes=sizes)

    def part_of(self, batches: float, part: Any) -> float | None:
        """How many of so many batches this process evaluates; see `Strategy.part_of`."""
        if self.world_size == 1 or batches == float("inf"):
            return batches
        return len(range(self.global_rank, int(batches), self.world_size)) if is_dealt(part) else None

    def place(self, batch: Any, transfer: Transfer) -> Sequence[Any]:
        """Copies a batch; see `Strategy.place`."""
        if batch is NO_BATCH:
            if self._restore_layers is not None:
                raise StepError(
                    "This process has no batch in a step while others have, but sync_batchnorm=True computes over all"
                    " of them. Take DataLoader(drop_last=True), or numbers of samples that leave some for each."
                )
            return ()
        members = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
        if any(member is NO_BATCH for member in members):
            raise StepError(
                "One of several loaders has no batch for this process in this step, while others have. Take numbers of"
                " samples that the processes share evenly, or DataLoader(drop_last=True)."
            )
        return (transfer(batch, self.devices[0]),)

    def begin_evaluation(self) -> None:
        """Gives all processes the first one's buffers, which are those that are saved; see the interface."""
        if not self._is_alone() and self._placed is not None:
            copy_from_first(self._placed.buffers())

    # Computation.

    def forward_backward(self, step: TrainingStep, parts: Sequence[Any], last: bool) -> StepResult:
        """Computes the gradients of a batch, or takes part without one; see `Strategy.forward_backward`."""
        if self.world_size == 1:
            return super().forward_backward(step, parts, last)
        assert self._shares is not None
        if self._guard is not None:
            step = self._guard.watched(step, training=True)
        if self._given_shares is None and not self.simulated:
            return self._made_engine().forward_backward(step, parts, last)
        self._shares.begin_step(step.batch_idx, self.gather_objects)
        return self._made_engine().forward_backward(self._shares.timed(step), parts, last)

    def arm_recovery(self) -> None:
        """From now on gradients are exchanged by the native engine, which can take a step again."""
        if self._guard is None and self.world_size > 1 and self._placed is not None:
            self._guard = CollectiveGuard(self._placed)

    def evaluate(self, step: EvaluationStep, parts: Sequence[Any]) -> Any:
        """Runs an evaluation step; see `Strategy.evaluate`."""
        return step(parts[0]) if self._guard is None else self._guard.run(step, parts[0], training=False)

    def obstacle(self, *, training: bool, leave_out: bool) -> str:
        """Communication within the forward; see `Strategy.obstacle`."""
        return "" if self._guard is None else self._guard.obstacle(training=training, leave_out=leave_out)

    def discard_gradients(self) -> bool:
        """Breaks off an exchange, to be gone on with; see `Strategy.discard_gradients`."""
        if self._shares is not None:
            self._shares.begin_again()
        return isinstance(self._engine, NativeEngine) and self._engine.break_off()

    def _made_engine(self) -> Engine:
        learned = [parameter.requires_grad for parameter in self._parameters]
        automatic = getattr(self._placed, "automatic_optimization", True)
        # Whoever optimises by hand freezes parameters in every step, to no effect on what is exchanged.
        pairs = zip(learned, self._learned, strict=True)
        if self._engine is not None and any(now != then and (now or automatic) for now, then in pairs):
            self._engine.close()
            self._engine = None
        if self._engine is None:
            module = self._placed
            assert module is not None
            self._parameters = list(module.parameters())
            self._learned = [parameter.requires_grad for parameter in self._parameters]
            # Torch's wrapper takes a step once, and one backward for it.
            plain = automatic and goes_backward_once(module)
            made = TorchEngine if self.engine == "torch" and plain and self._guard is None else NativeEngine
            self._engine = made(module, self.root_device, self._torch_options)
        return self._engine

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """One backward; see `Strategy.backward`."""
        if self.world_size > 1 and not getattr(self._placed, "automatic_optimization", True):
            engine = self._made_engine()
            assert isinstance(engine, NativeEngine)  # the other is for automatic optimisation
            engine.manual_backward(loss, *args, **kwargs)
        else:
            super().backward(loss, *args, **kwargs)

    def collect_gradients(self) -> None:
        """Ends the exchange of a window's last backward; see `Strategy.collect_gradients`."""
        if self._engine is not None:
            self._engine.collect()

    def finish_gradients(self, window: AccumulationWindow, optimizer: Optimizer) -> bool | None:
        """Turns the gradients of a window into their weighted mean over all processes; see the interface."""
        if self.world_size == 1:
            return super().finish_gradients(window, optimizer)
        assert self._engine is not None
        return self._engine.finish(window, optimizer)

    # Values over processes.

    def _is_alone(self) -> bool:
        """Whether there is nobody to ask: one process, the caller's before and after a run, or one that has failed."""
        return self.world_size == 1 or self._failed or not dist.is_initialized()

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: str = "mean") -> Any:
        """Reduces a value over all processes; see `Strategy.reduce`."""
        if self._is_alone() or not isinstance(tensor, Tensor):
            return tensor
        return reduce_tensor(tensor, self.root_device, group, reduce_op)

    def all_gather(self, tensor: Any, group: Any | None = None, sync_grads: bool = False) -> Any:
        """The values of all processes, along a new first dimension; see `Strategy.all_gather`."""
        return tensor if self._is_alone() else gather_tensors(tensor, self.root_device, group, sync_grads)

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all processes, in the order of their ranks; see `Strategy.gather_objects`."""
        if self._is_alone():
            return [value]
        return gather_objects(value)

    def broadcast(self, value: T, src: int = 0) -> T:
        """The value of one process, in all; see `Strategy.broadcast`."""
        if self._is_alone():
            return value
        return broadcast_object(value, src)

    def barrier(self, name: str | None = None) -> None:
        """Waits until every process has come here."""
        if not self._is_alone():
            dist.barrier(device_ids=[self.root_device.index or 0] if self.root_device.type == "cuda" else None)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The measured shares."""
        return {"shares": self.shares} if self._given_shares == "auto" and self.shares is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes measured shares back, if they are for as many processes; otherwise they are measured."""
        if self._shares is not None:
            self._shares.take(state.get("shares"))

    # On its way to other processes.

    def __getstate__(self) -> Mapping[str, Any]:
        """The options; nothing that belongs to a run."""
        return {**vars(self), **dict.fromkeys(_OF_A_RUN)}


def _run_in_process(strategy: DDPStrategy, function: Callable[[], T], port: int, rank: int) -> T:
    """What a process does that the trainer has started."""
    place = place_of_worker(rank, strategy.world_size, strategy._all_devices[0])
    strategy._take(place)
    with strategy._in_group(place, port):
        return function()
