"""`equipoise rounds`: how often the processes of a fit exchange values in one epoch."""

import math
from collections.abc import Sequence
from pathlib import Path

from equipoise import ConfigurationError
from equipoise.app import Command, compose_values


def show_rounds(overrides: Sequence[str], folders: Sequence[Path]) -> None:
    """Print the exchanges of one epoch under ddp and under local_sgd, behind its warm-up."""
    from hydra.utils import instantiate  # here: the help lists commands without Hydra

    values = compose_values(overrides, folders, Path("rounds"))
    trainer, strategy = values["trainer"], values["strategy"]
    every = strategy.get("every") if isinstance(strategy, dict) else None
    if not every or not isinstance(trainer["devices"], int) or not values.get("data"):
        raise ConfigurationError("equipoise rounds needs strategy=local_sgd, trainer.devices=NUMBER and data=NAME.")
    data = instantiate(values["data"])
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    batches = len(loader.dataset) / (loader.batch_size * trainer["devices"])
    steps = math.ceil((int(batches) if loader.drop_last else batches) / (trainer.get("accumulate_grad_batches") or 1))
    print(f"ddp        {steps:,} exchanges of gradients in an epoch")
    print(f"local_sgd  {math.ceil(steps / every):,} exchanges of parameters, one after {every} steps each")


COMMAND = Command(summary="exchanges of an epoch under ddp and local_sgd", run=show_rounds)
