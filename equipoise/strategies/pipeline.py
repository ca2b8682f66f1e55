"""The network cut into stages on several devices, computed micro-batch by micro-batch, in one process or several."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from equipoise.errors import ConfigurationError, StepError
from equipoise.parallel.internals import set_device_of
from equipoise.parallel.micro_steps import MicroStep
from equipoise.parallel.process_pipeline import ProcessPipeline
from equipoise.parallel.schedule import Timeline, check_schedule
from equipoise.parallel.shares import even_sizes
from equipoise.parallel.split import Splitter
from equipoise.parallel.tracing import CallStructure
from equipoise.parallel.weighting import Window
from equipoise.precision import Precision
from equipoise.strategies.pipeline_cut import CutOptions
from equipoise.strategies.pipeline_launch import StageLaunch
from equipoise.strategies.pipeline_network import StagedNetwork
from equipoise.strategies.pipeline_processes import SplitTraining
from equipoise.strategies.steps import StepResult, TrainingStep
from equipoise.strategies.strategy import Strategy, Transfer

__all__ = ["PipelineStrategy"]

T = TypeVar("T")
_OF_A_RUN = ("_network", "_placed", "_training", "timeline")


class _Finer(tuple[Any, ...]):
    """A placed batch that is to be computed in more micro-batches than usual."""

    factor: int = 1
    indices: Sequence[int] = ()  # of the outputs, in the order of the data


class PipelineStrategy(Strategy):
    """Cuts the network into stages, one for each device, and computes the micro-batches of a batch in a pipeline.

    `training_step` runs for every micro-batch, and calls the network once: the module itself, as in `self(x)`, or its
    largest child, as in `self.network(x)`. What it computes before runs on the last device, and so does the loss. The
    gradient is that of the whole batch, micro-batches counting by their samples, or by their `loss_weight`.

    Where the network is cut is chosen when it is first called: every part of it is measured, and a dynamic programme
    minimises the time of the slowest stage among the cuts that fit into memory. The cut is printed, and kept in
    checkpoints.

    Args:
        micro_batches: Into how many a batch is cut; fewer where it has fewer samples. Default: twice the stages.
        schedule: "1f1b", which holds fewer activations, or "gpipe". Default: "1f1b".
        cut_before: The modules with which the stages but the first begin, by their names. Default: chosen; a module
            may say by itself with a method `pipeline_cuts`, which returns such names.
        speeds: How fast the devices are beside one another, such as [3, 1]. Default: all alike.
        engine: "threads": all stages are computed in this process. "processes": each in a process of its own; the one
            with the last stage has the module, the data, the losses, callbacks and checkpoints, and the others are
            sent their layers. Started by the trainer, or, on several machines too, by torchrun or Slurm.
            Default: "threads".
        threads: For that engine, whether every stage has a thread. Default: where all devices are different ones.
        timeout: Seconds for which processes wait for what is due before a missing one counts as hung. Default: 1800.

    Raises:
        ConfigurationError: If an argument cannot be right.

    Example:
        >>> from equipoise import PipelineStrategy, Trainer
        >>> trainer = Trainer(strategy=PipelineStrategy(micro_batches=4), devices=["cpu", "cpu"], logger=False,
        ...                   enable_checkpointing=False)
    """

    name: ClassVar[str] = "pipeline"
    goes_back_in_parts: ClassVar[bool] = True

    def __init__(
        self,
        *,
        micro_batches: int | None = None,
        schedule: str = "1f1b",
        cut_before: Sequence[str] | None = None,
        speeds: Sequence[float] | None = None,
        engine: Literal["threads", "processes"] = "threads",
        threads: bool | None = None,
        timeout: float = 1800.0,
    ) -> None:
        if micro_batches is not None and (isinstance(micro_batches, bool) or micro_batches < 1):
            raise ConfigurationError(f"micro_batches is a number from 1, not {micro_batches!r}.")
        if isinstance(cut_before, str):
            raise ConfigurationError(f"cut_before takes a list of names, such as [{cut_before!r}], not {cut_before!r}.")
        if speeds is not None and not all(speed > 0 for speed in speeds):
            raise ConfigurationError(f"speeds are numbers above 0, one for each device, not {speeds!r}.")
        if engine not in ("threads", "processes"):
            raise ConfigurationError(f"engine must be 'threads' or 'processes', not {engine!r}.")
        if not timeout > 0:
            raise ConfigurationError(f"timeout is a positive number of seconds, not {timeout!r}.")
        if engine == "processes" and threads is not None:
            raise ConfigurationError("threads are for engine='threads': leave them out, or take that engine.")
        self.engine, self.timeout = engine, timeout
        self.micro_batches, self.schedule = micro_batches, check_schedule(schedule)
        self.cut_before = None if cut_before is None else list(cut_before)
        self.speeds, self.threads = speeds, threads
        self._pinned: list[str] | None = None
        self._network: StagedNetwork | None = None
        self.others: StageLaunch | None = None  # where there are other processes
        self._training: SplitTraining | None = None  # while they take part
        self._steps = 0  # from which the random numbers of other processes follow
        self.timeline: Timeline | None = None

    # Where it runs.

    @property
    def root_device(self) -> torch.device:
        """The last device: batches come to it, and losses are computed there."""
        return self.devices[-1]

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Takes the devices, one for each stage; see `Strategy.connect`."""
        self.others = StageLaunch(devices, num_nodes, self.timeout) if self.engine == "processes" else None
        super().connect(devices, num_nodes if self.others is None else 1)
        stages = len(devices) if self.others is None else self.others.stages
        if self.others is not None:
            self.launches, self.devices = stages > 1, (self.others.device,)
            self.global_rank, self.local_rank, self.node_rank = self.others.ranks
        for name, given, count in (("cut_before", self.cut_before, stages - 1), ("speeds", self.speeds, stages)):
            if given is not None and len(given) != count:
                raise ConfigurationError(
                    f"{name} must have {count} entries for {stages} devices, a stage on each, but has"
                    f" {len(given)}: {list(given)}."
                )

    def launch(self, function: Callable[[], T], known: Sequence[Any] = ()) -> T:
        """Runs a function in the first process, which tells the others what to do; see `Strategy.launch`."""
        if self.others is None or self.others.stages == 1:
            return function()
        return self.others.launch(self, function, known)

    def enter(self, others: StageLaunch) -> None:
        """Called in the first process, once the others are there."""
        self.others, self.devices = others, (others.device,)

    def check_module(self, module: nn.Module, *, training: bool) -> None:
        """Refuses what does not go backward micro-batch by micro-batch; see `Strategy.check_module`."""
        kind = type(module).__name__
        if training and not getattr(module, "automatic_optimization", True):
            raise ConfigurationError(
                f"{kind} optimises by hand (automatic_optimization=False), but under strategy='pipeline' the backward"
                " runs stage by stage. Let the trainer optimise, or choose another strategy."
            )
        own = getattr(type(module), "backward", None)
        if training and own is not None and not str(getattr(own, "__module__", "")).startswith("lightning."):
            raise ConfigurationError(
                f"{kind} overrides `backward`, but under strategy='pipeline' the backward runs stage by stage. Leave"
                " it out, or choose another strategy."
            )

    def setup(self, module: nn.Module, precision: Precision) -> None:
        """Converts the module; its parts are placed when the network is first called."""
        processes = None if self.others is None else self.others.processes
        if processes is not None and precision.scaler is not None:
            raise ConfigurationError(
                f"precision={precision.name!r} needs one scale for the gradients of all stages, which"
                " engine='processes' does not find. Take precision='bf16-mixed', or engine='threads'."
            )
        precision.convert_module(module)
        set_device_of(module, self.root_device)
        self._placed = module
        self._splitter = Splitter(module, self.dim)
        if processes is not None:
            self._training, processes.steps = SplitTraining(processes, module), self._steps
        devices = self.devices if processes is None else processes.devices
        options = CutOptions(
            devices=devices,
            measured_on=None if processes is None else self.root_device,
            schedule=self.schedule,
            micro_batches=self._usual_count(len(devices)),
            speeds=self.speeds,
        )
        self._network = StagedNetwork(module, options, self.cut_before, threads=self.threads, processes=processes)
        if self._pinned is not None:
            self._network.pin(self._pinned)
        self._network.cover()

    def _usual_count(self, stages: int) -> int:
        return self.micro_batches or 2 * stages

    def teardown(self, error: BaseException | None = None) -> None:
        """Lets the module be as it was; see `Strategy.teardown`."""
        network, self._network = self._network, None
        training, self._training = self._training, None
        if network is not None:
            network.uncover()
            if network.cut is not None:
                self._pinned = network.cut.first_blocks[1:]
        if training is not None:
            self._steps = training.processes.steps
            if not training.processes.messenger.broken:
                training.bring_home()
        super().teardown(error)

    def place(self, batch: Any, transfer: Transfer) -> Sequence[Any]:
        """Copies a batch to the last device; see `Strategy.place`."""
        return (transfer(batch, self.root_device),)

    # Computation.

    def forward_backward(self, step: TrainingStep, parts: Sequence[Any], last: bool) -> StepResult:
        """Computes a batch in micro-batches; see `Strategy.forward_backward`."""
        assert self._network is not None
        assert self._placed is not None
        batch, module = parts[0], self._placed
        whole = self._splitter.size(batch)
        factor = parts.factor if isinstance(parts, _Finer) else 1
        count = 1 if whole is None else min(whole, factor * self._usual_count(len(self._network.options.devices)))
        sizes = [1] if whole is None else [size for size in even_sizes(whole, count) if size]
        if isinstance(parts, _Finer):
            parts.indices = range(len(sizes))
        cut = [batch] if len(sizes) == 1 else self._splitter.parts(batch, sizes)
        micro = [MicroStep(partial(step.on, module, part, size)) for part, size in zip(cut, sizes, strict=True)]
        try:
            with step.inside():
                calls = self._begin(micro)
                self._compute(step, micro, calls, sizes)
        except BaseException:
            for one in micro:
                one.abandon()
            raise
        results = [one.result._replace(loss=_detached(one.result.loss)) for one in micro]
        return step.combine(results, sizes, self.root_device, dim=self.dim, original=lambda metric: metric)

    def _begin(self, micro: Sequence[MicroStep]) -> list[CallStructure]:
        """Runs every step to its call of the network."""
        calls = []
        for one in micro:
            one.start()
            if one.call is None:
                break
            calls.append(CallStructure(*one.call))
        if len(calls) < len(micro):
            if calls or any(one.ended and one.result.loss is not None for one in micro):
                raise StepError(
                    "`training_step` did not call the network, which is what a pipeline computes: the module itself, as"
                    " in self(x), or its largest child. Call it once for every batch, or choose another strategy."
                )
            for one in micro:
                if not one.ended:
                    one.start()
        return calls

    def _compute(
        self, step: TrainingStep, micro: Sequence[MicroStep], calls: Sequence[CallStructure], sizes: Sequence[int]
    ) -> None:
        assert self._network is not None
        whole = sum(sizes)

        def backward(index: int) -> None:
            step.piece_of(sizes[index], whole)
            step.backward(micro[index].result)

        if not calls:  # all were skipped
            if step.first and self._training is not None:
                self._training.processes.tell_all("zero")
            for index in range(len(micro)):
                backward(index)
            return
        pipelines = [self._network.pipeline(one.inside or "", call) for one, call in zip(micro, calls, strict=True)]
        first = pipelines[0]
        if any(pipeline is not first for pipeline in pipelines):
            raise StepError(
                "The micro-batches of a batch call the network with different arguments beside tensors, so they cannot"
                " go through one pipeline. Call it with the same."
            )
        if isinstance(first, ProcessPipeline):
            first.fresh = step.first
        first.run(micro, [call.tensors for call in calls], backward)
        self.timeline = first.timeline

    def cut(self, parts: Sequence[Any], count: int, splitter: Splitter) -> list[Sequence[Any]]:
        """More micro-batches instead of pieces one after the other; see `Strategy.cut`."""
        finer = _Finer(parts)
        finer.factor = count * (parts.factor if isinstance(parts, _Finer) else 1)
        return [finer]

    def arm_recovery(self) -> None:
        """Other processes note what a window changes, too; see `Strategy.arm_recovery`."""
        if self._training is not None:
            self._training.processes.tell_all("arm")

    def discard_gradients(self) -> bool:
        """Lets go of a failed attempt's gradients in other processes; see `Strategy.discard_gradients`."""
        if self._training is not None:
            self._training.processes.tell_all("discard")
        return False

    def finish_gradients(self, window: Window, optimizer: Optimizer) -> bool | None:
        """Weighs the gradients of a window, in all processes; see `Strategy.finish_gradients`."""
        if self._training is not None:
            self._training.gather(optimizer, window.correction())
        return super().finish_gradients(window, optimizer)

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        """Clips gradients over all stages; see `Strategy.clip_gradients`."""
        if self._training is None:
            super().clip_gradients(optimizer, value, algorithm)
        else:
            self._training.clip(optimizer, value, algorithm)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Steps an optimiser in all processes; see `Strategy.optimizer_step`."""
        if self._training is None:
            return super().optimizer_step(optimizer, closure, **kwargs)
        return self._training.optimizer_step(optimizer, closure, **kwargs)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The cut, so that a resumed run goes on with it, and what random numbers of other processes follow from."""
        state: dict[str, Any] = {} if self._pinned is None else {"cut_before": self._pinned}
        if self._network is not None and self._network.cut is not None:
            state["cut_before"] = self._network.cut.first_blocks[1:]
        if self.engine == "processes":
            state["steps"] = self._steps if self._training is None else self._training.processes.steps
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a cut back, if it is for as many devices."""
        names, steps = state.get("cut_before"), state.get("steps")
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            self._pinned = names
            if self._network is not None:
                self._network.pin(names)
        if isinstance(steps, int):
            self._steps = steps
            if self._training is not None:
                self._training.processes.steps = steps

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """The module's whole state, of all processes; see `Strategy.module_state`."""
        return super().module_state(module) if self._training is None else self._training.module_state()

    def load_module_state(self, module: nn.Module, state: dict[str, Any], strict: bool = True) -> None:
        """Loads the module's state in all processes; see `Strategy.load_module_state`."""
        if self._training is None:
            super().load_module_state(module, state, strict)
        else:
            self._training.load_module_state(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimiser's whole state, of all processes; see `Strategy.optimizer_state`."""
        return (
            super().optimizer_state(optimizer) if self._training is None else self._training.optimizer_state(optimizer)
        )

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Loads an optimiser's state in all processes; see `Strategy.load_optimizer_state`."""
        if self._training is None:
            super().load_optimizer_state(optimizer, state)
        else:
            self._training.load_optimizer_state(optimizer, state)

    # On its way to other processes.

    def __getstate__(self) -> Mapping[str, Any]:
        """The options; nothing that belongs to a run."""
        return {**vars(self), **dict.fromkeys(_OF_A_RUN)}


def _detached(loss: Any) -> Any:
    return None if loss is None else loss.detach()
