"""Private names of torch's `parallelize_module`: where the hooks come from that it leaves in layers, and its mark.

And those of a mesh: its groups, and Lightning's attribute behind a module's `device_mesh`.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["forget_cuts", "set_device_mesh", "wait_as_default"]

# Functions of this package turn the inputs and outputs of a layer into parts, and back.
_PACKAGE = "torch.distributed.tensor"
# An attribute of layers that are cut, which torch refuses to cut again.
_MARK = "_distribute_module_applied"


def forget_cuts(module: nn.Module) -> None:
    """Remove the hooks and marks of torch's tensor parallelism from a module and its submodules.

    Torch has no way back, and a layer that is whole again would still receive parts. Under other names they would stay,
    and the next call or cut of the layer would fail.

    Args:
        module: The module.
    """
    for part in module.modules():
        attributes = vars(part)
        attributes.pop(_MARK, None)
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            hooks: dict[int, Callable[..., Any]] = attributes[kind]
            for number in [number for number, hook in hooks.items() if _is_torchs(hook)]:
                del hooks[number]
                attributes[f"{kind}_with_kwargs"].pop(number, None)


def _is_torchs(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_PACKAGE)


def wait_as_default(mesh: DeviceMesh) -> DeviceMesh:
    """Let processes wait in the groups of a mesh as long as in the default group, and return the mesh.

    Torch gives these groups a timeout of its own, 30 minutes on the CPU. Nothing public reads that of a group.

    Args:
        mesh: The mesh.
    """
    default: Any = dist.group.WORLD
    backend = default._get_backend(torch.device(mesh.device_type))
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    if timeout is None:
        return mesh
    groups: list[Any] = mesh.get_all_groups()
    for group in groups:
        # Torch 2.11 refuses it for groups whose operations it compares, with TORCH_DISTRIBUTED_DEBUG=DETAIL.
        with suppress(RuntimeError):
            group.set_timeout(timeout)
    return mesh


def set_device_mesh(module: LightningModule, mesh: Any) -> None:
    """Set `self.device_mesh`, which has no setter, for `configure_model` and until the end of the run.

    In a version without the name, the module has no such property.
    """
    if "_device_mesh" in vars(module):
        vars(module)["_device_mesh"] = mesh
