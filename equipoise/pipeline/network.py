"""The network of a pipeline: its calls are caught, traced, cut and run in stages."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from equipoise.errors import ConfigurationError
from equipoise.notices import rank_zero_warn
from equipoise.parallel.activation_checkpointing import is_checkpointed
from equipoise.pipeline.execution.placement import Placement
from equipoise.pipeline.execution.suspended_step import current_step, is_inside_stage
from equipoise.pipeline.execution.threaded_engine import Pipeline
from equipoise.pipeline.graph.call_structure import CallStructure
from equipoise.pipeline.graph.stages import StageProgram, homes_of, make_stages
from equipoise.pipeline.graph.tracing import NotTraceable, Traced, trace
from equipoise.pipeline.planning.cut import (
    Cut,
    CutOptions,
    PinnedCut,
    cut_as_pinned,
    cut_by_names,
    table_of,
)
from equipoise.pipeline.planning.loss_profile import LossProfile
from equipoise.pipeline.planning.measured_cut import cut_automatically
from equipoise.pipeline.planning.traced_calls import compute_uncut
from equipoise.pipeline.processes.client import StageClient
from equipoise.pipeline.processes.engine import ProcessPipeline
from equipoise.pipeline.schedule.schedule import splits
from equipoise.pipeline.verification.trace_comparison import Comparison, Parting

__all__ = ["StagedNetwork"]


class StagedNetwork:
    """Stands before the forward of the network while a run lasts.

    Which module is the network shows when it is called: the user's module itself, or the largest of its children.
    Nothing is cut before the first call, since blocks are measured with real inputs; nor, where it is to be trained,
    before the first that trains it, since what follows the call in a training step counts, too.

    Args:
        module: The user's module.
        options: Devices, schedule, micro-batches.
        names: The modules to cut before; None: chosen by measuring.
        threads: See `Pipeline`.
        training: Whether it is to be trained; then it is measured as in training, whatever the first call is for.
        copy_always: See `Placement`.
        processes: Those that compute the stages but the last; None: all are computed here.

    Attributes:
        cut: Where it is cut; None before the first call.
        running: The stages of the last call; None before it.
        rest: Measures what a training step computes after the call; None where there is no such step.
        pinned: A cut of an earlier run, which is taken where nobody wishes another, if the network still has it.
    """

    def __init__(
        self,
        module: nn.Module,
        options: CutOptions,
        names: Sequence[str] | None,
        *,
        threads: bool | None,
        training: bool,
        copy_always: bool = False,
        processes: StageClient | None = None,
    ) -> None:
        self.module, self.options, self.names, self.threads = module, options, names, threads
        self.training, self.processes = training, processes
        self.cut: Cut | None = None
        self.running: Pipeline | ProcessPipeline | None = None
        self.rest: LossProfile | None = None
        self.pinned: PinnedCut | None = None
        self.placement = Placement(
            module,
            options.devices,
            stages_per_device=options.stages_per_device,
            copy_always=copy_always,
            in_processes=processes is not None,
        )
        self._signature: tuple[str, ...] = ()  # of the forward that was cut
        self._originals: dict[str, Callable[..., Any]] = {}
        self._own: dict[str, Any] = {}  # forwards that the user has set in an instance
        self._pipelines: dict[tuple[Any, ...], Pipeline | ProcessPipeline] = {}
        self._compared: set[tuple[Any, ...]] = set()  # calls of which what was followed has been compared
        self._differing: set[str] = set()  # networks that differ from themselves, of which the user has been told
        self._whole: dict[type[nn.Module], str] = {}  # submodules that were followed wrongly, with the reason
        self._named = dict(module.named_modules())

    # Calls.

    def cover(self) -> None:
        """Catches calls of the module and of its largest child.

        Raises:
            ConfigurationError: If activations are checkpointed where that cannot be.
        """
        if splits(self.options.schedule) and any(map(is_checkpointed, self.module.modules())):
            raise ConfigurationError(
                f"schedule={self.options.schedule!r} goes backward through a stage in many parts, for each of which"
                " activation_checkpointing would compute the forward once more. Take 'interleaved_1f1b', or leave"
                " activation_checkpointing out."
            )
        children = {
            name: child for name, child in self.module.named_children() if any(True for _ in child.parameters())
        }
        sizes = {name: sum(parameter.numel() for parameter in child.parameters()) for name, child in children.items()}
        names = [max(sizes, key=lambda name: sizes[name])] if sizes else []
        self.placement.place_outside(self._named[names[0]] if names else None)
        if type(self.module).forward is not nn.Module.forward:
            names.append("")
        for name in names:
            if is_checkpointed(self._named[name]):
                raise ConfigurationError(
                    f"activation_checkpointing means {name!r}, which is the network that is cut into stages. Name parts"
                    f" of it, such as '{name}.*'."
                )
            self._originals[name] = self._named[name].forward
            if "forward" in vars(self._named[name]):
                self._own[name] = vars(self._named[name])["forward"]
        self.recover()

    def uncover(self) -> None:
        """Lets calls through again."""
        for name in self._originals:
            if name in self._own:
                self._named[name].forward = self._own[name]
            elif "forward" in vars(self._named[name]):
                del self._named[name].forward

    def recover(self) -> None:
        """Catches calls again after `uncover`."""
        for name in self._originals:
            self._named[name].forward = self._catcher(name)

    def release(self) -> None:
        """The run has ended."""
        self.uncover()
        self.placement.stop_waiting()

    @contextmanager
    def caught(self) -> Iterator[None]:
        """While calls are caught in the midst of something that lets them through."""
        self.recover()
        try:
            yield
        finally:
            self.uncover()

    @contextmanager
    def _uncovered(self) -> Iterator[None]:
        self.uncover()
        try:
            yield
        finally:
            self.recover()

    def _catcher(self, name: str) -> Callable[..., Any]:
        def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if is_inside_stage():  # a stage that has it whole
                return self._original_of(name, module)(*args, **kwargs)
            if self.rest is not None and self.rest.running:
                return self.rest.network_output()
            step = current_step()
            if step is not None:
                step.inside = step.inside or name
                return step.hand_over(args, kwargs)
            structure = CallStructure(args, kwargs)
            if self._waits():
                traced = self._compared_trace(name, structure)
                with self._uncovered():
                    return compute_uncut(traced, structure.tensors, self.options.devices[-1])
            self.running = pipeline = self.pipeline(name, structure, whole=True)
            with self.placement.shadows.in_forward():
                return pipeline.forward(structure.tensors)

        # As a method: a copy of the module for another device binds methods to itself, and shares everything else.
        return MethodType(forward, self._named[name])

    def _original_of(self, name: str, module: nn.Module) -> Callable[..., Any]:
        """Return the forward that was there before, of the network or of its copy on another device."""
        original = self._originals[name]
        if module is not self._named[name] and isinstance(original, MethodType):
            return MethodType(original.__func__, module)
        return original

    def _waits(self) -> bool:
        """Whether this is a call before training, which alone shows what a cut by measuring has to count."""
        by_hand = self.names is not None or callable(getattr(self.module, "pipeline_cuts", None))
        chosen = by_hand or self.cut is not None or self.pinned is not None
        return self.training and not chosen and not torch.is_grad_enabled()

    # Stages.

    def pipeline(self, name: str, structure: CallStructure, *, whole: bool = False) -> Pipeline | ProcessPipeline:
        """The stages for a call.

        Args:
            name: The network's name in the user's module.
            structure: The call.
            whole: Whether it is a call with a whole batch, not with a micro-batch.

        Raises:
            ConfigurationError: If the network cannot be cut.
        """
        network = self._named[name]
        key = self._key(name, structure)
        found = self._pipelines.get(key)
        if found is None:
            if self.cut is None:
                self.placement.stop_waiting()
                with self._as_trained():
                    self._choose(name, structure, whole=whole)
            assert self.cut is not None
            traced = self._compared_trace(name, structure)
            if traced.signature == self._signature:
                ends = self.cut.ends
            else:
                ends = homes_of(traced, self.placement.stage_of(network), len(self.options.devices))
            stages = make_stages(traced, ends, self.placement.shadow(traced))
            found = self._make(traced, stages)
            if len(self._pipelines) > 64:
                self._pipelines.clear()  # calls with ever other numbers among their arguments
                self._compared.clear()
            self._pipelines[key] = found
        return found

    def _key(self, name: str, structure: CallStructure) -> tuple[Any, ...]:
        """Return what calls have in common that are followed in the same way."""
        return name, structure.key, tuple(part.training for part in self._named[name].modules())

    def _make(self, traced: Traced, stages: Sequence[StageProgram]) -> Pipeline | ProcessPipeline:
        if self.processes is None:
            options = self.options
            return Pipeline(
                stages,
                options.devices,
                options.schedule,
                stages_per_device=options.stages_per_device,
                threads=self._may_have_threads(),
            )
        with self._uncovered():  # the layers travel as they are
            number = self.processes.give_out(traced.root, stages)
        count = len(self.processes.devices)
        return ProcessPipeline(self.processes, number, stages[count - 1 :: count], self.options.schedule)

    def _may_have_threads(self) -> bool | None:
        """Threads that share a random generator would draw from it beside one another while forwards are repeated."""
        on_cpu = any(device.type == "cpu" for device in self.options.devices)
        return False if on_cpu and any(map(is_checkpointed, self.module.modules())) else self.threads

    def _trace(self, name: str, network: nn.Module, structure: CallStructure) -> Traced:
        try:
            with self._uncovered():
                return trace(network, self._originals[name], structure, self._whole)
        except NotTraceable as error:
            kind = type(network).__name__
            raise ConfigurationError(
                f"{kind} cannot be cut into stages: {error.obstacle}. Move what asks for values into a submodule, which"
                " stays whole; or write the network as a sequence of blocks (nn.Sequential); or place its parts by"
                " hand and train with strategy='single_device'."
            ) from error

    def _compared_trace(self, name: str, structure: CallStructure) -> Traced:
        """Follow a call, and make sure that this computes what the forward does.

        A submodule of the user's in which the two part stays whole, and the call is followed once more.

        Raises:
            ConfigurationError: If they part in the network's own forward.
        """
        network, key = self._named[name], (*self._key(name, structure), torch.is_grad_enabled())
        while True:
            traced = self._trace(name, network, structure)
            if key in self._compared:
                return traced
            comparison = Comparison(self.module, network, self._originals[name], structure, self.options.devices[-1])
            with self._uncovered(), self._all_here():
                parting = comparison.parting(traced)
            if not comparison.is_possible and name not in self._differing:
                self._differing.add(name)
                rank_zero_warn(_cannot_be_compared(network))
            if parting is None:
                self._compared.add(key)
                return traced
            kinds = [type(part) for part in parting.owners if type(part) not in self._whole]
            if not kinds:
                raise ConfigurationError(_cannot_be_followed(network, parting)) from parting.error
            self._whole[kinds[0]] = f"what was followed of it {parting}"

    @contextmanager
    def _all_here(self) -> Iterator[None]:
        """While values of all layers are in this process."""
        if self.processes is None or not self.processes.elsewhere():
            yield
            return
        with self.processes.all_at_home():
            yield

    @contextmanager
    def _as_trained(self) -> Iterator[None]:
        """In the mode of training, if that is what is to come: a check of the validation may be the first call."""
        before = [(part, part.training) for part in self.module.modules()]
        if self.training and not self.module.training:
            self.module.train()
        try:
            yield
        finally:
            for part, mode in before:
                part.training = mode

    def _sample(self, structure: CallStructure, whole: bool) -> list[Tensor]:
        """The tensors of a call with one micro-batch."""
        tensors, dim = structure.tensors, self.options.dim
        sizes = {tensor.size(dim) for tensor in tensors if tensor.ndim > dim}
        if not whole or not self.training or len(sizes) != 1:
            return tensors
        size = -(-sizes.pop() // self.options.micro_batches)
        return [tensor.narrow(dim, 0, size) if tensor.ndim > dim else tensor for tensor in tensors]

    def _choose(self, name: str, structure: CallStructure, *, whole: bool) -> None:
        """Cuts, and places every part on the device of its stage."""
        traced = self._trace(name, self._named[name], structure)
        names = self.names
        if names is None and callable(own := getattr(self.module, "pipeline_cuts", None)):
            names = list(own())
        if names is not None:
            cut: Cut | None = cut_by_names(traced, names, name, len(self.options.devices))
        else:
            cut = None if self.pinned is None else cut_as_pinned(traced, self.pinned, name, len(self.options.devices))
        if cut is None:
            traced = self._compared_trace(name, structure)
            tensors = self._sample(structure, whole)
            with self._uncovered():
                cut = cut_automatically(traced, self.module, tensors, self.options, name, self.rest)
        sizes = self.placement.place(self._named[name], traced, cut.ends)
        self.cut, self._signature = cut, traced.signature
        rank_zero_info(f"{type(self.module).__name__} is cut into stages:\n{table_of(cut, self.options, sizes)}")


def _cannot_be_followed(network: nn.Module, parting: Parting) -> str:
    return (
        f"{type(network).__name__} cannot be cut into stages: what was followed of its forward {parting}. Before that"
        " the forward asks something that a followed value answers wrongly, such as isinstance(x, Tensor), hasattr(x,"
        " ...), `x.dtype is ...`, or an error that `try` waits for. Move the question, with what depends on it, into a"
        " submodule, which then stays whole; or choose another strategy."
    )


def _cannot_be_compared(network: nn.Module) -> str:
    return (
        f"{type(network).__name__} computes something else when it is called again with the same input, random numbers"
        " and buffers, so what was followed of its forward could not be compared with it, and is used as it is. A"
        " forward may use the clock, a generator of its own, or a counter outside of the module. Whatever it asks there"
        " must not decide what is computed, unless it is asked in a submodule that stays whole."
    )
