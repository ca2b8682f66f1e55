"""The loss to fall below: that of a model which knows only how frequent each word is."""

from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["UnigramLoss"]


class UnigramLoss(Callback):
    """Logs `val_unigram_loss` beside the `val_words_loss` of the model; both have the same targets."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the loss."""
        pl_module.log("val_unigram_loss", trainer.datamodule.unigram_loss())
