"""Blocks of random costs, and stages that are cut of them."""

import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from equipoise.extensions.pipeline.planning.stage_costs import Block, StageDevice

__all__ = ["ALIKE", "all_cuts", "named_blocks", "random_blocks"]

ALIKE = [StageDevice(), StageDevice()]


def random_blocks(draw: random.Random, count: int) -> list[Block]:
    blocks = []
    for index in range(count):
        parameters = draw.randint(0, 50)
        sent = {1000 + index: draw.randint(0, 40)}
        blocks.append(
            Block(
                name=str(index),
                forward=draw.choice([0.0, draw.uniform(0, 5)]),
                backward=draw.uniform(0, 5),
                parameters=parameters,
                trained=draw.choice([0, parameters]),
                saved=draw.randint(0, 60),
                saves=frozenset({1000 + index - draw.randint(0, 1)}) if draw.random() < 0.5 else frozenset(),
                boundary=sum(sent.values()),
                passing=draw.choice([sent, {}]),
                transient=draw.randint(0, 30),
                may_end=draw.random() < 0.8,
            )
        )
    return blocks


def named_blocks(count: int, **options: Any) -> list[Block]:
    """Blocks that cost the same, or each what the list of an option says of it."""
    each = [
        {key: value[index] if isinstance(value, list) else value for key, value in options.items()}
        for index in range(count)
    ]
    return [Block(name=str(index), **costs) for index, costs in enumerate(each)]


def all_cuts(blocks: Sequence[Block], stages: int) -> list[list[int]]:
    """The ends of the stages in all cuts that are allowed."""
    return [
        [*inner, len(blocks)]
        for inner in combinations(range(1, len(blocks)), stages - 1)
        if all(blocks[end - 1].may_end for end in inner)
    ]
