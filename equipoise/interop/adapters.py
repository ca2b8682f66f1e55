"""Private names of other packages: which feature needs them, and what becomes of it where a version lacks one.

A file of `interop` looks its private names up with `find`, so a missing one disturbs no import. A feature that has no
other way is refused when it is chosen, by `check_feature`.
"""

import importlib
from dataclasses import dataclass
from typing import Any

from equipoise.interop.refusal import refusal
from equipoise.interop.versions import is_newer_than_tested

__all__ = [
    "BACKWARD_NODES",
    "BY_HAND",
    "DDP_RECOVERY",
    "DISPATCH_MODE",
    "FEATURES",
    "LEAKS",
    "PROFILE",
    "TENSOR_VERSION",
    "Adapter",
    "Feature",
    "check_feature",
    "find",
    "find_if_tested",
    "missing_names",
]


@dataclass(frozen=True)
class Adapter:
    """Private names of one package, behind one function or class of `interop`.

    Attributes:
        package: The package, as pip knows it.
        names: The names, with their modules, such as "torch.autograd.graph._engine_run_backward".
        fallback: A phrase that says what happens without them. Default: empty, what uses them is refused.
    """

    package: str
    names: tuple[str, ...]
    fallback: str = ""


@dataclass(frozen=True)
class Feature:
    """A feature that uses private names; an extension offers its own as "equipoise.features".

    Attributes:
        key: Its name in the output of `equipoise doctor --json`.
        name: The user's words for it.
        adapters: The private names that it uses.
    """

    key: str
    name: str
    adapters: tuple[Adapter, ...]


# What several features use.

TENSOR_VERSION = Adapter("torch", ("torch.Tensor._version",))
DISPATCH_MODE = Adapter("torch", ("torch.utils._python_dispatch.TorchDispatchMode",))
BACKWARD_NODES = Adapter(
    "torch",
    ("torch.autograd._get_sequence_nr", "torch._C._current_autograd_node"),
    "tensors of a backward count for the device of their arguments",
)
_COPIED_ANEW = Adapter("torch", TENSOR_VERSION.names, "every tensor counts as changed, and is copied anew")

# Features of the core.

BY_HAND = Feature(
    "by hand",
    "Manual optimisation under strategy='ddp'",
    (Adapter("torch", ("torch.autograd._engine_run_backward", "torch._C._current_graph_task_id")),),
)
DDP_RECOVERY = Feature(
    "ddp recovery",
    "OOMRecovery under strategy='ddp'",
    (
        Adapter(
            "torch",
            (
                "torch.distributed.distributed_c10d._world.pg_map",
                "torch.distributed.ProcessGroup._get_sequence_number_for_group",
            ),
        ),
    ),
)
PROFILE = Feature("profile", "MemoryLogger(detail='modules')", (DISPATCH_MODE, BACKWARD_NODES))
LEAKS = Feature("leaks", "MemoryLogger(leaks=True)", (DISPATCH_MODE,))

FEATURES: tuple[Feature, ...] = (
    Feature(
        "training",
        "A training",
        (
            Adapter("torch", ("torch.autograd.graph._engine_run_backward",), "`Tensor.backward` is called"),
            _COPIED_ANEW,
            Adapter(
                "torch",
                (
                    "torch._C._autograd._profiler_enabled",
                    "torch.optim.optimizer._global_optimizer_pre_hooks",
                    "torch.optim.optimizer._global_optimizer_post_hooks",
                ),
                "`Optimizer.step` is called, with its record for a profiler",
            ),
            Adapter(
                "torch",
                ("torch.utils.data._utils.collate.default_collate_fn_map",),
                "samples of data in memory are read one by one",
            ),
        ),
    ),
    Feature("dp", "strategy='dp'", (_COPIED_ANEW,)),
    Feature(
        "ddp",
        "strategy='ddp'",
        (Adapter("python", ("multiprocessing.forkserver._forkserver",), "the user's list is not imported"),),
    ),
    BY_HAND,
    PROFILE,
    LEAKS,
    Feature(
        "learning rate finder",
        "LearningRateFinder",
        (Adapter("lightning", ("lightning.pytorch.tuner.lr_finder._LRFinder",)),),
    ),
    DDP_RECOVERY,
)
"""Features of the core that use private names."""


def find(name: str) -> Any:
    """Return what a dotted name stands for; None if a module or attribute of it is missing.

    Args:
        name: A name with its module, such as "torch.autograd.graph._engine_run_backward".

    Example:
        >>> find("math.tau") > 6, find("math._tau")
        (True, None)
    """
    parts = name.split(".")
    # 1. Import the longest part of the name that is a module.
    value: Any = None
    attributes: list[str] = []
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except Exception:
            # A module that cannot be imported may raise anything.
            continue
        attributes = parts[length:]
        break
    # 2. Read the rest from it.
    for attribute in attributes:
        value = getattr(value, attribute, None)
    return value


def find_if_tested(name: str) -> Any:
    """Return what a name of torch stands for; None if it is missing, or torch is newer than the tested versions.

    This is for names whose meaning may change while they stay, and which have a fallback.

    Args:
        name: A name with its module.
    """
    if is_newer_than_tested("torch"):
        return None
    return find(name)


def missing_names(feature: Feature, *, with_fallback: bool = False) -> list[str]:
    """Return the private names that a feature needs and the installed versions lack.

    Args:
        feature: The feature.
        with_fallback: Include names that the feature can do without. Default: False.
    """
    adapters = [adapter for adapter in feature.adapters if with_fallback or not adapter.fallback]
    return [name for adapter in adapters for name in adapter.names if find(name) is None]


def check_feature(feature: Feature) -> None:
    """Check that the installed versions have the private names that a feature cannot do without.

    Args:
        feature: The feature.

    Raises:
        ConfigurationError: With the feature, the version and a remedy, if a name is missing.
    """
    missing = missing_names(feature)
    if not missing:
        return
    # Names of one package are enough for a remedy.
    package = next(adapter.package for adapter in feature.adapters if missing[0] in adapter.names)
    raise refusal(feature.name, package, missing)
