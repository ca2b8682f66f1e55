"""Sums in the order of a tree are the same to the bit, however parts are shared out."""

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from equipoise.extensions.virtual.parts.gradient_tree import GradientTree
from equipoise.parallel.communication.processes import Processes


def leaves(count: int) -> list[list[Tensor | None]]:
    """Gradients of parts: some are missing, and sizes of numbers vary, so that the order of a sum counts."""
    draw = torch.Generator().manual_seed(7)
    scales = 10.0 ** torch.randint(-3, 4, (count, 2), generator=draw)
    gradients: list[list[Tensor | None]] = []
    for number in range(count):
        values = torch.randn(2, 5, generator=draw) * scales[number][:, None]
        gradients.append([values[0], None if number % 3 == 1 else values[1]])
    return gradients


def whole_sum(gradients: list[list[Tensor | None]]) -> list[Tensor | None]:
    """The sum by recursion, as the tree is defined."""
    if len(gradients) == 1:
        return gradients[0]
    width = 1
    while 2 * width < len(gradients):
        width *= 2
    left, right = whole_sum(gradients[:width]), whole_sum(gradients[width:])
    total: list[Tensor | None] = []
    for one, other in zip(left, right, strict=True):
        if one is None or other is None:
            total.append(other if one is None else one)
        else:
            total.append(one + other)
    return total


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8, 13])
def test_one_process_adds_in_the_order_of_the_tree(count: int) -> None:
    tree = GradientTree(count, Processes())
    for number, gradients in enumerate(leaves(count)):
        tree.add(number, [None if each is None else each.clone() for each in gradients])
    total = tree.total([], [])
    for value, expected in zip(total, whole_sum(leaves(count)), strict=True):
        assert (value is None) == (expected is None)
        assert value is None or torch.equal(value, expected)


def test_each_part_is_in_one_sum() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        count = draw.randint(1, 20)
        borders = sorted({0, count, *(draw.randint(0, count) for _ in range(3))})
        covered: list[int] = []
        for first, end in pairwise(borders):
            tree = GradientTree(count, Processes())
            for part in range(first, end):
                tree.add(part, [None])
            for begin, size, _ in tree.forms():
                assert begin % size == 0
                covered += range(begin, min(count, begin + size))
        assert covered == list(range(count)), f"seed {seed}"
