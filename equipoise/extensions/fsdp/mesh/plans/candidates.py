"""Candidates of a plan: groups of layers that could be cut column-wise and then row-wise, and numbers to divide."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from equipoise.extensions.fsdp.mesh.plans.cutting import NUMBER
from equipoise.extensions.fsdp.mesh.plans.sources import matching
from equipoise.extensions.fsdp.mesh.plans.styles import Style, cut_width
from equipoise.extensions.fsdp.mesh.plans.uses import Group

__all__ = ["Candidate", "as_patterns", "candidates_of"]

# Parts of the names of numbers that count nothing, such as the width of a head, though they may divide a width.
_NO_COUNTS = ("dim", "size")
# The kinds of numbers that are divided, one choice after the other. Numbers of heads first, also where a step takes
# them from shapes: an evaluation may not.
_CHOICES = (("heads",), (), ("heads", "widths"), ("widths",), ("heads", "others"), ("heads", "others", "widths"))


class Candidate(NamedTuple):
    """Layers that are cut together, or stay whole together: those of a group, in all blocks that are alike.

    Attributes:
        styles: The style of each layer, by its name.
        numbers: Choices of numbers that are divided, each with their full names.
        width: Number of the layers of one group.
    """

    styles: dict[str, Style]
    numbers: list[list[str]]
    width: int


def candidates_of(module: nn.Module, groups: Iterable[Group], tensor: int) -> list[Candidate]:
    """Return the candidates in the order in which they are tried: a layer may belong to two of them.

    Args:
        module: The module.
        groups: Its groups of layers.
        tensor: The number of processes that compute a batch together.
    """
    # 1. Groups of blocks that are alike.
    alike: dict[Any, list[Group]] = defaultdict(list)
    for group in groups:
        kinds = [_kinds(module, names) for names in group]
        key = tuple(kinds)
        alike[key].append(group)

    # 2. What is cut in all of them, and what may count it.
    candidates = []
    for similar in alike.values():
        styles: dict[str, Style] = {}
        numbers: dict[str, list[str]] = defaultdict(list)
        for group in similar:
            for name in group.sources:
                styles[name] = "colwise"
            for name in group.sinks:
                styles[name] = "rowwise"
            # A process has a part of their gradients.
            for name in group.norms:
                styles[name] = "replicated_with_grad_allreduce"
            for kind, name in _numbers(module, group, tensor):
                numbers[kind].append(name)
        choices: list[list[str]] = []
        for chosen in _CHOICES:
            choice = []
            for kind in chosen:
                choice += numbers[kind]
            if choice not in choices:
                choices.append(choice)
        width = len(group.sources) + len(group.sinks)
        candidate = Candidate(styles, choices, width)
        candidates.append(candidate)

    # 3. Those of fewest layers first: layers that all blocks share cost more exchanges, and save less.
    def order(candidate: Candidate) -> tuple[int, int]:
        size = 0
        for name in candidate.styles:
            layer = module.get_submodule(name)
            for parameter in layer.parameters():
                size += parameter.numel()
        return candidate.width, -size

    candidates.sort(key=order)
    return candidates


def _kinds(module: nn.Module, names: Iterable[str]) -> frozenset[Any]:
    """Return what layers of blocks that are alike have in common."""
    kinds = set()
    for name in names:
        owner, _, _ = name.rpartition(".")
        kind = type(module.get_submodule(owner))
        layer = module.get_submodule(name)
        shapes = tuple(parameter.shape for parameter in layer.parameters())
        pattern = NUMBER.sub("*", name)
        kinds.add((pattern, kind, shapes))
    return frozenset(kinds)


def _numbers(module: nn.Module, group: Group, tensor: int) -> Iterator[tuple[str, str]]:
    """Yield the kind and the full name of numbers that may count what is cut."""
    widths = []
    for name in group.sources:
        layer = module.get_submodule(name)
        width = cut_width(layer, "colwise")
        widths.append(width or 0)
    # Attributes of the modules around the layers, up to the one that has all of them.
    for owner in _owners([*group.sources, *group.sinks]):
        part = module.get_submodule(owner)
        for attribute, value in vars(part).items():
            # By type: True counts among the integers.
            if type(value) is not int or value < 2 or value % tensor:
                continue
            kind = _kind(attribute, value, widths)
            if kind is not None:
                name = f"{owner}.{attribute}"
                yield kind, name.removeprefix(".")


def _kind(attribute: str, value: int, widths: Sequence[int]) -> str | None:
    """Return the kind of a number beside layers of some widths; None if it counts nothing of them."""
    divides = any(width % value == 0 for width in widths)
    is_count = divides and not any(word in attribute for word in _NO_COUNTS)
    if is_count and "head" in attribute:
        return "heads"
    if value in widths:
        return "widths"
    if is_count:
        return "others"
    return None


def _owners(names: Iterable[str]) -> list[str]:
    """Return the names of the modules that have some of the layers, from the innermost that has all of them."""
    around = []
    for name in names:
        owners = []
        while name:
            name, _, _ = name.rpartition(".")
            owners.append(name)
        around.append(owners)
    of_all = set.intersection(*map(set, around))
    innermost = max(of_all, key=len)
    found: dict[str, None] = {}
    for owners in around:
        for owner in owners:
            if len(owner) >= len(innermost):
                found[owner] = None
    return list(found)


def as_patterns(names: Iterable[str], everything: Sequence[str]) -> list[str]:
    """Return patterns that name layers, or numbers, and nothing else.

    Args:
        names: Their names.
        everything: The names of all layers, or of all numbers.
    """
    remaining = dict.fromkeys(names)
    patterns = []
    while remaining:
        name = next(iter(remaining))
        # All numbers as *, or the first alone, or none.
        every = NUMBER.sub("*", name)
        first = NUMBER.sub("*", name, count=1)
        for pattern in (every, first, name):
            named = matching(everything, pattern)
            if remaining.keys() >= set(named):
                break
        patterns.append(pattern)
        for another in named:
            del remaining[another]
    return patterns
