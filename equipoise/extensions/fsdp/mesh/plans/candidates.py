"""Candidates of a plan: groups of layers that could be cut column-wise and then row-wise, and numbers to divide."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        key = tuple(_kinds(module, names) for names in group)
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
        choices = _choices(numbers)
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

    return sorted(candidates, key=order)


def _choices(numbers: Mapping[str, list[str]]) -> list[list[str]]:
    """Return choices of numbers, each once.

    Args:
        numbers: Their names, by kind.
    """
    choices: list[list[str]] = []
    for kinds in _CHOICES:
        choice = []
        for kind in kinds:
            choice += numbers.get(kind, [])
        if choice not in choices:
            choices.append(choice)
    return choices


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
        widths.append(cut_width(layer, "colwise") or 0)
    # Attributes of the modules around the layers, up to the one that has all of them.
    for owner in _owners([*group.sources, *group.sinks]):
        part = module.get_submodule(owner)
        for attribute, value in vars(part).items():
            name = f"{owner}.{attribute}".removeprefix(".")
            # By type: True counts among the integers.
            if type(value) is not int:
                continue
            if value < 2 or value % tensor:
                continue
            is_count = not any(part in attribute for part in _NO_COUNTS)
            divides = any(width % value == 0 for width in widths)
            if is_count and divides and "head" in attribute:
                yield "heads", name
            elif value in widths:
                yield "widths", name
            elif is_count and divides:
                yield "others", name


def _owners(names: Iterable[str]) -> list[str]:
    """Return the names of the modules that have some of the layers, from the innermost that has all of them."""
    # 1. The length of what all names have in common.
    parts = [name.split(".") for name in names]
    shared = 0
    for of_names in zip(*parts, strict=False):
        if len(set(of_names)) > 1:
            break
        shared += 1
    # 2. The modules from there on, each once.
    owners: dict[str, None] = {}
    for of_name in parts:
        for length in range(shared, len(of_name)):
            owner = ".".join(of_name[:length])
            owners[owner] = None
    return list(owners)


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
