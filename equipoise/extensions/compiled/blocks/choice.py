"""The choice of the blocks that are compiled: repeated ones, since one program serves all of a kind."""

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric

from equipoise.interop.lightning.classes import is_overridden
from equipoise.interop.torch.modules import is_compiled

__all__ = ["Block", "choose_blocks", "kind_of"]


class Block(NamedTuple):
    """A submodule whose forward is compiled.

    Attributes:
        name: Its name in the module; empty for the module itself.
        module: The submodule.
    """

    name: str
    module: nn.Module


def choose_blocks(module: nn.Module, *, only_repeated: bool = False) -> list[Block]:
    """Return the blocks of a module, none of them inside another.

    They are the items of a ModuleList or Sequential that share a class, and have submodules of their own; of a part
    without such items, the part itself; of a LightningModule without such parts, its own forward.

    Args:
        module: The user's module.
        only_repeated: Whether parts without such items stay eager. Default: False.

    Example:
        >>> layers = [nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2)]
        >>> network = nn.ModuleDict({"layers": nn.Sequential(*layers), "head": nn.Linear(4, 2)})
        >>> [block.name for block in choose_blocks(network)]
        ['layers.0', 'layers.1']
    """
    blocks: dict[int, Block] = {}
    blocks_of = _repeated if only_repeated else _blocks_of
    for name, child in module.named_children():
        for block in blocks_of(name, child):
            blocks.setdefault(id(block.module), block)
    if blocks or only_repeated:
        return list(blocks.values())
    if isinstance(module, LightningModule) and is_overridden("forward", module) and _may_be_block(module):
        return [Block("", module)]
    return []


def kind_of(module: nn.Module) -> Hashable:
    """Return what blocks of one kind have in common: classes, and the shapes of their parameters."""
    features: list[Hashable] = []
    for name, part in module.named_modules():
        features.append((name, type(part)))
    for name, parameter in module.named_parameters():
        features.append((name, parameter.shape, parameter.dtype))
        features.append(parameter.requires_grad)
    return tuple(features)


def _blocks_of(name: str, part: nn.Module) -> Iterator[Block]:
    """Yield the repeated blocks in a part of the network; without any, the part itself."""
    repeated = list(_repeated(name, part))
    if repeated:
        yield from repeated
    elif _may_be_block(part) and _is_composite(part):
        yield Block(name, part)
    else:
        for child_name, child in part.named_children():
            yield from _blocks_of(f"{name}.{child_name}", child)


def _repeated(name: str, part: nn.Module) -> Iterator[Block]:
    children = list(part.named_children())
    num_of_class = Counter(type(child) for _, child in children)
    is_list = isinstance(part, nn.ModuleList | nn.Sequential)
    for child_name, child in children:
        path = f"{name}.{child_name}"
        is_repeated = is_list and num_of_class[type(child)] > 1 and _is_composite(child)
        if is_repeated and _may_be_block(child):
            yield Block(path, child)
        else:
            yield from _repeated(path, child)


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _may_be_block(module: nn.Module) -> bool:
    """Return True if a module has a forward of its class, and parameters."""
    if isinstance(module, torch.jit.ScriptModule | Metric):
        return False
    # What the user has compiled stays as it is.
    if any(map(is_compiled, module.modules())):
        return False
    if type(module).forward is nn.Module.forward or "forward" in vars(module):
        return False
    return next(module.parameters(), None) is not None
