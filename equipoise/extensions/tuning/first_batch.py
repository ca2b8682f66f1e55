"""The first batch of a fit, before the fit begins."""

from functools import partial
from typing import Any

from equipoise.extensions.planning.first_batch import read_ahead
from equipoise.trainer.runtime.request import Request

__all__ = ["read_first_batch"]


def read_first_batch(request: Request, trainer: Any, seconds: float = 60.0) -> Any:
    """Return the first batch of the training loader, on the CPU; see `read_ahead`.

    A copy of this process calls `setup` and `train_dataloader`. `prepare_data` is not called: it writes files, which a
    copy shares.

    Args:
        request: The fit.
        trainer: What module and data module have as `trainer` in the copy.
        seconds: Time after which the copy is ended. Default: 60.

    Raises:
        ConfigurationError: If the batch cannot be read in this way.
    """
    return read_ahead(partial(_open_loaders, request, trainer), seconds)


def _open_loaders(request: Request, trainer: Any) -> Any:
    request.module.trainer = trainer
    loaders = request.loaders.get("train")
    if loaders is not None:
        return loaders
    # They are those of a module, or of a data module.
    owner: Any = request.module
    if request.datamodule is not None:
        owner = request.datamodule
        owner.trainer = trainer
    owner.setup("fit")
    return owner.train_dataloader()
