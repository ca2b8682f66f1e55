"""Names of Lightning's strategies: their counterpart here, or advice."""

import re
from typing import Any

from lightning.pytorch.strategies import Strategy as LightningStrategy

from equipoise.errors import ConfigurationError

__all__ = ["lightning_strategy", "refuse_object"]

_DDP = re.compile(r"ddp(?:_spawn|_fork|_notebook)?(?:_find_unused_parameters_(true|false))?")
_LARGE_MODELS = (
    " A model that is too large for one device trains with strategy='pipeline', which cuts it over the devices; less"
    " memory on each take activation_checkpointing=['encoder.layers.*'] and precision='bf16-mixed'."
)
_NO_TPU = "is not supported: it is for TPUs. Take 'auto', which uses the GPUs or the CPU that there are."
_OTHER_WAYS = {
    "fsdp": f"is not there yet.{_LARGE_MODELS}",
    "deepspeed": f"is not supported: DeepSpeed steps by an engine of its own.{_LARGE_MODELS}",
    "model_parallel": f"is not there.{_LARGE_MODELS}",
    "xla": _NO_TPU,
    "single_xla": _NO_TPU,
    "tpu": _NO_TPU,
    "single_tpu": _NO_TPU,
    "horovod": "is not supported. Take 'ddp', which joins the processes that torchrun or Slurm start.",
}


def lightning_strategy(name: str) -> tuple[str, dict[str, bool]] | None:
    """Return our name, and the options that go with it, for a name of Lightning's; None for any other.

    Processes start in one way only, in a notebook as in a script, so how Lightning would start them is ignored.

    Args:
        name: Such as "ddp_spawn" or "ddp_find_unused_parameters_true".

    Raises:
        ConfigurationError: If there is no such strategy here; it names what to take instead.

    Example:
        >>> lightning_strategy("ddp_notebook_find_unused_parameters_true")
        ('ddp', {'find_unused_parameters': True})
        >>> lightning_strategy("ddp_fork")
        ('ddp', {})
    """
    match = _DDP.fullmatch(name)
    if match is not None:
        return "ddp", {} if match[1] is None else {"find_unused_parameters": match[1] == "true"}
    for start, way in _OTHER_WAYS.items():
        if name == start or name.startswith(f"{start}_"):
            raise ConfigurationError(f"strategy={name!r} {way}")
    return None


def refuse_object(strategy: Any) -> None:
    """Refuse what is neither a name nor one of our strategies.

    Raises:
        ConfigurationError: Always; for a strategy of Lightning's it names what to take instead.
    """
    found = f"strategy must be a name, or a Strategy such as SingleDeviceStrategy(), not {strategy!r}."
    if not isinstance(strategy, LightningStrategy):
        raise ConfigurationError(found)
    names = [base.__name__.removesuffix("Strategy") for base in type(strategy).__mro__]
    way = " Strategies of Lightning work inside its own loops. Leave strategy out, and it follows from the devices."
    if "DDP" in names:
        way = " Strategies of Lightning work inside its own loops. Take 'ddp', or DDPStrategy(...) from equipoise."
    elif {"FSDP", "DeepSpeed", "ModelParallel"} & set(names):
        way = f" Strategies of Lightning work inside its own loops.{_LARGE_MODELS}"
    raise ConfigurationError(found + way)
