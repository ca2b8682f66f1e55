"""The strategy interface; its defaults, such as the weighted mean of a window's gradients, are for one process.

The trainer never asks which strategy it has. A batch goes through a strategy in this order:

    batch_to_devices   put the batch where it is needed, as a sequence of parts
    forward_backward   compute the gradients of the parts        (evaluate: the outputs alone)
    finish_gradients   at the end of an accumulation window: weigh, exchange
    clip_gradients
    setup_optimizer    its result steps the optimiser
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.errors import ConfigurationError
from equipoise.interop.torch import foreach
from equipoise.parallel.batches.shard import Shard
from equipoise.parallel.batches.splitting import Splitter
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.communication.processes import Processes
from equipoise.parallel.communication.rank import may_be_one_of_several
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.optimizers.clipping import clip_by_value
from equipoise.parallel.step_protocols import EvaluationStep, StepResult, TrainingStep
from equipoise.parallel.strategy_optimizer import StrategyOptimizer
from equipoise.precision import Precision
from equipoise.strategies.portable_state import PortableState

if TYPE_CHECKING:
    from equipoise.parallel.divergence.replicated import Replicated
    from equipoise.strategies.recovery_support import RecoverySupport

__all__ = ["Strategy", "Transfer", "splitter_of"]

# A neutral collaborator without state, which all strategies share.
_WHOLE_STATE = PortableState()

Transfer = Callable[[Any, torch.device], Any]


class Strategy:
    """Computes steps on the devices; this class on one device, in one process.

    Subclasses override what differs from one process on one device. Arguments of a strategy's own belong in its
    constructor; the devices come from the trainer, by `connect`.

    Attributes:
        name: The name by which `Trainer(strategy=...)` finds it.
        keeps_batches_whole: Whether a batch is one part in one process, and `forward_backward` is that of this class.
            Default: False. Only then may a training step pull its batches by itself.
        devices: The devices of this process, in order.
        processes: The processes that compute together; this one alone unless `connect` sets others.
    """

    name: ClassVar[str] = ""
    keeps_batches_whole: ClassVar[bool] = False

    devices: Sequence[torch.device] = ()
    processes: Processes = Processes()

    # State of a run in this process, which copies of the strategy do not take along: the module, while it is on the
    # devices, and whatever else a subclass holds.
    _module: nn.Module | None = None
    _run: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the options. State of a run stays in its process."""
        state = self.__dict__.copy()
        # Left out, not None: a subclass may have a method of this name, which an entry would hide.
        state.pop("_module", None)
        state.pop("_run", None)
        return state

    @property
    def recovery(self) -> "RecoverySupport":
        """Support for steps that are repeated after an out-of-memory error."""
        from equipoise.strategies.recovery_support import RecoverySupport

        return RecoverySupport()

    @property
    def portable(self) -> PortableState:
        """Full states of the module and the optimisers, which any other strategy can load, and the strategy's own."""
        return _WHOLE_STATE

    # Where it runs.

    def on_one_device(self) -> "Strategy | None":
        """Return a strategy for one device that computes the same bits; None if only whole batches are comparable.

        Raises:
            ConfigurationError: If no steps of one device are comparable; the message is the reason, as a sentence.
        """
        # Parts of a batch are added up in another order.
        return None

    @property
    def root_device(self) -> torch.device:
        """The device on which this process computes, or gathers what it computed."""
        return self.devices[0]

    def default_devices(self, available: Sequence[torch.device]) -> Sequence[torch.device]:
        """Return the devices that `devices="auto"` stands for: the first one, unless a strategy computes on several.

        Args:
            available: All devices of this machine of the chosen kind; one for the CPU.
        """
        return available[:1]

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Use the devices that the user has chosen, for this process alone.

        Strategies that compute together with the processes of torchrun, Slurm or Ray override this method. This one
        refuses to train a copy in each of them.

        Args:
            devices: The devices on this machine, repeats allowed.
            num_nodes: The number of machines. Default: 1.

        Raises:
            ConfigurationError: If the strategy cannot run on them.
        """
        if may_be_one_of_several():
            from equipoise.parallel.communication.membership import refuse_copies

            refuse_copies(self.name)
        self._use_devices(devices, num_nodes)

    def _use_devices(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Use devices of this machine alone."""
        if num_nodes != 1:
            raise ConfigurationError(
                f"strategy={self.name!r} runs on one machine, but num_nodes={num_nodes} was given. Leave it out."
            )
        self.devices = tuple(devices)

    def check_module(self, module: nn.Module, *, training: bool) -> None:
        """Check that a module can be computed this way; called before the module is placed.

        Args:
            module: The user's module.
            training: Whether it is to be trained, not only evaluated.

        Raises:
            ConfigurationError: If it cannot; the message gives the reason and a remedy.
        """

    def setup(self, module: nn.Module, precision: Precision) -> None:
        """Convert and place the module; called before optimisers are made."""
        precision.convert_module(module)
        module.to(self.root_device)
        self._module = module

    def share_batch_statistics(self, module: nn.Module) -> None:
        """Let BatchNorm layers compute over all processes (`sync_batchnorm`); called after `setup`."""

    def teardown(self, error: BaseException | None = None) -> None:
        """Release processes, threads and devices, on any exit; move the module to the CPU.

        Args:
            error: The error that ended the run; None if there was none.
        """
        if self._module is not None:
            self._module.cpu()
            self._module = None

    # Data.

    def shard(self, loader: Any, stage: str) -> Shard:
        """Return this process's part of a loader.

        Args:
            loader: Any iterable over batches.
            stage: "train", "validate", "test" or "predict".
        """
        return Shard(loader)

    def sync_buffers(self) -> None:
        """Make the module the same in all processes, where training lets it differ."""

    def replicated_tensors(self) -> "Replicated":
        """Return the tensors that several processes hold alike, which are compared in the course of a fit.

        By default there are none: then nothing is compared. All processes call it together.
        """
        from equipoise.parallel.divergence.replicated import Replicated

        # The processes of a strategy by others may take steps of their own.
        return Replicated()

    def batch_to_devices(self, batch: Any, transfer: Transfer) -> Sequence[Any]:
        """Copy a batch to the devices that compute it.

        Args:
            batch: The batch, as the loader yields it.
            transfer: Function `transfer(part, device)` that copies with the user's transfer hooks.

        Returns:
            The parts, one for each computation; empty if this process has no batch.
        """
        return (transfer(batch, self.devices[0]),)

    # Computation.

    def forward_backward(self, step: TrainingStep, parts: Sequence[Any], last: bool) -> StepResult:
        """Compute the gradients of a batch, by one backward or, with `step.begin_micro_batch`, by several.

        Args:
            step: `step(part)` runs the training step, `step.backward(result)` its backward.
            parts: The parts that `batch_to_devices` has returned.
            last: Whether the accumulation window ends with this batch.
        """
        result = step(parts[0])
        step.backward(result)
        return result

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run one backward, for manual optimisation."""
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def collect_gradients(self) -> None:
        """Add the gradients of a backward to the module's own parameters; called after every backward."""

    def finish_gradients(self, window: AccumulationWindow, optimizer: Optimizer) -> bool | None:
        """Turn the summed gradients of a window into their weighted mean, over all processes.

        Args:
            window: The window of this process.
            optimizer: The optimiser that holds the parameters.

        Returns:
            Whether the weights of all processes are 0; None where this process has the weights itself.
        """
        # None: the gradients are those of the mean already.
        factor = window.correction()
        if factor is not None:
            foreach.multiply_([p.grad for p in optimizer_parameters(optimizer) if p.grad is not None], factor)
        return None

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        """Clip gradients in place.

        Args:
            optimizer: The optimiser that holds the parameters.
            value: The largest norm, or the largest absolute value.
            algorithm: "norm" or "value".
        """
        if algorithm == "value":
            clip_by_value(optimizer_parameters(optimizer), value)
        elif algorithm == "norm":
            nn.utils.clip_grad_norm_(optimizer_parameters(optimizer), value)
        else:
            raise ConfigurationError(f"Gradients are clipped by 'norm' or by 'value', not by {algorithm!r}.")

    def setup_optimizer(self, optimizer: Optimizer) -> StrategyOptimizer:
        """Return the ways in which this strategy steps an optimiser; called once for each optimiser and epoch.

        Args:
            optimizer: The user's optimiser, which stays as it is; several that are stepped together come as one.
        """
        return StrategyOptimizer(optimizer)

    def evaluate(self, step: EvaluationStep, parts: Sequence[Any]) -> Any:
        """Run an evaluation step without gradients and return its output."""
        return step(parts[0])

    def await_others(self, step: EvaluationStep) -> None:
        """Take part in what other processes still compute; called after the last batch of each evaluated loader.

        Args:
            step: The step that evaluated the loader's batches.
        """


def splitter_of(strategy: Strategy, module: nn.Module) -> Splitter:
    """Return what counts and splits the samples of batches.

    Args:
        strategy: The strategy. Where it has an attribute `dim`, samples are in this dimension, else in the first.
        module: The user's module, which may define `batch_size` and `split_batch`.
    """
    return Splitter(module, getattr(strategy, "dim", 0))
