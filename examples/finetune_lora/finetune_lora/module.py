"""The language model, whole or with low-rank adapters."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

__all__ = ["LanguageModel"]


class LanguageModel(LightningModule):
    """A causal language model of transformers, from a configuration or from a folder with its weights.

    With adapters the weights of the base are frozen, and two small matrices beside each chosen linear layer train
    (Hu et al., 2021: LoRA).

    Args:
        architecture: The model, by its `model_type` in transformers. Default: "llama".
        settings: Arguments of its configuration. Default: none.
        base: A folder with a saved model, which is read in place of a configuration, as safetensors alone.
            Default: None.
        lora: Arguments of `peft.LoraConfig`. Default: None, all weights train.
        lr: AdamW's learning rate. Default: 0.003.
    """

    def __init__(
        self,
        *,
        architecture: str = "llama",
        settings: dict[str, Any] | None = None,
        base: str | None = None,
        lora: dict[str, Any] | None = None,
        lr: float = 3e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if base is None:
            self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **(settings or {})))
        else:
            self.model = AutoModelForCausalLM.from_pretrained(base, local_files_only=True, use_safetensors=True)
        if lora is not None:
            # In the dtype of the base: the precision of the run decides.
            config = LoraConfig(task_type="CAUSAL_LM", **lora)
            self.model = get_peft_model(self.model, config, autocast_adapter_dtype=False)
            # Checkpoints may hold the adapters alone.
            self.strict_loading = False
        # Models from a folder are in evaluation mode.
        self.model.train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of the batch's tokens."""
        loss = self.model(**batch, use_cache=False).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the mean loss of the batch's tokens."""
        loss = self.model(**batch, use_cache=False).loss
        self.log("val_loss", loss, prog_bar=True, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW for the parameters that train."""
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trainable, lr=self.hparams.lr, weight_decay=0.0)
