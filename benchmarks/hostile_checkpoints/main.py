"""Campaign of checkpoints that are damaged, or changed to run code.

python benchmarks/hostile_checkpoints/main.py             the table, some minutes
python benchmarks/hostile_checkpoints/main.py --check     exits with 1 if a promise is broken
"""

import argparse
import io
import logging
import os
import platform
import random
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))

from attacks import damaged_pickles, damages, mutations, positions, replaced_pickles

from equipoise import CheckpointError, ConfigurationError, Trainer
from equipoise.trainer.checkpointing.file_reading import read_checkpoint

MOST_SECONDS = 20  # for one file
MOST_MEMORY = 8 << 30  # bytes of addresses beyond those at the start


class Module(L.LightningModule):
    """A small network with dropout, Adam and a schedule; counts its steps.

    Attributes:
        steps: Number of steps that have begun since it was set to 0, which is no state of a module.
        seen: Number of batches, which a checkpoint holds.
    """

    steps: ClassVar[int] = 0

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, 1))
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        type(self).steps += 1
        self.seen += 1
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(12.0).reshape(6, 2)), batch_size=2, shuffle=True)


def trainer(**options: Any) -> Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return Trainer(accelerator="cpu", **quiet, **options)


def checkpoint() -> bytes:
    """Return a checkpoint that was written in the midst of an epoch."""
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(max_steps=4)
        run.fit(Module(), loader())
        run.save_checkpoint(f"{folder}/x.ckpt")
        return Path(folder, "x.ckpt").read_bytes()


# Campaigns


def read_all(
    attacks: Iterable[tuple[str, bytes]], folder: Path, canary: Path, whole: Any
) -> tuple[Counter[str], list[str]]:
    """Read files; return how many were refused and read, and what went wrong.

    Args:
        attacks: Names and contents.
        folder: Where they are written to.
        canary: The path that nothing may create.
        whole: What the undamaged file holds, which damaged ones may hold as well; None: they may hold anything.
    """
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    path = folder / "attack.ckpt"
    for name, content in attacks:
        path.write_bytes(content)
        try:
            with _deadline():
                read = read_checkpoint(path)
            counts["read as data"] += 1
            if whole is not None and not _same(read, whole):
                counts["read as something else"] += 1
                wrong.append(f"{name}: read as something else")
        except CheckpointError:
            counts["refused"] += 1
        except BaseException as error:
            counts["other error"] += 1
            wrong.append(f"{name}: {type(error).__name__}: {error}")
            if isinstance(error, KeyboardInterrupt):
                raise
        if canary.exists():
            counts["code ran"] += 1
            wrong.append(f"{name}: code ran")
            canary.unlink()
    return counts, wrong


def resume_all(mutated: Iterable[tuple[str, dict[str, Any]]], folder: Path) -> tuple[Counter[str], list[str]]:
    """Resume from checkpoints with values of other types."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    path = folder / "mutated.ckpt"
    for name, content in mutated:
        torch.save(content, path)
        module = Module()
        Module.steps = 0
        try:
            with _deadline():
                trainer(max_steps=6).fit(module, loader(), ckpt_path=path)
            counts["accepted"] += 1
        except (CheckpointError, ConfigurationError):
            counts["refused before a step" if not Module.steps else "refused later"] += 1
        except Exception as error:
            if Module.steps:
                counts["error in a step"] += 1
            else:
                counts["other error"] += 1
                wrong.append(f"{name}: {type(error).__name__}: {error}"[:200])
    return counts, wrong


class _deadline:
    """Raises TimeoutError if a block takes too long."""

    def __enter__(self) -> None:
        signal.signal(signal.SIGALRM, self._raise)
        signal.alarm(MOST_SECONDS)

    def __exit__(self, *args: object) -> None:
        signal.alarm(0)

    def _raise(self, *args: object) -> None:
        raise TimeoutError(f"more than {MOST_SECONDS} s")


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)


def _limit_memory() -> None:
    import resource

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_MEMORY, size + MOST_MEMORY))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--damages", type=int, default=900)
    parser.add_argument("--mutations", type=int, default=150)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    content = checkpoint()
    whole = torch.load(io.BytesIO(content), weights_only=True)
    attributes = set(dir(torch.Tensor))
    _limit_memory()
    folder = Path(tempfile.mkdtemp())
    canary = folder / "canary"
    campaigns: dict[str, Callable[[], tuple[Counter[str], list[str]]]] = {
        "damaged file": lambda: read_all(
            damages(content, given.damages, random.Random(given.seed)), folder, canary, whole=whole
        ),
        "damaged pickle, right check sums": lambda: read_all(
            damaged_pickles(content, given.damages, random.Random(given.seed)), folder, canary, whole=None
        ),
        "payload at each position": lambda: read_all(
            positions(content, str(canary), random.Random(given.seed)), folder, canary, whole=None
        ),
        "replaced pickle": lambda: read_all(replaced_pickles(content, str(canary)), folder, canary, whole=None),
        "value of another type": lambda: resume_all(
            mutations(whole, given.mutations, random.Random(given.seed)), folder
        ),
    }
    table = Table("campaign", "files", "outcome", title=f"{platform.machine()}, torch {torch.__version__}")
    failures: list[str] = []
    for name, campaign in campaigns.items():
        counts, wrong = campaign()
        files = sum(counts.values()) - counts["code ran"] - counts["read as something else"]
        table.add_row(name, str(files), ", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
        failures += wrong
    if set(dir(torch.Tensor)) != attributes:
        failures.append("a file has changed torch's classes")
    Console(width=140).print(table)
    for failure in failures:
        print(failure)
    for left in folder.iterdir():
        os.unlink(left)
    folder.rmdir()
    return int(bool(failures) and given.check)


if __name__ == "__main__":
    sys.exit(main())
