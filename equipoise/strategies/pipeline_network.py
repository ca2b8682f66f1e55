"""The network of a pipeline: its calls caught, its forward traced, its parts placed on devices."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from equipoise.errors import ConfigurationError
from equipoise.parallel.micro_steps import current_step
from equipoise.parallel.pipeline import Pipeline
from equipoise.parallel.process_pipeline import ProcessPipeline
from equipoise.parallel.stage_processes import StageProcesses
from equipoise.parallel.stages import StageProgram, homes_of, make_stages, owners
from equipoise.parallel.tracing import CallStructure, NotTraceable, Traced, trace
from equipoise.strategies.pipeline_cut import Cut, CutOptions, cut_automatically, cut_by_names, table_of

__all__ = ["StagedNetwork"]


class StagedNetwork:
    """Stands before the forward of the network while a run lasts.

    Which module is the network shows when it is called: the user's module itself, or the largest of its children.
    Nothing is cut before the first call, since blocks are measured with real inputs.

    Args:
        module: The user's module.
        options: Devices, schedule, micro-batches.
        names: The modules to cut before; None: chosen by measuring.
        threads: See `Pipeline`.
        processes: Those that compute the stages but the last; None: all are computed here.

    Attributes:
        cut: Where it is cut; None before the first call.
    """

    def __init__(
        self,
        module: nn.Module,
        options: CutOptions,
        names: Sequence[str] | None,
        *,
        threads: bool | None,
        processes: StageProcesses | None = None,
    ) -> None:
        self.module, self.options, self.names, self.threads = module, options, names, threads
        self.processes = processes
        self._pinned: Sequence[str] | None = None
        self.cut: Cut | None = None
        self._originals: dict[str, Callable[..., Any]] = {}
        self._homes: dict[int, int] = {}  # of a module's or tensor's id its stage
        self._pipelines: dict[tuple[Any, ...], Pipeline | ProcessPipeline] = {}
        self._named = dict(module.named_modules())

    # Calls.

    def cover(self) -> None:
        """Catches calls of the module and of its largest child."""
        children = {
            name: child for name, child in self.module.named_children() if any(True for _ in child.parameters())
        }
        sizes = {name: sum(parameter.numel() for parameter in child.parameters()) for name, child in children.items()}
        names = [max(sizes, key=lambda name: sizes[name])] if sizes else []
        if type(self.module).forward is not nn.Module.forward:
            names.append("")
        for name in names:
            self._originals[name] = self._named[name].forward
        self.recover()

    def uncover(self) -> None:
        """Lets calls through again."""
        for name in self._originals:
            if "forward" in vars(self._named[name]):
                del self._named[name].forward

    def recover(self) -> None:
        """Catches calls again after `uncover`."""
        for name in self._originals:
            self._named[name].forward = self._catcher(name)

    def _catcher(self, name: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            step = current_step()
            if step is not None and step.inside is None:
                step.inside = name
                return step.hand_over(args, kwargs)
            if step is not None and step.inside != name:
                return self._originals[name](*args, **kwargs)
            if step is not None:
                return step.hand_over(args, kwargs)  # a second time, which it refuses
            structure = CallStructure(args, kwargs)
            return self.pipeline(name, structure).forward(structure.tensors)

        return forward

    # Stages.

    def pin(self, names: Sequence[str]) -> None:
        """Cuts where an earlier run did, if nothing else is said, nothing is cut yet, and it can be found again."""
        if len(names) == len(self.options.devices) - 1:
            self._pinned = names

    def pipeline(self, name: str, structure: CallStructure) -> Pipeline | ProcessPipeline:
        """The stages for a call.

        Args:
            name: The network's name in the user's module.
            structure: The call.

        Raises:
            ConfigurationError: If the network cannot be cut.
        """
        network = self._named[name]
        key = (name, structure.key, tuple(part.training for part in network.modules()))
        found = self._pipelines.get(key)
        if found is None:
            traced = self._trace(name, network, structure)
            if self.cut is None:
                self._choose(name, traced, structure)
            ends = homes_of(traced, self._stage_finder(network), len(self.options.devices))
            stages = make_stages(traced, ends)
            found = self._make(traced, stages)
            if len(self._pipelines) > 64:
                self._pipelines.clear()  # calls with ever other numbers among their arguments
            self._pipelines[key] = found
        return found

    def _make(self, traced: Traced, stages: Sequence[StageProgram]) -> Pipeline | ProcessPipeline:
        if self.processes is None:
            return Pipeline(stages, self.options.devices, self.options.schedule, threads=self.threads)
        self.uncover()  # the layers travel as they are
        try:
            number = self.processes.give_out(traced.root, stages)
        finally:
            self.recover()
        return ProcessPipeline(self.processes, number, stages[-1], self.options.schedule)

    def _trace(self, name: str, network: nn.Module, structure: CallStructure) -> Traced:
        self.uncover()
        try:
            return trace(network, self._originals[name], structure)
        except NotTraceable as error:
            kind = type(network).__name__
            raise ConfigurationError(
                f"{kind} cannot be cut into stages: {error.obstacle}. Move what asks for values into a submodule, which"
                " stays whole; or write the network as a sequence of blocks (nn.Sequential); or place its parts by"
                " hand and train with strategy='single_device'."
            ) from error
        finally:
            self.recover()

    def _choose(self, name: str, traced: Traced, structure: CallStructure) -> None:
        """Cuts, and places every part on the device of its stage."""
        names = self.names
        if names is None and callable(own := getattr(self.module, "pipeline_cuts", None)):
            names = list(own())
        cut = None if names is None else cut_by_names(traced, names, name)
        if cut is None and self._pinned is not None:
            with suppress(ConfigurationError):
                cut = cut_by_names(traced, self._pinned, name)
        if cut is None:
            self.uncover()
            try:
                cut = cut_automatically(traced, self.module, structure.tensors, self.options)
            finally:
                self.recover()
        self.cut = cut
        sizes = self._place(self._named[name], traced, cut)
        rank_zero_info(f"{type(self.module).__name__} is cut into stages:\n{table_of(cut, self.options, sizes)}")

    def _place(self, network: nn.Module, traced: Traced, cut: Cut) -> list[int]:
        """Moves the parts; what no call uses goes to the last device, where the loss is computed."""
        first, sizes = 0, [0] * len(cut.ends)
        placed: set[int] = set()
        for stage, end in enumerate(cut.ends):
            for names in owners(traced)[first:end]:
                for name in names:
                    part = _find(network, name)
                    self._homes.setdefault(id(part), stage)
                    for tensor in _tensors_of(part):
                        if id(tensor) not in placed:
                            placed.add(id(tensor))
                            self._homes.setdefault(id(tensor), stage)
                            if self.processes is None:  # which takes what is its own
                                tensor.data = tensor.data.to(self.options.devices[stage])
                            sizes[stage] += tensor.nbytes
            first = end
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            if id(tensor) not in placed:
                tensor.data = tensor.data.to(self.options.devices[-1])
                sizes[-1] += tensor.nbytes
        return sizes

    def _stage_finder(self, network: nn.Module) -> Callable[[str], int | None]:
        def stage_of(name: str) -> int | None:
            part = _find(network, name)
            if (home := self._homes.get(id(part))) is not None:
                return home
            homes = [self._homes[id(tensor)] for tensor in _tensors_of(part) if id(tensor) in self._homes]
            return min(homes) if homes else None

        return stage_of


def _find(network: nn.Module, name: str) -> Any:
    """A submodule or a tensor by its name."""
    part: Any = network
    for own in filter(None, name.split(".")):
        part = getattr(part, own)
    return part


def _tensors_of(part: Any) -> list[Tensor]:
    if isinstance(part, nn.Module):
        return [*part.parameters(), *part.buffers()]
    return [part] if isinstance(part, Tensor) else []
