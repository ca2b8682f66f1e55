"""Steps of a training run, which stay the same if it continues with another number of processes.

Step k of W processes has the samples order[k·B : (k+1)·B], where B = batch_size·W. If B and the order stay what they
were, then so do steps, counters and schedules, whatever the number of processes: only who computes which samples
changes. So a run notes the number of processes with which it began, and the sizes of its steps.
"""

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from equipoise.interop.torch.loaders import with_sampler
from equipoise.parallel.batches.sampling import SameOrder, seed_of_order
from equipoise.parallel.communication.processes import Processes

if TYPE_CHECKING:
    from equipoise.parallel.batches.whole_steps import WholeSteps

__all__ = ["RunSteps"]


@dataclass
class RunSteps:
    """Steps with which a run began, and in which it continues.

    Attributes:
        processes: Number of processes with which the run began; None if it begins now.
        seed: Seed of the order that several processes share. Default: that of `seed_everything`.
        batch_sizes: The `batch_size` of each training loader then; None if it is not known any more.
        step_sizes: Number of samples in a step of each loader; None if it is not known any more.
        has_one_state: Whether its processes have one state; see `Processes`. Default: None, the run begins now.
        obstacle: Reason why the steps of a run with another number of processes could not be kept. Empty: they are.
    """

    processes: int | None = None
    seed: int = field(default_factory=seed_of_order)
    batch_sizes: list[int | None] | None = None
    step_sizes: list[int | None] | None = None
    has_one_state: bool | None = None
    obstacle: str = field(default="", init=False)
    # Whether a strategy whose processes have one state continues a run of one whose processes have not, or reversely.
    _has_changed_kind: bool = field(default=False, init=False)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return the steps in plain data."""
        return {declared.name: getattr(self, declared.name) for declared in fields(self) if declared.init}

    @classmethod
    def from_checkpoint(cls, entry: dict[str, Any]) -> "RunSteps":
        """Return the steps of a checkpoint.

        Args:
            entry: The entry of Equipoise. An old one holds the positions of the processes alone; that of Lightning's
                checkpoints is empty, and the run begins with the present number of processes.
        """
        state = entry.get("steps")
        if state is not None:
            # Earlier versions have written no `has_one_state`.
            return cls(
                processes=state["processes"],
                seed=state["seed"],
                batch_sizes=state["batch_sizes"],
                step_sizes=state["step_sizes"],
                has_one_state=state.get("has_one_state", False),
            )
        if entry.get("position") is None:
            return cls()
        # One process has written its position alone.
        processes = len(entry.get("positions", ())) or 1
        return cls(processes, has_one_state=False)

    # Loaders.

    def note_states(self, *, one: bool) -> None:
        """Note whether the processes of the strategy have one state; called before `keep`."""
        self._has_changed_kind = self.has_one_state not in (None, one)
        self.has_one_state = one

    def keep(self, loaders: list[Any], processes: Processes, *, share: bool = True) -> list[Any]:
        """Return the training loaders, with whole steps where the number of processes has changed.

        Args:
            loaders: The training loaders as the user gave them.
            processes: The present processes, which will divide the steps.
            share: Whether the strategy divides them. False: the loaders read the share of each process by themselves.
        """
        count = processes.world_size
        self.obstacle = ""
        # Steps of processes with one state are the same for any number of them.
        has_changed_number = self.processes not in (None, count) and not self.has_one_state
        if self._has_changed_kind:
            self.obstacle = "its strategy orders and divides samples in another way"
        elif has_changed_number:
            self.obstacle = self._find_obstacle(loaders, share=share)
            if not self.obstacle:
                return self._with_whole_steps(loaders, processes)
            rank_zero_info(
                f"The run began with {_processes(self.processes)} and continues with {_processes(count)}. A step has"
                f" other samples from now on: {self.obstacle}."
            )
        self._begin(loaders, count)
        return loaders

    def _begin(self, loaders: list[Any], count: int) -> None:
        """Note the present steps as those with which the run began."""
        # None: the loader or its own batch sampler decides.
        sizes = [loader.batch_size if isinstance(loader, DataLoader) else None for loader in loaders]
        self.processes = count
        self.seed = seed_of_order()
        self.batch_sizes = sizes
        self.step_sizes = [None if size is None else size * count for size in sizes]

    def _find_obstacle(self, loaders: list[Any], *, share: bool) -> str:
        """Return why the steps cannot be kept; empty if they can."""
        if not share:
            return "with use_distributed_sampler=False the loaders decide which samples a process reads"
        for loader in loaders:
            reason = _why_not_divided(loader)
            if reason:
                return reason
        sizes = [loader.batch_size for loader in loaders]
        if self.batch_sizes is not None and sizes != self.batch_sizes:
            return f"the loaders had batch_size {_in_words(self.batch_sizes)}, and now it is {_in_words(sizes)}"
        return ""

    def _with_whole_steps(self, loaders: list[Any], processes: Processes) -> list[Any]:
        """Return the loaders with the steps of the run, which the present processes divide."""
        assert self.processes is not None
        if self.batch_sizes is None or self.step_sizes is None:
            self.batch_sizes = [loader.batch_size for loader in loaders]
            self.step_sizes = [None if size is None else size * self.processes for size in self.batch_sizes]
        loaders_of_steps = []
        for loader, size in zip(loaders, self.step_sizes, strict=True):
            steps = self._steps_of(loader, size, processes)
            loaders_of_steps.append(with_sampler(loader, steps, batches=True))
        self._report(processes.world_size)
        return loaders_of_steps

    def _steps_of(self, loader: DataLoader[Any], size: int | None, processes: Processes) -> "WholeSteps":
        """Return the steps of one loader."""
        from equipoise.parallel.batches.whole_steps import AgreedOrder, WholeSteps, deal_of

        assert self.processes is not None
        if size is not None:
            order: Any = self._order_of(loader, processes)
            return WholeSteps(BatchSampler(order, size, loader.drop_last), size=size)
        batches: Any = loader.batch_sampler
        deal = deal_of(batches)
        if self.processes == 1:
            return WholeSteps(AgreedOrder(batches, processes.broadcast), deal=deal)
        return WholeSteps(SameOrder(batches, self.seed), joined=self.processes, deal=deal)

    def _order_of(self, loader: DataLoader[Any], processes: Processes) -> Any:
        """Return the order of the samples, which is that with which the run began."""
        assert self.processes is not None
        if self.processes > 1:
            from equipoise.strategies.distributed.loaders import order_of_processes

            return order_of_processes(loader, self.seed)
        if isinstance(loader.sampler, SequentialSampler):
            return loader.sampler
        from equipoise.parallel.batches.whole_steps import AgreedOrder

        return AgreedOrder(loader.sampler, processes.broadcast)

    def _report(self, count: int) -> None:
        assert self.step_sizes is not None
        samples = "samples"
        if None not in self.step_sizes:
            samples = f"{_in_words(self.step_sizes)} samples"
        rank_zero_info(
            f"The run began with {_processes(self.processes)} and continues with {_processes(count)}: a step keeps its"
            f" {samples}."
        )


def _why_not_divided(loader: Any) -> str:
    """Return why another number of processes cannot divide the steps of a loader; empty if it can."""
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader):
        return f"{kind} is no DataLoader, so the samples that it has read are unknown"
    if isinstance(loader.dataset, IterableDataset):
        return f"{type(loader.dataset).__name__} is a stream, so the samples that it has read are unknown"
    if callable(getattr(loader, "state_dict", None)):
        return f"{kind} saves a position of its own, which is that of one process"
    if loader.batch_sampler is None:
        return "a loader with batch_size=None makes no batches that could be divided"
    from equipoise.strategies.distributed.loaders import has_distributed_sampler

    if has_distributed_sampler(loader):
        return f"a {type(loader.sampler).__name__} of your own decides which samples a process reads"
    return ""


def _in_words(sizes: list[Any]) -> str:
    return " and ".join(map(str, sizes))


def _processes(count: int | None) -> str:
    if count == 1:
        return "one process"
    return f"{count} processes"
