"""A note on the error of a module that asks for a device mesh in a run without one."""

from traceback import walk_tb

from lightning.pytorch import LightningModule

from equipoise.interop.lightning.classes import is_a

__all__ = ["add_note_on_mesh"]


def add_note_on_mesh(error: BaseException) -> None:
    """Add a note to an error of a module that asks for `device_mesh` where it is None.

    Args:
        error: Any error of a run.
    """
    if "NoneType" not in str(error):
        return
    for frame, _ in walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if is_a(owner, LightningModule) and "device_mesh" in frame.f_code.co_names:
            error.add_note(
                "`self.device_mesh` is None: only strategy='fsdp' makes one, with several devices, for modules that cut"
                " their layers themselves: FSDPStrategy(tensor=2). Without one, leave that part of the module out."
            )
            return
