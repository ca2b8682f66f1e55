"""Base of the strategies with replicas in one process: a batch is split over several devices.

    parallelize="step"       the batch is split, and the whole training_step, its loss included, runs on every device;
                             losses meet on the first one, for one backward
    parallelize="forward"    training_step runs once, on `output_device`; arguments of the module's calls are split,
                             computed on every device and gathered there, as with `nn.DataParallel`

Subclasses choose the number of samples of each device.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from equipoise.errors import ConfigurationError
from equipoise.notices import rank_zero_warn
from equipoise.parallel.batches.splitting import Splitter
from equipoise.parallel.replicas.device_threads import DeviceThreads
from equipoise.parallel.replicas.replicable import check_replicable
from equipoise.parallel.replicas.replicas import Replicas
from equipoise.parallel.step_protocols import EvaluationStep, StepResult, TrainingStep
from equipoise.parallel.strategy_optimizer import StrategyOptimizer
from equipoise.precision import Precision
from equipoise.strategies.partial_gradients import refuse_partial_gradients
from equipoise.strategies.recovery_support import RecoverySupport
from equipoise.strategies.replicated.recovery import PlacedParts, ReplicatedRecovery
from equipoise.strategies.replicated.replicated_forward import ReplicatedForward
from equipoise.strategies.strategy import Strategy, Transfer
from equipoise.validation import is_whole

__all__ = ["Parallelize", "ReplicatedStrategy"]

Parallelize = Literal["step", "forward"]


@dataclass(kw_only=True)
class _Run:
    """State of a run.

    Attributes:
        splitter: Splits batches.
        replicas: The replicas of the module.
        threads: The threads that compute the parts.
        recovery: Support for steps that are repeated.
        forward: Computes calls of the module on several devices; None where the whole step runs on each.
        allow_gradients: Function that allows gradients for parameters again; None where they were not refused.
    """

    splitter: Splitter
    replicas: Replicas
    threads: DeviceThreads
    recovery: ReplicatedRecovery
    forward: ReplicatedForward | None
    allow_gradients: Callable[[], None] | None


class ReplicatedStrategy(Strategy):
    """Replicas of the module in one process; see the module's docstring.

    Args:
        parallelize: "step": the whole step runs on every device. "forward": only the module's forward does.
        output_device: Device that gathers outputs of forward and runs the rest of the step: an index into the devices,
            or a device. Default: the first device. For "forward" only.
        dim: The dimension of the samples. Default: the first.

    Raises:
        ConfigurationError: If an argument is out of range or does not fit the others.
    """

    # Replicas compute in several threads, so compiled blocks are compared between two steps.
    may_compile_blocks: ClassVar[str] = "between steps"

    def __init__(
        self,
        *,
        parallelize: Parallelize = "step",
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        if parallelize not in ("step", "forward"):
            raise ConfigurationError(f"parallelize must be 'step' or 'forward', not {parallelize!r}.")
        if not is_whole(dim, least=0):
            raise ConfigurationError(f"dim must be the index of a dimension, from 0, not {dim!r}.")
        if output_device is not None and parallelize == "step":
            raise ConfigurationError(
                f"output_device={output_device!r} has no effect with parallelize='step', where losses are computed on"
                " every device. Leave it out, or choose parallelize='forward'."
            )
        self.parallelize = parallelize
        self.output_device = output_device
        self.dim = dim
        self._run: _Run | None = None
        # True if the last computation trained, False if it evaluated.
        self._is_training = True
        # True until the module was called, or a warning said that it was not.
        self._expects_forward = parallelize == "forward"

    # How a batch is shared out.

    @abstractmethod
    def sizes(self, batch_size: int) -> list[int]:
        """Return the number of samples for each device.

        Args:
            batch_size: The number of samples of the batch.
        """

    def _reduce_share(self, index: int, computed: Mapping[int, int]) -> None:
        """Reduce the share of a device that ran out of memory, unless shares stay even."""

    # Where it runs.

    def default_devices(self, available: Sequence[torch.device]) -> Sequence[torch.device]:
        """Return all devices; see `Strategy.default_devices`."""
        return available

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Use the devices; see `Strategy.connect`."""
        super().connect(devices, num_nodes)
        # The device that `output_device` stands for.
        self._gathering = self._gathering_device()

    def _gathering_device(self) -> torch.device:
        chosen = self.output_device
        if chosen is None:
            return self.devices[0]
        if is_whole(chosen):
            if 0 <= chosen < len(self.devices):
                return self.devices[chosen]
        else:
            # The text may name no device at all.
            with suppress(RuntimeError, TypeError):
                device = torch.device(chosen)
                if device in self.devices:
                    return device
        raise ConfigurationError(
            f"output_device={chosen!r} is none of the devices {', '.join(map(str, self.devices))}. Give one of them, or"
            " its index among them."
        )

    def check_module(self, module: nn.Module, *, training: bool) -> None:
        """Refuse a module that cannot be copied; see `Strategy.check_module`."""
        if len(self.devices) == 1:
            return
        if training and self.parallelize == "step" and not getattr(module, "automatic_optimization", True):
            raise ConfigurationError(
                f"{type(module).__name__} optimises by hand (automatic_optimization=False), but under"
                f" strategy={self.name!r} `training_step` runs once for every part of a batch. Choose"
                f" parallelize='forward', where it runs once: {type(self).__name__}(parallelize='forward')."
            )
        check_replicable(module, self.devices)

    def setup(self, module: nn.Module, precision: Precision) -> None:
        """Place the module on the first device; replicas are constructed when they are needed."""
        super().setup(module, precision)
        replicas = Replicas(module, self.devices, always_connected=self.parallelize == "forward")
        threads = DeviceThreads(self.devices)
        forward = None
        if self.parallelize == "forward" and len(self.devices) > 1:
            forward = ReplicatedForward(module, replicas, self._gathering, self.dim, self.sizes, self._compute)
        recovery = ReplicatedRecovery(replicas, threads, self._reduce_share)
        allow_gradients = None
        if self.parallelize == "step" and len(self.devices) > 1:
            allow_gradients = refuse_partial_gradients(module, self.name)
        self._run = _Run(
            splitter=Splitter(module, self.dim),
            replicas=replicas,
            threads=threads,
            recovery=recovery,
            forward=forward,
            allow_gradients=allow_gradients,
        )

    def teardown(self, error: BaseException | None = None) -> None:
        """Release replicas and threads; see `Strategy.teardown`."""
        run = self._run
        self._run = None
        if run is not None:
            if run.forward is not None and run.forward.was_called:
                self._expects_forward = False
            if run.allow_gradients is not None:
                run.allow_gradients()
            run.threads.close()
        super().teardown(error)

    @property
    def recovery(self) -> RecoverySupport:
        """Support for steps that are repeated; see `Strategy.recovery`."""
        if self._run is None:
            return super().recovery
        return self._run.recovery

    # Data.

    def batch_to_devices(self, batch: Any, transfer: Transfer) -> Sequence[Any]:
        """Split a batch, then copy every part to its device; see `Strategy.batch_to_devices`."""
        if len(self.devices) == 1:
            return (transfer(batch, self.devices[0]),)
        if self.parallelize == "forward":
            return (transfer(batch, self._gathering),)
        splitter = self._current_run.splitter
        sizes_of_devices = self.sizes(splitter.size_to_cut(batch))
        # A device without samples takes no part, but one device computes an empty batch.
        indices = [index for index, size in enumerate(sizes_of_devices) if size] or [0]
        sizes = [sizes_of_devices[index] for index in indices]
        parts = [batch]
        if len(indices) > 1:
            parts = splitter.parts(batch, sizes)
        placed = [transfer(part, self.devices[index]) for part, index in zip(parts, indices, strict=True)]
        return PlacedParts.of(placed, indices, sizes)

    # Computation.

    @property
    def _current_run(self) -> _Run:
        assert self._run is not None
        return self._run

    def forward_backward(self, step: TrainingStep, parts: Sequence[Any], last: bool) -> StepResult:
        """Compute every part on its device, then one backward; see `Strategy.forward_backward`."""
        run = self._current_run
        self._is_training = True
        # Hooks and optimisers may have changed tensors through `.data`, which leaves no trace.
        run.replicas.distrust()
        # What the first device computes alone is a whole batch, for which the module itself runs its step.
        if isinstance(parts, PlacedParts) and parts.indices != (0,):
            result = self._run_parts(step, parts)
        else:
            with self._replicated_calls(step):
                result = step(parts[0])
            if run.forward is not None:
                run.forward.check(result.loss)
                self._warn_without_call(run.forward)
        step.backward(result)
        return result

    def evaluate(self, step: EvaluationStep, parts: Sequence[Any]) -> Any:
        """Compute every part on its device; see `Strategy.evaluate`."""
        if self._is_training:
            self._is_training = False
            self._current_run.replicas.distrust()
        if isinstance(parts, PlacedParts) and parts.indices != (0,):
            return self._run_parts(step, parts).outputs
        with self._replicated_calls(step):
            return step(parts[0])

    def _run_parts(self, step: TrainingStep | EvaluationStep, parts: PlacedParts) -> StepResult:
        replicas = self._current_run.replicas
        replicas.refresh(parts.indices)
        work = [
            (index, partial(step.run_on, replicas[index], part, size))
            for part, index, size in zip(parts, parts.indices, parts.sizes, strict=True)
        ]
        with replicas.metrics_in_parts(parts.indices, parts.sizes):
            results: list[StepResult] = self._compute(work, parts.sizes)
        replicas.give_back(parts.indices[0])
        return step.merge(results, parts.sizes, self.root_device, dim=self.dim, original=replicas.original)

    def _compute(self, functions: Sequence[tuple[int, Callable[[], Any]]], sizes: Sequence[int]) -> list[Any]:
        """Run the computation of every part on its device."""
        run = self._current_run
        run.recovery.note_sizes([index for index, _ in functions], sizes)
        return run.threads.run(functions)

    def collect_gradients(self) -> None:
        """Add the gradients of the replicas to the module's; see `Strategy.collect_gradients`."""
        if self._run is not None and self.parallelize == "step":
            self._run.replicas.collect_gradients()

    def setup_optimizer(self, optimizer: Optimizer) -> StrategyOptimizer:
        """Refresh the replicas after each step of an optimiser; see `Strategy.setup_optimizer`."""
        if self._run is None:
            return super().setup_optimizer(optimizer)
        return _ReplicatedOptimizer(optimizer, self._run.replicas)

    # Forward only.

    def _replicated_calls(self, step: TrainingStep | EvaluationStep) -> AbstractContextManager[None]:
        """Return a context in which calls of the module are computed on every device, if only its forward is."""
        forward = self._current_run.forward
        if forward is None:
            return nullcontext()
        return forward.replaced(step)

    def _warn_without_call(self, forward: ReplicatedForward) -> None:
        if forward.was_called or not self._expects_forward:
            return
        self._expects_forward = False
        rank_zero_warn(
            "`training_step` did not call the module, as `self(batch)` does, so nothing was computed in parts."
            " Call it, or choose parallelize='step'."
        )


class _ReplicatedOptimizer(StrategyOptimizer):
    """An optimiser of parameters that have replicas."""

    def __init__(self, optimizer: Optimizer, replicas: Replicas) -> None:
        super().__init__(optimizer)
        self._replicas = replicas

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the optimiser. A step may change parameters through `.data`, which leaves no trace."""
        result = super().step(closure, **kwargs)
        self._replicas.distrust()
        return result
