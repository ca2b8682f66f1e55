"""Declares two operators of torchvision, whose wheel is built for CUDA and lacks them beside a torch for the CPU.

Torch calls `declare` when it is imported, since the metadata beside this file names it in the group `torch.backends`.
Without a declaration `import torchvision` fails. The operators themselves stay missing; where torchvision has them,
nothing is declared.
"""

import torch

_kept = []


def declare() -> None:
    """Declare the operators."""
    if torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
