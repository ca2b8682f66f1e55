"""Random modules: nested, tied, with buffers, of many dtypes and shapes; and what their weights are compared by."""

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.equality import assert_equal

__all__ = ["assert_same", "random_module"]

_PARAMETERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_OTHERS = (torch.complex64, torch.float8_e4m3fn, torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool)
_BUFFERS = (*_PARAMETERS, *_OTHERS)


class Node(nn.Module):
    """A module without a forward."""


def random_module(seed: int) -> nn.Module:
    """Return a module; the same for the same seed."""
    choose = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    root = Node()
    nodes: list[nn.Module] = [root]
    for number in range(choose.randint(1, 6)):
        node = Node()
        choose.choice(nodes).add_module(choose.choice(["a", "layers_0", "ü"]) + str(number), node)
        nodes.append(node)
    flat = torch.randn(64, generator=generator)
    parameters: list[nn.Parameter] = []
    buffers: list[Tensor] = []
    for number in range(choose.randint(3, 12)):
        node = choose.choice(nodes)
        name = f"{choose.choice(['w', 'weight', 'format'])}{number}"
        kind = choose.choice(["new", "new", "tied", "view", "buffer", "shared"])
        if kind == "tied" and parameters:
            node.register_parameter(name, choose.choice(parameters))
        elif kind == "shared" and buffers:
            node.register_buffer(name, choose.choice(buffers))
        elif kind == "view":
            begin = choose.randint(0, 50)
            node.register_buffer(name, flat[begin : begin + choose.randint(0, 14)])
        elif kind == "buffer":
            buffers.append(_tensor(choose, generator, _BUFFERS))
            node.register_buffer(name, buffers[-1])
        else:
            parameters.append(nn.Parameter(_tensor(choose, generator, _PARAMETERS)))
            node.register_parameter(name, parameters[-1])
    return root


def _tensor(choose: random.Random, generator: torch.Generator, dtypes: Any) -> Tensor:
    """Return a tensor of 0 to 3 dimensions, of which one may be empty, and perhaps not contiguous."""
    shape = [choose.randint(0, 5) for _ in range(choose.randint(0, 3))]
    tensor = (10 * torch.randn(shape, generator=generator)).to(choose.choice(dtypes))
    form = choose.choice(["plain", "transposed", "strided", "expanded", "conjugated"])
    if form == "transposed" and tensor.ndim > 1:
        return tensor.transpose(0, -1)
    if form == "strided" and tensor.ndim:
        return tensor[::2]
    if form == "expanded":
        return tensor.expand(2, *tensor.shape)
    if form == "conjugated" and tensor.is_complex():
        return tensor.conj()
    return tensor


def assert_same(read: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Assert that weights have the same names, and are the same to the bit."""
    assert_equal(*({name: _plain(value) for name, value in each.items()} for each in (expected, read)))


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format)
