"""Processor time from the start of a program to the end of its first step, with Equipoise over that with Lightning.

A process imports what both programs import. Then it forks one process after the other, in turn, of which each imports a
trainer and trains. So the two differ in what is forked alone.
"""

import os
import sys
import tempfile
import warnings
from importlib import import_module
from time import process_time
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

PACKAGES = ("equipoise", "lightning")


class Layer(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class EndsAfterOneStep(L.Callback):
    """Writes the processor time of the process, and ends it.

    Args:
        pipe: Where to write.
    """

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def on_train_batch_end(self, *_: Any) -> None:
        os.write(self.pipe, str(process_time()).encode())
        raise SystemExit


def train(package: str, pipe: int) -> None:
    warnings.simplefilter("ignore")
    data = TensorDataset(torch.randn(8, 4), torch.randint(2, (8,)))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        trainer = import_module(package).Trainer(accelerator="cpu", max_epochs=1, callbacks=[EndsAfterOneStep(pipe)])
        trainer.fit(Layer(), DataLoader(data, batch_size=4))


def seconds(package: str) -> float:
    """Return the processor time of a process that trains one step."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # What trainers print is of no interest.
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            train(package, writing)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return float(text)


def main() -> None:
    torch.set_num_threads(1)
    common = process_time()
    rounds = [[seconds(package) for package in PACKAGES] for _ in range(int(sys.argv[1]))]
    # The quickest of each: other work makes a start slower, and none quicker.
    equipoise, lightning = (common + min(times) for times in zip(*rounds, strict=True))
    print(equipoise / lightning)


if __name__ == "__main__":
    main()
