"""Cut layers compared with whole ones before the first step: the loss and all gradients of the first batch.

A wrong plan computes another function without an error. A weight that is whole, but receives a part of a sequence in
each process, has a gradient that lacks the other parts.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.replaced_forwards import own_forwards
from equipoise.extensions.fsdp.mesh.grid import DATA, is_cut
from equipoise.extensions.fsdp.mesh.whole_layers import WholeLayers
from equipoise.extensions.fsdp.mesh.without_dropout import without_dropout
from equipoise.extensions.fsdp.state.gathering import gather_whole
from equipoise.interop.torch.autograd import run_backward_in_modes
from equipoise.notices import rank_zero_warn
from equipoise.parallel.communication.object_exchange import gather_objects
from equipoise.parallel.equality import Gap, Tolerance, copied, gap_of, largest, tolerance_of
from equipoise.parallel.snapshot.preserve_state import preserve_state
from equipoise.parallel.step_protocols import TrainingStep
from equipoise.precision import Precision
from equipoise.tree import map_leaves

__all__ = ["CUT_LAYERS", "Difference", "LayerComparison", "Sides", "gradient_of"]

# Computes the gradients of a batch, and returns its loss.
Compute = Callable[[TrainingStep, Any], Tensor | None]


_OPTION = "FSDPStrategy(compare_layers=False)"


class Difference(NamedTuple):
    """A difference between cut and whole layers.

    Attributes:
        gap: How far the two are apart.
        name: The name of the parameter; empty for the loss.
        is_cut: Whether the parameter is cut over a row.
    """

    gap: Gap
    name: str
    is_cut: bool = False


class Sides(NamedTuple):
    """Names of the two sides of a comparison, for messages.

    Attributes:
        parts: Name of the layers or sequences of which each process computes a part.
        wholes: Name of those with which they are compared.
        advice: The remedy if they differ. Default: empty, it follows from the differences of cut layers.
    """

    parts: str = "cut layers"
    wholes: str = "whole ones"
    advice: str = ""


CUT_LAYERS = Sides()


class LayerComparison:
    """Compares parts that processes of a row compute with the whole, once in a fit: cut layers, or parts of sequences.

    All processes call each method together, and decide alike.

    Args:
        module: The user's module, before its layers are cut.
        sides: Names of the compared sides. Default: cut layers, with whole ones.
    """

    def __init__(self, module: LightningModule, sides: Sides = CUT_LAYERS) -> None:
        self._module = module
        self._sides = sides
        # That of the module in shards is another.
        self._name = type(module).__name__
        self._twin: WholeLayers | None = None
        # What has failed in this process.
        self._failure: str | None = None
        self._rows: dist.ProcessGroup | None = None
        self._dtypes: set[torch.dtype] = set()
        self._attempt(self._copy)

    def begin(self, precision: Precision, mesh: DeviceMesh, batches: DeviceMesh) -> None:
        """Prepare the comparison, once the module is in shards.

        Args:
            precision: The precision of the run.
            mesh: The mesh that the module sees.
            batches: The processes, with a row for each batch of a step.
        """
        rows = batches[DATA]
        if rows.size() > 1:
            self._rows = rows.get_group()
        self._dtypes = {parameter.dtype for parameter in self._module.parameters()}
        if precision.autocast is not None:
            self._dtypes.add(precision.autocast[1])
        if not getattr(self._module, "automatic_optimization", True):
            self._failure = "its training step runs backwards and optimisers by hand"
        if self._twin is not None:
            self._attempt(partial(self._twin.configure, self._module, precision, mesh))

    def run(self, step: TrainingStep, batch: Any, compute: Compute) -> bool:
        """Compare loss and gradients of a batch, and restore all that this changes.

        Args:
            step: The step.
            batch: The batch of this row.
            compute: Computes the gradients of a batch with the cut layers, and returns the loss. None: some process has
                none.

        Returns:
            False if nothing could be compared with this batch.

        Raises:
            ConfigurationError: In all processes, if a loss or a gradient is another.
        """
        gradients = [(parameter, parameter.grad) for parameter in self._module.parameters()]
        self._module.zero_grad()
        try:
            if self._is_possible(self._check):
                with preserve_state(self._module, containers=True), own_forwards(), without_dropout() as shapes:
                    loss = compute(step, map_leaves(copied, batch))
                    buffers = {name: buffer.detach().clone() for name, buffer in self._module.named_buffers()}
                if loss is None:
                    return False
                self._compare(step, batch, loss, buffers, shapes)
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
        self.close()
        return True

    def close(self) -> None:
        """Release the copy."""
        if self._twin is not None:
            self._twin.close()
            self._twin = None

    # What may fail in a process.

    def _attempt(self, function: Callable[[], None]) -> None:
        """Call a function, unless something has failed before. An error is noted."""
        if self._failure is not None:
            return
        try:
            function()
        except Exception as error:
            first_line = str(error).partition("\n")[0].rstrip(".")
            self._failure = f"a copy with whole layers fails ({type(error).__name__}: {first_line})"

    def _is_possible(self, function: Callable[[], None]) -> bool:
        """Call a function in all processes. Warn, and return False, if it has failed in one."""
        self._attempt(function)
        reasons = [reason for reason in gather_objects(self._failure) if reason is not None]
        if reasons:
            rank_zero_warn(
                f"The {self._sides.parts} of {self._name} were not compared with {self._sides.wholes}, because"
                f" {reasons[0]}. {_OPTION} leaves the comparison out."
            )
        return not reasons

    def _copy(self) -> None:
        self._twin = WholeLayers(self._module)

    def _check(self) -> None:
        """Check that the copy has the same parameters, and that there is memory for them and their gradients."""
        assert self._twin is not None
        needed: dict[torch.device, int] = defaultdict(int)
        for parameter in self._module.parameters():
            nbytes = parameter.numel() * parameter.element_size()
            needed[parameter.device] += 2 * nbytes
        for device, nbytes in needed.items():
            torch.empty(nbytes, dtype=torch.uint8, device=device)
        names = [name for name, _ in self._module.named_parameters()]
        names_of_twin = [name for name, _ in self._twin.module.named_parameters()]
        if names != names_of_twin:
            raise ConfigurationError("its parameters have other names")

    # The comparison.

    def _compare(
        self, step: TrainingStep, batch: Any, loss: Tensor, buffers: dict[str, Tensor], shapes: list[torch.Size]
    ) -> None:
        """Compute the loss and the gradients of whole layers, and compare with what cut layers leave."""
        twin = self._twin
        assert twin is not None
        losses: list[Tensor] = []

        def compute() -> None:
            outcome = step.run_on(twin.module, map_leaves(copied, batch), 1)
            assert outcome.loss is not None
            run_backward_in_modes(outcome.loss)
            losses.append(outcome.loss)

        with preserve_state(self._module, containers=True), without_dropout() as whole_shapes:
            twin.fill(self._module, loss.device)
            if not self._is_possible(compute):
                return
        # Statistics of parts of sequences are those of the parts.
        if self._sides is CUT_LAYERS:
            self._check_buffers(buffers, twin.module)
            _warn_of_equal_masks(shapes, whole_shapes)
        self._judge([self._of_loss(loss, losses[0]), *self._of_gradients(twin.module)])

    def _check_buffers(self, buffers: dict[str, Tensor], twin: nn.Module) -> None:
        """Refuse buffers that whole layers change in another way, such as statistics of what is cut."""
        others = []
        for name, expected in twin.named_buffers():
            if gap_of(expected, buffers.get(name), self._tolerance(expected.dtype)):
                others.append(name)
        for of_process in gather_objects(others):
            if of_process:
                raise ConfigurationError(
                    f"In the first batch the buffer {of_process[0]!r} has other values with cut layers than with whole"
                    f" ones: its module computes them from parts. Leave the layers beside it whole. {_OPTION}"
                    " trains without this comparison."
                )

    def _tolerance(self, dtype: torch.dtype) -> Tolerance:
        dtypes = {*self._dtypes, dtype}
        if torch.float32 in dtypes and torch.get_float32_matmul_precision() != "highest":
            dtypes.add(torch.bfloat16)
        return tolerance_of(dtypes)

    def _of_loss(self, loss: Tensor, expected: Tensor) -> Difference:
        loss = _whole_of(loss)
        return Difference(gap_of(_whole_of(expected), loss, self._tolerance(loss.dtype)), "")

    def _of_gradients(self, twin: nn.Module) -> list[Difference]:
        """Return the differences of the gradients of all parameters."""
        # 1. Those of all rows together, which lie in the memory of the copy's.
        compared = []
        for (name, parameter), other in zip(self._module.named_parameters(), twin.parameters(), strict=True):
            if parameter.requires_grad:
                expected = gradient_of(other)
                if self._rows is not None:
                    dist.all_reduce(expected, group=self._rows)
                compared.append((name, parameter, expected))
        # 2. In parts of what is allowed.
        size = largest(expected for *_, expected in compared)
        differences = []
        for name, parameter, expected in compared:
            tolerance = self._tolerance(parameter.dtype)
            gap = gap_of(expected, gradient_of(parameter), tolerance._replace(floor=tolerance.floor * size))
            differences.append(Difference(gap, name, is_cut(parameter)))
        return differences

    def _judge(self, differences: Sequence[Difference]) -> None:
        """Refuse the layers if a difference is too large in any process."""
        loss, *of_parameters = differences
        worst = max(of_parameters, default=loss)
        num_others = sum(bool(difference.gap) for difference in of_parameters)
        of_processes = gather_objects((loss, worst, num_others))
        loss = max(loss for loss, _, _ in of_processes)
        worst = max(worst for _, worst, _ in of_processes)
        if loss.gap or worst.gap:
            num_others = max(number for _, _, number in of_processes)
            raise ConfigurationError(self._refusal(loss, worst, num_others))
        rank_zero_info(
            f"The {self._sides.parts} compute the same as {self._sides.wholes}: in the first batch the loss and all"
            f" gradients agree. The largest difference is {max(loss, worst).gap.excess:.0e} of what rounding may cause."
        )

    def _refusal(self, loss: Difference, worst: Difference, num_others: int) -> str:
        """Return the message for parts that compute something else."""
        reasons = []
        if loss.gap:
            reasons.append(f"the loss differs by {loss.gap.share:.1e} of its value")
        if worst.gap:
            more = ""
            if num_others > 1:
                more = f" (and those of {num_others - 1} more parameters)"
            reasons.append(
                f"the gradient of {worst.name} differs by {worst.gap.share:.1e} of its largest element{more}"
            )
        return (
            f"The {self._sides.parts} compute something else than {self._sides.wholes}. In the first batch"
            f" {' and '.join(reasons)}. {self._advice(loss, worst)} {_OPTION} trains without this comparison."
        )

    def _advice(self, loss: Difference, worst: Difference) -> str:
        """Return what to do about parts that compute something else."""
        if self._sides.advice:
            return self._sides.advice
        if not loss.gap and not worst.is_cut:
            return (
                f"{worst.name} is whole, so each process computes its gradient from all inputs of its layer, but here"
                " it receives a part of them. Add that layer to the plan, as SequenceParallel() if it is a norm, or"
                " give it whole inputs."
            )
        return (
            "Correct the plan: a ColwiseParallel layer is followed by a RowwiseParallel one, and an attribute such as"
            " the number of heads is divided by the size of the mesh."
        )


def _warn_of_equal_masks(shapes: Sequence[torch.Size], whole_shapes: Sequence[torch.Size]) -> None:
    """Warn where dropout sees a part in each process, since all of them draw the same numbers."""
    for shape, whole in zip(shapes, whole_shapes, strict=False):
        if shape != whole:
            rank_zero_warn(
                f"Dropout between cut layers draws one mask for all parts: a tensor of shape {list(whole)} is one of"
                f" {list(shape)} in each process, and all processes of a row draw the same numbers. Gradients are right"
                " for these masks. For those of one device, drop elements in front of the first layer that is cut, or"
                " behind the last."
            )
            return


def _whole_of(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, whole where it lies in parts; all processes call it together."""
    detached = tensor.detach()
    if isinstance(detached, DTensor):
        return gather_whole(detached)
    return detached


def gradient_of(parameter: Tensor) -> Tensor:
    """Return the whole gradient of a parameter, zeros if it has none; all processes call this together."""
    if parameter.grad is None:
        return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return _whole_of(parameter.grad)
