"""Runs one program as a script, with Lightning's Trainer or ours and some of its arguments replaced, and records it.

    python run_program.py SETTINGS.json

`SETTINGS.json` names the program, its command line, the Trainer, and for each run the arguments of the Trainer that
replace the program's own, and the file of the record. A record holds the weights and values of each Trainer of the
program, or the error, and how long it took. The runs follow one another in this process.
"""

import importlib
import json
import os
import random
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy
import torch

EXCHANGED_IN = (
    "lightning",
    "lightning.pytorch",
    "lightning.pytorch.trainer",
    "lightning.pytorch.trainer.trainer",
    "pytorch_lightning",
    "pytorch_lightning.trainer",
    "pytorch_lightning.trainer.trainer",
)
SEED = 7

# The Trainers of this run of the program, and the arguments that replace the program's.
_trainers: list[Any] = []
_arguments: dict[str, Any] = {}


def exchange_trainer(kind: str) -> None:
    """Put a subclass of a Trainer, of whose arguments some are fixed, in the place of Lightning's.

    Args:
        kind: "lightning", which keeps the Trainer of each package, or "equipoise".
    """
    for name in EXCHANGED_IN:
        if sys.modules.get(name.split(".")[0], ...) is None:
            continue
        module: Any = importlib.import_module(name)
        base = module.Trainer
        if kind == "equipoise":
            base = importlib.import_module("equipoise").Trainer
        module.Trainer = _fixed(base)


def _fixed(base: Any) -> Any:
    """Return a subclass of a Trainer of whose arguments some are fixed."""

    class Trainer(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **others: Any) -> None:
            super().__init__(*args, **{**others, **_arguments})
            _trainers.append(self)

    return Trainer


def stand_in(packages: list[str]) -> None:
    """Replace what a program would take from the network or from the operating system's entropy.

    Args:
        packages: Those of "gym" and "datasets" that the program uses.
    """
    if "gym" in packages:
        seeding: Any = importlib.import_module("gym.utils.seeding")
        seeding.np_random = seeded_generator
    if "datasets" in packages:
        datasets: Any = importlib.import_module("datasets")
        datasets.load_metric = lambda *args, **kwargs: Accuracy()


def seeded_generator(seed: int | None = None) -> tuple[numpy.random.Generator, int]:
    """Return a generator of numpy and its seed. Gym's own class, beside a current numpy, cannot be copied."""
    if seed is None:
        seed = SEED
    return numpy.random.Generator(numpy.random.PCG64(seed)), seed


class Accuracy:
    """The accuracy, in the form of a metric of `datasets`."""

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float((numpy.asarray(predictions) == numpy.asarray(references)).mean())}


def record_of(trainer: Any) -> dict[str, Any]:
    """Return what a Trainer leaves after the program: weights, values and the step."""
    module = trainer.lightning_module
    weights = {} if module is None else {name: value.detach().clone() for name, value in module.state_dict().items()}
    values = {name: torch.as_tensor(value).detach().clone() for name, value in trainer.callback_metrics.items()}
    return {"weights": weights, "values": values, "step": trainer.global_step}


def run(program: str, command: list[str]) -> dict[str, Any]:
    """Run the program once, and return its record."""
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)
    sys.argv = [program, *command]
    _trainers.clear()
    error = ""
    began = time.monotonic()
    try:
        runpy.run_path(program, run_name="__main__")
    except BaseException as failure:
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    runs = [] if error else [record_of(trainer) for trainer in _trainers]
    return {"runs": runs, "error": error, "seconds": time.monotonic() - began}


def main() -> None:
    """Run the program as often as the settings say, and write the records."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for name in settings["hidden"]:
        sys.modules[name] = None  # type: ignore[assignment]  # its import raises ImportError
    exchange_trainer(settings["trainer"])
    stand_in(settings["stand_ins"])
    program = settings["program"]
    sys.path.insert(0, os.path.dirname(program))
    for arguments, file in settings["runs"]:
        print(f"\n==== {arguments}", flush=True)
        _arguments.clear()
        _arguments.update(arguments)
        torch.save(run(program, settings["command"]), file)


if __name__ == "__main__":
    main()
