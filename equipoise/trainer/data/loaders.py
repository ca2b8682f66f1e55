"""Loaders of a run: found, checked, limited, counted; their samplers receive the number of each epoch.

A stage ("train", "val", "test", "predict") has one `Loaders`: the user's loaders, checked, sharded by the strategy and
limited.
"""

import math
from collections.abc import Callable, Sized
from dataclasses import replace
from itertools import zip_longest
from traceback import walk_tb
from typing import Any, cast

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from equipoise.errors import ConfigurationError, ConfigurationTypeError
from equipoise.interop.lightning.classes import is_overridden
from equipoise.interop.lightning.loaders import combine, seed_workers
from equipoise.interop.torch.loaders import with_sampler
from equipoise.notices import rank_zero_warn, warn, warn_of_method
from equipoise.parallel.batches.dealing import Turns, with_batch_for_each
from equipoise.parallel.batches.sampling import DrawnAlike, seed_of_order
from equipoise.parallel.batches.shard import Shard
from equipoise.parallel.snapshot.generators import linked
from equipoise.strategies.distributed.epoch_length import Certainty, Extent, certainty_of, length_of
from equipoise.strategies.distributed.run_steps import RunSteps
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.data.batch_stream import BatchStream
from equipoise.trainer.data.loader_state import PersistentWorkers, has_state, separate_workers

__all__ = ["Loaders", "Source", "set_epoch"]


class Source:
    """Origin of a stage's loaders: an object that the user passed, or a method of the data module or the module.

    Some modules ask for it as `_data_source` of a loop, so it has Lightning's names for what they read.

    Args:
        stage: "train", "val", "test" or "predict".
        loaders: Loaders passed to `fit` and its siblings; None if a method returns them. Default: None.
        owner: The data module, if there is one, else the module. Default: None, there was no run yet.
    """

    def __init__(
        self, stage: str, loaders: Any = None, owner: LightningModule | LightningDataModule | None = None
    ) -> None:
        self.stage = stage
        self.loaders = loaders
        self.owner = owner
        self.method = f"{stage}_dataloader"
        # Loaders may be requested several times in a run, but each warning is given once.
        self._has_reported = False
        self._has_reported_difference = False

    def is_defined(self) -> bool:
        """Return True if there are loaders."""
        return self.loaders is not None or (self.owner is not None and is_overridden(self.method, self.owner))

    def is_module(self) -> bool:
        """Return True if a method of a module or data module returns the loaders."""
        return self.loaders is None and self.owner is not None

    @property
    def name(self) -> str:
        """Name of the method that returns the loaders; empty where they were passed."""
        if not self.is_module():
            return ""
        return self.method

    @property
    def instance(self) -> Any:
        """The loaders that were passed, else the module or data module whose method returns them."""
        if self.loaders is None:
            return self.owner
        return self.loaders

    def dataloader(self) -> Any:
        """Return the loaders, by calling the method if they were not passed."""
        if self.is_module():
            return getattr(self.owner, self.method)()
        return self.loaders

    def request(self, call: Callable[[str], Any]) -> Any:
        """Return the loaders as the user passed them, or as the method returns them.

        Raises:
            ConfigurationError: If torch refuses an argument of a loader, such as `batch_size=0`.
        """
        if self.loaders is not None:
            return self.loaders
        try:
            return call(self.method)
        except ValueError as error:
            if not _is_about_arguments_of_torch(error):
                raise
            remedy = ""
            if "num_samples=0" in str(error):
                remedy = " Its data set is empty. Where other processes have samples, take shuffle=False in this one."
            raise ConfigurationError(f"torch refuses a loader in {self.describe()}: {error}.{remedy}") from error

    def describe(self) -> str:
        """Return the text by which an error names this source."""
        if self.loaders is not None:
            return f"the {self.stage} loader that was passed"
        return f"`{type(self.owner).__name__}.{self.method}()`"

    def report_wrong_length(self, promised: int, came: float, rank: int | None) -> None:
        """Warn once in a run that another number of batches came than was promised.

        Args:
            promised: Number that was promised.
            came: Number that came; infinite: more than were read.
            rank: The rank of this process, if it alone knows this: data set and samplers were certain of the number.
        """
        if self._has_reported:
            return
        self._has_reported = True
        name = self.describe()
        received = "more, which are not read" if came > promised else str(came)
        message = f"{name[0].upper()}{name[1:]} promised {promised} batches by its length, and gave {received}"
        if rank is not None:
            warn(f"{message} in process {rank}. A StopIteration of its data set or `collate_fn` has ended the pass.")
            return
        rank_zero_warn(
            f"{message}. What was planned by the length, such as a learning-rate schedule over"
            " `trainer.estimated_stepping_batches`, does not fit the data: let `__len__` return the number of batches."
        )

    def report_different_data(self, index: int, lengths: list[int | None]) -> None:
        """Warn once in a run that processes have loaders of different lengths, each of which is divided among all."""
        if self._has_reported_difference:
            return
        self._has_reported_difference = True
        rank_zero_warn(
            f"Loader {index} of {self.describe()} is not the same in all processes: by rank, its data have the lengths"
            f" {', '.join(map(str, lengths))}. The trainer divides it as if it were, so each process reads only a part"
            " of its data. If each process has data of its own, say Trainer(use_distributed_sampler=False)."
        )


class Loaders:
    """The loaders of one stage, ready to iterate.

    Args:
        source: Origin of the loaders.
        requested: The loader, or a structure of loaders, that the source returned.
        limit: The `limit_*_batches` of the stage.
        overfit: Whether shuffling is to be turned off (`overfit_batches`).
        strategy: Shards the loaders among its processes.
        share: Whether the strategy does so. If not, the user's loaders read the share of each process by themselves.
        steps: Steps of a training run, which stay the same with another number of processes. Default: None, those of
            the loaders.

    Attributes:
        flat: The loaders of this process, in order.
        extents: Number of batches of each of them.
        extents_everywhere: These extents in each process.
        sequential: Whether they are read one after another.
        single: Whether there is one loader, whose batches are not wrapped.
        workers: Workers that live from one pass to the next.

    Raises:
        ConfigurationError: If a loader cannot be iterated, is empty, or a limit leaves nothing of it.
    """

    def __init__(
        self,
        source: Source,
        requested: Any,
        *,
        limit: float,
        overfit: bool,
        strategy: Strategy,
        share: bool = True,
        steps: RunSteps | None = None,
    ) -> None:
        if strategy.processes.has_one_state and not share:
            raise ConfigurationError(
                f"use_distributed_sampler=False leaves the samples of each process to the loaders, but"
                f" strategy={strategy.name!r} divides them itself. Leave it out."
            )
        # 1. Flatten the user's structure.
        self._combined, self._mode = _combine(source, requested)
        self.sequential = self._mode == "sequential"
        flattened = _flattened(source, requested, self._combined)

        # 2. Check the loaders.
        # Workers of loaders that read the share of this process by themselves may draw how it is divided.
        rank = strategy.processes.data.rank if share else 0
        prepared = [_prepare(loader, source, overfit, rank) for loader in flattened]
        if steps is not None:
            steps.note_states(one=strategy.processes.has_one_state)
            prepared = steps.keep(prepared, strategy.processes.data, share=share)
        # Predictions keep their batches, and a limit counts those of the user.
        is_whole_evaluation = source.stage in ("val", "test") and isinstance(limit, float) and limit == 1.0
        if share and is_whole_evaluation and not strategy.processes.has_one_state:
            count = strategy.processes.data.world_size
            prepared = [with_batch_for_each(loader, count) for loader in prepared]

        # 3. Shard them.
        self._reads_alike = not share and strategy.processes.world_size > 1
        self._seed = seed_of_order() if steps is None else steps.seed
        self._epoch = 0
        if share:
            shards = [strategy.shard(loader, source.stage) for loader in prepared]
        else:
            shards = [Shard(self._with_same_order(loader)) for loader in prepared]
        self.flat = [shard.loader for shard in shards]
        self.single = len(self.flat) == 1 and (requested is flattened[0] or self.sequential)
        if self.flat:
            self._combined.flattened = self.flat

        # 4. Count their batches.
        self._source = source
        self._rank = strategy.processes.data.rank
        self.extents: list[Extent] = []
        lengths: list[int | None] = []
        for loader, shard in zip(prepared, shards, strict=True):
            self.extents.append(_extent_of_part(loader, shard, limit, source))
            lengths.append(_divided_length(loader, shard))
        # All processes know them, so that all refuse the same.
        everywhere = strategy.processes.data.gather_objects((self.extents, lengths))
        self.extents_everywhere = [extents for extents, _ in everywhere]
        self._check_not_empty(limit)
        self._warn_of_different_data([lengths for _, lengths in everywhere])
        self.workers = PersistentWorkers(self.flat, several_at_once=not (self.single or self.sequential))

    @property
    def iterables(self) -> Any:
        """The loaders in the structure in which the user passed or returned them."""
        return self._combined.iterables

    @property
    def num_batches(self) -> list[float]:
        """Number of batches of each loader; infinite if unknown."""
        return [extent.num_batches for extent in self.extents]

    @property
    def extent(self) -> Extent:
        """Number of batches of one pass over loaders that are read together."""
        return self._extent_together(self.extents)

    @property
    def joint_extents(self) -> list[Extent]:
        """Number of batches of such a pass in each process."""
        return [self._extent_together(extents) for extents in self.extents_everywhere]

    def _extent_together(self, extents: list[Extent]) -> Extent:
        if self.single:
            return extents[0]
        longest = min if self._mode == "min_size" else max
        is_certain = all(extent.certainty is Certainty.AT_REQUEST for extent in extents)
        return Extent(
            longest(extent.promised for extent in extents),
            longest(extent.limit for extent in extents),
            Certainty.AT_REQUEST if is_certain else Certainty.AT_END,
        )

    def _check_not_empty(self, limit: float) -> None:
        """Check that each loader has batches in a process.

        Raises:
            ConfigurationError: If all processes have none, or the limit leaves none. Also if one process lacks those of
                one loader alone, where its loaders begin anew until all are read.
        """
        for extents in zip_longest(*self.extents_everywhere, fillvalue=Extent(0)):
            if not any(extent.num_batches for extent in extents):
                raise nothing_to_read(max(extent.promised for extent in extents), limit, self._source)
        if self.single or self._mode != "max_size_cycle":
            return
        for rank, extents_of_process in enumerate(self.extents_everywhere):
            empty = [not extent.num_batches for extent in extents_of_process]
            if any(empty) and not all(empty):
                raise ConfigurationError(
                    f"Loader {empty.index(True)} of those that {self._source.describe()} reads together is empty in"
                    f" process {rank}, where others have batches. Give each process samples of it, or take"
                    " CombinedLoader(mode='max_size'), which yields None for it."
                )

    def _warn_of_different_data(self, lengths_everywhere: list[list[int | None]]) -> None:
        """Warn that the trainer divides loaders which are not the same in all processes."""
        # Processes may have unequal numbers of loaders. Those that all of them have are compared.
        for index, lengths in enumerate(zip(*lengths_everywhere, strict=False)):
            if len(set(lengths)) > 1:
                self._source.report_different_data(index, list(lengths))

    def streams(self, most: float = math.inf) -> list[BatchStream]:
        """Return a stream for each loader that is read by itself, or one for all of them together.

        Args:
            most: Largest number of batches of each loader. Default: what the limits of the run allow.
        """
        extents = [replace(extent, limit=min(extent.limit, most)) for extent in self.extents]
        # 1. One loader after another.
        if self.single or self.sequential:
            pairs = zip(self.flat, extents, strict=True)
            return [self._stream(index, loader, extent) for index, (loader, extent) in enumerate(pairs)]
        # 2. All of them together.
        return [self.stream_of_all(replace(self.extent, limit=min(self.extent.limit, most)))]

    def stream_of_all(self, extent: Extent, *, together: bool = False) -> BatchStream:
        """Return a stream over one loader, or over several that are read together.

        Args:
            extent: Number of batches.
            together: Whether all processes take part in each step; see `BatchStream`. Default: False.
        """
        own_limit = self.extent.limit
        if self.extent.certainty is Certainty.AT_END:
            own_limit = self.extent.num_batches
        if self.single:
            return self._stream(0, self.flat[0], extent, together=together, own_limit=own_limit)
        self._combined.limits = [min(each.limit, extent.limit) for each in self.extents]
        return self._stream(0, self._combined, extent, combined=True, together=together, own_limit=own_limit)

    def _stream(
        self,
        index: int,
        loader: Any,
        extent: Extent,
        *,
        combined: bool = False,
        together: bool = False,
        own_limit: float = math.inf,
    ) -> BatchStream:
        """Return a stream over the loader with an index, or over all of them combined; see `BatchStream`."""
        loaders = self.flat if combined else [loader]
        return BatchStream(
            loader,
            extent,
            combined=combined,
            before_opening=self.workers.starter(index),
            together=together,
            own_limit=own_limit,
            on_wrong_length=self.report_wrong_length,
            seed=self._seed_of_pass(loaders),
        )

    def report_wrong_length(self, promised: int, came: float, certain: bool) -> None:
        """Warn that another number of batches came than was promised; see `Source.report_wrong_length`."""
        self._source.report_wrong_length(promised, came, self._rank if certain else None)

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the epoch that begins to the samplers, which shuffle by it."""
        self._epoch = epoch
        for loader in self.flat:
            set_epoch(loader, epoch)

    def _with_same_order(self, loader: Any) -> Any:
        """Return a loader whose own sampler draws with the same random numbers in all processes.

        It may choose the share of each process from an order of all samples.
        """
        if not self._reads_alike or not isinstance(loader, DataLoader) or _is_stream(loader):
            return loader
        if loader.batch_sampler is None or has_state(loader) or certainty_of(loader) is not Certainty.AT_END:
            return loader
        return with_sampler(loader, DrawnAlike(loader.batch_sampler, self._seed), batches=True)

    def _seed_of_pass(self, loaders: list[Any]) -> int | None:
        """Return the seed with which all processes read loaders; None if each draws numbers of its own."""
        if any(map(self._is_drawn_alike, loaders)):
            return self._seed + self._epoch
        return None

    def _is_drawn_alike(self, loader: Any) -> bool:
        if isinstance(loader, Turns) and certainty_of(loader) is Certainty.AT_END:
            return True
        # A list of batches draws nothing.
        return self._reads_alike and type(loader) not in (list, tuple) and _is_stream(loader)

    def draw_seeds(self) -> None:
        """Draw the random numbers that opening the loaders draws."""
        for loader in self.flat:
            if isinstance(loader, DataLoader):
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)

    def close(self) -> None:
        """End worker processes."""
        self._combined.reset()
        self.workers.forget()


def _is_about_arguments_of_torch(error: ValueError) -> bool:
    """Return True if a constructor of `torch.utils.data` has raised an error."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    module = str(frame.f_globals.get("__name__"))
    return module.startswith("torch.utils.data.") and frame.f_code.co_name == "__init__"


def _combine(source: Source, requested: Any) -> tuple[CombinedLoader, str]:
    """Return the structure that the source returned, and how its loaders are read together.

    Raises:
        ConfigurationError: If they are read one after another in training.
    """
    if source.stage != "train":
        return combine(requested, "sequential")
    combined, mode = combine(requested, "max_size_cycle")
    if mode == "sequential":
        raise ConfigurationError(
            "CombinedLoader(mode='sequential') cannot train: take 'max_size_cycle', 'max_size' or 'min_size'."
        )
    return combined, mode


def _flattened(source: Source, requested: Any, combined: CombinedLoader) -> list[Any]:
    """Return the loaders of a structure, in order."""
    is_empty = isinstance(requested, (list, tuple)) and not requested
    if is_empty and source.stage != "train" and source.loaders is None:
        # A method of the user may return that there is no loader.
        rank_zero_warn(f"{source.describe()} holds no loader: nothing is read.")
        return []
    return combined.flattened


def _prepare(loader: Any, source: Source, overfit: bool, rank: int) -> Any:
    """Check a loader, and return it in the form in which it is read."""
    # A batch sampler may know whether it belongs to the data set.
    check = getattr(getattr(loader, "batch_sampler", None), "check_dataset", None)
    if check is not None:
        check(loader.dataset)
    if not isinstance(loader, DataLoader):
        _check_iterable(loader, source)
    elif overfit:
        loader = _with_same_batches(loader, source)
    elif source.stage != "train" and isinstance(loader.sampler, RandomSampler):
        rank_zero_warn(f"The {source.stage} loader shuffles; an evaluation is better read in order.")
    seed_workers(loader, rank)
    separate_workers(loader, rank)
    return loader


def _with_same_batches(loader: DataLoader[Any], source: Source) -> DataLoader[Any]:
    """Return a loader that has the same batches in every epoch."""
    if _may_shuffle(loader):
        rank_zero_warn(
            f"`overfit_batches` needs the same batches in every epoch: shuffling of the {source.stage} loader"
            " is turned off."
        )
        return with_sampler(loader, SequentialSampler(cast(Sized, loader.dataset)))
    if _may_draw_other_batches(loader):
        from equipoise.trainer.data.batch_samplers import FirstDrawn

        rank_zero_warn(
            f"`overfit_batches` needs the same batches in every epoch: those that the {source.stage} loader's"
            f" {type(loader.batch_sampler).__name__} draws first are repeated."
        )
        return with_sampler(loader, FirstDrawn(loader.batch_sampler, seed_of_order()), batches=True)
    return loader


def _check_iterable(loader: Any, source: Source) -> None:
    try:
        iter(loader)
    except TypeError:
        raise ConfigurationTypeError(
            f"A loader must be iterable, but {source.describe()} is {loader!r}."
            f" Pass a DataLoader, or define `{source.method}` in the module or data module."
        ) from None


def _is_stream(loader: Any) -> bool:
    """Return True if a loader itself decides which samples it reads, without a sampler."""
    return not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)


def _may_shuffle(loader: DataLoader[Any]) -> bool:
    """Return True if a loader has a sampler that may read the samples in another order than theirs."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    return not isinstance(loader.sampler, SequentialSampler)


def _may_draw_other_batches(loader: DataLoader[Any]) -> bool:
    """Return True if a batch sampler may draw other batches in each pass; one that deals them says it itself."""
    batch_sampler: Any = loader.batch_sampler
    # The batch sampler of a stream yields no indices.
    if _is_stream(loader) or batch_sampler is None:
        return False
    if isinstance(batch_sampler, list | tuple) or hasattr(batch_sampler, "deal_step"):
        return False
    return type(batch_sampler) is not BatchSampler or not isinstance(batch_sampler.sampler, SequentialSampler)


def extent_of(loader: Any, limit: float, source: Source) -> Extent:
    """Return the number of batches of a loader that are used.

    Args:
        loader: The loader.
        limit: Number of batches (int) or a fraction of them (float), rounded down.
        source: Origin of the loader, for the messages.

    Raises:
        ConfigurationError: If the limit is a fraction of a loader without length.
    """
    length = length_of(loader)
    if length is None and not isinstance(limit, int) and limit != 1.0:
        raise ConfigurationError(
            f"limit_{source.stage}_batches={limit} is a fraction, but {source.describe()} has no length. Give a number"
            " of batches, or 1.0."
        )
    promised = math.inf if length is None else length
    if isinstance(limit, int):
        most: float = limit
    elif limit == 1.0:
        most = math.inf
    else:
        most = int(promised * limit)
    return Extent(promised, most, certainty_of(loader))


def _extent_of_part(loader: Any, shard: Shard, limit: float, source: Source) -> Extent:
    """Return the number of batches of a loader that this process reads.

    In training a limit is that of each process, in an evaluation that of all together, which take batches in turn.
    """
    if source.stage == "train" or shard.num_shards == 1 or not shard.in_turn:
        return extent_of(shard.loader, limit, source)
    whole = extent_of(loader, limit, source)
    if not whole.num_batches:
        raise nothing_to_read(whole.promised, limit, source, divided=True)
    # Without a length, the limit alone says nothing about what the loader promises.
    promised_of_all = whole.num_batches if whole.promised < math.inf else math.inf
    promised = shard.num_batches(promised_of_all)
    most = shard.num_batches(whole.limit)
    assert promised is not None
    assert most is not None
    return Extent(promised, most, certainty_of(shard.loader))


def _divided_length(loader: Any, shard: Shard) -> int | None:
    """Return the length of the data that the trainer divides, in samples or batches; None: there is none."""
    if shard.num_shards == 1:
        return None
    return length_of(getattr(loader, "dataset", loader))


def nothing_to_read(length: float, limit: float, source: Source, *, divided: bool = False) -> ConfigurationError:
    """Return the error about a loader without a batch.

    Args:
        length: Its number of batches.
        limit: Number of batches or a fraction of them; see `extent_of`.
        source: Origin of the loader.
        divided: Whether the trainer divides it among processes. Default: False.
    """
    name = f"limit_{source.stage}_batches"
    if length:
        return ConfigurationError(
            f"{name}={limit} of the {length:.0f} batches of {source.describe()} is less than one. Give at least"
            f" {name}={1 / length:.4g}, or a number."
        )
    remedy = ""
    if divided:
        remedy = " If each process has data of its own, say Trainer(use_distributed_sampler=False)."
    return ConfigurationError(
        f"A loader must give at least one batch, but {source.describe()} is empty, as one with drop_last=True is whose"
        f" samples do not fill a batch. Set {name}=0 to do without it.{remedy}"
    )


def set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of a loader's samplers and data sets, also of those within them, once each.

    Persistent workers have copies of a data set, which learn nothing unless they share memory.
    """
    for part in linked([loader]):
        method = getattr(part, "set_epoch", None)
        if not callable(method):
            continue
        method(epoch)
        if epoch > 0 and part is getattr(loader, "dataset", None) and getattr(loader, "persistent_workers", False):
            _warn_of_copies(loader, part)


def _warn_of_copies(loader: Any, data: Any) -> None:
    """Warn once of a data set whose copies in persistent workers keep the epoch in which they were made."""
    shares_memory = False
    value: Any
    for value in vars(data).values():
        shared_tensor = isinstance(value, torch.Tensor) and value.untyped_storage().is_shared()
        shares_memory |= shared_tensor or type(value).__module__.startswith("multiprocessing.")
    if not shares_memory:
        warn_of_method(
            type(data).set_epoch,
            f"`{type(data).__name__}.set_epoch` does not reach the workers of a loader with persistent_workers=True:"
            " their copies of the data keep the epoch in which they were made, and read the same order in each. Leave"
            " out persistent_workers, or keep the epoch in `torch.tensor(0).share_memory_()`.",
        )
