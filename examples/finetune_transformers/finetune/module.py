"""The model and how it is trained."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

__all__ = ["TextClassifier"]


class TextClassifier(LightningModule):
    """A classifier of transformers, from a configuration or from a folder with its weights.

    The model computes its loss itself, as all models of transformers do when they receive labels.

    Args:
        architecture: The model, by its `model_type` in transformers. Default: "distilbert".
        settings: Arguments of its configuration. Default: none.
        pretrained: A folder with a saved model, which is read in place of a configuration, as safetensors alone.
            Default: None.
        labels: Number of classes. Default: 2.
        head_only: Whether only the classifier on top of the body trains. Default: False.
        lr: AdamW's learning rate. Default: 0.0005.
    """

    def __init__(
        self,
        *,
        architecture: str = "distilbert",
        settings: dict[str, Any] | None = None,
        pretrained: str | None = None,
        labels: int = 2,
        head_only: bool = False,
        lr: float = 5e-4,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if pretrained is None:
            config = AutoConfig.for_model(architecture, num_labels=labels, **(settings or {}))
            self.model = AutoModelForSequenceClassification.from_config(config)
        else:
            self.model = AutoModelForSequenceClassification.from_pretrained(
                pretrained, num_labels=labels, local_files_only=True, use_safetensors=True
            )
        # Models from a folder are in evaluation mode.
        self.model.train()
        if head_only:
            self.model.base_model.requires_grad_(False)

    def on_train_start(self) -> None:
        """Print how many parameters train, and switch off the dropout of a body that does not."""
        if self.hparams.head_only:
            self.model.base_model.eval()
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in self.parameters()]
        trainable = sum(size for size, is_trainable in sizes if is_trainable)
        self.print(f"{trainable:,} of {sum(size for size, _ in sizes):,} parameters train")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the model's own loss."""
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss and the share of texts whose kind is recognised."""
        output = self.model(**batch)
        accuracy = (output.logits.argmax(dim=1) == batch["labels"]).float().mean()
        values = {"val_loss": output.loss, "val_accuracy": accuracy}
        self.log_dict(values, prog_bar=True, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW for the parameters that train."""
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trainable, lr=self.hparams.lr)
