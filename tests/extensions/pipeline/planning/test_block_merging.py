"""Merged blocks cost what their calls cost one by one."""

import random

import pytest

from equipoise.extensions.pipeline.planning.block_merging import merge_blocks
from equipoise.extensions.pipeline.planning.stage_costs import Costs, StageDevice
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
