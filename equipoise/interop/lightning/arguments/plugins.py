"""Plugins of Lightning: what each means here.

Libraries pass them to the trainer. Those of a precision, of processes, and of batch statistics are read; a CheckpointIO
is used as it is.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments import (
    KubeflowEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch import plugins as theirs

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.classes import is_a, is_stock

__all__ = ["PluginsInUse", "PrecisionInUse", "read_precision", "sort_plugins"]

# Names of precisions in float8 elsewhere.
_FLOAT8 = ("transformer-engine", "transformer-engine-float16", "float8")

_PRECISIONS = (theirs.MixedPrecision, theirs.HalfPrecision, theirs.DoublePrecision, theirs.FSDPPrecision)
_ENVIRONMENTS = (LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment, KubeflowEnvironment)
_TAKEN = (
    "plugins takes a CheckpointIO of Lightning, its plugins for precisions that the trainer has, TorchSyncBatchNorm,"
    " and the environments of torchrun and Slurm"
)


@dataclass
class PluginsInUse:
    """The plugins of a trainer, by their purpose.

    Attributes:
        checkpoint_io: Writes and reads checkpoints.
        precision: Lightning's plugin for a precision.
        environment: Lightning's plugin for the rank of a process.
        sync_batchnorm: Whether layers compute batch statistics over all processes.
    """

    checkpoint_io: Any = None
    precision: Any = None
    environment: Any = None
    sync_batchnorm: bool = False

    @property
    def starts_processes(self) -> bool:
        """True for the environment of processes which the trainer itself starts."""
        return is_a(self.environment, LightningEnvironment)

    @property
    def requeues(self) -> bool:
        """True if SIGUSR1 puts a job of Slurm into the queue again."""
        return bool(getattr(self.environment, "auto_requeue", True))


class PrecisionInUse(NamedTuple):
    """A precision as the trainer takes it.

    Attributes:
        name: Its name, such as "16-mixed".
        scaler: The user's own scaler of the loss; None: a default one.
        device_type: The type of the devices for which it is; None: of any.
    """

    name: Any
    scaler: Any = None
    device_type: str | None = None


def sort_plugins(plugins: Any) -> PluginsInUse:
    """Return plugins by their purpose.

    Args:
        plugins: One, several, or None.

    Raises:
        ConfigurationError: If one has no meaning here, or two are for the same; the message names what to take instead.
    """
    candidates = [plugins]
    if plugins is None:
        candidates = []
    elif isinstance(plugins, list | tuple):
        candidates = list(plugins)
    sorted_plugins = PluginsInUse()
    for plugin in candidates:
        field, value = _sorted(plugin)
        if getattr(sorted_plugins, field):
            raise ConfigurationError(
                f"plugins holds two for the same: {type(plugin).__name__} is another {_KINDS[field]}, of which one can"
                " be used."
            )
        setattr(sorted_plugins, field, value)
    return sorted_plugins


_KINDS = {
    "checkpoint_io": "CheckpointIO",
    "precision": "precision",
    "environment": "environment",
    "sync_batchnorm": "layer for batch statistics",
}


def _sorted(plugin: Any) -> tuple[str, Any]:
    """Return the field for a plugin, and its value."""
    kind = type(plugin).__name__
    if is_a(plugin, CheckpointIO):
        return "checkpoint_io", plugin
    if is_a(plugin, theirs.Precision):
        # Refuses one without a counterpart.
        read_precision(plugin)
        return "precision", plugin
    if is_stock(plugin, theirs.TorchSyncBatchNorm):
        return "sync_batchnorm", True
    if is_a(plugin, theirs.LayerSync):
        raise ConfigurationError(
            f"{_TAKEN}, not {kind}, which replaces layers in a way of its own. Take sync_batchnorm=True, or replace"
            " them in `configure_model`."
        )
    if is_a(plugin, ClusterEnvironment):
        _check_environment(plugin)
        return "environment", plugin
    raise ConfigurationError(
        f"{_TAKEN}, not {kind}. For precisions there is precision=..., for processes strategy=... or the environment,"
        " from which `Trainer()` takes its place."
    )


def read_precision(precision: Any) -> PrecisionInUse:
    """Return what a precision means here: a name as it is, or one of Lightning's plugins.

    Args:
        precision: The Trainer's argument.

    Raises:
        ConfigurationError: If it is a plugin without a counterpart.
    """
    if not is_a(precision, theirs.Precision) and precision not in _FLOAT8:
        return PrecisionInUse(precision)
    # Few runs name a plugin, and none but them loads what quantises.
    from equipoise.interop.lightning.arguments.quantization import quantization_in_our_words, refuse_float8

    refuse_float8(precision)
    quantization = quantization_in_our_words(precision)
    if quantization is not None:
        return PrecisionInUse(quantization.precision)
    if not is_stock(precision, *_PRECISIONS, theirs.Precision):
        raise ConfigurationError(
            f"The precision {type(precision).__name__} is not supported, since it computes in a way of its own. Take"
            " precision=..., such as 'bf16-mixed' or '16-true', or convert the module in `configure_model`."
        )
    if is_a(precision, theirs.MixedPrecision):
        return PrecisionInUse(precision.precision, precision.scaler, precision.device)
    # The scaler of an FSDPPrecision is for torch's own wrapper.
    return PrecisionInUse(precision.precision)


def _check_environment(environment: Any) -> None:
    """Refuse environments from which the trainer would not find its place in the same way."""
    if not is_stock(environment, *_ENVIRONMENTS):
        raise ConfigurationError(
            f"{_TAKEN}, not {type(environment).__name__}. Leave it out: the trainer finds its rank by itself, in a"
            " process group that has begun, in a worker of Ray, or from RANK, WORLD_SIZE and LOCAL_RANK, as torchrun"
            " sets them."
        )
    requeue_signal = getattr(environment, "requeue_signal", None)
    if requeue_signal is not None and requeue_signal.name != "SIGUSR1":
        raise ConfigurationError(
            f"SLURMEnvironment(requeue_signal={requeue_signal!s}): the trainer waits for SIGUSR1. Request that one:"
            " #SBATCH --signal=SIGUSR1@120."
        )
