"""The network of a pipeline: calls of it are intercepted, traced, cut and run in stages."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.replaced_forwards import own_forwards
from equipoise.extensions.common.timeline import Timeline
from equipoise.extensions.pipeline.checked_traces import CheckedTraces, NotFollowed
from equipoise.extensions.pipeline.cut_choice import CommonCut, CutChoice
from equipoise.extensions.pipeline.execution.placement import Placement
from equipoise.extensions.pipeline.execution.suspended_step import SuspendedStep, current_step, is_inside_stage
from equipoise.extensions.pipeline.execution.threaded_engine import Pipeline
from equipoise.extensions.pipeline.forward.layer_lending import computed_on
from equipoise.extensions.pipeline.forward.layer_marks import LayerMarks
from equipoise.extensions.pipeline.forward_patch import ForwardPatch
from equipoise.extensions.pipeline.graph.call_structure import CallStructure, NetworkCall
from equipoise.extensions.pipeline.graph.stages import StageProgram, ends_by_placement, make_stages
from equipoise.extensions.pipeline.graph.traced import Traced
from equipoise.extensions.pipeline.planning.cut import (
    Cut,
    CutOptions,
    PinnedCut,
    table_of,
)
from equipoise.extensions.pipeline.planning.measured_cut import TooFewBlocks, largest_opaque
from equipoise.extensions.pipeline.processes.engine import ProcessPipeline
from equipoise.extensions.pipeline.processes.main_process.client import StageClient
from equipoise.extensions.pipeline.schedule.schedule import splits
from equipoise.extensions.pipeline.stack.stack_pipeline import StackPipeline
from equipoise.extensions.pipeline.stack.stacked_call import StackedCall
from equipoise.extensions.pipeline.stack.stacked_network import StackedNetwork
from equipoise.parallel.activation_checkpointing import is_checkpointed

__all__ = ["StagedNetwork"]

# Number of forwards whose stages are kept.
_MOST_PIPELINES = 64
# Ratio of the slowest stage to the mean from which another way to cut is tried, and share of the slowest stage's time
# with which that way is taken.
_UNBALANCED = 1.5
_MUCH_QUICKER = 0.8


class StagedNetwork:
    """Intercept calls of the network while a run lasts, and run them in stages.

    The first call shows which module is the network: the user's module itself, or the largest of its children. Nothing
    is cut before the first call, since blocks are measured with real inputs. A network to train is not cut before its
    first training step either, since what follows the call in that step counts, too.

    Args:
        module: The user's module.
        options: Devices, schedule, micro-batches.
        names: Modules to cut before; None: chosen by measuring.
        threads: See `Pipeline`.
        training: True for a run that trains. The network is then measured in training mode, even if the first call
            comes from a validation.
        pinned: The cut of an earlier run. It is used if the user names no cut, and the network still has it.
        processes: Processes of the stages but the last; None: this process computes all stages.
        common_cut: Cut that all replicas of the pipeline take; None: there is one replica.

    Attributes:
        cut: The cut; None before the first call.
        running: The stages of the last call; None before it.
    """

    def __init__(
        self,
        module: nn.Module,
        options: CutOptions,
        names: Sequence[str] | None,
        *,
        threads: bool | None,
        training: bool,
        pinned: PinnedCut | None = None,
        processes: StageClient | None = None,
        common_cut: CommonCut | None = None,
    ) -> None:
        self.module = module
        self.options = options
        self.threads = threads
        self.training = training
        self.processes = processes
        time_links = None
        if processes is not None:
            time_links = processes.commands.time_links
        self._choice = CutChoice(module, options, names, pinned, common_cut, time_links)
        self.cut: Cut | None = None
        self.running: Pipeline | ProcessPipeline | None = None
        self.placement = Placement(
            module,
            options.devices,
            stages_per_device=options.stages_per_device,
            in_processes=processes is not None,
        )
        self._modules = dict(module.named_modules())
        self._patch = ForwardPatch(self._modules, self._interceptor)
        self._traces = CheckedTraces(
            module,
            self._modules,
            self._patch,
            options.devices[-1],
            self._all_parameters_here,
        )
        # Signature of the forward that was cut.
        self._signature: tuple[str, ...] = ()
        # The stages of recorded forwards.
        self._pipelines: dict[Traced, Pipeline | ProcessPipeline] = {}
        # The layers of the network, once it is cut.
        self._marks: LayerMarks | None = None
        # For a network whose forward runs as it is; its stages by the name of the module that is called.
        self._stacked: StackedNetwork | None = None
        self._stack_pipelines: dict[str, StackPipeline] = {}

    # Interception of calls.

    def cover(self) -> None:
        """Intercept calls of the module and of its largest child.

        Raises:
            ConfigurationError: If activations are checkpointed where that is impossible.
        """
        if splits(self.options.schedule) and any(map(is_checkpointed, self.module.modules())):
            raise ConfigurationError(
                f"schedule={self.options.schedule!r} goes backward through a stage in many parts, for each of which"
                " activation_checkpointing would compute the forward once more. Take 'interleaved_1f1b', or leave"
                " activation_checkpointing out."
            )

        # 1. The largest child is the likeliest network. All else can be placed now.
        names = []
        largest_child = self._largest_child()
        if largest_child is None:
            self.placement.place_outside(None)
        else:
            self.placement.place_outside(self._modules[largest_child])
            names.append(largest_child)

        # 2. The module itself is one only if it has a forward.
        if type(self.module).forward is not nn.Module.forward:
            names.append("")
        for name in names:
            if is_checkpointed(self._modules[name]):
                raise ConfigurationError(
                    f"activation_checkpointing means {name!r}, which is the network that is cut into stages. Name parts"
                    f" of it, such as '{name}.*'."
                )
            self._patch.add(name)
        self._patch.apply()

    def _largest_child(self) -> str | None:
        """Return the name of the child with the most parameters; None if no child has any."""
        sizes: dict[str, int] = {}
        for name, child in self.module.named_children():
            parameters = list(child.parameters())
            if parameters:
                sizes[name] = sum(parameter.numel() for parameter in parameters)
        if not sizes:
            return None
        return max(sizes, key=lambda name: sizes[name])

    def release(self) -> None:
        """Let calls through again, after a run."""
        self._patch.remove()
        self.placement.stop_waiting()

    def pin(self, cut: PinnedCut) -> None:
        """Use the cut of an earlier run, unless the network is cut already."""
        self._choice.pin(cut)

    def _interceptor(self, name: str) -> Callable[..., Any]:
        def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # 1. A stage that contains the whole network computes it.
            if is_inside_stage():
                return self._patch.original_of(name, module)(*args, **kwargs)

            # 2. A training step stops here until the stages have run.
            step = current_step()
            if step is not None:
                output = step.suspend(name, args, kwargs)
                if isinstance(output, StackedCall):
                    # The forward runs in this thread, and pauses between stages.
                    return output.run(args, kwargs)
                return output

            # 3. Any other call runs forward.
            structure = CallStructure(args, kwargs)
            if self._postpones_cut():
                return self._uncut_output(name, structure)
            pipeline = self.pipeline(name, structure, is_full_batch=True)
            self.running = pipeline
            if isinstance(pipeline, StackPipeline):
                return pipeline.call(structure)
            with self.placement.tied_copies.refreshed():
                return pipeline.forward(structure.tensors)

        # As a method: a copy of the module for another device binds methods to itself, and shares everything else.
        return MethodType(forward, self._modules[name])

    def _postpones_cut(self) -> bool:
        """Return True for a call before training, if the cut is measured: only a training step shows all costs."""
        if not self.training or torch.is_grad_enabled():
            return False
        return self.cut is None and self._choice.measures()

    def _uncut_output(self, name: str, structure: CallStructure) -> Any:
        """Return the output of a call before the network is placed: its layers are lent to the last device."""
        device = self.options.devices[-1]
        args, kwargs = structure.fill([tensor.to(device) for tensor in structure.tensors])
        with self._patch.removed(), computed_on(device, self._modules[name], self.module):
            return self._patch.original(name)(*args, **kwargs)

    # Stages.

    def pipeline(
        self, name: str, structure: CallStructure, *, is_full_batch: bool = False
    ) -> Pipeline | ProcessPipeline:
        """Return the stages for a call.

        Args:
            name: The network's name in the user's module.
            structure: The call.
            is_full_batch: True for a call with a full batch, False for one with a micro-batch. Default: False.

        Raises:
            ConfigurationError: If the network cannot be cut.
        """
        if self._marks is not None:
            self._marks.check()
        if self._stacked is None:
            traced = self._traces.find(name, structure)
            if traced is not None and traced in self._pipelines:
                return self._pipelines[traced]
            # Compiled parts are one call.
            with own_forwards():
                self._ensure_cut(name, structure, is_full_batch=is_full_batch)
                # The cut may have stages that begin at the layers of a stack.
                if self._stacked is None:
                    return self._recorded_pipeline(name, structure)
        return self._stack_pipeline(name)

    def _ensure_cut(self, name: str, structure: CallStructure, *, is_full_batch: bool) -> None:
        """Cut and place the network at its first call."""
        if self.cut is None:
            self.placement.stop_waiting()
            with self._training_mode():
                self._choose_cut(name, structure, is_full_batch=is_full_batch)
            self._marks = LayerMarks({name: self._modules[name]}, contents=False)

    def _recorded_pipeline(self, name: str, structure: CallStructure) -> Pipeline | ProcessPipeline:
        """Record a call, and return and keep its stages."""
        # 1. Calls with ever other numbers or shapes would fill the memory.
        if len(self._pipelines) == _MOST_PIPELINES:
            self._pipelines.clear()
            self._traces.forget()

        # 2. Cut the same forward in the same places, and another one where its layers are.
        assert self.cut is not None
        traced = self._traces.checked(name, structure)
        if traced.signature == self._signature:
            ends = self.cut.ends
        else:
            stage_of = self.placement.stage_of(self._modules[name])
            ends = ends_by_placement(traced, stage_of, len(self.options.devices))
        stages = make_stages(traced, ends, self.placement.tied_copy(traced), self.options.devices)
        pipeline = self._make_pipeline(traced, stages)
        self._pipelines[traced] = pipeline
        return pipeline

    def _stack_pipeline(self, name: str) -> StackPipeline:
        """Return the stages of a network whose forward runs as it is; they serve for calls of any structure."""
        assert self._stacked is not None
        if name not in self._stack_pipelines:
            forward = self._patch.original(name)
            self._stack_pipelines[name] = self._stacked.pipeline(forward, threads=self._allowed_threads())
        return self._stack_pipelines[name]

    def begin_step(self) -> None:
        """Forget the stages of the last call, so that a failure before the next call is not taken for theirs."""
        self.running = None

    def run_steps(
        self,
        steps: Sequence[SuspendedStep],
        calls: Sequence[CallStructure],
        backward: Callable[[int], None],
        *,
        begins_window: bool,
    ) -> Timeline:
        """Run suspended steps: their calls in stages, then the rest of each step and its backward.

        Args:
            steps: The steps, each of which has called the network.
            calls: Their calls.
            backward: Runs the backward of a step, by its position among `steps`.
            begins_window: True if an accumulation window begins with these steps.
        """
        # 1. The stages of each call, in the state of the thread that called first.
        state = steps[0].state
        assert state is not None
        pipelines: list[Any] = []
        with state.entered():
            for step, call in zip(steps, calls, strict=True):
                pipelines.append(self.pipeline(step.module_name or "", call))
        pipeline = pipelines[0]
        self.running = pipeline
        if isinstance(pipeline, ProcessPipeline):
            pipeline.begins_window = begins_window

        # 2. Forwards and backwards in the order of the schedule.
        tied_copies = self.placement.tied_copies
        tied_copies.begin_step()
        pipeline.run(steps, [call.tensors for call in calls], backward, pipelines)
        tied_copies.end_step()
        timeline: Timeline = pipeline.timeline
        return timeline

    def _make_pipeline(self, traced: Traced, stages: Sequence[StageProgram]) -> Pipeline | ProcessPipeline:
        options = self.options
        if self.processes is None:
            return Pipeline(
                stages,
                options.devices,
                options.schedule,
                stages_per_device=options.stages_per_device,
                threads=self._allowed_threads(),
            )
        # Layers are sent to the processes with their original forwards.
        with self._patch.removed():
            number = self.processes.send_stages(traced.root, stages)
        count = len(self.processes.commands.devices)
        # Stages run against the ranks: rank 0, this process, computes the last one.
        own_stages = stages[count - 1 :: count]
        return ProcessPipeline(self.processes, number, own_stages, options.schedule)

    def _allowed_threads(self) -> bool | None:
        """Return `threads`, or False if activations are checkpointed on a CPU.

        Threads would share its random generator, and draw from it while another one repeats a forward.
        """
        on_cpu = any(device.type == "cpu" for device in self.options.devices)
        if on_cpu and any(map(is_checkpointed, self.module.modules())):
            return False
        return self.threads

    @contextmanager
    def _all_parameters_here(self) -> Iterator[None]:
        """Gather the parameters of all stages in this process within the context."""
        if self.processes is None or not self.processes.placement.keys_elsewhere():
            yield
            return
        with self.processes.transfer.gathered_parameters():
            yield

    # The cut.

    @contextmanager
    def _training_mode(self) -> Iterator[None]:
        """Set training mode within the context, if the run trains: its first call may come from a validation."""
        # The submodules themselves: a forward that creates further ones changes `module.modules()`.
        modes = [(submodule, submodule.training) for submodule in self.module.modules()]
        if self.training and not self.module.training:
            self.module.train()
        try:
            yield
        finally:
            for submodule, mode in modes:
                submodule.training = mode

    def _choose_cut(self, name: str, structure: CallStructure, *, is_full_batch: bool) -> None:
        cut, sizes = self._placed_cut(name, structure, is_full_batch=is_full_batch)
        self.cut = cut
        table = table_of(cut, self.options, sizes)
        rank_zero_info(f"{type(self.module).__name__} is cut into stages:\n{table}")

    def _placed_cut(self, name: str, structure: CallStructure, *, is_full_batch: bool) -> tuple[Cut, list[int]]:
        """Cut and place the network, and return the cut and the bytes of each stage."""
        # 1. Where its calls cannot be recorded and cut, stages begin at the layers of a stack.
        try:
            traced, cut = self._recorded_cut(name, structure, is_full_batch=is_full_batch)
        except (NotFollowed, TooFewBlocks) as error:
            candidate = self._cut_between_layers(name, structure)
            if candidate is None:
                raise self._with_advice(name, error) from error.__cause__
            return self._begin_at_layers(*candidate, _reason_of(error))

        # 2. Also where that is much quicker.
        reason = _imbalance(cut, traced)
        if reason:
            candidate = self._cut_between_layers(name, structure, quicker_than=cut)
            if candidate is not None:
                return self._begin_at_layers(*candidate, reason)

        # 3. Usually stages consist of recorded calls.
        self._signature = traced.signature
        return cut, self.placement.place(self._modules[name], traced, cut.ends)

    def _recorded_cut(self, name: str, structure: CallStructure, *, is_full_batch: bool) -> tuple[Traced, Cut]:
        traced = self._traces.checked(name, structure)
        cut = self._choice.unmeasured(traced, name)
        if cut is None:
            tensors = structure.tensors
            if is_full_batch and self.training:
                tensors = self._choice.narrowed(traced, tensors)
            with self._patch.removed():
                cut = self._choice.measured(traced, name, tensors)
        return traced, cut

    def _cut_between_layers(
        self, name: str, structure: CallStructure, *, quicker_than: Cut | None = None
    ) -> tuple[StackedNetwork, Cut] | None:
        """Return the network as it is cut between the layers of its largest stack, and the cut.

        Args:
            name: The network's name in the user's module.
            structure: Its call.
            quicker_than: A measured cut. Default: any cut is returned.

        Returns:
            None if it has too few layers, if the cut is not much quicker than the other one, or if stages lie in
            several processes.
        """
        # The forward runs as it is, so one process computes it.
        if self.processes is not None:
            return None
        stacked = StackedNetwork.of(self._modules[name], name, self.options)
        if stacked is None:
            return None
        choice = self._choice
        device = self.options.measured_on or self.options.devices[0]
        call = NetworkCall(self._modules[name], self._patch.original(name), structure, self.module, device)
        with self._patch.removed():
            cut = stacked.cut(call, choice.given_names(), choice.earlier())
        if cut is None:
            return None
        # A cut of an earlier run, without stages, was quicker then and is not measured again.
        is_measured = bool(cut.stages)
        if quicker_than is not None and is_measured and _slowest(cut) > _MUCH_QUICKER * _slowest(quicker_than):
            return None
        return stacked, cut

    def _begin_at_layers(self, stacked: StackedNetwork, cut: Cut, reason: str) -> tuple[Cut, list[int]]:
        """Place a network whose stages begin at layers, and return the cut with a note, and the bytes of each stage."""
        self._stacked = stacked
        sizes = stacked.place(cut, self.placement)
        note = f"The forward runs as it is, and stages begin at its layers, since {reason}."
        return replace(cut, note=note), sizes

    def _with_advice(self, name: str, error: ConfigurationError) -> ConfigurationError:
        """Return an error that also names the engine which may cut the network, if there is one."""
        stacked = StackedNetwork.of(self._modules[name], name, self.options)
        if self.processes is None or stacked is None:
            return error
        return ConfigurationError(
            f"{error} Or take engine='threads', which begins stages at the layers of a stack and lets the forward run"
            " as it is, unless it keeps something in attributes."
        )


def _reason_of(error: NotFollowed | TooFewBlocks) -> str:
    """Return the reason why recorded calls cannot be cut, as a part of a sentence."""
    if isinstance(error, NotFollowed):
        return error.reason
    return "its recorded calls are fewer blocks than stages"


def _imbalance(cut: Cut, traced: Traced) -> str:
    """Return the reason why the stages of a cut are unbalanced; empty if they are not, or if nothing was measured."""
    if not cut.stages or not traced.opaque:
        return ""
    seconds = [stage.seconds for stage in cut.stages]
    mean = sum(seconds) / len(seconds)
    if max(seconds) <= _UNBALANCED * mean:
        return ""
    name = largest_opaque(traced)
    return f"stages of recorded calls are unbalanced: {name!r} stays whole, because {traced.opaque[name]}"


def _slowest(cut: Cut) -> float:
    return max(stage.seconds for stage in cut.stages)
