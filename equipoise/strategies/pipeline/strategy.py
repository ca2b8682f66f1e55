"""PipelineStrategy: the network cut into stages on several devices, computed by micro-batches."""

from collections.abc import Iterable, Sequence
from functools import partial
from numbers import Real
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.errors import ConfigurationError, StepError
from equipoise.interop.torch.modules import is_compiled, set_device_of
from equipoise.parallel.batches.shares import even_sizes
from equipoise.parallel.batches.splitting import Splitter
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.step_protocols import StepResult, TrainingStep
from equipoise.pipeline.execution.suspended_step import SuspendedStep
from equipoise.pipeline.graph.call_structure import CallStructure
from equipoise.pipeline.network import StagedNetwork
from equipoise.pipeline.planning.cut import CutOptions, PinnedCut
from equipoise.pipeline.planning.loss_profile import LossProfile
from equipoise.pipeline.processes.backend import ProcessBackend
from equipoise.pipeline.processes.engine import ProcessPipeline
from equipoise.pipeline.processes.launch import StageLaunch
from equipoise.pipeline.schedule.schedule import check_schedule, check_stages, splits
from equipoise.pipeline.schedule.timeline import Timeline
from equipoise.precision import Precision
from equipoise.strategies.pipeline.recovery import FinerBatch, PipelineRecovery
from equipoise.strategies.pipeline.staged_strategy import StagedStrategy
from equipoise.strategies.recovery_support import RecoverySupport
from equipoise.strategies.strategy import Transfer
from equipoise.validation import check_whole

__all__ = ["PipelineStrategy"]


class PipelineStrategy(StagedStrategy):
    """Cuts the network into stages, one or more for each device, and computes micro-batches of a batch in a pipeline.

    `training_step` runs for every micro-batch, and calls the network once: the module itself, as in `self(x)`, or its
    largest child, as in `self.network(x)`. What it computes before runs on the last device, and so does the loss. The
    gradient is that of the whole batch, micro-batches counting by their samples, or by their `loss_weight`.

    Where the network is cut is chosen when it is first called: every part of it is measured, and a dynamic programme
    minimises the time of the slowest stage among the cuts that fit into memory. The cut is printed, and kept in
    checkpoints.

    Args:
        micro_batches: Into how many a batch is cut; fewer where it has fewer samples. Default: twice the devices.
        schedule: "1f1b", which holds fewer activations, or "gpipe"; with several stages on each device, which idle
            less, "interleaved_1f1b", "looped_bfs" or, which idles least, "interleaved_zero_bubble". Default: "1f1b".
        stages_per_device: How many stages each device has. Of p devices, device d has the stages d, d + p, d + 2p, ...
            Default: 1 for "gpipe" and "1f1b", which have no more, 2 for the others; "interleaved_zero_bubble" may
            have 1.
        cut_before: The modules with which the stages but the first begin, by their names. Default: chosen; a module
            may say by itself with a method `pipeline_cuts`, which returns such names.
        speeds: How fast the devices are beside one another, such as [3, 1], for the cut to be chosen; one that is given
            stays as it is. Default: all alike.
        engine: "threads": all stages are computed in this process. "processes": each device's in one of its own; the
            one with the last stage has the module, the data, the losses, callbacks and checkpoints, and the others
            are sent their layers. Started by the trainer, or, on several machines too, by torchrun or Slurm.
            Default: "threads".
        threads: For that engine, whether every device has a thread. Default: where all are different ones. Never for
            stages on a CPU with `Trainer(activation_checkpointing=...)`, which is how to train such a model with less
            memory.
        timeout: Seconds for which processes wait for what is due before a missing one counts as hung. The first process
            counts as hung, too, if a callback or loader sleeps for so long and computes nothing. Default: 1800.

    Raises:
        ConfigurationError: If an argument cannot be right.

    Example:
        >>> from equipoise import PipelineStrategy, Trainer
        >>> trainer = Trainer(strategy=PipelineStrategy(micro_batches=4), devices=["cpu", "cpu"], logger=False,
        ...                   enable_checkpointing=False)
    """

    name: ClassVar[str] = "pipeline"
    backward_per_micro_batch: ClassVar[bool] = True
    copies_always: ClassVar[bool] = False  # tied weights also for stages on one device, as if it were several

    def __init__(
        self,
        *,
        micro_batches: int | None = None,
        schedule: str = "1f1b",
        stages_per_device: int | None = None,
        cut_before: Sequence[str] | None = None,
        speeds: Sequence[float] | None = None,
        engine: Literal["threads", "processes"] = "threads",
        threads: bool | None = None,
        timeout: float = 1800.0,
    ) -> None:
        if micro_batches is not None:
            check_whole("micro_batches", micro_batches, least=1)
        if cut_before is not None and (isinstance(cut_before, str) or not _all_are(str, cut_before)):
            raise ConfigurationError(f"cut_before takes a list of names, such as ['encoder.4'], not {cut_before!r}.")
        if speeds is not None and not (_all_are(Real, speeds) and all(0 < speed < float("inf") for speed in speeds)):
            raise ConfigurationError(f"speeds are numbers above 0, one for each device: [3, 1], not {speeds!r}.")
        if threads is not None and not isinstance(threads, bool):
            raise ConfigurationError(f"threads is True, False or None, not {threads!r}.")
        if engine not in ("threads", "processes"):
            raise ConfigurationError(f"engine must be 'threads' or 'processes', not {engine!r}.")
        if not (_all_are(Real, [timeout]) and 0 < timeout < float("inf")):
            raise ConfigurationError(f"timeout is a positive number of seconds, not {timeout!r}.")
        if engine == "processes" and threads is not None:
            raise ConfigurationError("threads are for engine='threads': leave them out, or take that engine.")
        self.engine, self.timeout = engine, timeout
        self.joins_processes = engine == "processes"
        self.micro_batches, self.schedule = micro_batches, check_schedule(schedule)
        self.stages_per_device = check_stages(self.schedule, stages_per_device)
        self.cut_before = None if cut_before is None else list(cut_before)
        self.speeds, self.threads = speeds, threads
        self._pinned: PinnedCut | None = None
        self._trains = False
        self._retains = False
        self._network: StagedNetwork | None = None
        self._steps = 0  # from which the random numbers of other processes follow
        self.timeline: Timeline | None = None

    # Where it runs.

    @property
    def root_device(self) -> torch.device:
        """The last device: batches come to it, and losses are computed there."""
        return self.devices[-1]

    def default_devices(self, available: Sequence[torch.device]) -> Sequence[torch.device]:
        """Return all devices; see `Strategy.default_devices`."""
        return available

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Takes the devices, one for each stage or for several; see `Strategy.connect`."""
        self.others = None
        if self.engine == "processes":
            self.others = StageLaunch(devices, num_nodes, self.timeout, on_joined=self._use_device_of_process)
        super().connect(devices, num_nodes if self.others is None else 1)
        number, each = len(devices) if self.others is None else self.others.count, self.stages_per_device
        if self.others is not None:
            self.processes = self.others
            self._use_device_of_process()
        entries = (("cut_before", self.cut_before, number * each - 1), ("speeds", self.speeds, number))
        for name, given, count in entries:
            if given is not None and len(given) != count:
                raise ConfigurationError(
                    f"{name} must have {count} entries for {number} devices, {'a stage' if each == 1 else each} on"
                    f" each, but has {len(given)}: {list(given)}."
                )

    def _use_device_of_process(self) -> None:
        assert self.others is not None
        self.devices = (self.others.device,)

    def check_module(self, module: nn.Module, *, training: bool) -> None:
        """Refuses what does not go backward micro-batch by micro-batch; see `Strategy.check_module`."""
        kind = type(module).__name__
        self._trains = training
        if any(is_compiled(part) for part in module.modules()):
            raise ConfigurationError(
                f"{kind} is compiled, in whole or in part, but strategy='pipeline' cuts what was written. Leave"
                " torch.compile out, or choose another strategy."
            )
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
        precision.convert_module(module)
        set_device_of(module, self.root_device)
        self._module = module
        self._splitter = Splitter(module, self.dim)
        if processes is not None:
            self._split, processes.steps = ProcessBackend(processes, module), self._steps
        devices = self.devices if processes is None else processes.devices
        options = CutOptions(
            devices=tuple(devices) * self.stages_per_device,
            measured_on=None if processes is None else self.root_device,
            schedule=self.schedule,
            micro_batches=self._usual_count(len(devices)),
            stages_per_device=self.stages_per_device,
            speeds=self.speeds,
            dim=self.dim,
        )
        self._network = StagedNetwork(
            module,
            options,
            self.cut_before,
            threads=self.threads,
            training=self._trains,
            copy_always=self.copies_always,
            processes=processes,
        )
        self._network.pinned = self._pinned
        self._network.cover()

    def _usual_count(self, devices: int) -> int:
        return self.micro_batches or 2 * devices

    @property
    def recovery(self) -> RecoverySupport:
        """Support for steps that are repeated; see `Strategy.recovery`."""
        if self._network is None:
            return super().recovery
        return PipelineRecovery(self._network, self._split)

    def teardown(self, error: BaseException | None = None) -> None:
        """Lets the module be as it was; see `Strategy.teardown`."""
        network, self._network = self._network, None
        split, self._split = self._split, None
        if network is not None:
            network.release()
            if network.cut is not None:
                self._pinned = network.cut.pinned
        if split is not None:
            split.release()
            self._steps = split.processes.steps
            if not split.processes.messenger.broken:
                split.end()
        super().teardown(error)

    def batch_to_devices(self, batch: Any, transfer: Transfer) -> Sequence[Any]:
        """Copies a batch to the last device; see `Strategy.batch_to_devices`."""
        return (transfer(batch, self.root_device),)

    # Computation.

    def forward_backward(self, step: TrainingStep, parts: Sequence[Any], last: bool) -> StepResult:
        """Computes a batch in micro-batches; see `Strategy.forward_backward`."""
        assert self._network is not None
        assert self._module is not None
        self._network.running = None
        batch, module = parts[0], self._module
        whole = self._splitter.size(batch)
        factor = parts.factor if isinstance(parts, FinerBatch) else 1
        count = 1 if whole is None else min(whole, factor * self._usual_count(len(self._network.options.own_devices)))
        sizes = [1] if whole is None else [size for size in even_sizes(whole, count) if size]
        if isinstance(parts, FinerBatch):
            parts.indices = range(len(sizes))
        cut = [batch] if len(sizes) == 1 else self._splitter.parts(batch, sizes)
        micro = [SuspendedStep(partial(step.run_on, module, part, size)) for part, size in zip(cut, sizes, strict=True)]
        try:
            with step.hook_scope():
                if self._network.cut is None:
                    first = partial(step.run_on, module, cut[0], sizes[0])
                    self._network.rest = LossProfile(module, first, cut[0], self.root_device, self._network.caught)
                self._begin(micro)
                self._compute(step, micro, sizes)
        except BaseException:
            for one in micro:
                one.abandon()
            raise
        finally:
            self._network.rest = None
        results = [_detached(one.result) for one in micro]
        return step.merge(results, sizes, self.root_device, dim=self.dim, original=lambda metric: metric)

    @staticmethod
    def _begin(micro: Sequence[SuspendedStep]) -> None:
        """Runs every step to its call of the network, or to its end where it skips its micro-batch."""
        for one in micro:
            one.start()
            if one.ended and one.result.loss is not None:
                raise StepError(
                    "`training_step` did not call the network, which is what a pipeline computes: the module itself, as"
                    " in self(x), or its largest child. Call it once for every batch, or choose another strategy."
                )

    def _compute(self, step: TrainingStep, micro: Sequence[SuspendedStep], sizes: Sequence[int]) -> None:
        """Computes the network's calls, and lets every step go backward once."""
        assert self._network is not None
        waiting = [index for index, one in enumerate(micro) if not one.ended]
        calls = {index: CallStructure(*(micro[index].call or ((), {}))) for index in waiting}

        def backward(index: int) -> None:
            step.begin_micro_batch(sizes[index], sum(sizes))
            self._retains = index in calls and any(tensor.grad_fn is not None for tensor in calls[index].tensors)
            step.backward(micro[index].result)
            micro[index].result = _detached(micro[index].result)

        if waiting:
            state = micro[waiting[0]].state
            assert state is not None
            with state.entered():
                pipelines = [self._network.pipeline(micro[index].inside or "", calls[index]) for index in waiting]
            first: Any = pipelines[0]
            self._network.running = first
            if isinstance(first, ProcessPipeline):
                first.fresh = step.begins_window
            shadows = self._network.placement.tied_copies
            shadows.begin_step()
            first.run(
                [micro[index] for index in waiting],
                [calls[index].tensors for index in waiting],
                lambda position: backward(waiting[position]),
                pipelines,
            )
            shadows.end_step()
            self.timeline = first.timeline
        elif step.begins_window and self._split is not None:  # nobody else hears of this step
            self._split.processes.send_to_all("zero")
        for index in set(range(len(micro))) - set(waiting):
            backward(index)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward of a micro-batch, down to the inputs of the last stage.

        What was computed before the network, and is used beside it too, goes backward once more from the first stage.
        Of the last stage a loss may use something beside its output, an attribute for instance.
        """
        if self._retains or splits(self.schedule):
            kwargs = {"retain_graph": True, **kwargs}
        super().backward(loss, *args, **kwargs)

    def finish_gradients(self, window: AccumulationWindow, optimizer: Optimizer) -> bool | None:
        """See `Strategy.finish_gradients`."""
        assert self._network is not None
        self._network.placement.settle_optimizer(optimizer)
        if self._split is not None:
            self._split.gather(optimizer, window.correction())
        return super().finish_gradients(window, optimizer)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The cut, so that a resumed run goes on with it, and what random numbers of other processes follow from."""
        if self._network is not None and self._network.cut is not None:
            self._pinned = self._network.cut.pinned
        pinned = self._pinned
        state: dict[str, Any] = {} if pinned is None else {"cut_before": pinned.names, "calls": pinned.calls}
        if self.engine == "processes":
            state["steps"] = self._steps if self._split is None else self._split.processes.steps
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a cut back, which counts if it is for as many devices, and nobody says otherwise."""
        names, calls = state.get("cut_before"), state.get("calls")
        if isinstance(names, list) and isinstance(calls, list) and _all_are(str, [*names, *calls]):
            self._pinned = PinnedCut(names=names, calls=calls)
            if self._network is not None:
                self._network.pinned = self._pinned
        steps = state.get("steps")
        if isinstance(steps, int):
            self._steps = steps
            if self._split is not None:
                self._split.processes.steps = steps


def _all_are(kind: type, values: Any) -> bool:
    return isinstance(values, Iterable) and all(
        isinstance(value, kind) and not isinstance(value, bool) for value in values
    )


def _detached(result: StepResult) -> StepResult:
    """A result without its graph, whose end holds the last stage's inputs and their gradients."""
    outputs = apply_to_collection(result.outputs, Tensor, Tensor.detach)
    return result._replace(loss=None if result.loss is None else result.loss.detach(), outputs=outputs)
