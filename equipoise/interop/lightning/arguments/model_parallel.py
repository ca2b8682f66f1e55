"""Lightning's ModelParallelStrategy in our words."""

from typing import Any

from equipoise.interop.lightning.arguments.reading import OurWords, process_options, read

__all__ = ["model_parallel_in_our_words"]

_ATTRIBUTES = {
    "data": "_data_parallel_size",
    "tensor": "_tensor_parallel_size",
    "saves_shards": "_save_distributed_checkpoint",
}


def model_parallel_in_our_words(strategy: Any) -> OurWords:
    """Return what a ModelParallelStrategy of Lightning means here.

    Args:
        strategy: The strategy.
    """
    options = read(strategy, _ATTRIBUTES)
    checkpoints = "sharded" if options.pop("saves_shards") else "full"
    return OurWords(
        "fsdp", "FSDPStrategy", options={**process_options(strategy), **options, "checkpoints": checkpoints}
    )
