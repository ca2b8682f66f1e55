"""Lightning's FSDPStrategy in our words."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from equipoise.interop.lightning.arguments.reading import OurWords, process_options, read

__all__ = ["MACHINES", "fsdp_in_our_words"]

# In place of a number of replicas: one for each machine.
MACHINES = "machines"

_ATTRIBUTES = {
    "arguments": "kwargs",
    "cpu_offload": "cpu_offload",
    "mixed_precision": "mixed_precision",
    "sharding": "sharding_strategy",
    "checkpointing": "_activation_checkpointing_kwargs",
    "state_dict_type": "_state_dict_type",
}
# These have a meaning here, or none: modules are the same in all processes, parameters keep their names and devices.
_READ = ("auto_wrap_policy", "device_mesh", "use_orig_params", "sync_module_states", "device_id")
_OF_SPEED = ("backward_prefetch", "forward_prefetch", "limit_all_gathers")
_KEEP_UNITS_WHOLE = ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
_PRECISIONS = {torch.bfloat16: "bf16-mixed", torch.float16: "16-mixed"}


def fsdp_in_our_words(strategy: Any) -> OurWords:
    """Return what an FSDPStrategy of Lightning means here.

    Args:
        strategy: The strategy.
    """
    options = read(strategy, _ATTRIBUTES)
    arguments = options["arguments"]
    sharding = options["sharding"]
    # 1. Nothing is sharded: gradients are exchanged, and parameters may stay without one.
    if sharding == ShardingStrategy.NO_SHARD:
        words = OurWords("ddp", "DDPStrategy", options=process_options(strategy))
        words.options["engine"] = "native"
    else:
        words = OurWords("fsdp", "FSDPStrategy", options=process_options(strategy))
        _add_sharding(words, sharding, arguments)
        words.options["cpu_offload"] = bool(getattr(options["cpu_offload"], "offload_params", False))
        words.options["checkpoints"] = options["state_dict_type"]

    # 2. Precision and activations, which are the trainer's.
    _add_precision(words, options["mixed_precision"])
    if options["checkpointing"]:
        classes = _classes_of_checkpointing(options["checkpointing"])
        if classes is None:
            words.left_out.append(
                "activation_checkpointing_policy, a function (submodules are named by"
                " Trainer(activation_checkpointing=[...]))"
            )
        else:
            words.trainer["activation_checkpointing"] = classes

    # 3. The other arguments of torch's wrapper.
    further = {name: value for name, value in arguments.items() if name not in _READ}
    words.note_arguments(further, FullyShardedDataParallel, _OF_SPEED)
    return words


def _add_sharding(words: OurWords, sharding: ShardingStrategy, arguments: dict[str, Any]) -> None:
    """Add the units, what becomes of them after their forward, and the number of copies."""
    # 1. The units.
    policy = arguments.get("auto_wrap_policy")
    if policy is not None:
        classes = _classes_of_policy(policy)
        if classes is None:
            words.left_out.append("auto_wrap_policy, a function (the units are chosen, or named by `units`)")
        else:
            words.options["units"] = classes
    # 2. Whether their weights are gathered twice.
    if sharding.name in _KEEP_UNITS_WHOLE:
        words.options["reshard_after_forward"] = False
    # 3. Copies of the whole module.
    mesh = arguments.get("device_mesh")
    if mesh is not None:
        replicas, _ = tuple(mesh.shape if hasattr(mesh, "shape") else mesh)
        words.options["replicas"] = replicas
    elif "HYBRID" in sharding.name:
        words.options["replicas"] = MACHINES


def _add_precision(words: OurWords, mixed: Any) -> None:
    """Add the precision in which torch's wrapper would compute."""
    if mixed is None:
        return
    if mixed.param_dtype in _PRECISIONS:
        words.trainer["precision"] = _PRECISIONS[mixed.param_dtype]
    elif mixed.param_dtype not in (None, torch.float32):
        words.refused.append(f"mixed_precision with param_dtype={mixed.param_dtype}")
    if mixed.reduce_dtype not in (None, torch.float32):
        words.left_out.append(f"reduce_dtype={mixed.reduce_dtype} (gradients are exchanged in their own dtype)")


def _classes_of_policy(policy: Any) -> list[type[nn.Module]] | None:
    """Return the classes of submodules that a policy chooses; None if it decides in another way.

    It is a set of classes, torch's ModuleWrapPolicy, or a partial of torch's transformer_auto_wrap_policy.
    """
    if isinstance(policy, functools.partial):
        policy = policy.keywords.get("transformer_layer_cls")
    classes = getattr(policy, "_module_classes", policy)
    if not isinstance(classes, set | frozenset | list | tuple) or not classes:
        return None
    return sorted(classes, key=lambda kind: kind.__qualname__)


def _classes_of_checkpointing(arguments: Mapping[str, Any]) -> list[type[nn.Module]] | None:
    """Return the classes whose activations are computed again; None if a function decides."""
    if "auto_wrap_policy" in arguments:
        return _classes_of_policy(arguments["auto_wrap_policy"])
    # The deprecated list of classes is in the closure of a function.
    for cell in getattr(arguments.get("check_fn"), "__closure__", None) or ():
        if isinstance(cell.cell_contents, tuple):
            return _classes_of_policy(cell.cell_contents)
    return None
