"""Options of the strategy that are out of range, or do not go together: among themselves, or with callbacks."""

from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from torch import nn

from equipoise.callbacks.oom_recovery import OOMRecovery
from equipoise.errors import ConfigurationError
from equipoise.extensions.fsdp.mesh.grid import check_size
from equipoise.extensions.fsdp.sharded_run import NOT_REPEATED

__all__ = ["check_callbacks", "check_divisible", "check_options"]


def check_options(strategy: Any) -> None:
    """Check the arguments of an `FSDPStrategy`.

    Raises:
        ConfigurationError: If one is out of range, or two do not go together.
    """
    units = strategy.units
    checkpoints = strategy.checkpoints
    if isinstance(units, str) and units != "auto":
        raise ConfigurationError(f"units must be 'auto' or a list of names such as ['blocks.*'], not {units!r}.")
    for name in ("replicas", "context"):
        check_size(name, getattr(strategy, name), or_auto=False)
    for name in ("data", "tensor"):
        check_size(name, getattr(strategy, name))
    _check_blocks(strategy.context_blocks, strategy.context)
    if strategy.tensor_plan is not None:
        # A run with whole layers has no use for this module.
        from equipoise.extensions.fsdp.mesh.plans.styles import check_plan

        check_plan(strategy.tensor_plan, "FSDPStrategy(tensor_plan=...)")
    for name in ("tensor", "context"):
        for other, default in (("replicas", 1), ("cpu_offload", False)):
            size = getattr(strategy, name)
            value = getattr(strategy, other)
            if size != 1 and value and value != default:
                raise ConfigurationError(
                    f"{name}={size!r} and {other}={value!r} do not go together yet. Leave one of both out."
                )
    if checkpoints not in ("full", "sharded"):
        raise ConfigurationError(f"checkpoints must be 'full' or 'sharded', not {checkpoints!r}.")
    if strategy.save_in_background and checkpoints == "full":
        raise ConfigurationError(
            "save_in_background=True is for shards that each process writes, but checkpoints='full'. Add"
            " checkpoints='sharded'."
        )


def _check_blocks(blocks: Any, context: int) -> None:
    """Check the names of blocks between which alone sequences are divided."""
    if blocks is None:
        return
    is_list = bool(blocks) and not isinstance(blocks, str)
    if not is_list or not all(isinstance(name, str) for name in blocks):
        raise ConfigurationError(f"context_blocks must be a list of names such as ['encoder.layers'], not {blocks!r}.")
    if context == 1:
        raise ConfigurationError(
            f"context_blocks={list(blocks)!r} divides sequences over `context` processes, but context=1. Give"
            " context=2, or leave context_blocks out."
        )


def check_divisible(module: nn.Module) -> None:
    """Check that the sequences of a module's batches can be divided.

    Raises:
        ConfigurationError: If it optimises by hand: a process has a part of the loss, which has a weight.
    """
    if not getattr(module, "automatic_optimization", True):
        raise ConfigurationError(
            "FSDPStrategy(context=...) weighs the losses of parts of sequences, which manual optimisation does not."
            " Leave context out, or optimise automatically."
        )


def check_callbacks(trainer: Any, strategy: Any) -> None:
    """Check the callbacks and plugins of a trainer.

    Args:
        trainer: The trainer; None: the module has none.
        strategy: The strategy.

    Raises:
        ConfigurationError: If one needs whole weights, or one file.
    """
    plugin = getattr(trainer, "checkpoint_io", None)
    if strategy.checkpoints == "sharded" and plugin is not None:
        raise ConfigurationError(
            f"{type(plugin).__name__} writes whole checkpoints, but under FSDPStrategy(checkpoints='sharded') each"
            " process writes its shards. Leave one of both out."
        )
    for callback in getattr(trainer, "callbacks", ()):
        if isinstance(callback, OOMRecovery) and callback.policy != "raise":
            raise ConfigurationError(
                f"OOMRecovery(policy={callback.policy!r}): {NOT_REPEATED} OOMRecovery(policy='raise') reports"
                " memory only."
            )
        if isinstance(callback, ModelPruning):
            raise ConfigurationError(
                "ModelPruning computes masks of whole weights, which lie in shards here. Take strategy='ddp'."
            )
        if strategy.save_in_background and isinstance(callback, ModelCheckpoint) and callback.save_last == "link":
            raise ConfigurationError(
                "ModelCheckpoint(save_last='link') links to a checkpoint that is not complete yet under"
                " FSDPStrategy(save_in_background=True). Take save_last=True, or save immediately."
            )
