"""A strategy of Lightning as the name, the options and the trainer's arguments that mean the same here.

Libraries make such objects themselves, so a program cannot leave them out. They are only read: Lightning's strategies
work inside its own loops.
"""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import strategies as theirs

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.arguments.ddp import ddp_in_our_words
from equipoise.interop.lightning.arguments.fsdp import fsdp_in_our_words
from equipoise.interop.lightning.arguments.reading import OurWords, process_options, read
from equipoise.interop.lightning.classes import is_a, is_stock
from equipoise.notices import rank_zero_warn

__all__ = ["is_lightning_strategy", "strategy_in_our_words"]

# What each strategy of Lightning holds for the trainer: its argument, and the attribute.
_FOR_THE_TRAINER = {"accelerator": "_accelerator", "precision": "_precision_plugin", "checkpoint_io": "_checkpoint_io"}
_OF_MODEL_PARALLEL = {
    "data": "_data_parallel_size",
    "tensor": "_tensor_parallel_size",
    "saves_shards": "_save_distributed_checkpoint",
}
_OF_PROCESSES = {"environment": "cluster_environment", "devices": "parallel_devices"}


def is_lightning_strategy(strategy: Any) -> bool:
    """Return True for an object of one of Lightning's strategies, or of a class derived from them."""
    return is_a(strategy, theirs.Strategy)


def strategy_in_our_words(strategy: Any) -> OurWords | None:
    """Return what a strategy of Lightning means here; None for one without a counterpart, or of a derived class.

    An option that only concerns speed or memory, and has no counterpart, is named in a warning.

    Args:
        strategy: The strategy.

    Raises:
        ConfigurationError: If an option that changes results has no counterpart.
    """
    words = _words_of(strategy)
    if words is None:
        return None
    kind = type(strategy).__name__
    if words.refused:
        raise ConfigurationError(
            f"Lightning's {kind} is translated into {words.ours} of equipoise, in which these options have no"
            f" counterpart, and results would be others without them: {_listed(words.refused)}"
        )
    if words.left_out:
        rank_zero_warn(
            f"Lightning's {kind} is translated into {words.ours} of equipoise. What is left out concerns speed or"
            f" memory alone: {_listed(words.left_out)}"
        )
    return words


def _words_of(strategy: Any) -> OurWords | None:
    if is_stock(strategy, theirs.SingleDeviceStrategy):
        words = OurWords("single_device", "SingleDeviceStrategy", trainer={"devices": [strategy.root_device]})
    elif is_stock(strategy, theirs.DDPStrategy):
        words = ddp_in_our_words(strategy)
    elif is_stock(strategy, theirs.FSDPStrategy):
        words = fsdp_in_our_words(strategy)
    elif is_stock(strategy, theirs.ModelParallelStrategy):
        options = read(strategy, _OF_MODEL_PARALLEL)
        options["checkpoints"] = "sharded" if options.pop("saves_shards") else "full"
        words = OurWords("fsdp", "FSDPStrategy", options={**process_options(strategy), **options})
    else:
        return None
    arguments = read(strategy, _FOR_THE_TRAINER)
    if words.name != "single_device":
        arguments |= read(strategy, _OF_PROCESSES)
    for name, value in arguments.items():
        # An empty list of devices is none.
        if value:
            words.trainer[name] = value
    return words


def _listed(sentences: Iterable[str]) -> str:
    return "; ".join(sentences) + "."
