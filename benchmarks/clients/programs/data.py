"""The data of the programs, in the forms that they look for before they would download anything.

MNIST is read from a folder; the graphs, sentences and small networks are made.
"""

import gzip
import json
import random
import shutil
from pathlib import Path

WORDS = 200
SENTENCES = {"train": 128, "validation": 64, "test": 32}


def write_mnist(source: Path, folder: Path) -> None:
    """Unpack MNIST where torchvision finds it.

    Args:
        source: A folder with the four files in idx format, compressed by gzip.
        folder: The data folder that the program names.
    """
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.gz"):
        with gzip.open(path) as packed, (raw / path.stem).open("wb") as file:
            shutil.copyfileobj(packed, file)


def write_graphs(folder: Path, graphs: int = 320) -> None:
    """Write random graphs of two classes, rings and stars with chords, as the data set IMDB-BINARY of TUDataset."""
    draw = random.Random(3)
    raw = folder / "IMDB-BINARY" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    edges, indicators, labels = [], [], []
    first = 1
    for graph in range(graphs):
        size = draw.randrange(6, 20)
        label = graph % 2
        pairs = [(0, node) if label else (node - 1, node) for node in range(1, size)]
        pairs += [tuple(draw.sample(range(size), 2)) for _ in range(size // 3)]
        for one, other in pairs:
            edges += [f"{first + one}, {first + other}", f"{first + other}, {first + one}"]
        indicators += [str(graph + 1)] * size
        labels.append(str(label))
        first += size
    for name, lines in (("A", edges), ("graph_indicator", indicators), ("graph_labels", labels)):
        (raw / f"IMDB-BINARY_{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_sentences(folder: Path) -> None:
    """Write three tasks of GLUE with made sentences, as a local data set of the library `datasets`."""
    draw = random.Random(5)
    columns = {
        "cola": ["sentence"],
        "mrpc": ["sentence1", "sentence2"],
        "mnli": ["premise", "hypothesis"],
    }
    lines = ["---", "configs:"]
    for task, names in columns.items():
        lines += [f"- config_name: {task}", "  data_files:"]
        splits = dict(SENTENCES)
        if task == "mnli":
            splits = {f"validation_{kind}": 64 for kind in ("matched", "mismatched")}
        for split, count in splits.items():
            lines += [f"  - split: {split}", f"    path: {task}/{split}.jsonl"]
            path = folder / task / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = []
            for index in range(count):
                row = {name: " ".join(f"w{draw.randrange(WORDS)}" for _ in range(12)) for name in names}
                rows.append(json.dumps({**row, "label": draw.randrange(2), "idx": index}))
            path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")


def write_networks(folder: Path) -> None:
    """Write an ALBERT and two DistilBERTs with two small layers and random weights, under the names of real ones."""
    import torch
    from transformers import (
        AlbertConfig,
        AlbertModel,
        BertTokenizerFast,
        DistilBertConfig,
        DistilBertModel,
        DistilBertTokenizerFast,
    )

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *(f"w{number}" for number in range(WORDS))]
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(words) + "\n", encoding="utf-8")
    torch.manual_seed(11)
    albert = AlbertConfig(
        vocab_size=len(words),
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=128,
    )
    distilled = DistilBertConfig(
        vocab_size=len(words), dim=32, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=128
    )
    networks = {
        "albert-base-v2": (AlbertModel(albert), BertTokenizerFast),
        "distilbert-base-uncased": (DistilBertModel(distilled), DistilBertTokenizerFast),
        "distilbert-base-cased": (DistilBertModel(distilled), DistilBertTokenizerFast),
    }
    for name, (network, tokenizer) in networks.items():
        network.save_pretrained(folder / name)
        tokenizer(vocab_file=str(vocabulary), model_max_length=128).save_pretrained(folder / name)
