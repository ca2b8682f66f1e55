"""Base of the strategies with replicas in one process: a batch is split over several devices.

    parallelize="step"       place cuts the batch; the whole training_step, its loss included, runs on every device;
                             losses meet on the first one, for one backward
    parallelize="forward"    training_step runs once, on `output_device`; its calls of the module are cut, computed on
                             every device and gathered there, as with `nn.DataParallel`

Subclasses say how a batch is shared out.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import nn

from equipoise.errors import ConfigurationError, StepError
from equipoise.notices import rank_zero_warn
from equipoise.parallel.batches.gathering import gather
from equipoise.parallel.batches.shares import even_sizes
from equipoise.parallel.batches.splitting import Splitter, size_to_cut, split, why_not
from equipoise.parallel.replicas.device_threads import DeviceThreads
from equipoise.parallel.replicas.replicable import check_replicable
from equipoise.parallel.replicas.replicas import Replicas
from equipoise.parallel.step_protocols import EvaluationStep, StepResult, TrainingStep
from equipoise.precision import Precision
from equipoise.strategies.replicated.scalar_outputs import ScalarOutputs
from equipoise.strategies.strategy import Strategy, Transfer

__all__ = ["Parallelize", "ReplicatedStrategy"]

Parallelize = Literal["step", "forward"]


class _Parts(tuple[Any, ...]):
    """The parts of a batch, in the order of the data.

    Attributes:
        indices: The device of each.
        sizes: The number of samples of each.
    """

    indices: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[Any], indices: Sequence[int], sizes: Sequence[int]) -> "_Parts":
        made = cls(parts)
        made.indices, made.sizes = tuple(indices), tuple(sizes)
        return made


class ReplicatedStrategy(Strategy):
    """Replicas of the module in one process; see the module's docstring.

    Args:
        parallelize: "step": the whole step runs on every device. "forward": only the module's forward does.
        output_device: Where outputs of forward are gathered and the rest of the step runs: an index into the devices,
            or a device. Default: the first device. For "forward" only.
        dim: The dimension of the samples. Default: the first.

    Raises:
        ConfigurationError: If an argument cannot be right.
    """

    def __init__(
        self,
        *,
        parallelize: Parallelize = "step",
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        if parallelize not in ("step", "forward"):
            raise ConfigurationError(f"parallelize must be 'step' or 'forward', not {parallelize!r}.")
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0:
            raise ConfigurationError(f"dim must be the index of a dimension, from 0, not {dim!r}.")
        if output_device is not None and parallelize == "step":
            raise ConfigurationError(
                f"output_device={output_device!r} has no effect with parallelize='step', where losses are computed on"
                " every device. Leave it out, or choose parallelize='forward'."
            )
        self.parallelize, self.output_device, self.dim = parallelize, output_device, dim
        self._replicas: Replicas | None = None
        self._threads: DeviceThreads | None = None
        self._training = True  # or evaluating
        self._inside = threading.local()
        self._computed: dict[int, int] = {}  # the samples of each device in the last computation
        self._failed: int | None = None  # the device that ran out of memory, by its index
        self._scalars = ScalarOutputs()
        self._forwarded = parallelize == "step"  # whether forward has been called, or need not be

    # How a batch is shared out.

    @abstractmethod
    def sizes(self, batch_size: int) -> list[int]:
        """The number of samples for each device.

        Args:
            batch_size: The number of samples of the batch.
        """

    # Where it runs.

    def default_devices(self, available: Sequence[torch.device]) -> Sequence[torch.device]:
        """Return all devices; see `Strategy.default_devices`."""
        return available

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Takes the devices; see `Strategy.connect`."""
        super().connect(devices, num_nodes)
        self._gathering = self._gathering_device()

    def _gathering_device(self) -> torch.device:
        given = self.output_device
        if given is None:
            return self.devices[0]
        if isinstance(given, int) and not isinstance(given, bool):
            if 0 <= given < len(self.devices):
                return self.devices[given]
        else:
            try:
                if torch.device(given) in self.devices:
                    return torch.device(given)
            except (RuntimeError, TypeError):
                pass
        raise ConfigurationError(
            f"output_device={given!r} is none of the devices {', '.join(map(str, self.devices))}. Give one of them, or"
            " its index among them."
        )

    def check_module(self, module: nn.Module, *, training: bool) -> None:
        """Refuses what cannot be copied; see `Strategy.check_module`."""
        if len(self.devices) == 1:
            return
        if training and self.parallelize == "step" and not getattr(module, "automatic_optimization", True):
            raise ConfigurationError(
                f"{type(module).__name__} optimises by hand (automatic_optimization=False), but under"
                f" strategy={self.name!r} `training_step` runs once for every part of a batch. Choose"
                f" parallelize='forward', where it runs once: {type(self).__name__}(parallelize='forward')."
            )
        check_replicable(module, self.devices)

    def setup(self, module: nn.Module, precision: Precision) -> None:
        """Places the module on the first device; copies are made when they are needed."""
        super().setup(module, precision)
        self._splitter = Splitter(module, self.dim)
        self._cut_before = False
        self._scalars = ScalarOutputs()
        self._replicas = Replicas(module, self.devices, always_connected=self.parallelize == "forward")
        self._threads = DeviceThreads(self.devices)

    def teardown(self, error: BaseException | None = None) -> None:
        """Lets go of copies and threads; see `Strategy.teardown`."""
        threads, self._threads, self._replicas = self._threads, None, None
        if threads is not None:
            threads.close()
        super().teardown(error)

    # Data.

    def place(self, batch: Any, transfer: Transfer) -> Sequence[Any]:
        """Cuts a batch, then copies every part to its device; see `Strategy.place`."""
        if len(self.devices) == 1:
            return (transfer(batch, self.devices[0]),)
        if self.parallelize == "forward":
            return (transfer(batch, self._gathering),)
        sizes = self.sizes(self._splitter.size_to_cut(batch))
        indices = [index for index, size in enumerate(sizes) if size] or [0]
        if len(indices) == 1:
            index = indices[0]
            return _Parts.of([transfer(batch, self.devices[index])], indices, [sizes[index]])
        parts = self._splitter.parts(batch, [sizes[index] for index in indices])
        placed = [transfer(part, self.devices[index]) for part, index in zip(parts, indices, strict=True)]
        return _Parts.of(placed, indices, [sizes[index] for index in indices])

    # Computation.

    def forward_backward(self, step: TrainingStep, parts: Sequence[Any], last: bool) -> StepResult:
        """Computes every part on its device, then one backward; see `Strategy.forward_backward`."""
        self._begin(training=True)
        if not isinstance(parts, _Parts) or parts.indices == (0,):
            with self._replicated_forward(step):
                result = step(parts[0])
            self._scalars.check(result.loss)
            self._expect_forward()
        else:
            result = self._run(step, parts)
        step.backward(result)
        return result

    def cut(self, parts: Sequence[Any], count: int, splitter: Splitter) -> list[Sequence[Any]]:
        """Cuts every device's part; see `Strategy.cut`."""
        if not isinstance(parts, _Parts):
            return super().cut(parts, count, splitter)
        cuts = [[size for size in even_sizes(size, count) if size] for size in parts.sizes]
        pieces = [splitter.parts(part, sizes) for part, sizes in zip(parts, cuts, strict=True)]
        return [
            _Parts.of(
                [each[index] for each in pieces if index < len(each)],
                [device for device, each in zip(parts.indices, pieces, strict=True) if index < len(each)],
                [sizes[index] for sizes in cuts if index < len(sizes)],
            )
            for index in range(max(map(len, pieces)))
        ]

    def discard_gradients(self) -> bool:
        """Lets go of the gradients of copies; see `Strategy.discard_gradients`."""
        if self._replicas is not None:
            self._replicas.discard_gradients()
        return False

    def evaluate(self, step: EvaluationStep, parts: Sequence[Any]) -> Any:
        """Computes every part on its device; see `Strategy.evaluate`."""
        self._begin(training=False)
        if not isinstance(parts, _Parts) or parts.indices == (0,):
            with self._replicated_forward(step):
                return step(parts[0])
        return self._run(step, parts).outputs

    def _begin(self, *, training: bool) -> None:
        """Hooks and optimisers may have changed tensors through `.data`, which leaves no trace."""
        if (training or training is not self._training) and self._replicas is not None:
            self._training = training
            self._replicas.distrust()

    def _run(self, step: TrainingStep | EvaluationStep, parts: _Parts) -> StepResult:
        """Runs a step on every part and puts the results together."""
        replicas, indices, sizes = self._refreshed(parts.indices), parts.indices, parts.sizes
        results: list[StepResult] = []

        def compute(position: int) -> Callable[[], StepResult]:
            return lambda: step.run_on(replicas[indices[position]], parts[position], sizes[position])

        with replicas.metrics_in_parts(indices, sizes):
            results = self._compute([(index, compute(position)) for position, index in enumerate(indices)], sizes)
        replicas.give_back(indices[0])
        root = self.root_device
        return step.merge(results, sizes, root, dim=self.dim, original=replicas.original)

    def _compute(self, functions: Sequence[tuple[int, Callable[[], Any]]], sizes: Sequence[int]) -> list[Any]:
        """Runs the computation of every part on its device."""
        assert self._threads is not None
        self._computed = {index: size for (index, _), size in zip(functions, sizes, strict=True)}
        return self._threads.run(functions)

    def failed_device(self, named: str | None) -> torch.device:
        """That of the part that failed, or the one that is named; see `Strategy.failed_device`."""
        self._failed = None if self._threads is None else self._threads.failed
        alike = [index for index, device in enumerate(self.devices) if str(device) == named]
        if named is not None and self._failed not in alike:  # another one, or the backward, where parts have no threads
            self._failed = alike[0] if len(alike) == 1 else None
        return super().failed_device(named) if self._failed is None else self.devices[self._failed]

    def _refreshed(self, indices: Sequence[int]) -> Replicas:
        assert self._replicas is not None
        self._replicas.refresh(indices)
        return self._replicas

    def collect_gradients(self) -> None:
        """Adds the gradients of the copies to the module's; see `Strategy.collect_gradients`."""
        if self._replicas is not None and self.parallelize == "step":
            self._replicas.collect_gradients()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Steps the optimiser; see `Strategy.optimizer_step`."""
        answer = super().optimizer_step(optimizer, closure, **kwargs)
        if self._replicas is not None:
            self._replicas.distrust()
        return answer

    # Forward only.

    def _expect_forward(self) -> None:
        if not self._forwarded and len(self.devices) > 1:
            self._forwarded = True
            rank_zero_warn(
                "`training_step` did not call the module, as `self(batch)` does, so nothing was computed in parts."
                " Call it, or choose parallelize='step'."
            )

    @contextmanager
    def _replicated_forward(self, step: TrainingStep | EvaluationStep) -> Iterator[None]:
        """Lets calls of the module be computed on every device."""
        module = self._placed
        if self.parallelize == "step" or len(self.devices) == 1 or module is None:
            yield
            return
        state = vars(module)
        own = state.get("forward")
        original = module.forward

        def uncover() -> None:
            del state["forward"]
            if own is not None:
                state["forward"] = own

        def forward(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "replica", False):
                return original(*args, **kwargs)
            uncover()  # copies are made of the module as it is
            try:
                return self._forward(step, original, args, kwargs)
            finally:
                state["forward"] = forward

        state["forward"] = forward
        try:
            yield
        finally:
            uncover()

    def _forward(
        self,
        step: TrainingStep | EvaluationStep,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Cuts the arguments, runs every part on its device, and gathers the outputs."""
        self._forwarded = True
        inputs = (args, kwargs)
        size = size_to_cut(inputs, self.dim, cut_before=self._cut_before)
        if size is None:
            why = why_not((*args, kwargs) if kwargs else args, self.dim, "What forward is called with", "argument")
            raise StepError(
                f"{why} Choose parallelize='step', which cuts batches and not arguments, or bring the samples to one"
                " dimension."
            )
        self._cut_before = True
        sizes = self.sizes(size)
        indices = [index for index, each in enumerate(sizes) if each] or [0]
        sizes = [sizes[index] for index in indices]
        replicas = self._refreshed(indices)
        parts = split(inputs, sizes, self.dim) if len(indices) > 1 else [inputs]

        def compute(index: int, part: Any) -> Callable[[], Any]:
            forward = replicas[index].forward if index else original

            def run() -> Any:
                given, named = move_data_to_device(part, self.devices[index])
                self._inside.replica = True
                try:
                    return step.capture_logs(lambda: forward(*given, **named))
                finally:
                    self._inside.replica = False

            return run

        work = [(index, compute(index, part)) for index, part in zip(indices, parts, strict=True)]
        with replicas.metrics_in_parts(indices, sizes), replicas.connected(indices):
            answers = self._compute(work, sizes)
        replicas.give_back(indices[0])
        outputs, logged = [out for out, _ in answers], [values for _, values in answers]
        step.log_together(logged, sizes, self._gathering, original=replicas.original)
        gathered = gather(outputs, sizes, self._gathering, dim=self.dim)
        self._scalars.watch(outputs, gathered)
        return gathered
