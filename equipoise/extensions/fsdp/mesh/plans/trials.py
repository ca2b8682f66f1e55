"""Trials of a plan: copies of a module whose layers are cut compute a batch as a whole copy does, or they do not."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from equipoise.errors import ConfigurationError
from equipoise.extensions.fsdp.interop.tensor_parallel import leave_group
from equipoise.extensions.fsdp.mesh.grid import row_apart
from equipoise.extensions.fsdp.mesh.layer_comparison import gradient_of
from equipoise.extensions.fsdp.mesh.plans.cutting import apply_plan
from equipoise.extensions.fsdp.mesh.plans.sources import Plan
from equipoise.extensions.fsdp.mesh.plans.uses import Group, LayerUses
from equipoise.extensions.fsdp.mesh.without_dropout import without_dropout
from equipoise.interop.torch.autograd import run_backward_in_modes
from equipoise.parallel.communication.object_exchange import gather_objects
from equipoise.parallel.communication.process_group import follows_from_another
from equipoise.parallel.equality import TOLERANCES, copied, gap_of, largest
from equipoise.parallel.snapshot import random_state
from equipoise.parallel.snapshot.preserve_state import preserve_state
from equipoise.tree import map_leaves

__all__ = ["Trials", "attempt"]

T = TypeVar("T")

# A gradient that is smaller than so many of the differences that rounding may cause shows nothing.
_TELLING = 10


class Trials:
    """Computes the loss and all gradients of a batch with copies of a module; all processes call each method together.

    Copies compute in float32, or in float64 if the run does, without dropout and with the same random numbers. Their
    weights have noise: those that are zero in the beginning would hide what is wrong behind them.

    Args:
        module: The user's module, in a run.
        row: The processes that compute a batch together.
        device: The device of this process.
        batch: A batch, on the CPU.
    """

    def __init__(self, module: LightningModule, row: DeviceMesh, device: torch.device, batch: Any) -> None:
        self._trainer = cast("Any", module.trainer)
        self._context = self._trainer.parts.context
        self._row = row
        # The mesh stays the same.
        self._memo = {id(module.device_mesh): module.device_mesh}
        self._whole = self._copy(module).to(device)
        self._dtype = torch.float32
        if self._context.precision.widens:
            self._dtype = torch.float64
            self._whole.double()
        else:
            self._whole.float()
        # The loss comes first.
        self._expected: list[Tensor] = []
        self._shown: dict[str, Tensor] = {}
        with _alike(), preserve_state(module, containers=True):
            # Hooks of the transfer are those of the user's module.
            placed = self._context.make_transfer()(batch, device)
            self._batch = map_leaves(self._converted, placed)
            _add_noise(self._whole)

    def _copy(self, module: LightningModule) -> LightningModule:
        other = copy.deepcopy(module, dict(self._memo))
        # Lightning leaves it out.
        other.trainer = self._trainer
        return other

    def _converted(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.to(self._dtype)
        return leaf

    def groups(self) -> list[Group]:
        """Compute the whole module, and return the groups of its layers.

        Raises:
            ConfigurationError: If the loss is not finite.
        """
        module = self._copy(self._whole)
        uses = LayerUses(module)
        loss, self._shown = self._compute(module)
        if not loss.isfinite():
            raise ConfigurationError("the loss is not finite")
        self._expected = [loss.detach(), *map(gradient_of, module.parameters())]
        return uses.groups(loss)

    def reason(self, plan: Plan) -> str | None:
        """Return why the layers of a plan cannot be cut; None if they can.

        Args:
            plan: The plan.
        """
        row = row_apart(self._row)
        try:
            attempt(partial(self._check_equal, plan, row), partial(leave_group, row))
        except ConfigurationError as error:
            return f"cut, {error}"
        return None

    def _compute(self, module: LightningModule) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the gradients of the batch, and return the loss and what `_shown` returns.

        Raises:
            ConfigurationError: If there is no loss.
        """
        module.zero_grad()
        step = self._context.hooks.bind_step("training_step", module)
        captures = self._context.logs.captures
        context = nullcontext
        if self._context.precision.widens:
            context = self._context.precision.forward_context
        # The trainer does not receive what a step logs.
        outer = captures.begin()
        try:
            with _alike(), context():
                batch = map_leaves(copied, self._batch)
                output = step(batch, 0)
                loss = output["loss"] if isinstance(output, Mapping) else output
                if loss is None:
                    raise ConfigurationError("`training_step` returns no loss for the first batch")
                run_backward_in_modes(loss)
        finally:
            logged = captures.end(outer)
        return loss, _shown(module, logged)

    def _check_equal(self, plan: Plan, row: DeviceMesh) -> None:
        """Check that the loss, all gradients, logged values and buffers of a cut copy are those of the whole one.

        Raises:
            ConfigurationError: If one differs, or is too small to tell.
        """
        cut = self._copy(self._whole)
        apply_plan(cut, plan, {}, row)
        loss, shown = self._compute(cut)
        tolerance = TOLERANCES[self._dtype]
        of_gradients = tolerance.of_gradients(self._expected)
        compared = [("the loss", loss, loss.detach())]
        for name, parameter in cut.named_parameters():
            gradient = gradient_of(parameter)
            what = f"the gradient of {name}"
            entry = (what, parameter, gradient)
            compared.append(entry)
        for (name, tensor, value), expected in zip(compared, self._expected, strict=True):
            gap = gap_of(expected, value, of_gradients)
            # Rounding causes less.
            if gap:
                raise ConfigurationError(f"{name} differs{gap}")
            # Zeros are the same, whatever a layer computes. A bias of keys has no other gradient.
            is_cut = isinstance(tensor, DTensor) and not tensor.placements[0].is_replicate()
            size = largest([expected])
            if is_cut and tensor.ndim > 1 and size <= _TELLING * of_gradients.floor:
                raise ConfigurationError(f"{name} is too small in the first batch to be compared")
        for name, expected in self._shown.items():
            computed = shown.get(name)
            gap = gap_of(expected, computed, tolerance)
            if gap:
                raise ConfigurationError(f"{name} differs")


def _shown(module: nn.Module, logged: Sequence[Any]) -> dict[str, Tensor]:
    """Return logged numbers and buffers, by what they are."""
    shown = {}
    for index, entry in enumerate(logged):
        # Metrics are computed later.
        if isinstance(entry.value, Tensor | int | float):
            what = f"the logged value {entry.name!r} ({index})"
            value = torch.as_tensor(entry.value)
            shown[what] = value.detach()
    for name, buffer in module.named_buffers():
        shown[f"the buffer {name!r}"] = buffer.detach()
    return shown


@contextmanager
def _alike() -> Iterator[None]:
    """Compute in a `with` block as exactly as the dtype allows, without dropout and with the same random numbers."""
    precision = torch.get_float32_matmul_precision()
    with random_state.isolated(), without_dropout(), torch.enable_grad():
        random_state.seeded(0).restore()
        # On devices as well.
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)


def _add_noise(module: nn.Module) -> None:
    """Add noise to all parameters, of about the size of first values, and let all of them have gradients."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
            size = 0.1
            if parameter.ndim > 1:
                size = parameter[0].numel() ** -0.5
            noise = torch.randn_like(parameter)
            parameter.detach().add_(noise, alpha=size)


class _Failure(NamedTuple):
    """An error of a process.

    Attributes:
        follows: Whether it follows from the end of another process.
        text: A description of the error.
    """

    follows: bool
    text: str


def attempt(function: Callable[[], T], leave: Callable[[], None] | None = None) -> T:
    """Call a function in all processes, and return its result.

    Args:
        function: The function.
        leave: Called when all are done, and before in a process that has failed, so that no other waits for it within
            the function. Default: None, where processes exchange nothing.

    Raises:
        ConfigurationError: In all processes, with the error of the first in which it fails.
    """
    results = []
    failure = None
    try:
        results.append(function())
    except ConfigurationError as error:
        failure = _Failure(False, str(error))
    except Exception as error:
        first_line, _, _ = str(error).partition("\n")
        message = f"{type(error).__name__}: {first_line}"
        failure = _Failure(follows_from_another(error), message)
    if failure is not None and leave is not None:
        leave()
    failures = [of_process for of_process in gather_objects(failure) if of_process is not None]
    if failure is None and leave is not None:
        leave()
    if failures:
        first = min(failures, key=attrgetter("follows"))
        raise ConfigurationError(first.text)
    return results[0]
