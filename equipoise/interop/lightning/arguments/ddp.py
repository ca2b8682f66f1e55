"""Lightning's DDPStrategy in our words."""

from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel

from equipoise.interop.lightning.arguments.reading import OurWords, process_options, read

__all__ = ["ddp_in_our_words"]

_HOOK = {
    "state": "_ddp_comm_state",
    "hook": "_ddp_comm_hook",
    "wrapper": "_ddp_comm_wrapper",
    "averaging": "_model_averaging_period",
    "arguments": "_ddp_kwargs",
}
# Arguments of torch's wrapper, and ours.
_OPTIONS = {
    "bucket_cap_mb": "bucket_megabytes",
    "find_unused_parameters": "find_unused_parameters",
    "static_graph": "static_graph",
    "gradient_as_bucket_view": "gradient_as_bucket_view",
    "broadcast_buffers": "forward_sync_buffers",
    "forward_sync_buffers": "forward_sync_buffers",
}
# Lightning's Trainer or torch gives these, or they say when parameters are exchanged, which are exchanged here anyway.
_OF_SPEED = (
    "init_sync",
    "check_reduction",
    "bucket_cap_mb_list",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
)


def ddp_in_our_words(strategy: Any) -> OurWords:
    """Return what a DDPStrategy of Lightning means here.

    How Lightning starts processes ("popen", "spawn", "fork") has no meaning here, where there is one way.

    Args:
        strategy: The strategy.
    """
    words = OurWords("ddp", "DDPStrategy", options=process_options(strategy))
    options = read(strategy, _HOOK)

    # 1. The arguments of torch's wrapper.
    further = {}
    for name, value in options["arguments"].items():
        if name not in _OPTIONS:
            further[name] = value
        elif value is not None:
            words.options[_OPTIONS[name]] = value
    words.note_arguments(further, DistributedDataParallel, _OF_SPEED)

    # 2. The hook that exchanges gradients.
    if options["hook"] is not None:
        words.options["comm_hook"] = options["hook"]
        if options["wrapper"] is not None:
            words.options["comm_hook"] = options["wrapper"](options["hook"])
        if options["state"] is not None:
            words.options["comm_state"] = options["state"]

    # 3. Processes whose parameters differ for some steps.
    if options["averaging"] is not None:
        words.refused.append(
            f"model_averaging_period={options['averaging']} (processes have the same parameters after each step here)"
        )
    if isinstance(options["state"], PostLocalSGDState):
        words.refused.append("ddp_comm_state=PostLocalSGDState(...) (gradients are exchanged in each step here)")
    return words
