"""A text, a small base model with random weights, and runs that differ in their trainer alone."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'equipoise[transformers]'")
pytest.importorskip("peft", reason="peft is not installed: pip install 'equipoise[finetuning]'")

from finetune_lora.data import TextDataModule
from finetune_lora.module import LanguageModel
from torch.utils.data import DataLoader

from equipoise import Trainer
from equipoise.parallel.workers.preloading import preload

# Each process of a strategy would import the model anew, which takes longer than its training.
preload("finetune_lora.module", "transformers.models.llama.modeling_llama")

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": "gaussian"}


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A folder with a model."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    LanguageModel(settings=SIZES).model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Twenty blocks of 16 bytes to train on, and two to validate on."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"{number} squared is {number**2}." for number in range(100)), encoding="utf-8")
    module = TextDataModule(text=str(path), characters=352, length=16, val_share=1 / 11)
    module.setup("fit")
    return module


@pytest.fixture
def adapted(base, data):
    """A function that fits adapters with eight blocks in a step, of all processes together."""

    def fit(strategy="single_device", *, precision="64-true", **options):
        processes = 1 if strategy == "single_device" else 2
        torch.manual_seed(1)
        module = LanguageModel(base=base, lora=LORA)
        trainer = Trainer(
            max_epochs=2,
            strategy=strategy,
            accelerator="cpu",
            devices=processes,
            precision=precision,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        # In the order of the text.
        train = DataLoader(data.train, batch_size=8 // processes)
        trainer.fit(module, train, data.val_dataloader())
        return module

    return fit
