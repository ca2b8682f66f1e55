"""Outputs of any class: their tensors are taken out, and the same structure is built with others."""

from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from equipoise.extensions.pipeline.graph.output_structure import OutputStructure
from tests.support.nested import Checked, Pair


@dataclass(frozen=True)
class Data:
    tensor: Any
    name: str


def test_outputs_in_nested_containers_are_filled_with_other_tensors():
    checked = Checked(torch.rand(2))
    tensors = [*(torch.rand(2) for _ in range(5)), *checked]
    one, two, three, four, five, _, _ = tensors
    output = (one, [two, 3], OrderedDict(x=three, size=torch.Size([2])), Pair(four, None), Data(five, "x"), [checked])
    structure, found = OutputStructure.of(output)
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in tensors]
    filled = structure.fill("abcdefg")
    *plain, last = filled
    assert plain == ["a", ["b", 3], OrderedDict(x="c", size=torch.Size([2])), Pair("d", None), Data("e", "x")]
    assert last == [("f", "g")]
    assert [type(item) for item in (*filled[1:], *last)] == [type(item) for item in (*output[1:], checked)]
    assert output[1][0] is two  # the output is as it was


def test_objects_with_tensors_are_copied():
    """Also one that refers to itself."""
    one, other = torch.rand(2), torch.rand(3)
    cache = SimpleNamespace(layers=[SimpleNamespace(key=one), {"key": other}], length=2)
    cache.itself = cache
    config = SimpleNamespace(name="x")
    structure, tensors = OutputStructure.of({"cache": cache, "logits": one, "config": config})
    assert len(tensors) == 2
    new = [torch.full((1,), float(tensor is other)) for tensor in tensors]
    first, second = structure.fill(new), structure.fill(new)
    for filled in (first, second):
        made = filled["cache"]
        assert (made.layers[0].key, made.layers[1]["key"], made.length) == (0.0, 1.0, 2)
        assert made.itself is made
        assert filled["logits"] is made.layers[0].key
        assert filled["config"] is config
    assert first["cache"] is not second["cache"]
    assert cache.layers[0].key is one
