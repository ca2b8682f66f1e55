"""Traits of operations: random numbers, and sizes that depend on values. Torch's tags may change with its version."""

import pytest
import torch

from equipoise.extensions.pipeline.forward.operation_traits import Traits, traits_of

NONE, RANDOM, DYNAMIC = Traits(0), Traits.RANDOM, Traits.DYNAMIC


@pytest.mark.parametrize(
    ("name", "traits"),
    [
        ("split", NONE),
        ("rand", RANDOM),
        ("native_dropout", RANDOM),
        ("nonzero", DYNAMIC),
        ("masked_select", DYNAMIC),
        ("_local_scalar_dense", DYNAMIC),
        ("_pack_padded_sequence", DYNAMIC),
        ("no_operation_of_torch", RANDOM | DYNAMIC),
    ],
)
def test_operations_that_draw_or_have_dynamic_sizes(name, traits):
    assert traits_of(name, ()) == traits


def test_an_index_by_a_mask_has_a_dynamic_size():
    x, mask, numbers = torch.rand(3), torch.tensor([True, False, True]), torch.tensor([0, 1])
    assert traits_of("index", (x, [mask])) == DYNAMIC
    assert traits_of("index", (x, [None, numbers])) == NONE
