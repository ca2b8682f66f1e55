"""Placeholders in nested containers, which may be damaged or written by anyone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise import CheckpointError
from equipoise.parallel.shards.placeholders import (
    make_placeholder,
    name_of,
    place_without_values,
    replace_placeholders,
)
from equipoise.parallel.shards.sources import source_of
from equipoise.trainer.checkpointing.reading import load_checkpoint
from tests.parallel.shards.folders import save
from tests.support.trainer_runs import refuses


def placeholder(name: str = "w") -> Tensor:
    return make_placeholder(torch.ones(2), name)


def named(content: dict[str, Any]) -> dict[str, Any]:
    """The same containers with names in place of placeholders."""
    replace_placeholders(content, lambda tensor, name: name)
    return content


def test_placeholders_in_containers_that_hold_themselves() -> None:
    content: dict[str, Any] = {"w": placeholder()}
    content["self"] = (content, [content])
    named(content)
    assert content["w"] == "w"
    assert content["self"][0] is content["self"][1][0] is content


def test_placeholders_in_a_tuple_with_many_references() -> None:
    """Each has its predecessor twice, so that a search of all paths would never end."""
    value: Any = (placeholder(),)
    for _ in range(200):
        value = (value, value)
    content = named({"value": value, "other": placeholder()})
    for _ in range(200):
        value = content["value"]
        content["value"] = value[0]
        assert value[0] is value[1]
    assert content["value"] == ("w",)


def test_containers_that_are_too_deep_are_refused() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    refuses(lambda: named({"value": value}), "nested too deeply", error=CheckpointError)
    # Lists are taken apart one within the other, which takes as many calls.
    while value:
        value = value.pop()


def test_what_was_computed_from_a_placeholder_has_no_values() -> None:
    content = {"state_dict": {"w": placeholder()}, "list": [1, (torch.ones(1), "text")]}
    assert place_without_values(content) is None
    with torch.inference_mode():
        assert place_without_values({"w": placeholder()}) is None
    content["list"] = [(0, placeholder().half())]
    assert place_without_values(content) == "['list'][0][1]"
    content["list"] = [placeholder().mul_(2)]
    assert place_without_values(content) == "['list'][0]"
    content["list"] = content
    assert place_without_values(content) is None


@pytest.mark.parametrize("source", ["text", {"reader": 1}])
def test_attributes_that_anyone_may_have_written(source: Any, tmp_path: Path) -> None:
    tensor = placeholder()
    vars(tensor)["equipoise_source"] = source
    torch.save({"state_dict": {"w": tensor}}, tmp_path / "a.ckpt")
    loaded = load_checkpoint(tmp_path / "a.ckpt")["state_dict"]["w"]
    assert name_of(loaded) == "w"
    assert source_of(loaded) is None
    vars(tensor)["equipoise_shards"] = source
    assert name_of(tensor) in (source, None)


def test_tied_weights_are_read_once(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", {"w": torch.ones(2)}, {"state_dict": {"one": placeholder(), "other": placeholder()}})
    state = load_checkpoint(tmp_path / "a.ckpt")["state_dict"]
    assert state["one"] is state["other"]
    assert state["one"].tolist() == [1, 1]
