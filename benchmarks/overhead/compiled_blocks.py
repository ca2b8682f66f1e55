"""Time of steps with compiled blocks beside eager ones, and time to the first compiled step with torch's cache on disk.

python benchmarks/overhead/compiled_blocks.py            the table, ten minutes
"""

import argparse
import os
import statistics
import tempfile
import time
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import Trainer

WIDTH, LENGTH, BATCH = 64, 32, 16
# Steps before the times count: the first batch, the comparison, and some more.
WARM_UP = 10
WAYS = [("single_device", 1), ("ddp", 2), ("fsdp", 2), ("pipeline", 2), ("dp", 2)]


class Encoder(L.LightningModule):
    """Four transformer layers, optimised automatically or by hand."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = not by_hand
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.encoder(tokens)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(batch[0]).square().mean()
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(Callback):
    """Logs the median time of a step, and the time of the steps until then."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.times = [time.perf_counter()]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(time.perf_counter())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        steps = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        pl_module.log("step", 1000 * statistics.median(steps[WARM_UP:]))
        pl_module.log("warm_up", sum(steps[:WARM_UP]))


def measure(strategy: str, processes: int, steps: int, *, by_hand: bool = False, **options: Any) -> tuple[float, float]:
    """Return the median time of a step in ms, and the seconds of the first steps."""
    batch = BATCH // processes if strategy in ("ddp", "fsdp") else BATCH
    loader = DataLoader(TensorDataset(torch.randn(steps * BATCH, LENGTH, WIDTH)), batch_size=batch)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(
        strategy=strategy, devices=["cpu"] * processes, max_epochs=1, callbacks=[Clock()], **quiet, **options
    )
    trainer.fit(Encoder(by_hand), loader)
    metrics = trainer.callback_metrics
    return float(metrics["step"]), float(metrics["warm_up"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("| strategy | eager, ms | compiled / eager | first steps, s: eager, empty cache, filled cache |")
    print("| --- | --- | --- | --- |")
    rows = [(name, processes, False) for name, processes in WAYS] + [("single_device", 1, True)]
    for name, processes, by_hand in rows:
        eager, begin = measure(name, processes, steps, by_hand=by_hand)
        begins = [begin]
        compiled = float("inf")
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            for _ in range(2):
                # Blocks on one device, too.
                step, begin = measure(name, processes, steps, by_hand=by_hand, compile={"dynamic": None})
                compiled = min(compiled, step)
                begins.append(begin)
                torch.compiler.reset()
        title = f"{name}, {processes} devices" if processes > 1 else "one device" + ", by hand" * by_hand
        print(
            f"| {title} | {eager:.1f} | {compiled / eager:.2f} | {', '.join(f'{b:.1f}' for b in begins)} |", flush=True
        )


if __name__ == "__main__":
    main()
