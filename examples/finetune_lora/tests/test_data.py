"""Mistakes without an error: bytes lost or used twice, a text that is longer than asked for, a tokenizer not used."""

import pytest
import torch
from finetune_lora.data import Blocks, TextDataModule
from finetune_lora.text import read_text
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.mark.parametrize(("text", "start"), [("docstrings", ""), ("sources", '"""')])
def test_a_text_of_the_running_python(text, start):
    read = read_text(text, 50_000)
    assert len(read) == 50_000
    # The documentation of the first module, __future__.
    assert read.startswith(f"{start}Record of phased-in incompatible language changes.")


def test_a_file(tmp_path):
    (tmp_path / "text.txt").write_text("ä short text", encoding="utf-8")
    assert read_text(str(tmp_path / "text.txt"), 7) == "ä short"
    with pytest.raises(FileNotFoundError, match="neither 'docstrings' nor 'sources'"):
        read_text(str(tmp_path / "none.txt"), 7)


def test_blocks_are_consecutive():
    blocks = Blocks(torch.arange(11), 3)
    assert [sample["input_ids"].tolist() for sample in blocks] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert all(sample["labels"] is sample["input_ids"] or torch.equal(*sample.values()) for sample in blocks)


def test_the_end_of_the_text_validates(data):
    train, val = (b"".join(bytes(block.tolist()) for block in part.blocks) for part in (data.train, data.val))
    assert (len(data.train), len(data.val)) == (20, 2)
    assert train + val == read_text(data.text, 352).encode()


def test_a_saved_tokenizer_is_used(data, tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "squared": 1, "is": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path)
    words = TextDataModule(text=data.text, characters=352, tokenizer=str(tmp_path), length=5)
    words.setup("fit")
    # A number, "squared", "is", a number, a dot.
    assert words.train[3]["input_ids"].tolist() == [0, 1, 2, 0, 0]
