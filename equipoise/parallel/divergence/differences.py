"""The first tensor that differs between processes, and the error that names it, the ranks and likely causes."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from equipoise.errors import StepError

__all__ = ["Difference", "Digests", "agree", "differences", "divergence_error", "summary"]

# Digests of tensors by their names, by the part of the module that a process holds.
Digests = dict[str, dict[str, int]]

_CAUSES = (
    "Likely causes: a change of weights, an optimiser step or the load of a file that depends on the rank"
    " (`global_rank`, `is_global_zero`, torch.distributed.get_rank()); random numbers, or statistics of a process's own"
    " samples, in such a change; a learning rate, another option or the state of an optimiser, or a step of a"
    " scheduler, that depends on the rank; gradients that were changed or clipped in one process, or not exchanged. Let"
    " all processes do the same, with values that `self.all_gather` or `trainer.strategy.broadcast` makes the same in"
    " all. What each process is to have for itself is no parameter, but a buffer:"
    " register_buffer(..., persistent=False)."
)


class Difference(NamedTuple):
    """A tensor that differs between processes.

    Attributes:
        name: Its name.
        groups: The ranks that agree about it with one another; the largest group first.
    """

    name: str
    groups: list[list[int]]


def summary(digests: Digests) -> dict[str, str]:
    """Return a short text for each part, the same in processes of which all digests are the same."""
    texts = {}
    for part, values in digests.items():
        # The order of names does not count.
        content = repr(sorted(values.items()))
        texts[part] = hashlib.sha256(content.encode()).hexdigest()
    return texts


def agree(summaries: Sequence[dict[str, str]]) -> bool:
    """Return True if all processes that hold a part have the same summary of it."""
    first: dict[str, str] = {}
    for summary_of_rank in summaries:
        for part, text in summary_of_rank.items():
            expected = first.setdefault(part, text)
            if text != expected:
                return False
    return True


def differences(digests: Sequence[Digests]) -> Iterator[Difference]:
    """Yield the tensors that differ between processes, in the order of the module.

    Args:
        digests: Those of each process, by rank.
    """
    # 1. For each part, the digests of the processes that hold it, by rank.
    holders_of_parts: dict[str, dict[int, dict[str, int]]] = {}
    for rank, parts in enumerate(digests):
        for part, digests_of_part in parts.items():
            holders_of_parts.setdefault(part, {})[rank] = digests_of_part

    # 2. For each tensor, which a process may lack, the ranks by its digest.
    for holders in holders_of_parts.values():
        names: dict[str, int] = {}
        for digests_of_rank in holders.values():
            names.update(digests_of_rank)
        for name in names:
            ranks_by_digest: dict[int | None, list[int]] = {}
            for rank, digests_of_rank in holders.items():
                ranks_by_digest.setdefault(digests_of_rank.get(name), []).append(rank)
            if len(ranks_by_digest) > 1:
                groups = sorted(ranks_by_digest.values(), key=len, reverse=True)
                yield Difference(name, groups)


def divergence_error(differing: Sequence[Difference], agreed: int, now: int) -> StepError:
    """Return the error of processes that hold different replicas.

    Args:
        differing: The differences.
        agreed: The number of optimiser steps after which the processes agreed last.
        now: The present number of optimiser steps.
    """
    first, *others = differing
    most, *rest = map(_ranks, first.groups)
    elsewhere = " or in ".join(rest)
    also = ""
    if others:
        also = f" {len(others)} other tensors differ, too."
    if agreed:
        since = f"after optimiser step {agreed}"
    else:
        since = "before the first optimiser step"
    return StepError(
        f"Replicas differ between processes: {first.name} is not the same in {elsewhere} as in {most}.{also}"
        f" All agreed {since}; this is step {now}, so the cause lies in between. {_CAUSES}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words.

    Example:
        >>> _ranks([1]), _ranks([0, 2, 3])
        ('rank 1', 'ranks 0, 2 and 3')
    """
    *before, last = map(str, ranks)
    if not before:
        return f"rank {last}"
    return f"ranks {', '.join(before)} and {last}"
