"""Choice of the cut of a network: as the user, an earlier run or another replica has chosen, or by measured costs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]

from equipoise.extensions.pipeline.graph.traced import Traced
from equipoise.extensions.pipeline.planning.cut import Cut, CutOptions, PinnedCut, cut_as_pinned, cut_by_names
from equipoise.extensions.pipeline.planning.measured_cut import cut_automatically, narrow_to_micro_batch

__all__ = ["CommonCut", "CutChoice"]

_KEY = "cut"


class CommonCut:
    """The cut that all replicas take: that of the replica which measures first, in a store that all of them read.

    Replicas with other cuts would be right as well: they move each tensor to the processes that have it anywhere. But
    they would hold more than they need.

    Args:
        store: Store of the processes that choose cuts.

    Example:
        >>> from torch.distributed import HashStore
        >>> common_cut = CommonCut(HashStore())
        >>> common_cut.publish(PinnedCut(names=["b"], calls=["b_1"])) == common_cut.read()
        True
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self) -> PinnedCut | None:
        """Return the cut; None if no replica has published one."""
        if not self._store.check([_KEY]):
            return None
        return PinnedCut(**json.loads(self._store.get(_KEY)))

    def publish(self, cut: PinnedCut) -> PinnedCut:
        """Publish a cut, and return the one that was published first.

        Args:
            cut: The cut of this replica.
        """
        first = self._store.compare_set(_KEY, "", json.dumps(asdict(cut)))
        return PinnedCut(**json.loads(first))


class CutChoice:
    """Chooses the cut of a network.

    Args:
        module: The user's module.
        options: Devices, schedule, micro-batches.
        names: Modules to cut before; None: chosen by measuring.
        pinned: The cut of an earlier run. It is used if the user names no cut, and the network still has it.
        common_cut: Cut that all replicas of the pipeline take; None: there is one replica.
        time_links: Returns `CutOptions.links`, if these are not in the options; None: values take no time.
    """

    def __init__(
        self,
        module: nn.Module,
        options: CutOptions,
        names: Sequence[str] | None,
        pinned: PinnedCut | None,
        common_cut: CommonCut | None,
        time_links: Callable[[], Sequence[float]] | None = None,
    ) -> None:
        self._module = module
        self._options = options
        self._names = names
        self._pinned = pinned
        self._common_cut = common_cut
        self._time_links = time_links

    def pin(self, cut: PinnedCut) -> None:
        """Note the cut of an earlier run."""
        self._pinned = cut

    def given_names(self) -> Sequence[str] | None:
        """Return the names of the modules to cut before, from the user or the module; None if neither names any."""
        pipeline_cuts = getattr(self._module, "pipeline_cuts", None)
        if self._names is None and callable(pipeline_cuts):
            return list(pipeline_cuts())
        return self._names

    def earlier(self) -> PinnedCut | None:
        """Return the cut of an earlier run or of another replica; None if there is none."""
        if self._pinned is None and self._common_cut is not None:
            return self._common_cut.read()
        return self._pinned

    def measures(self) -> bool:
        """Return True if the cut is going to be measured."""
        return self.given_names() is None and self.earlier() is None

    def unmeasured(self, traced: Traced, name: str) -> Cut | None:
        """Return the cut that the user names, that of an earlier run or of another replica; None if there is none.

        Args:
            traced: The forward.
            name: The network's name in the user's module.
        """
        stages = len(self._options.devices)
        names = self.given_names()
        if names is not None:
            return cut_by_names(traced, names, name, stages)
        pinned = self.earlier()
        if pinned is None:
            return None
        return cut_as_pinned(traced, pinned, name, stages)

    def narrowed(self, traced: Traced, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors of a full batch as those of a micro-batch, if the forward can be measured with them."""
        micro_batch = narrow_to_micro_batch(tensors, self._options.micro_batches)
        if traced.fits(micro_batch):
            return micro_batch
        return tensors

    def measured(self, traced: Traced, name: str, tensors: Sequence[Tensor]) -> Cut:
        """Return the best cut by measured costs, or the one that another replica has measured earlier.

        Args:
            traced: The forward.
            name: The network's name in the user's module.
            tensors: Tensors of a call with one micro-batch.
        """
        options = self._options
        if not options.links and self._time_links is not None:
            options = replace(options, links=self._time_links())
        cut = cut_automatically(traced, self._module, tensors, options, name)
        if self._common_cut is None:
            return cut
        first_cut = self._common_cut.publish(cut.pinned)
        if first_cut == cut.pinned:
            return cut
        # This forward may have no calls there.
        return cut_as_pinned(traced, first_cut, name, len(self._options.devices)) or cut
