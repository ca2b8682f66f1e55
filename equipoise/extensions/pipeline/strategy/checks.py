"""Checks of the arguments of a pipeline, and of modules that are to be trained in one."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.callbacks import copying_callbacks
from equipoise.interop.lightning.classes import is_a, is_overridden
from equipoise.interop.torch.modules import is_compiled
from equipoise.parallel.batches.shares import are_shares
from equipoise.validation import check_whole

__all__ = ["all_are", "check_arguments", "check_entries", "check_for_processes", "check_module"]


def check_arguments(
    *,
    micro_batches: Any,
    cut_before: Any,
    speeds: Any,
    link_speeds: Any,
    threads: Any,
    engine: Any,
    timeout: Any,
    replicas: Any,
    shares: Any,
) -> None:
    """Check the arguments of the strategy, each by itself.

    Raises:
        ConfigurationError: If one of them is out of range, or does not fit the engine.
    """
    # 1. Values.
    if micro_batches is not None:
        check_whole("micro_batches", micro_batches, least=1)
    if cut_before is not None and (isinstance(cut_before, str) or not all_are(str, cut_before)):
        raise ConfigurationError(f"cut_before takes a list of names, such as ['encoder.4'], not {cut_before!r}.")
    if speeds is not None and not _are_positive(speeds):
        raise ConfigurationError(f"speeds are numbers above 0, one for each device: [3, 1], not {speeds!r}.")
    if link_speeds is not None and not _are_positive(link_speeds):
        raise ConfigurationError(
            f"link_speeds are MiB per second above 0, one for each device: [12000, 3000], not {link_speeds!r}."
        )
    if threads is not None and not isinstance(threads, bool):
        raise ConfigurationError(f"threads is True, False or None, not {threads!r}.")
    if engine not in ("threads", "processes"):
        raise ConfigurationError(f"engine must be 'threads' or 'processes', not {engine!r}.")
    if not _are_positive([timeout]):
        raise ConfigurationError(f"timeout is a positive number of seconds, not {timeout!r}.")
    check_whole("replicas", replicas, least=1)
    if shares is not None and not are_shares(shares):
        raise ConfigurationError(
            f"shares must be a number from 0 for each replica, not all of them 0, such as [2, 3]; not {shares!r}."
        )

    # 2. Combinations.
    if replicas > 1 and engine != "processes":
        raise ConfigurationError("replicas are for engine='processes': take that engine, or leave them out.")
    if shares is not None and replicas == 1:
        raise ConfigurationError("shares are for several replicas: give replicas=2 or more, or leave shares out.")
    if shares is not None and len(shares) != replicas:
        raise ConfigurationError(
            f"shares={list(shares)} are {len(shares)} numbers, but there are {replicas} replicas. Give one for each."
        )
    if engine == "processes" and threads is not None:
        raise ConfigurationError("threads are for engine='threads': leave them out, or take that engine.")


def _are_positive(values: Any) -> bool:
    return all_are(Real, values) and all(0 < value < float("inf") for value in values)


def all_are(kind: type, values: Any) -> bool:
    """Return whether `values` is a sequence whose entries are all of a type; a bool counts as no number."""
    if not isinstance(values, Sequence):
        return False
    return all(isinstance(value, kind) and not isinstance(value, bool) for value in values)


def check_entries(name: str, entries: Sequence[Any] | None, count: int, plan: str) -> None:
    """Check that an argument has an entry for each cut or device.

    Args:
        name: The name of the argument.
        entries: Its value; None: chosen by the strategy.
        count: The number of entries that it needs.
        plan: Words for the devices, for instance "2 devices, a stage on each".

    Raises:
        ConfigurationError: If it has another number.
    """
    if entries is not None and len(entries) != count:
        raise ConfigurationError(
            f"{name} must have {count} entries for {plan}, but has {len(entries)}: {list(entries)}."
        )


def check_module(module: nn.Module, *, training: bool) -> None:
    """Check that a module can be computed in stages, and in training that its backward can be.

    Args:
        module: The user's module.
        training: Whether it is to be trained.

    Raises:
        ConfigurationError: If it cannot.
    """
    kind = type(module).__name__
    # 1. Tracing reads the calls that the module makes, which a compiled one does not show.
    if any(is_compiled(submodule) for submodule in module.modules()):
        raise ConfigurationError(
            f"{kind} is compiled, in whole or in part, but strategy='pipeline' cuts what was written. Leave"
            " torch.compile out, or choose another strategy."
        )
    if not training:
        return
    # 2. The backward of each micro-batch runs when the schedule has its turn.
    if not getattr(module, "automatic_optimization", True):
        raise ConfigurationError(
            f"{kind} optimises by hand (automatic_optimization=False), but under strategy='pipeline' the backward"
            " runs stage by stage. Let the trainer optimise, or choose another strategy."
        )
    if is_a(module, LightningModule) and is_overridden("backward", module):
        raise ConfigurationError(
            f"{kind} overrides `backward`, but under strategy='pipeline' the backward runs stage by stage. Leave"
            " it out, or choose another strategy."
        )


def check_for_processes(module: nn.Module) -> None:
    """Check that gradients are zeroed, and that callbacks can average weights, where layers are in other processes.

    Args:
        module: The user's module.

    Raises:
        ConfigurationError: If the module zeroes gradients itself, if StochasticWeightAveraging would reset layers of
            BatchNorm, or if a trainable parameter to be averaged has a class of its own.
    """
    if is_a(module, LightningModule) and is_overridden("optimizer_zero_grad", module):
        raise ConfigurationError(
            f"{type(module).__name__} overrides `optimizer_zero_grad`, but under engine='processes' gradients are"
            " zeroed in the processes that have them. Leave it out: the trainer zeroes gradients; or take"
            " engine='threads'."
        )
    for callback in copying_callbacks(module):
        if is_a(callback, StochasticWeightAveraging) and callback.pl_module_contains_batch_norm(module):
            raise ConfigurationError(
                "StochasticWeightAveraging resets the statistics of BatchNorm layers, which are in other processes"
                " under engine='processes'. Take engine='threads', or WeightAveraging, which averages them."
            )
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and type(parameter) is not nn.Parameter:
                raise ConfigurationError(
                    f"{type(callback).__name__} cannot average {name} in other processes, since its class,"
                    f" {type(parameter).__name__}, is not nn.Parameter. Take engine='threads'."
                )
