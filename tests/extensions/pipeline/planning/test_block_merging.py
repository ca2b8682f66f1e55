"""Merged blocks cost what their calls cost one by one."""

import random

import pytest

from equipoise.extensions.pipeline.planning.block_merging import merge_blocks
from equipoise.extensions.pipeline.planning.stage_costs import Block, Costs, StageDevice
from tests.extensions.pipeline.planning.blocks import random_blocks

OPTIONS = {"schedule": "1f1b", "micro_batches": 4}


def test_stages_of_merged_blocks_cost_as_much():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    compared = 0
    for _ in range(200):
        blocks = random_blocks(draw, draw.randint(4, 12))
        merged, ends = merge_blocks(blocks)
        # Tensors that pass by are counted where a cut is.
        if len(merged) < 2 or len(merged) == len(blocks):
            continue
        compared += 1
        cut = draw.randint(1, len(merged) - 1)
        devices = [StageDevice(), StageDevice()]
        whole = Costs(merged, devices, **OPTIONS).stages([cut, len(merged)])
        singly = Costs(blocks, devices, **OPTIONS).stages([ends[cut - 1], len(blocks)])
        for stage, other in zip(whole, singly, strict=True):
            assert stage.forward == pytest.approx(other.forward)
            assert stage.backward == pytest.approx(other.backward)
            assert stage.memory == pytest.approx(other.memory)
    assert compared > 50


def test_a_tensor_that_several_calls_save_is_kept_once():
    """The first call saves the tensor that comes from before the cut, and so does the second."""
    arriving = {7: 100}
    first = Block(name="first", forward=1.0, backward=1.0, passing=arriving, boundary=100, may_end=True)
    second = Block(name="second", forward=1.0, backward=1.0, saved=10, saves=frozenset({7}), may_end=False)
    third = Block(name="third", forward=1.0, backward=1.0, saved=10, saves=frozenset({7}))
    merged, ends = merge_blocks([first, second, third])
    assert ends == [1, 3]
    assert merged[1].saves == {7}
    assert merged[1].saved == 20
