"""A program that trains without private names of other packages: `python -m tests.interop.without_a_name NAME ...`.

Each name is missing in a fork of its own, which imports the package anew. It prints a line of JSON for each: the
weights after a training under single_device, dp and ddp, and the messages of the features that are refused. The name ""
stands for no missing name.
"""

import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torchmetrics  # noqa: F401  imported once, before the forks
from lightning.pytorch.callbacks import LearningRateFinder

from equipoise.errors import ConfigurationError
from equipoise.interop import adapters

PLAIN = {"single_device": ["cpu"], "dp": ["cpu", "cpu"], "ddp": ["cpu", "cpu"]}


def fit(strategy: str, devices: list[str], **options: Any) -> list[float]:
    """Return the weights after a short training."""
    from tests.support.trainer_runs import loader, trainer, with_optimizers

    torch.manual_seed(3)
    module = with_optimizers(lambda module: torch.optim.Adam(module.parameters(), lr=0.05))
    size = 4 // len(devices) if strategy == "ddp" else 4
    run = trainer(strategy=strategy, devices=devices, max_epochs=2, precision="64-true", **options)
    run.fit(module, loader(12 // size, size))
    return [value.item() for parameter in module.parameters() for value in parameter.flatten()]


def check_recovery() -> None:
    """Train under ddp with OOMRecovery."""
    from equipoise import OOMRecovery

    fit("ddp", ["cpu", "cpu"], callbacks=[OOMRecovery()])


def train_by_hand() -> None:
    """Begin a training by hand under ddp, in this process."""
    from equipoise.strategies.ddp.exchange.by_hand.manual_engine import ManualEngine
    from tests.support.trainer_runs import Small

    ManualEngine(Small(), torch.device("cpu"), {"bucket_cap_mb": 25})


def predict() -> None:
    """Predict the memory of a step."""
    from equipoise import predict_memory
    from tests.support.trainer_runs import Small

    predict_memory(Small(), (torch.ones(4, 2),))


def make(name: str, **options: Any) -> Callable[[], Any]:
    """Return a function that constructs something public."""
    import equipoise

    return lambda: getattr(equipoise, name)(**options)


def uses() -> dict[str, Callable[[], Any]]:
    """Return what a user does to choose each feature that may be refused."""
    return {
        "fsdp": make("FSDPStrategy"),
        "pipeline": make("PipelineStrategy"),
        "profile": make("MemoryLogger", detail="modules"),
        "leaks": make("MemoryLogger", leaks=True),
        "inplace": make("InplaceActivations"),
        "offload": lambda: fit("single_device", ["cpu"], offload_activations=True),
        "plan": predict,
        "learning rate finder": lambda: fit("single_device", ["cpu"], callbacks=[LearningRateFinder()]),
        "ddp recovery": check_recovery,
        "by hand": train_by_hand,
    }


def refusals(name: str) -> dict[str, str]:
    """Return the messages of the features that need a name."""
    from equipoise.app.machine.facts.features import all_features

    messages = {}
    for feature in all_features():
        if not any(name in adapter.names and not adapter.fallback for adapter in feature.adapters):
            continue
        try:
            uses()[feature.key]()
            messages[feature.key] = "not refused"
        except ConfigurationError as error:
            messages[feature.key] = str(error)
    return messages


def run_without(name: str) -> None:
    """Hide a name, train, and print the results."""
    present = adapters.find
    adapters.find = lambda wanted: None if wanted == name else present(wanted)
    from equipoise.parallel.workers import launch

    # Workers that are forked have this process's modules.
    launch.get_context = lambda method: multiprocessing.get_context("fork")
    weights = {strategy: fit(strategy, devices) for strategy, devices in PLAIN.items()}
    print(json.dumps({"name": name, "weights": weights, "refusals": refusals(name)}), flush=True)


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    code = 0
    for name in names:
        child = os.fork()
        if not child:
            try:
                run_without(name)
            except BaseException as error:
                print(json.dumps({"name": name, "error": f"{type(error).__name__}: {error}"}), flush=True)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        code = code or status
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
