"""Operators without which a torchvision whose compiled part cannot be loaded is not importable.

That part of a wheel for CUDA does not fit a torch for the CPU. timm, transformers and torchmetrics import torchvision
as well. No model of the campaign uses these operators; a torchvision that can be imported stays as it is.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["define", "define_when_needed"]

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width,"
    " int sampling_ratio, bool aligned) -> Tensor",
)

_kept: list[Any] = []  # definitions last as long as their library


def define() -> None:
    """Defines the operators."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    _kept.append(library)
    for operator in OPERATORS:
        library.define(operator)


def define_when_needed() -> None:
    """Defines the operators as soon as torchvision is imported."""
    sys.meta_path.insert(0, _Definer())


class _Definer(importlib.abc.MetaPathFinder):
    """Finds nothing, but notices the import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            define()
        return None
