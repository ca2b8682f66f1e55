"""DDPStrategy: a process for each device, with its share of the data and a replica of the module."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from equipoise.parallel.batches.calibration import SimulatedDevice
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.divergence.replicated import Replicated, unchanging_buffers, whole_module
from equipoise.parallel.step_protocols import EvaluationStep, StepResult, TrainingStep
from equipoise.parallel.workers.preloading import preload
from equipoise.strategies.ddp.exchange.comm_hook import CommHook
from equipoise.strategies.ddp.exchange.gradient_exchange import GradientExchange, check_engine_options
from equipoise.strategies.ddp.recovery import DDPRecovery
from equipoise.strategies.distributed.loaders import Sizes
from equipoise.strategies.distributed.process_strategy import ProcessRun, ProcessStrategy, same_in_all_processes
from equipoise.strategies.distributed.sample_shares import ProcessShares, check_shares, check_shares_count
from equipoise.strategies.partial_gradients import refuse_partial_gradients
from equipoise.strategies.portable_state import PortableState
from equipoise.strategies.recovery_support import RecoverySupport

__all__ = ["DDPStrategy"]

preload(__name__)

# Methods with which a derived class may exchange something else than all gradients.
_EXCHANGES = ("forward_backward", "backward", "finish_gradients", "setup_optimizer")


@dataclass(kw_only=True)
class _Run(ProcessRun):
    """State of a run in this process, where several compute together."""

    exchange: GradientExchange
    recovery: DDPRecovery

    def close(self) -> None:
        self.exchange.close()
        super().close()


class DDPStrategy(ProcessStrategy):
    """A process for each device; gradients are those of one device on all samples of a step.

    The trainer starts the processes, once and without running the script again. Under torchrun or Slurm, or inside a
    process group that exists already, each process joins instead. In training every process receives `batch_size`
    samples of a step. An epoch trains on each sample once, in a new random order. Evaluations compute what one device
    computes.

    Args:
        engine: "torch": torch's DistributedDataParallel. "native": our own reducer, which exchanges gradients once per
            window in every case. Manual optimisation exchanges after each backward, with either. Default: "torch".
        shares: A number from 0 for each process, relative to one another, by which the samples of a step are shared
            out. "auto": measured in the first steps, so that all processes finish together and none exceeds its
            memory; then logged, to be pinned, and saved in checkpoints. Default: None, evenly.
        bucket_megabytes: The size of a bucket of gradients in MiB. Default: 25.
        find_unused_parameters: Allow steps that do not use all parameters. Default: False, where that is an error.
        static_graph: Promise that every step uses the same parameters in the same way. Default: False.
        gradient_as_bucket_view: Let gradients be views of the buckets, which saves their memory. Default: True.
        forward_sync_buffers: Copy rank 0's buffers to all processes before each forward (torch engine). Default: True.
        comm_hook: Function that torch's `register_comm_hook` accepts; for the torch engine. Default: None.
        comm_state: The state of `comm_hook`. A function without arguments makes it in each process, once the process
            group is there, such as `partial(PowerSGDState, None)`. Default: None.
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
    # Blocks of the module are called as they are, and all processes begin each batch together.
    may_compile_blocks: ClassVar[bool] = True

    _run: _Run | None = None

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
        comm_state: Any = None,
        timeout: float = 1800.0,
        backend: str | None = None,
        simulated: Mapping[int, SimulatedDevice] | None = None,
    ) -> None:
        super().__init__(timeout=timeout, backend=backend)
        check_engine_options(engine, bucket_megabytes, comm_hook, comm_state)
        check_shares(shares)
        self.engine = engine
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.simulated = dict(simulated or {})
        self._user_shares = shares
        self._engine_options: dict[str, Any] = {
            "bucket_cap_mb": bucket_megabytes,
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "forward_sync_buffers": forward_sync_buffers,
            "comm_hook": comm_hook and CommHook(comm_hook, comm_state),
        }
        # Whether replicas differ from one average of their weights to the next.
        self._is_local_sgd = comm_hook is not None and _is_local_sgd(comm_hook, comm_state)
        # The shares, once the number of processes is known.
        self._shares: ProcessShares | None = None

    # Where it runs, and with which share of the samples.

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Use one device for each process of this machine; see `Strategy.connect`."""
        super().connect(devices, num_nodes)
        check_shares_count(self._user_shares, self.processes.world_size)
        self._create_shares()

    def _create_shares(self) -> None:
        shares_before = self.shares
        self._shares = ProcessShares(
            self._user_shares, self.processes.world_size, self.processes.rank, self.root_device, self.simulated
        )
        self._shares.restore(shares_before)

    @property
    def _current_shares(self) -> ProcessShares:
        assert self._shares is not None
        return self._shares

    @property
    def shares(self) -> list[float] | None:
        """The shares in use; None where they are even, or not measured yet."""
        if self._shares is not None:
            return self._shares.shares
        if self._user_shares is None or isinstance(self._user_shares, str):
            return None
        return list(self._user_shares)

    def _begin_run(self, module: nn.Module) -> _Run:
        # 1. The same parameters, buffers and metrics everywhere.
        restore_metrics = same_in_all_processes(module)
        # 2. A process that the trainer has started did not have its rank in `connect`.
        self._create_shares()
        # 3. The exchange of gradients, whose engine is constructed with the first batch.
        exchange = GradientExchange(self.engine, module, self.root_device, self._engine_options)
        recovery = DDPRecovery(module, exchange, self._current_shares)
        restores = [restore_metrics]
        if getattr(module, "automatic_optimization", True):
            restores.append(refuse_partial_gradients(module, self.name))
        return _Run(exchange=exchange, recovery=recovery, restores=restores)

    def replicated_tensors(self) -> Replicated:
        """Return the whole module, if each window ends with an exchange of all gradients; see the interface."""
        # A derived class with an exchange of its own overrides this method, too, where replicas agree.
        kind = type(self)
        has_own_exchange = any(getattr(kind, name) is not getattr(DDPStrategy, name) for name in _EXCHANGES)
        if self._run is None or has_own_exchange or self._is_local_sgd:
            return super().replicated_tensors()
        assert self._module is not None
        return Replicated(whole_module(self._module), unchanging_buffers(self._module))

    def _sizes_for(self, loader: Any) -> Sizes | None:
        return self._current_shares.sizes_for(loader)

    # Computation.

    def forward_backward(self, step: TrainingStep, parts: Sequence[Any], last: bool) -> StepResult:
        """Compute the gradients of a batch, or join the exchange without one; see `Strategy.forward_backward`."""
        if self._run is None:
            return super().forward_backward(step, parts, last)
        if self._user_shares is not None or self.simulated:
            # All processes come here in each step, so they may agree on shares.
            self._current_shares.begin_step(step.batch_idx, self.processes.gather_objects)
            step.run_inside(partial(self._run_forward, step))
        elif self._run.recovery.is_enabled:
            step.run_inside(partial(self._run_forward, step))
        return self._run.exchange.forward_backward(step, parts, last)

    def _run_forward(self, step: TrainingStep, compute: Callable[[], Any], part: Any) -> Any:
        """Run the forward of a training step, watched if it may be repeated, and measured as far as that applies."""
        assert self._run is not None
        recovery = self._run.recovery
        run = partial(recovery.run, compute, training=True, in_micro_batches=step.in_micro_batches)
        return self._current_shares.run(run, part, step.batch_idx)

    @property
    def recovery(self) -> RecoverySupport:
        """Support for steps that are repeated; see `Strategy.recovery`."""
        if self._run is None:
            return super().recovery
        return self._run.recovery

    def evaluate(self, step: EvaluationStep, parts: Sequence[Any]) -> Any:
        """Run an evaluation step; see `Strategy.evaluate`."""
        if self._run is None:
            return step(parts[0])
        compute = partial(step, parts[0])
        with self._run.exchange.paused():
            return self._run.recovery.run(compute, training=False, in_micro_batches=step.in_micro_batches)

    def collect_gradients(self) -> None:
        """Complete the exchange of a window's last backward; see `Strategy.collect_gradients`."""
        if self._run is not None:
            self._run.exchange.collect()

    def finish_gradients(self, window: AccumulationWindow, optimizer: Optimizer) -> bool | None:
        """Turn the gradients of a window into their weighted mean over all processes; see the interface."""
        if self._run is None:
            return super().finish_gradients(window, optimizer)
        return self._run.exchange.finish(window, optimizer)

    @property
    def portable(self) -> PortableState:
        """Full states, and the measured shares; see `Strategy.portable`."""
        return PortableState(self._own_state, self._load_own_state)

    def _own_state(self) -> dict[str, Any]:
        if self._user_shares == "auto" and self.shares is not None:
            return {"shares": self.shares}
        return {}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        """Restore measured shares, if they are for as many processes; otherwise they are measured."""
        if self._shares is not None:
            self._shares.restore(state.get("shares"))


def _is_local_sgd(hook: Callable[..., Any], state: Any) -> bool:
    """Return True if a hook exchanges gradients within groups alone, so that an average of weights does the rest.

    Args:
        hook: The hook, which may be wrapped in another one.
        state: Its state, or a `partial` that makes it.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

    kind = getattr(state, "func", type(state))
    return hook is post_localSGD_hook or kind is PostLocalSGDState
