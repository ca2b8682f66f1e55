"""Loaders of a run: their origin, their limits, and their number of batches.

A stage ("train", "val", "test", "predict") has one `Loaders`: what the user gave, checked, sharded by the strategy and
limited.
"""

import math
from collections.abc import Callable, Sized
from typing import Any, cast

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import is_overridden
from equipoise.interop.lightning.loaders import combine, combined_mode, seed_workers
from equipoise.interop.torch.loaders import with_sampler
from equipoise.notices import rank_zero_warn
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.data.batch_stream import BatchStream, length_of
from equipoise.trainer.data.loader_state import PersistentWorkers

__all__ = [
    "Loaders",
    "Source",
    "set_epoch",
]


class Source:
    """Where the loaders of a stage come from: an object the user passed, or a method of the data module or the module.

    Args:
        stage: "train", "val", "test" or "predict".
        given: Loaders passed to `fit` and its siblings; None if the method is to be asked.
        owner: The data module, if there is one, else the module.
    """

    def __init__(self, stage: str, given: Any, owner: LightningModule | LightningDataModule) -> None:
        self.stage, self.given, self.owner = stage, given, owner
        self.method = f"{stage}_dataloader"

    def is_defined(self) -> bool:
        """Return True if there are loaders."""
        return self.given is not None or is_overridden(self.method, self.owner)

    def request(self, call: Callable[[str], Any]) -> Any:
        """The loaders, as the user gave or returned them.

        Args:
            call: Calls a method of the owner by name, as a hook.
        """
        return self.given if self.given is not None else call(self.method)

    def describe(self) -> str:
        """Return the text by which an error names this source."""
        return (
            f"the {self.stage} loader that was passed"
            if self.given is not None
            else f"`{type(self.owner).__name__}.{self.method}()`"
        )


class Loaders:
    """The loaders of one stage, ready to iterate.

    Args:
        source: Where they come from.
        given: What the source gave.
        limit: The `limit_*_batches` of the stage.
        overfit: Whether shuffling is to be turned off (`overfit_batches`).
        strategy: Says which part of them is this process's.
        share: Whether it is asked; else the user's loaders give each process its own part.

    Raises:
        ConfigurationError: If a loader cannot be iterated, is empty, or a limit leaves nothing of it.
    """

    def __init__(
        self, source: Source, given: Any, *, limit: float, overfit: bool, strategy: Strategy, share: bool = True
    ) -> None:
        training, stage = source.stage == "train", source.stage
        combined = combine(given, "max_size_cycle" if training else "sequential")
        self.sequential = combined_mode(combined) == "sequential"
        if training and self.sequential:
            raise ConfigurationError(
                "CombinedLoader(mode='sequential') cannot train: take 'max_size_cycle', 'max_size' or 'min_size'."
            )
        found = combined.flattened
        if not training and source.given is None and isinstance(given, (list, tuple)) and not given:
            found = []  # a method may say so: no loader today
            rank_zero_warn(f"{source.describe()} holds no loader: nothing is read.")
        whole = [self._prepare(loader, source, overfit, strategy.global_rank) for loader in found]
        self.flat = [strategy.shard(loader, stage) for loader in whole] if share else whole
        self.single = len(self.flat) == 1 and (given is found[0] or self.sequential)
        self.given = self.flat[0] if self.single and given is found[0] else combined
        if self.flat:
            combined.flattened = self.flat
        # In training a limit is that of each process, in an evaluation that of all together.
        self.num_batches = []
        for loader, part in zip(whole, self.flat, strict=True):
            own = None if training or not share else strategy.part_of(count_batches(loader, limit, source), part)
            self.num_batches.append(count_batches(part, limit, source) if own is None else own)
        self._combined = combined
        self.workers = PersistentWorkers(self.flat, several_at_once=not (self.single or self.sequential))

    @property
    def iterables(self) -> Any:
        """The loaders in the structure in which the user gave them."""
        return self._combined.iterables

    def length(self, limits: list[float] | None = None) -> float:
        """The batches of one pass over loaders that are read together; infinite if unknown.

        Args:
            limits: The batches of each loader. Default: `num_batches`.
        """
        limits = limits or self.num_batches
        return min(limits) if combined_mode(self._combined) == "min_size" else max(limits)

    def streams(self, limits: list[float] | None = None) -> list["BatchStream"]:
        """One stream for each loader that is read by itself, or one for all of them together.

        Args:
            limits: The batches of each loader. Default: `num_batches`.
        """
        limits = limits or self.num_batches
        if self.single or self.sequential:
            pairs = zip(self.flat, limits, strict=True)
            return [
                BatchStream(loader, limit, before_opening=self.workers.starter(index))
                for index, (loader, limit) in enumerate(pairs)
            ]
        self._combined.limits = limits
        starter = self.workers.starter(0)
        return [BatchStream(self._combined, self.length(limits), combined=True, before_opening=starter)]

    def set_epoch(self, epoch: int) -> None:
        """Tells samplers that the user brought which epoch begins."""
        for loader in self.flat:
            set_epoch(loader, epoch)

    def draw_seeds(self) -> None:
        """Draws the random numbers that making an iterator draws."""
        for loader in self.flat:
            if isinstance(loader, DataLoader):
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)

    def close(self) -> None:
        """Ends worker processes."""
        self._combined.reset()
        self.workers.forget()

    @staticmethod
    def _prepare(loader: Any, source: Source, overfit: bool, rank: int) -> Any:
        if not isinstance(loader, DataLoader):
            try:
                iter(loader)
            except TypeError:
                raise ConfigurationError(
                    f"A loader must be iterable, but {source.describe()} is {loader!r}."
                    f" Pass a DataLoader, or define `{source.method}` in the module or data module."
                ) from None
        elif (
            overfit
            and not isinstance(loader.dataset, IterableDataset)
            and not isinstance(loader.sampler, SequentialSampler)
        ):
            rank_zero_warn(
                f"`overfit_batches` needs the same batches in every epoch: shuffling of the {source.stage} loader"
                " is turned off."
            )
            loader = with_sampler(loader, SequentialSampler(cast(Sized, loader.dataset)))
        elif source.stage != "train" and isinstance(loader.sampler, RandomSampler):
            rank_zero_warn(f"The {source.stage} loader shuffles; an evaluation is better read in order.")
        seed_workers(loader, rank)
        return loader


def count_batches(loader: Any, limit: float, source: Source) -> float:
    """How many batches of a loader are used; infinite if unknown.

    Args:
        loader: The loader.
        limit: A number of batches (int) or a fraction of them (float).
        source: Where it comes from, for the messages.
    """
    length, name = length_of(loader), f"limit_{source.stage}_batches"
    if length == 0:
        raise ConfigurationError(
            f"A loader must give at least one batch, but {source.describe()} is empty. Set {name}=0 to do without it."
        )
    if isinstance(limit, int):
        return limit if length is None else min(length, limit)
    if length is None:
        if limit == 1.0:
            return math.inf
        raise ConfigurationError(
            f"{name}={limit} is a fraction, but {source.describe()} has no length. Give a number of batches, or 1.0."
        )
    if limit > 0 and int(length * limit) == 0:
        raise ConfigurationError(
            f"{name}={limit} of the {length} batches of {source.describe()} is less than one. Give at least"
            f" {name}={1 / length:.4g}, or a number."
        )
    return int(length * limit)


def set_epoch(loader: Any, epoch: int) -> None:
    """Calls `set_epoch` of a loader's sampler and of its batch sampler's, once each."""
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    for sampler in {id(s): s for s in samplers}.values():
        if callable(method := getattr(sampler, "set_epoch", None)):
            method(epoch)
