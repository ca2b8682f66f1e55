"""LocalSGDStrategy: each process steps for itself, and all average their parameters from time to time."""

from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from equipoise import ConfigurationError, PortableState, ProcessStrategy, StrategyOptimizer


class LocalSGDStrategy(ProcessStrategy):
    """Processes that step for themselves with their own samples, and average their parameters every few steps.

    They also average before an evaluation, before a checkpoint and at the end; the next `every` steps count from there.
    The state of the optimisers and buffers are not averaged: evaluations and checkpoints have those of rank 0. Steps
    count in each process, those of all optimisers together.

    Args:
        every: The number of steps from one averaging to the next. Default: 8.
        warmup_steps: The number of steps at the begin of training with an averaging after each. Default: 0.
        timeout: Seconds for which processes wait for one another before a missing one counts as hung. Default: 1800.

    Raises:
        ConfigurationError: If an argument is out of range.

    Source: Lin, Stich, Patel, Jaggi: Don't Use Large Mini-Batches, Use Local SGD, 2018.
    """

    name: ClassVar[str] = "local_sgd"
    steps_together: ClassVar[bool] = False

    def __init__(self, *, every: int = 8, warmup_steps: int = 0, timeout: float = 1800.0) -> None:
        super().__init__(timeout=timeout)
        if every < 1 or warmup_steps < 0:
            raise ConfigurationError(f"every must be at least 1, warmup_steps 0, not {every!r} and {warmup_steps!r}.")
        self.every, self.warmup_steps = every, warmup_steps
        self.counts, self.steps_of_round = {"steps": 0, "rounds": 0, "bytes": 0}, 0
        self.measures_divergence, self.divergence = False, 0.0
        self.stepped: dict[int, Optimizer] = {}

    def measure_divergence(self) -> None:
        """Measure from now on how far the parameters are apart before they are averaged."""
        self.measures_divergence = True

    def teardown(self, error: BaseException | None = None) -> None:
        """End the round and release the optimisers."""
        self.steps_of_round = 0
        self.stepped.clear()
        super().teardown(error)

    def setup_optimizer(self, optimizer: Optimizer) -> StrategyOptimizer:
        """Return an optimiser whose steps are counted."""
        self.stepped[id(optimizer)] = optimizer
        return CountedOptimizer(optimizer, self)

    def end_step(self) -> None:
        """Count a step, and average if it is the last one of its round."""
        self.counts["steps"] += 1
        self.steps_of_round += 1
        if self.steps_of_round >= self.every or self.counts["steps"] <= self.warmup_steps:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Average the parameters over all processes, unless they are the same everywhere."""
        if self.steps_of_round == 0 or self.processes.world_size == 1:
            return
        self.steps_of_round = 0
        parameters = [p for optimizer in self.stepped.values() for g in optimizer.param_groups for p in g["params"]]
        own = torch.cat([parameter.reshape(-1) for parameter in parameters])
        mean = self.processes.reduce(own)
        if self.measures_divergence:
            self.divergence = self.processes.reduce((own - mean).abs().square().sum()).sqrt().item()
        for parameter, values in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            parameter.copy_(values.view(parameter.shape))
        self.counts["rounds"] += 1
        self.counts["bytes"] += own.nbytes

    def sync_buffers(self) -> None:
        """Make the module the same in all processes: before an evaluation and at the end."""
        self.average()
        super().sync_buffers()

    @property
    def portable(self) -> PortableState:
        """Full states for checkpoints, collected after an averaging, and the counts."""
        return AveragedState(self)

    def load_counts(self, state: dict[str, Any]) -> None:
        """Restore the counts of the run that continues, unless another strategy has written the checkpoint."""
        self.counts.update((name, state[name]) for name in self.counts if name in state)


class CountedOptimizer(StrategyOptimizer):
    """An optimiser whose steps are counted, also those without gradients: all processes count the same."""

    def __init__(self, optimizer: Optimizer, strategy: LocalSGDStrategy) -> None:
        super().__init__(optimizer)
        self.strategy = strategy

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Step the optimiser."""
        result = super().step(closure, **kwargs)
        self.strategy.end_step()
        return result

    def scaled_step(self, scaler: Any, **kwargs: Any) -> Any:
        """Step the optimiser unless a gradient overflows."""
        result = super().scaled_step(scaler, **kwargs)
        self.strategy.end_step()
        return result

    def skip(self) -> None:
        """Leave out a step."""
        self.strategy.end_step()


class AveragedState(PortableState):
    """Full states of a module whose parameters are averaged first."""

    def __init__(self, strategy: LocalSGDStrategy) -> None:
        super().__init__(lambda: dict(strategy.counts), strategy.load_counts)
        self.strategy = strategy

    def prepare(self) -> None:
        """Average; every process calls this before a checkpoint."""
        self.strategy.average()
