"""Mistakes without an error: a body that trains though it is frozen, texts in both parts, words cut off."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'equipoise[transformers]'")

import finetune.data
from finetune.data import DocstringDataModule
from finetune.docstrings import labelled_docstrings
from finetune.module import TextClassifier


@pytest.fixture(scope="module", autouse=True)
def texts():
    """The texts, read once."""
    texts = labelled_docstrings()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune.data, "labelled_docstrings", texts.copy)
        yield texts


SETTINGS = {"vocab_size": 20, "dim": 8, "hidden_dim": 16, "n_layers": 1, "n_heads": 2, "pad_token_id": 0}


@pytest.mark.thorough
def test_each_text_has_one_kind(texts):
    assert len({text for text, _ in texts}) == len(texts) > 1000
    assert 0.4 < sum(kind for _, kind in texts) / len(texts) < 0.6


@pytest.mark.thorough
def test_batches_are_dictionaries():
    data = DocstringDataModule(vocabulary=200, length=10, batch_size=4)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch["input_ids"].shape[0] == len(batch["labels"]) == 4
    assert batch["input_ids"].shape[1] <= 10
    assert len(data.tokenizer) == 200


@pytest.mark.thorough
def test_no_text_is_in_both_parts():
    data = DocstringDataModule(vocabulary=100_000, length=1_000)
    data.setup("fit")
    train = {str(sample["input_ids"]) for sample in data.train}
    in_both = [sample for sample in data.val if str(sample["input_ids"]) in train]
    assert len(in_both) <= 0.01 * len(data.val)  # whole texts differ, though some only in their spaces and line breaks


def test_batches_by_tokens():
    data = DocstringDataModule(vocabulary=200, max_tokens=256)
    data.setup("fit")
    batches = list(data.train_dataloader())
    assert max(batch["input_ids"].numel() for batch in batches) <= 256
    assert sum(len(batch["labels"]) for batch in batches) == len(data.train)


@pytest.mark.parametrize("head_only", [False, True])
def test_the_head_trains_alone_if_asked(head_only):
    module = TextClassifier(settings=SETTINGS, head_only=head_only)
    module.log = lambda *args, **kwargs: None
    batch = {"input_ids": torch.randint(1, 20, (6, 5)), "labels": torch.tensor([0, 1] * 3)}
    module.training_step(batch, 0).backward()
    has_gradient = {name for name, parameter in module.named_parameters() if parameter.grad is not None}
    of_head = {name for name, _ in module.named_parameters() if ".distilbert." not in name}
    assert of_head < set(dict(module.named_parameters()))
    assert (has_gradient == of_head) == head_only
    module.print = lambda *args, **kwargs: None
    module.on_train_start()
    assert module.model.base_model.training != head_only
    (group,) = module.configure_optimizers().param_groups
    assert len(group["params"]) == len(has_gradient)


@pytest.mark.thorough
def test_a_saved_tokenizer_is_read(tmp_path):
    data = DocstringDataModule(vocabulary=200)
    data.setup("fit")
    data.tokenizer.save_pretrained(tmp_path)
    again = DocstringDataModule(pretrained=str(tmp_path))
    again.setup("fit")
    assert again.train == data.train
    assert data.train[0]["input_ids"][0] == data.tokenizer.convert_tokens_to_ids("[CLS]")


def test_a_saved_model_is_read(tmp_path):
    saved = TextClassifier(settings=SETTINGS)
    saved.model.save_pretrained(tmp_path)
    module = TextClassifier(pretrained=str(tmp_path))
    for name, parameter in saved.model.named_parameters():
        assert torch.equal(module.model.get_parameter(name), parameter)
