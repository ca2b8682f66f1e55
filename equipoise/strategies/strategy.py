"""The strategy interface, with neutral defaults for one process.

The trainer never asks which strategy it has. A batch goes through a strategy in this order:

    place        put the batch where it is needed, as a sequence of parts
    forward_backward   compute the gradients of the parts        (evaluate: the outputs alone)
    finish_gradients   at the end of an accumulation window: weigh, exchange
    clip_gradients, optimizer_step
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from equipoise.errors import ConfigurationError
from equipoise.interop.torch import foreach
from equipoise.parallel.batches.shares import even_sizes
from equipoise.parallel.batches.splitting import Splitter
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.communication.membership import refuse_copies
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.step_protocols import EvaluationStep, StepResult, TrainingStep
from equipoise.precision import Precision

__all__ = ["Strategy", "Transfer"]

T = TypeVar("T")
Transfer = Callable[[Any, torch.device], Any]


class Strategy:
    """How a step is computed on the devices.

    Subclasses override what differs from one process on one device. Arguments of a strategy's own belong in its
    constructor; the devices come from the trainer, by `connect`.

    Attributes:
        name: The name by which `Trainer(strategy=...)` finds it.
        goes_back_in_parts: Whether `forward_backward` runs a backward for each part of a batch rather than one for all.
        keeps_batches_whole: Whether a batch is one part in one process, and `forward_backward` is that of this class.
            Default: False. Only then may a training step pull its batches by itself.
        devices: The devices of this process, in order.
        dim: The dimension of a batch's tensors that holds its samples.
        launches: Whether `launch` runs things in other processes than the caller's.
        joins_processes: Whether it computes together with the processes that torchrun, Slurm or Ray have started.
            Default: False, and `connect` refuses to train a copy in each of them.
    """

    name: ClassVar[str] = ""
    goes_back_in_parts: ClassVar[bool] = False
    keeps_batches_whole: ClassVar[bool] = False

    devices: Sequence[torch.device] = ()
    dim: int = 0
    launches: bool = False
    joins_processes: bool = False
    global_rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1

    _placed: nn.Module | None = None  # the module, while it is on the devices

    # Where it runs.

    @property
    def root_device(self) -> torch.device:
        """The device on which this process computes, or gathers what it computed."""
        return self.devices[0]

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process that writes files and speaks to the user."""
        return self.global_rank == 0

    def default_devices(self, available: Sequence[torch.device]) -> Sequence[torch.device]:
        """Return the devices that `devices="auto"` stands for: the first one, unless a strategy computes on several.

        Args:
            available: All devices of this machine of the chosen kind; one for the CPU.
        """
        return available[:1]

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Takes the devices the user asked for.

        Args:
            devices: The devices on this machine, repeats allowed.
            num_nodes: The number of machines. Default: 1.

        Raises:
            ConfigurationError: If the strategy cannot run on them.
        """
        if not self.joins_processes:
            refuse_copies(self.name)
        if num_nodes != 1:
            raise ConfigurationError(
                f"strategy={self.name!r} runs on one machine, but num_nodes={num_nodes} was given. Leave it out."
            )
        self.devices = tuple(devices)

    def check_module(self, module: nn.Module, *, training: bool) -> None:
        """Checks that a module can be computed this way; called before anything is placed.

        Args:
            module: The user's module.
            training: Whether it is to be trained, not only evaluated.

        Raises:
            ConfigurationError: Naming what is in the way, and the way out.
        """

    def launch(self, function: Callable[[], T], known: Sequence[Any] = ()) -> T:
        """Runs `function` in every process and returns the main one's result.

        Args:
            function: What to run.
            known: The caller's objects; a result that refers to one refers to the caller's own.
        """
        return function()

    def setup(self, module: nn.Module, precision: Precision) -> None:
        """Converts and places the module; called before optimisers are made."""
        precision.convert_module(module)
        module.to(self.root_device)
        self._placed = module

    def share_batch_statistics(self, module: nn.Module) -> None:
        """Lets BatchNorm layers compute over all processes (`sync_batchnorm`); called after `setup`."""

    def ends_after(self, batch: int, window: int) -> bool:
        """Return whether a run ends after this batch; called after each batch once a signal has asked for its end.

        Args:
            batch: The number of training batches so far.
            window: The number of batches from one optimiser step to the next.
        """
        return True

    def fail(self, error: BaseException) -> None:
        """This process has failed and is about to tell callbacks; others may not know, and must not be waited for."""

    def teardown(self, error: BaseException | None = None) -> None:
        """Releases processes, threads and devices, on any exit; the module goes back to the CPU.

        Args:
            error: What ended the run; None after a good end.
        """
        if self._placed is not None:
            self._placed.cpu()
            self._placed = None

    # Data.

    def shard(self, loader: Any, stage: str) -> Any:
        """This process's part of a loader.

        Args:
            loader: Any iterable over batches.
            stage: "train", "validate", "test" or "predict".
        """
        return loader

    def part_of(self, batches: float, part: Any) -> float | None:
        """How many of the batches of a loader this process evaluates.

        Args:
            batches: The number that all processes together evaluate; infinite if unknown.
            part: What `shard` made of the loader.

        Returns:
            The number; None where the part is a loader in its own right, whose batches may be counted.
        """
        return batches

    def set_epoch(self, epoch: int) -> None:
        """Tells samplers that `shard` put in which epoch begins."""

    def begin_evaluation(self) -> None:
        """Makes the module the same in all processes, as far as training lets it differ."""

    def place(self, batch: Any, transfer: Transfer) -> Sequence[Any]:
        """Puts a batch where it is needed.

        Args:
            batch: What the loader gave.
            transfer: `transfer(part, device)` copies with the user's transfer hooks.

        Returns:
            The parts, one for each computation; empty if this process has no batch.
        """
        return (transfer(batch, self.devices[0]),)

    # Computation.

    def forward_backward(self, step: TrainingStep, parts: Sequence[Any], last: bool) -> StepResult:
        """Computes the gradients of a batch.

        Args:
            step: `step(part)` runs the training step, `step.backward(result)` its backward.
            parts: What `place` returned.
            last: Whether the accumulation window ends with this batch.
        """
        result = step(parts[0])
        step.backward(result)
        return result

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """One backward, for manual optimisation."""
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def collect_gradients(self) -> None:
        """Brings the gradients of a backward to the module's own parameters; called after every backward."""

    def finish_gradients(self, window: AccumulationWindow, optimizer: Optimizer) -> bool | None:
        """Turns the summed gradients of a window into their weighted mean, over all processes.

        Returns:
            Whether no process had anything to learn from; None where this one knows by itself.
        """
        factor = window.correction()
        if factor is not None:
            foreach.multiply_([p.grad for p in optimizer_parameters(optimizer) if p.grad is not None], factor)
        return None

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        """Clips gradients in place.

        Args:
            optimizer: Whose parameters.
            value: The largest norm, or the largest absolute value.
            algorithm: "norm" or "value".
        """
        if algorithm == "value":
            nn.utils.clip_grad_value_(optimizer_parameters(optimizer), value)
        elif algorithm == "norm":
            nn.utils.clip_grad_norm_(optimizer_parameters(optimizer), value)
        else:
            raise ConfigurationError(f"Gradients are clipped by 'norm' or by 'value', not by {algorithm!r}.")

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Steps an optimiser, handing it the closure if there is one."""
        return optimizer.step(**kwargs) if closure is None else optimizer.step(closure=closure, **kwargs)

    def unscale_gradients(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Takes the scale of the loss out of an optimiser's gradients, and notes whether all of them are finite."""
        scaler.unscale_(optimizer)

    def scaled_step(self, scaler: GradScaler, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Steps an optimiser unless one of its gradients, unscaled or not yet, is not finite."""
        return scaler.step(optimizer, **kwargs)

    def cut(self, parts: Sequence[Any], count: int, splitter: Splitter) -> list[Sequence[Any]]:
        """Cuts a batch that was placed, to be computed piece by piece where it does not fit as a whole.

        Args:
            parts: What `place` returned.
            count: The number of pieces, at most as many as the largest part has samples.
            splitter: Cuts batches.

        Returns:
            The pieces, each like what `place` returns; a part of few samples has none in the last ones.
        """
        pieces: list[list[Any]] = [[] for _ in range(count)]
        for part in parts:
            sizes = [size for size in even_sizes(splitter.size_to_cut(part), count) if size]
            for piece, cut in zip(pieces, splitter.parts(part, sizes), strict=False):
                piece.append(cut)
        return [tuple(piece) for piece in pieces if piece]

    def arm_recovery(self) -> None:
        """Steps may be done again from now on; called before the first one."""

    def obstacle(self, *, training: bool, leave_out: bool) -> str:
        """Why a step that ran out of memory cannot be done again, or left out; empty if it can."""
        return ""

    def failed_device(self, named: str | None) -> torch.device:
        """The device that ran out of memory in the last computation, as far as anybody knows.

        Args:
            named: What the allocator's message calls it; None if it does not say.
        """
        return self.root_device if named is None else torch.device(named)

    def relieve(self) -> None:
        """Lets the failed device compute less from now on, where batches are shared out unequally.

        Called in training, after `failed_device`; the batch at hand stays as it was cut.
        """

    def discard_gradients(self) -> bool:
        """Lets go of gradients that a failed attempt has left anywhere but in the module's own parameters.

        Returns:
            Whether other processes have a part of them already, which this one's next attempt completes.
        """
        return False

    def empty_cache(self) -> None:
        """Gives memory that the allocators hold in reserve back to the devices."""
        if any(device.type == "cuda" for device in self.devices):
            torch.cuda.empty_cache()

    def evaluate(self, step: EvaluationStep, parts: Sequence[Any]) -> Any:
        """Runs an evaluation step without gradients and returns its output."""
        return step(parts[0])

    # Values over processes.

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: str = "mean") -> Any:
        """Reduces a value over all processes."""
        return tensor

    def all_gather(self, tensor: Any, group: Any | None = None, sync_grads: bool = False) -> Any:
        """Gathers a value of every process, stacked along a new first dimension where there are several."""
        return tensor

    def gather_objects(self, value: T) -> list[T]:
        """The values of all processes, in the order of their ranks."""
        return [value]

    def broadcast(self, value: T, src: int = 0) -> T:
        """The value of process `src`, in every process."""
        return value

    def barrier(self, name: str | None = None) -> None:
        """Waits until every process has come here."""

    # State: full and portable, whatever the strategy; called in every process.

    def state_dict(self) -> dict[str, Any]:
        """What the strategy itself has learned and a resumed run goes on with."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` returned, also from another strategy or for other devices, if it is of use."""

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """The module's whole state."""
        return module.state_dict()

    def load_module_state(self, module: nn.Module, state: dict[str, Any], strict: bool = True) -> None:
        """Loads what `module_state` returned."""
        module.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimiser's whole state."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Loads what `optimizer_state` returned, moved to where the parameters are."""
        optimizer.load_state_dict(state)
