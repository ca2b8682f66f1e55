"""The trainer: options, loops and what they keep."""

from typing import TYPE_CHECKING

from equipoise.names.public import lazy_dir, lazy_getattr, names_of

if TYPE_CHECKING:
    from equipoise.extensions.ensemble.split_checkpoint import split_ensemble as split_ensemble
    from equipoise.trainer.checkpointing.merging import merge_shards as merge_shards
    from equipoise.trainer.cli_trainer import CLITrainer as CLITrainer
    from equipoise.trainer.trainer import Trainer as Trainer
else:
    __getattr__ = lazy_getattr(__name__)
    __dir__ = lazy_dir(__name__)

__all__ = names_of(__name__)
