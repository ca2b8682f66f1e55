"""The network cut into stages on several devices, computed micro-batch by micro-batch, in one process."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from equipoise.errors import ConfigurationError, StepError
from equipoise.parallel.internals import set_device_of
from equipoise.parallel.micro_steps import MicroStep
from equipoise.parallel.schedule import Timeline, check_schedule
from equipoise.parallel.shares import even_sizes
from equipoise.parallel.split import Splitter
from equipoise.parallel.tracing import CallStructure
from equipoise.precision import Precision
from equipoise.strategies.pipeline_cut import CutOptions
from equipoise.strategies.pipeline_network import StagedNetwork
from equipoise.strategies.steps import StepResult, TrainingStep
from equipoise.strategies.strategy import Strategy, Transfer

__all__ = ["PipelineStrategy"]


class _Finer(tuple[Any, ...]):
    """A placed batch that is to be computed in more micro-batches than usual."""

    factor: int = 1


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
        threads: Whether every stage has a thread. Default: where all devices are different ones. Never for stages on a
            CPU with `Trainer(activation_checkpointing=...)`, which is how to train such a model with less memory.

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
        threads: bool | None = None,
    ) -> None:
        if micro_batches is not None and (isinstance(micro_batches, bool) or micro_batches < 1):
            raise ConfigurationError(f"micro_batches is a number from 1, not {micro_batches!r}.")
        if isinstance(cut_before, str):
            raise ConfigurationError(f"cut_before takes a list of names, such as [{cut_before!r}], not {cut_before!r}.")
        if speeds is not None and not all(speed > 0 for speed in speeds):
            raise ConfigurationError(f"speeds are numbers above 0, one for each device, not {speeds!r}.")
        self.micro_batches, self.schedule = micro_batches, check_schedule(schedule)
        self.cut_before = None if cut_before is None else list(cut_before)
        self.speeds, self.threads = speeds, threads
        self._pinned: list[str] | None = None
        self._network: StagedNetwork | None = None
        self.timeline: Timeline | None = None

    # Where it runs.

    @property
    def root_device(self) -> torch.device:
        """The last device: batches come to it, and losses are computed there."""
        return self.devices[-1]

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Takes the devices, one for each stage; see `Strategy.connect`."""
        super().connect(devices, num_nodes)
        for name, given, count in (
            ("cut_before", self.cut_before, len(devices) - 1),
            ("speeds", self.speeds, len(devices)),
        ):
            if given is not None and len(given) != count:
                raise ConfigurationError(
                    f"{name} must have {count} entries for {len(devices)} devices, a stage on each, but has"
                    f" {len(given)}: {list(given)}."
                )

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
        precision.convert_module(module)
        set_device_of(module, self.root_device)
        self._placed = module
        self._splitter = Splitter(module, self.dim)
        options = CutOptions(
            devices=self.devices,
            schedule=self.schedule,
            micro_batches=self._usual_count(),
            speeds=self.speeds,
        )
        names = self.cut_before if self.cut_before is not None else self._pinned
        if names is not None and len(names) != len(self.devices) - 1:
            names = None  # of a run with another number of devices
        self._network = StagedNetwork(module, options, names, threads=self.threads)
        self._network.cover()

    def _usual_count(self) -> int:
        return self.micro_batches or 2 * len(self.devices)

    def teardown(self, error: BaseException | None = None) -> None:
        """Lets the module be as it was; see `Strategy.teardown`."""
        network, self._network = self._network, None
        if network is not None:
            network.uncover()
            if network.cut is not None:
                self._pinned = network.cut.first_blocks[1:]
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
        count = 1 if whole is None else min(whole, factor * self._usual_count())
        sizes = [1] if whole is None else [size for size in even_sizes(whole, count) if size]
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
        first.run(micro, [call.tensors for call in calls], backward)
        self.timeline = first.timeline

    def cut(self, parts: Sequence[Any], count: int, splitter: Splitter) -> list[Sequence[Any]]:
        """More micro-batches instead of pieces one after the other; see `Strategy.cut`."""
        finer = _Finer(parts)
        finer.factor = count * (parts.factor if isinstance(parts, _Finer) else 1)
        return [finer]

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The cut, so that a resumed run goes on with it."""
        if self._network is not None and self._network.cut is not None:
            return {"cut_before": self._network.cut.first_blocks[1:]}
        return {} if self._pinned is None else {"cut_before": self._pinned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a cut back, if it is for as many devices."""
        names = state.get("cut_before")
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            self._pinned = names


def _detached(loss: Any) -> Any:
    return None if loss is None else loss.detach()
