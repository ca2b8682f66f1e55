"""CLITrainer: our Trainer for `LightningCLI`, which asks for a subclass of Lightning's."""

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer as LightningTrainer

from equipoise.trainer.trainer import Trainer

__all__ = ["CLITrainer"]


class CLITrainer(LightningTrainer):
    """Makes an `equipoise.Trainer` where Lightning's command line takes only subclasses of Lightning's.

    It has the arguments of `equipoise.Trainer`, which become flags.

    Args:
        options: Those of `equipoise.Trainer`.

    Example:
        >>> from lightning.pytorch.cli import LightningCLI
        >>> cli = LightningCLI(Model, Data, trainer_class=CLITrainer)  # doctest: +SKIP
    """

    # The command line reads the arguments here. Type checkers, which cannot follow it, read `__new__` alone.
    if not TYPE_CHECKING:
        __init__ = Trainer.__init__

    def __new__(cls, **options: Any) -> Trainer:  # type: ignore[misc]
        """Return a trainer of Equipoise, whose `__init__` alone is called."""
        return Trainer(**options)
