"""Request: the arguments of `fit` or one of its siblings."""

from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.trainer.states import TrainerFn

__all__ = ["Request"]


@dataclass
class Request:
    """The arguments of `fit`, `validate`, `test` or `predict`.

    Attributes:
        fn: The entry point.
        module: The user's module.
        module_given: True if the module was passed; False if it is that of the last run.
        datamodule: The user's data module, if there is one.
        loaders: Loaders that were passed, by stage.
        ckpt_path: A path, "best", "last" or None.
        weights_only: False: objects in the checkpoint are created, with whatever code it names.
    """

    fn: TrainerFn
    module: LightningModule
    module_given: bool = True
    datamodule: LightningDataModule | None = None
    loaders: dict[str, Any] = field(default_factory=dict)
    ckpt_path: Any = None
    weights_only: bool | None = None

    @property
    def fitting(self) -> bool:
        """True for `fit`."""
        return self.fn == TrainerFn.FITTING
