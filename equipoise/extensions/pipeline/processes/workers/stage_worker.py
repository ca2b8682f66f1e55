"""Worker process of a pipeline: computes its stages as the main process commands.

The main process has the last stage, and with it the user's module, the data, the losses, callbacks and checkpoints. A
worker knows none of these. It receives the calls and layers of its stages, computes the forwards and backwards of
micro-batches in the order of its schedule, and steps its part of the optimisers.

    main process        stage 0       stage 1       ...
    command        ──>  all of them
    input          ──>
                        output   ──>
                                      output   ──>        to the main process, which has the last stage
                                      gradient <──        from the main process
                        gradient <──
    reply          <──  of each

With several stages in each of p processes, the process of stage s also has the stages s + p, s + 2p, ..., and values
pass round the processes several times. `process_step` says how errors pass.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.errors import WorkerError
from equipoise.extensions.common.timeline import Span
from equipoise.extensions.pipeline.execution.stage_graphs import StageGraphs
from equipoise.extensions.pipeline.graph.stage_spec import StageSpec, rebuild
from equipoise.extensions.pipeline.graph.stages import StageProgram
from equipoise.extensions.pipeline.graph.training_modes import set_modes
from equipoise.extensions.pipeline.messaging.commands import COMMAND, REPLY, StepOrder, TensorSpec, rank_of
from equipoise.extensions.pipeline.messaging.link_times import answer_link, time_link
from equipoise.extensions.pipeline.messaging.messages import Messenger, StageError, as_late
from equipoise.extensions.pipeline.messaging.process_step import ProcessStep, tasks_of
from equipoise.extensions.pipeline.processes.workers.tensor_store import TensorStore
from equipoise.extensions.pipeline.processes.workers.worker_optimizers import WorkerOptimizers
from equipoise.extensions.pipeline.schedule.schedule import splits
from equipoise.interop.torch.modules import buffers_of
from equipoise.parallel.communication.tensor_copies import copy_from_first
from equipoise.parallel.payload.object_bytes import loads

__all__ = ["StageWorker"]


class _Programs(NamedTuple):
    """The stages of a worker for one kind of call."""

    stages: list[StageProgram]
    modes: dict[str, list[bool]]


class _BufferSlot(NamedTuple):
    """Place where a layer keeps a buffer.

    Attributes:
        buffers: Buffers of a submodule by name.
        name: Name of this buffer.
        key: Key of its tensor.
    """

    buffers: dict[str, Tensor | None]
    name: str
    key: int


class StageWorker:
    """Computes one or several stages. Commands of the main process name its methods, and those of its two attributes.

    Args:
        messenger: Connection to the other processes.
        stage: Number of its first stage.
        count: Number of processes.
        device: Its device.
        before: Device of the stages before; for the first stage that of the main process, which sends the inputs.

    Attributes:
        tensors: Parameters and buffers.
        optimizers: Optimisers of these parameters.
    """

    def __init__(
        self,
        messenger: Messenger,
        stage: int,
        count: int,
        device: torch.device,
        before: torch.device,
    ) -> None:
        self._messenger = messenger
        self._stage = stage
        self._count = count
        self._device = device
        self._device_before = before
        self._failure: StageError | None = None
        self._spans: list[Span] = []
        self.begin([])

    def serve(self) -> Any:
        """Run commands until the end, and return the argument of the last one."""
        while True:
            has_reply, name, *arguments = self._messenger.receive(0, COMMAND, idle=True)
            if name == "end":
                return arguments[0]
            result = None
            try:
                result = attrgetter(name)(self)(*arguments)
            except BaseException as error:
                # Without a connection nothing can be reported.
                if self._messenger.broken:
                    raise
                raised = error if has_reply else as_late(error, name)
                self._note_failure(StageError.of(raised, self._stage, self._device))
            if has_reply:
                self._reply(result)

    def _reply(self, result: Any) -> None:
        """Send a result, or the failure of this command or an earlier one."""
        failure = self._failure
        self._failure = None
        if failure is not None:
            result = None
        self._messenger.send(0, REPLY, (result, failure))
        self._messenger.flush()

    def _note_failure(self, failure: StageError) -> None:
        """Keep the first failure until the next reply."""
        if self._failure is None:
            self._failure = failure

    # Module and stages.

    def begin(self, specs: Sequence[TensorSpec]) -> None:
        """Drop everything, and begin with a module.

        Args:
            specs: Properties of its parameters and buffers, whose indices are their keys.
        """
        self.tensors = TensorStore(specs, self._device)
        self.optimizers = WorkerOptimizers(self.tensors)
        self._layers: dict[str, Any] = {}
        self._buffer_slots: list[_BufferSlot] = []
        self._programs: dict[int, _Programs] = {}
        # Whether a window may be computed again, and the buffers from before it.
        self._may_recover = False
        self._earlier_buffers: dict[int, Tensor] = {}

    def load_stages(
        self,
        number: int,
        specs: Sequence[StageSpec],
        layers: bytes,
        names: Mapping[str, str],
        modes: dict[str, list[bool]],
    ) -> None:
        """Load the calls of its stages, and the layers that are new.

        Args:
            number: Number of these calls.
            specs: The calls of each stage.
            layers: The new layers, pickled, by their names in the user's module.
            names: For the names of layers in the calls their names in the user's module.
            modes: For each layer the training mode of each of its submodules.
        """
        # 1. Load the layers. The store stands for a list of tensors, of which only items are read.
        new_layers = loads(layers, self.tensors)  # type: ignore[arg-type]
        self._layers.update(new_layers)
        self._buffer_slots += self._buffer_slots_of(new_layers.values())

        # 2. Build the stages.
        used_layers = {target: self._layers[name] for target, name in names.items()}
        self._programs[number] = _Programs([rebuild(spec, used_layers) for spec in specs], modes)

    def _buffer_slots_of(self, layers: Iterable[Any]) -> Iterator[_BufferSlot]:
        keys = self.tensors.keys_by_identity()
        for layer in layers:
            if not isinstance(layer, nn.Module):
                continue
            for submodule in layer.modules():
                buffers = buffers_of(submodule)
                for name, buffer in buffers.items():
                    if id(buffer) in keys:
                        yield _BufferSlot(buffers, name, keys[id(buffer)])

    # Steps.

    def spans(self) -> list[Span]:
        """Return the actions of the last step as they ran."""
        return self._spans

    def step(self, *fields: Any) -> None:
        """Compute the stages of this process for all micro-batches of a step, given the fields of a `StepOrder`."""
        order = StepOrder(*fields)

        # 1. Prepare. If that fails, the failure passes in place of all values.
        try:
            self._prepare(order)
        except BaseException as error:
            self._note_failure(StageError.of(error, self._stage, self._device))

        # 2. Compute.
        step = self._new_step(order)
        step.run(tasks_of(order.schedule, self._stage, self._count, len(order.programs), order.stages_per_device))
        self._failure = step.failure
        self._spans = step.spans

        # 3. Finish.
        self._restore_buffers()
        self._messenger.flush()
        if order.schedule is None:
            # The failure has reached the main process in place of the output.
            self._failure = None

    def _prepare(self, order: StepOrder) -> None:
        for number in set(order.programs):
            for name, modes in self._programs[number].modes.items():
                set_modes(self._layers[name], modes)
        if order.begins_window:
            self.begin_window()
        torch.manual_seed(order.seed)

    def _new_step(self, order: StepOrder) -> ProcessStep:
        keep = order.schedule is not None
        split = order.schedule is not None and splits(order.schedule)
        last_stage = self._count * order.stages_per_device - 1
        stages = range(self._stage, last_stage, self._count)
        graphs = {stage: StageGraphs(self._device, self._device_before, split=split) for stage in stages}

        def forward(stage: int, micro_batch: int, inputs: Any) -> Any:
            program = self._programs[order.programs[micro_batch]].stages[stage // self._count]
            with order.state.entered():
                return graphs[stage].forward(micro_batch, program, inputs, keep=keep, last=False)

        return ProcessStep(
            self._messenger,
            rank_of(self._stage, self._count),
            self._count,
            self._device,
            graphs,
            last_stage,
            forward,
            failure=self._failure,
            input_gradients=order.input_gradients,
        )

    def _restore_buffers(self) -> None:
        """Put buffers back that a forward has replaced by other tensors, with the values of those."""
        # Commands know a buffer by the tensor that the store has.
        for buffers, name, key in self._buffer_slots:
            tensor = self.tensors[key]
            current = buffers[name]
            if current is not tensor and current is not None:
                self.tensors.set_values(key, current)
                buffers[name] = tensor

    def copy_buffers(self) -> None:
        """Take the buffers of the first replica."""
        # The default group has the workers with the same stages.
        copy_from_first(self.tensors.buffers().values())

    def optimize(self, index: int, options: Sequence[dict[str, Any]], kwargs: dict[str, Any]) -> None:
        """Step an optimiser; see `WorkerOptimizers.step`."""
        if self._failure is not None:
            raise WorkerError("An earlier command failed.")
        self.optimizers.step(index, options, kwargs)

    def time_link(self, other: int) -> float:
        """Return the seconds in which a byte passes to another process; see `link_times`."""
        return time_link(self._messenger, other, self._device)

    def answer_link(self, other: int) -> None:
        """Return what another process sends while it times the way; see `link_times`."""
        answer_link(self._messenger, other, self._device)

    # Accumulation windows.

    def begin_window(self) -> None:
        """Begin without gradients, and note the buffers if the window may be computed again."""
        self.tensors.clear_gradients()
        if self._may_recover:
            self._earlier_buffers = {key: buffer.detach().clone() for key, buffer in self.tensors.buffers().items()}

    def enable_recovery(self) -> None:
        """Copy buffers before each window from now on, so that it may be computed again."""
        self._may_recover = True

    def discard(self) -> None:
        """Drop gradients, and restore buffers to their values before the window."""
        self.tensors.clear_gradients()
        for key, value in self._earlier_buffers.items():
            self.tensors[key].data.copy_(value)
