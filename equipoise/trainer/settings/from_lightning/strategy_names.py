"""Names of strategies, and those of Lightning's: their counterpart here, or advice."""

import re
from typing import Any

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.arguments.strategies import is_lightning_strategy

__all__ = ["lightning_strategy", "refuse_object"]

# The group is the value of the option.
_DDP = re.compile(r"ddp(?:_spawn|_fork|_notebook)?(?:_find_unused_parameters_(true|false))?")
_LARGE_MODELS = (
    " A model that is too large for one device trains with strategy='fsdp', which shards its weights over the devices,"
    " or with strategy='pipeline', which cuts it; less memory on each take"
    " activation_checkpointing=['encoder.layers.*'] and precision='bf16-mixed'."
)
_NO_TPU = "is not supported: it is for TPUs. Take 'auto', which uses the GPUs if there are any, else the CPU."

# Ends of messages about Lightning's strategies that have no counterpart, by the beginnings of their names.
_ADVICE = {
    "deepspeed": f"is not supported: DeepSpeed steps by an engine of its own.{_LARGE_MODELS}",
    "xla": _NO_TPU,
    "single_xla": _NO_TPU,
    "tpu": _NO_TPU,
    "single_tpu": _NO_TPU,
    "horovod": "is not supported. Take 'ddp', which joins the processes that torchrun or Slurm start.",
}


def lightning_strategy(name: str) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the options of Equipoise's strategy for a name of Lightning's; None for any other name.

    Processes start in one way only, in a notebook as in a script, so the part of the name about that is ignored.

    Args:
        name: Lightning's name, such as "ddp_spawn" or "ddp_find_unused_parameters_true".

    Raises:
        ConfigurationError: If Lightning's strategy has no counterpart here. The message names an alternative.

    Example:
        >>> lightning_strategy("ddp_notebook_find_unused_parameters_true")
        ('ddp', {'find_unused_parameters': True})
        >>> lightning_strategy("ddp_fork")
        ('ddp', {})
        >>> lightning_strategy("fsdp_cpu_offload")
        ('fsdp', {'cpu_offload': True})
    """
    # 1. Variants of DDP.
    match = _DDP.fullmatch(name)
    if match is not None:
        options: dict[str, Any] = {}
        if match[1] is not None:
            options["find_unused_parameters"] = match[1] == "true"
        return "ddp", options

    # 2. The variants of FSDP.
    if name == "fsdp_cpu_offload":
        return "fsdp", {"cpu_offload": True}
    if name == "model_parallel":
        return "fsdp", {"data": "auto", "tensor": "auto"}

    # 3. Strategies without a counterpart, and their variants, such as "deepspeed_stage_2".
    for start, advice in _ADVICE.items():
        if name == start or name.startswith(f"{start}_"):
            raise ConfigurationError(f"strategy={name!r} {advice}")
    return None


def refuse_object(strategy: Any) -> None:
    """Refuse an object that is neither a name, nor a strategy of Equipoise, nor one of Lightning's with a counterpart.

    Raises:
        ConfigurationError: Always. For a strategy of Lightning's, the message names an alternative.
    """
    from equipoise.names.misfits import described

    message = f"strategy must be a name, or a Strategy such as SingleDeviceStrategy(), not {described(strategy)}."
    if not is_lightning_strategy(strategy):
        raise ConfigurationError(message)
    # Classes derived from Lightning's strategies count as those.
    names = {base.__name__.removesuffix("Strategy") for base in type(strategy).__mro__}
    advice = " Leave strategy out, and it follows from the devices."
    if any(name.startswith("Ray") for name in names):
        advice = " Leave strategy out: in a worker of Ray `Trainer()` asks Ray for its place and its devices."
    elif "DeepSpeed" in names:
        # It derives from DDPStrategy.
        advice = _LARGE_MODELS
    elif "DDP" in names:
        advice = " Take 'ddp', or DDPStrategy(...) from equipoise."
    elif "FSDP" in names:
        advice = " Take 'fsdp', or FSDPStrategy(...) from equipoise."
    elif "ModelParallel" in names:
        advice = " Take FSDPStrategy(data=..., tensor=...) from equipoise."
    raise ConfigurationError(f"{message} This one works inside Lightning's own loops.{advice}")
