"""The attribute behind a module's `device_mesh`, which has no setter."""

from typing import Any

from lightning.pytorch import LightningModule

__all__ = ["set_device_mesh"]

_MESH = "_device_mesh"


def set_device_mesh(module: LightningModule, mesh: Any) -> None:
    """Set `self.device_mesh` for `configure_model` and until the end of the run, which clears it (`forget_run`).

    In a version without the name, the module has no such property.
    """
    if _MESH in vars(module):
        vars(module)[_MESH] = mesh
