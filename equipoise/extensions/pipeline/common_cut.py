"""Cut that all replicas of a pipeline take: that of the replica which measures first."""

import json

from torch.distributed import Store  # type: ignore[attr-defined]

from equipoise.extensions.pipeline.planning.cut import PinnedCut

__all__ = ["CommonCut"]

_KEY = "cut"


class CommonCut:
    """The cut of all replicas, in a store that all of them read.

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
        return _decoded(self._store.get(_KEY))

    def publish(self, cut: PinnedCut) -> PinnedCut:
        """Publish a cut, and return the one that was published first.

        Args:
            cut: The cut of this replica.
        """
        content = json.dumps({"names": cut.names, "calls": cut.calls})
        first = self._store.compare_set(_KEY, "", content)
        return _decoded(first)


def _decoded(content: bytes) -> PinnedCut:
    fields = json.loads(content)
    return PinnedCut(names=fields["names"], calls=fields["calls"])
