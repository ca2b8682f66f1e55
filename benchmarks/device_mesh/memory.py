"""Memory of a step of a long sequence on each of four devices, predicted and measured, and the bytes that it sends."""

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))

from equipoise import Callback, FSDPStrategy, MemoryLogger, Trainer, predict_memory
from equipoise.extensions.planning import PlannedDevice, plan_strategies
from equipoise.interop.torch.dispatch import OperationWatch, tensors_in
from equipoise.memory.resident_set import ResidentSet

PROCESSES = 4
WIDTH = 64
HEADS = 4
LAYERS = 2
VOCABULARY = 256

PLAN = {
    "blocks.*.query": "colwise",
    "blocks.*.key": "colwise",
    "blocks.*.value": "colwise",
    "blocks.*.output": "rowwise",
    "blocks.*.heads": "divided",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}
# The options of the strategy.
MESHES: dict[str, dict[str, Any]] = {
    "fsdp alone": {},
    "context 2 x data 2": {"context": 2},
    "context 4": {"context": 4},
    "tensor 4": {"tensor": 4, "tensor_plan": PLAN},
}
# Seconds of one row.
LIMIT = 600


class Block(nn.Module):
    """Causal attention and a perceptron, each with a norm and a residual, as in GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states of the same shape."""
        normed = self.norms[0](hidden)
        layers = (self.query, self.key, self.value)
        parts = [layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in layers]
        attended = scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(2))
        inner = self.up(self.norms[1](hidden))
        return hidden + self.down(nn.functional.gelu(inner))


class Language(L.LightningModule):
    """Predicts the next token of sequences, whose labels the data have shifted."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        tokens, labels = batch
        logits = self.head(self.blocks(self.embedding(tokens)))
        return cross_entropy(logits.flatten(0, 1), labels.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters())


class Gauges(Callback):
    """Writes what each process has sent in the first step, and its peaks in the second.

    Args:
        folder: Where each process writes a file.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.sent: Counter[str] = Counter()
        self.resident = ResidentSet()
        self.watch = OperationWatch(self._count)

    def _count(self, name: str, result: Any, args: Any) -> None:
        """Add what a process sends at least: its part to each other process, or a part of a sum and of its result."""
        kind = _KINDS.get(name)
        if kind is None:
            return
        tensors = list(tensors_in(args))
        sizes = [tensor.nbytes for tensor in tensors]
        # Lists of parts come first; what is gathered or summed in one piece is as large as all parts.
        if name in ("allgather_", "reduce_scatter_"):
            others = len(sizes) - 2
        else:
            others = PROCESSES - 1
        nbytes = others * min(sizes)
        if name in ("all_reduce", "allreduce_"):
            nbytes = 2 * (PROCESSES - 1) * sizes[0] // PROCESSES
        self.sent[kind if tensors[0].ndim != 1 or "base" in name else "numbers"] += nbytes

    def on_train_batch_start(self, trainer: Any, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to count, or to measure."""
        if trainer.global_step == 0:
            self.watch.start()
        else:
            self.resident.reset()

    def on_train_batch_end(
        self, trainer: Any, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the results of this process."""
        self.watch.stop()
        if trainer.global_step == 1:
            return
        (memory,) = [callback for callback in trainer.callbacks if isinstance(callback, MemoryLogger)]
        tensors = max(composition.nbytes for composition in memory.compositions)
        results = {"tensors": tensors, "resident": self.resident.read()[1], "sent": self.sent}
        Path(self.folder, f"{trainer.global_rank}.json").write_text(json.dumps(results))


_KINDS = {
    "_allgather_base_": "weights",
    "_reduce_scatter_base_": "gradients",
    "allgather_": "keys and values",
    "reduce_scatter_": "keys and values",
    "all_reduce": "sums of parts",
    "allreduce_": "numbers",
}


def predicted(options: dict[str, Any], tokens: int) -> int | None:
    """Return the predicted peak of the fullest device, None if there is no prediction."""
    batch = torch.zeros(1, tokens, dtype=torch.int64)
    module = Language()
    prediction = predict_memory(module, (batch, batch))
    devices = [PlannedDevice(name="cpu", kind="cpu", memory=2**40)] * PROCESSES
    (plan,) = plan_strategies(prediction, module, [FSDPStrategy(**options)], devices)
    if plan.reason is not None:
        return None
    return max(device.peak.nbytes for device in plan.devices)


def measure(options: dict[str, Any], tokens: int) -> list[dict[str, Any]]:
    """Train for two steps, and return what each process has measured."""
    draw = torch.Generator().manual_seed(1)
    sequences = torch.randint(VOCABULARY, (2 * PROCESSES, tokens + 1), generator=draw)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            # Whole sequences, with which the first batch would be compared, are what shall not be in memory.
            strategy=FSDPStrategy(compare_layers=False, timeout=LIMIT, **options),
            devices=["cpu"] * PROCESSES,
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[MemoryLogger(detail="modules", leaks=False), Gauges(folder)],
        )
        trainer.fit(Language(), DataLoader([(row[:-1], row[1:]) for row in sequences], batch_size=1))
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(PROCESSES)]


def cells(name: str, tokens: int) -> list[str]:
    """Return a row of the table."""
    options = MESHES[name]
    measured = measure(options, tokens)
    peaks = [of_rank["tensors"] for of_rank in measured]
    expected = predicted(options, tokens)
    plan = ["not predicted", ""]
    if expected is not None:
        plan = [_mib(expected), f"{expected / max(peaks):.3f}"]
    resident = max(of_rank["resident"] for of_rank in measured)
    sent = [max(of_rank["sent"].get(kind, 0) for of_rank in measured) for kind in dict.fromkeys(_KINDS.values())]
    texts = dict.fromkeys(map(_mib, sorted(peaks)))
    return [name, *plan, " to ".join([*texts][:: max(1, len(texts) - 1)]), _mib(resident), *map(_mib, sent)]


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f}"


def main() -> None:
    """Measure each mesh in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--meshes", nargs="+", choices=[*MESHES], default=[*MESHES], help="default: all")
    parser.add_argument("--tokens", type=int, default=2**14, help="length of a sequence; default: 16384")
    parser.add_argument("--row", choices=[*MESHES], help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.row is not None:
        print("|", " | ".join(cells(options.row, options.tokens)), "|", flush=True)
        return
    kinds = [f"sent: {kind}" for kind in dict.fromkeys(_KINDS.values())]
    print("| mesh | predicted | ratio | tensors | resident set |", " | ".join(kinds), "|")
    print("| --- |", " | ".join(["---:"] * (4 + len(kinds))), "|", flush=True)
    for name in options.meshes:
        command = [sys.executable, __file__, "--row", name, "--tokens", str(options.tokens)]
        subprocess.run(command, timeout=LIMIT, check=True)


if __name__ == "__main__":
    main()
