"""Steps of restoring a checkpoint that need no run: does a state belong to a module?"""

import re

import pytest
import torch
from torch import nn

from equipoise.errors import CheckpointError
from equipoise.trainer.restoration import check_fits


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def refuse(state: dict[str, object], text: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(text)):
        check_fits(layers(), state)


def test_a_state_of_the_same_layers_fits() -> None:
    check_fits(layers(), layers().state_dict())


def test_keys_that_are_missing_or_unexpected_are_named() -> None:
    state = dict(layers().state_dict())
    state["head.weight"] = state.pop("1.weight")
    refuse(state, "of another model than Sequential: missing: 1.weight; unexpected: head.weight.")


def test_shapes_are_compared() -> None:
    state = {**layers().state_dict(), "0.bias": torch.zeros(4)}
    refuse(state, "of another shape: 0.bias [4] for [3].")


def test_what_is_no_tensor_is_named() -> None:
    state = {**layers().state_dict(), "0.bias": [0.0, 0.0, 0.0]}
    refuse(state, "not tensors: 0.bias is a list.")


def test_a_long_list_of_keys_is_cut() -> None:
    state = {f"extra.{index}": torch.zeros(1) for index in range(8)}
    with pytest.raises(CheckpointError) as caught:
        check_fits(layers(), {**layers().state_dict(), **state})
    message = str(caught.value)
    assert "extra.5 ..." in message
    assert "extra.6" not in message
