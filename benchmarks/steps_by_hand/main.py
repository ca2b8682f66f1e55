"""Do programs that take their steps by hand, or change weights in a step, train as on one device?"""

import argparse
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.steps_by_hand.changes import CHANGES, FormerGradients
from benchmarks.steps_by_hand.networks import FEATURES
from benchmarks.steps_by_hand.roads import ROADS
from equipoise import (
    ConfigurationError,
    DDPStrategy,
    FSDPStrategy,
    PipelineStrategy,
    StepError,
    Trainer,
    VirtualDevicesStrategy,
)

__all__ = ["PROGRAMS", "STRATEGIES", "cell", "on_one_device"]

PROGRAMS = {program.__name__: program for program in [*ROADS, *CHANGES]}
# Each makes a strategy, for two devices but where its name says otherwise.
STRATEGIES: dict[str, Callable[[], Any]] = {
    "one device": lambda: "single_device",
    "ddp": lambda: DDPStrategy(timeout=60),
    "ddp, native": lambda: DDPStrategy(engine="native", timeout=60),
    "fsdp": lambda: FSDPStrategy(timeout=60),
    "fsdp, one unit": lambda: FSDPStrategy(units=[], timeout=60),
    "fsdp, named": lambda: FSDPStrategy(units=[torch.nn.Linear], timeout=60),
    "pipeline": lambda: PipelineStrategy(),
    "virtual": lambda: VirtualDevicesStrategy(count=2),
}
SAMPLES = 16
BATCH = 4
BOUND = 1e-12

Numbers = dict[str, Tensor]


def fit(program: str, trainer_class: Any, batch_size: int, **options: Any) -> Numbers:
    """Train for two epochs in float64; return weights, buffers and logged values."""
    task = PROGRAMS[program]().double()
    trainer = trainer_class(
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=2 if program == FormerGradients.__name__ else 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(SAMPLES, FEATURES, generator=draw, dtype=torch.float64)
    targets = torch.randn(SAMPLES, 1, generator=draw, dtype=torch.float64) + features.sum(1, keepdim=True)
    trainer.fit(task, DataLoader(TensorDataset(features, targets), batch_size))
    return {**task.state_dict(), **{name: torch.as_tensor(value) for name, value in trainer.logged_metrics.items()}}


def on_one_device(program: str) -> Numbers:
    """Return the numbers of a program under Lightning's trainer, on one device."""
    return fit(program, L.Trainer, BATCH, devices=1)


def cell(program: str, strategy: str, expected: Numbers) -> str:
    """Return "equal", the largest difference, or how the program was refused or failed."""
    # The batch of a loader is that of a process; virtual devices divide it instead.
    processes = 2 if strategy.startswith(("ddp", "fsdp")) else 1
    devices = 1 if strategy == "one device" else 2
    torch.manual_seed(4)
    try:
        found = fit(program, Trainer, BATCH // processes, devices=devices, strategy=STRATEGIES[strategy]())
    except (ConfigurationError, StepError) as error:
        return f"refused: {error}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    missing = expected.keys() ^ found.keys()
    if missing:
        return f"different: {', '.join(sorted(missing))}"
    largest = max(float((found[name] - value).abs().max()) for name, value in expected.items())
    return "equal" if largest <= BOUND else f"different: {largest:.1e}"


def main() -> int:
    """Run the programs, print the table and the refusals; return 1 if a program differs in silence or fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", nargs="+", choices=[*PROGRAMS], default=[*PROGRAMS], help="default: all")
    parser.add_argument("--strategies", nargs="+", choices=[*STRATEGIES], default=[*STRATEGIES], help="default: all")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    begin = time.perf_counter()
    texts: dict[str, list[str]] = {}
    verdicts: Counter[str] = Counter()
    print("| program |", " | ".join(options.strategies), "|")
    print("| --- |", " | ".join("---" for _ in options.strategies), "|")
    for program in options.programs:
        expected = on_one_device(program)
        cells = [cell(program, strategy, expected) for strategy in options.strategies]
        for strategy, text in zip(options.strategies, cells, strict=True):
            if not text.startswith(("equal", "different")):
                texts.setdefault(text, []).append(f"{program} under {strategy}")
        verdicts.update(text.split(":")[0] for text in cells)
        summary = [text if text.startswith("different") else text.split(":")[0] for text in cells]
        print(f"| {program} |", " | ".join(summary), "|", flush=True)
    print(f"\n{dict(verdicts)}, {time.perf_counter() - begin:.0f} s")
    for text, places in texts.items():
        print(f"\n{'; '.join(places)}:\n  {text}")
    return int(bool(verdicts["different"] or verdicts["failed"]))


if __name__ == "__main__":
    sys.exit(main())
