"""Worker process of a pipeline: computes its stages as the main process commands.

The first process has the last stage, and with it the user's module, the data, the losses, callbacks and checkpoints. A
worker knows nothing of these: it is sent its stage's calls and layers, computes the forwards and backwards of micro-
batches in its schedule's order, and steps its own part of the optimisers.

    first process       stage 0       stage 1       ...
    command        ──>  all of them
    input          ──>
                        output   ──>
                                      output   ──>        to the first process, which has the last stage
                                      gradient <──        from it
                        gradient <──
    reply          <──  each

With several stages in each of p processes the one of stage s has s + p, s + 2p, ..., too, and values go round.

What goes wrong in a stage is sent on in the place of its values, forward and backward, until the step's messages have
all been exchanged. So nobody waits for what will not come, and the next command finds everybody ready for it.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.errors import WorkerError
from equipoise.interop.torch.modules import buffers_of
from equipoise.parallel.payload.shared_payload import loads
from equipoise.pipeline.execution.stage_graphs import StageGraphs
from equipoise.pipeline.graph.stages import StageProgram
from equipoise.pipeline.processes.commands import (
    BACKWARD,
    COMMAND,
    FORWARD,
    HOME,
    REPLY,
    Kind,
    StepOrder,
    nothing_like,
    rank_of,
    way_to,
)
from equipoise.pipeline.processes.loss_scale import unscale
from equipoise.pipeline.processes.messages import Arrivals, Messenger, StageError, as_late
from equipoise.pipeline.processes.stage_spec import StageSpec, rebuild
from equipoise.pipeline.schedule.schedule import Action, actions_of, splits
from equipoise.pipeline.schedule.timeline import Span

__all__ = ["StageWorker"]


class StageWorker:
    """Computes a stage, or several.

    Args:
        messenger: To the other processes.
        stage: The first of them.
        count: How many processes there are.
        device: Where.
        before: The device of the stages before; of the first stage, the last one's, where its inputs come from.
    """

    def __init__(
        self, messenger: Messenger, stage: int, count: int, device: torch.device, before: torch.device
    ) -> None:
        self._messenger, self._stage, self._count = messenger, stage, count
        self._device, self._before = device, before
        self._failure: StageError | None = None
        self._spans: list[Span] = []
        self._commands: dict[str, Callable[..., Any]] = {
            "begin": self._begin,
            "take": self._take,
            "learn": self._learn,
            "program": self._program,
            "step": self._step,
            "zero": self._zero,
            "give": self._give,
            "spans": self._give_spans,
            "gradients": self._gradients,
            "set_gradients": self._set_gradients,
            "scale": self._scale,
            "unscale": self._unscale,
            "optimizer": self._optimizer,
            "optimizer_state": self._optimizer_state,
            "norms": self._norms,
            "clip": self._clip,
            "optimize": self._optimize,
            "arm": self._arm,
            "discard": self._discard,
        }
        self._begin([])

    def serve(self) -> Any:
        """Does what it is told until the end; returns what the first process says then."""
        while True:
            asked, name, *arguments = self._messenger.receive(0, COMMAND, idle=True)
            if name == "end":
                return arguments[0]
            answer = None
            try:
                answer = self._commands[name](*arguments)
            except BaseException as error:
                if self._messenger.broken:
                    raise
                told = error if asked else as_late(error, name)
                self._failure = self._failure or StageError.of(told, self._stage, self._device)
            if asked:
                failure, self._failure = self._failure, None
                self._messenger.send(0, REPLY, (answer if failure is None else None, failure))
                self._messenger.flush()

    # What it has.

    def _begin(self, kinds: Sequence[Kind]) -> None:
        """Forgets all; afterwards tensors are known by their numbers in a list."""
        self._kinds = list(kinds)
        self._tensors: dict[int, Tensor] = {}
        self._held: set[int] = set()  # of those, the ones that have come
        self._parts: dict[str, Any] = {}
        self._buffers: list[tuple[dict[str, Tensor | None], str, int]] = []  # where layers keep them, and their numbers
        self._programs: dict[int, tuple[list[StageProgram], dict[str, list[bool]]]] = {}
        self._optimizers: dict[int, Optimizer] = {}
        self._notes = False
        self._noted: dict[int, Tensor] = {}  # buffers before a window, where it may be done again

    def __getitem__(self, key: int) -> Tensor:
        """A tensor by its number; one that has not come stands for itself."""
        if key not in self._tensors:
            kind = self._kinds[key]
            empty = nothing_like(kind.shape, kind.dtype)
            self._tensors[key] = nn.Parameter(empty, requires_grad=False) if kind.is_parameter else empty
        return self._tensors[key]

    def _take(self, values: dict[int, Tensor], learned: dict[int, bool]) -> None:
        """Takes the values of tensors, and whether they are trained."""
        for key, value in values.items():
            tensor = self[key]
            tensor.data = value.detach().to(self._device)
            tensor.requires_grad_(learned[key])
            self._held.add(key)

    def _learn(self, learned: dict[int, bool]) -> None:
        """Freezes and unfreezes parameters."""
        for key in self._held & learned.keys():
            self._tensors[key].requires_grad_(learned[key])

    def _program(
        self,
        number: int,
        recipes: Sequence[StageSpec],
        parts: bytes,
        names: dict[str, str],
        modes: dict[str, list[bool]],
    ) -> None:
        """Takes its stages' calls.

        Args:
            number: Their number.
            recipes: The calls of each stage.
            parts: The layers that have not come before, by their names in the user's module.
            names: The names of layers by those in the calls.
            modes: For each layer which of its parts train.
        """
        new = loads(parts, known=self)  # type: ignore[arg-type]  # which asks for items alone
        self._parts.update(new)
        numbers = {id(tensor): key for key, tensor in self._tensors.items()}
        for owner in (owner for part in new.values() if isinstance(part, nn.Module) for owner in part.modules()):
            held = buffers_of(owner)
            self._buffers += [(held, name, numbers[id(each)]) for name, each in held.items() if id(each) in numbers]
        used = {target: self._parts[name] for target, name in names.items()}
        self._programs[number] = ([rebuild(recipe, used) for recipe in recipes], modes)

    def _give(self, keys: Sequence[int]) -> dict[int, Tensor]:
        return {key: self._tensors[key].detach() for key in keys}

    def _give_spans(self) -> list[Span]:
        return self._spans

    # A step.

    def _step(self, *given: Any) -> None:
        """Computes its stages for all micro-batches of a step."""
        order = StepOrder(*given)
        rank, self._spans = rank_of(self._stage, self._count), []
        before, after = rank - 1, rank_of(self._stage + 1, self._count)
        plan = (self._stage, self._count, len(order.programs), order.stages_per_device)
        graphs: StageGraphs | None = None
        try:
            graphs = self._prepared(order)
        except BaseException as error:
            self._failure = self._failure or StageError.of(error, self._stage, self._device)
        each = [graphs, *(self._graphs(order) for _ in range(order.stages_per_device - 1))]
        actions = actions_of(order.schedule or "gpipe", *plan)
        if order.schedule is None:
            actions = [(stage, action) for stage, action in actions if not action.backward]

        def way(stage: int, action: Action) -> tuple[int, int]:
            return (after, way_to(stage, BACKWARD)) if action.backward else (before, way_to(stage, FORWARD))

        arrivals = Arrivals(self._messenger, (way(*each) for each in actions if not each[1].weights))
        for stage, action in actions:
            own = graphs and each[stage // self._count]
            if action.weights:
                self._attempt(own, stage, action, order, None)
                continue
            received = arrivals.receive(*way(stage, action))
            made = self._attempt(own, stage, action, order, received)
            if not action.backward:
                self._hand_on(after, way_to(stage + 1, FORWARD), made)
            elif stage:
                self._hand_on(before, way_to(stage - 1, BACKWARD), made)
            elif order.home:
                self._hand_on(0, HOME, made)
            del received, made
        self._take_back_buffers()
        self._messenger.flush()
        if order.schedule is None:
            self._failure = None  # it has come to the first process in the place of the output

    def _take_back_buffers(self) -> None:
        """Where a forward has put another tensor in the place of a buffer, the known one takes its value."""
        for held, name, key in self._buffers:
            known, now = self._tensors[key], held[name]
            if now is not known and now is not None:
                known.data, held[name] = now.detach(), known

    def _prepared(self, order: StepOrder) -> StageGraphs:
        for number in set(order.programs):
            for name, trains in self._programs[number][1].items():
                for part, mode in zip(self._parts[name].modules(), trains, strict=True):
                    part.training = mode
        if order.fresh:
            self._zero()
        torch.manual_seed(order.seed)
        return self._graphs(order)

    def _graphs(self, order: StepOrder) -> StageGraphs:
        return StageGraphs(self._device, self._before, split=order.schedule is not None and splits(order.schedule))

    def _zero(self) -> None:
        """Begins a window of accumulation."""
        for key in self._held:
            self._tensors[key].grad = None
        if self._notes:
            buffers = [key for key in self._held if not self._kinds[key].is_parameter]
            self._noted = {key: self._tensors[key].detach().clone() for key in buffers}

    def _hand_on(self, rank: int, tag: int, made: Any) -> None:
        failure = self._messenger.hand_on(rank, tag, made, (self._stage, self._device))
        self._failure = self._failure or failure

    def _attempt(self, graphs: StageGraphs | None, stage: int, action: Action, order: StepOrder, given: Any) -> Any:
        """Computes an action; once anything has failed, that is all that is handed on."""
        if isinstance(given, StageError):
            self._failure = self._failure or given
        if self._failure is not None or graphs is None:
            if graphs is not None:
                graphs.forget(action.micro_batch)
            return self._failure
        begin = perf_counter()
        try:
            made: Any = None
            if action.weights:
                graphs.weights(action.micro_batch)
            elif action.backward:
                made = graphs.backward(action.micro_batch, given)
            else:
                programs, keep = self._programs[order.programs[action.micro_batch]][0], order.schedule is not None
                with order.state.entered():
                    program = programs[stage // self._count]
                    made = graphs.forward(action.micro_batch, program, given, keep=keep, last=False)
        except BaseException as error:
            made = self._failure = StageError.of(error, stage, self._device)
        self._spans.append(Span(stage, action, begin, perf_counter()))
        return made

    # Gradients and optimisers.

    def _gradients(self, keys: Sequence[int]) -> dict[int, Tensor | None]:
        return {key: self._tensors[key].grad for key in keys}

    def _set_gradients(self, gradients: dict[int, Tensor | None]) -> None:
        for key, gradient in gradients.items():
            self._tensors[key].grad = None if gradient is None else gradient.to(self._device)

    def _parameters(self, index: int) -> dict[int, Tensor]:
        """The trained parameters of an optimiser that are here and have a gradient."""
        ours = {id(parameter) for group in self._optimizers[index].param_groups for parameter in group["params"]}
        found = ((key, self._tensors[key]) for key in sorted(self._held))
        return {key: tensor for key, tensor in found if id(tensor) in ours and tensor.grad is not None}

    def _scale(self, index: int, factor: float | Tensor) -> None:
        """Multiplies gradients."""
        for parameter in self._parameters(index).values():
            assert parameter.grad is not None
            parameter.grad.mul_(factor.to(self._device) if isinstance(factor, Tensor) else factor)

    def _unscale(self, index: int, scale: float) -> bool:
        """Takes the scale of the loss out of gradients; says whether they are finite."""
        return unscale(list(self._parameters(index).values()), scale, self._device)

    def _norms(self, index: int) -> dict[int, Tensor]:
        """The norm of each gradient."""
        return {
            key: torch.linalg.vector_norm(p.grad) for key, p in self._parameters(index).items() if p.grad is not None
        }

    def _clip(self, index: int, value: float, norm: Tensor | None) -> None:
        """Clips gradients: by the norm of all, over all stages, or by value."""
        parameters = list(self._parameters(index).values())
        if norm is None:
            nn.utils.clip_grad_value_(parameters, value)
        else:
            nn.utils.clip_grads_with_norm_(parameters, value, norm.to(self._device))

    def _optimizer(self, index: int, content: bytes) -> None:
        """Takes an optimiser, of whose parameters it keeps those that are here."""
        kind, state, groups, defaults = loads(content, known=self)  # type: ignore[arg-type]
        here = {id(self._tensors[key]) for key in self._held}
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in here]
        optimizer: Optimizer = kind.__new__(kind)
        optimizer.__setstate__({"state": {}, "param_groups": groups, "defaults": defaults})
        optimizer.load_state_dict(_packed(optimizer, state))
        self._optimizers[index] = optimizer

    def _optimizer_state(self, index: int) -> dict[int, Any]:
        optimizer = self._optimizers.get(index)
        if optimizer is None:
            return {}
        return {
            key: dict(state)
            for key in sorted(self._held)
            if (state := optimizer.state.get(self._tensors[key])) is not None
        }

    def _optimize(self, index: int, options: Sequence[dict[str, Any]], kwargs: dict[str, Any]) -> None:
        """Steps an optimiser whose options are now those of the first process."""
        if self._failure is not None:
            raise WorkerError("An earlier command failed.")
        optimizer = self._optimizers[index]
        for group, given in zip(optimizer.param_groups, options, strict=True):
            group.update(given)
        optimizer.step(**kwargs)

    def _arm(self) -> None:
        """From now on a window may be done again."""
        self._notes = True

    def _discard(self) -> None:
        """Lets go of gradients, and brings buffers back to where the window began."""
        for key in self._held:
            self._tensors[key].grad = None
        for key, value in self._noted.items():
            self._tensors[key].data.copy_(value)


def _packed(optimizer: Optimizer, state: dict[Any, Any]) -> dict[str, Any]:
    """A state by parameters as `load_state_dict` wants it, which converts what it must."""
    made = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    made["state"] = {index: state[parameter] for index, parameter in enumerate(parameters) if parameter in state}
    return made
