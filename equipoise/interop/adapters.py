"""Private names of other packages: which feature needs them, and what becomes of it where a version lacks one.

A file of `interop` looks its private names up with `find`, so a missing one disturbs no import. A feature that has no
other way is refused when it is chosen, by `check_feature`.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from equipoise.interop.refusal import refusal
from equipoise.interop.versions import is_newer_than_tested

__all__ = ["ADAPTERS", "FEATURES", "Adapter", "check_feature", "find", "find_if_tested", "missing_names"]


@dataclass(frozen=True)
class Adapter:
    """Private names of one package, behind one function or class of `interop`.

    Attributes:
        package: The package, as pip knows it.
        names: The names, with their modules, such as "torch.autograd.graph._engine_run_backward".
        features: Keys of `FEATURES` that use them.
        fallback: A phrase that says what happens without them. Empty: the features are refused.
    """

    package: str
    names: tuple[str, ...]
    features: tuple[str, ...]
    fallback: str = ""


FEATURES: Mapping[str, str] = {
    "training": "A training",
    "dp": "strategy='dp'",
    "ddp": "strategy='ddp'",
    "by hand": "Manual optimisation under strategy='ddp'",
    "fsdp": "strategy='fsdp'",
    "pipeline": "strategy='pipeline'",
    "ensemble": "strategy='ensemble'",
    "compile": "Trainer(compile=True)",
    "compile blocks": "Trainer(compile=True) in parts or processes",
    "capture": "Trainer(capture=True)",
    "offload": "Trainer(offload_activations=True)",
    "plan": "predict_memory",
    "profile": "MemoryLogger(detail='modules')",
    "leaks": "MemoryLogger(leaks=True)",
    "inplace": "InplaceActivations",
    "learning rate finder": "LearningRateFinder",
    "ddp recovery": "OOMRecovery under strategy='ddp'",
}
"""Features that use private names: the key, and the user's words for it."""

_FAKE = "torch._subclasses.fake_tensor"
_FUNCTORCH = "torch._C._functorch"
_DYNAMO = "torch._dynamo"
_VERSION = ("torch.Tensor._version",)
_EAGER = "steps stay eager, and a warning gives the reason"
_WATCH = ("torch.utils._python_dispatch.TorchDispatchMode",)

ADAPTERS: tuple[Adapter, ...] = (
    # What trainings use.
    Adapter("torch", ("torch.autograd.graph._engine_run_backward",), ("training",), "`Tensor.backward` is called"),
    Adapter("torch", _VERSION, ("training", "dp"), "every tensor counts as changed, and is copied anew"),
    Adapter(
        "torch",
        (
            "torch._C._autograd._profiler_enabled",
            "torch.optim.optimizer._global_optimizer_pre_hooks",
            "torch.optim.optimizer._global_optimizer_post_hooks",
        ),
        ("training",),
        "`Optimizer.step` is called, with its record for a profiler",
    ),
    Adapter(
        "torch",
        ("torch.utils.data._utils.collate.default_collate_fn_map",),
        ("training",),
        "samples of data in memory are read one by one",
    ),
    Adapter("python", ("multiprocessing.forkserver._forkserver",), ("ddp",), "the user's list is not imported"),
    # What features cannot do without.
    Adapter("torch", _VERSION, ("pipeline", "offload")),
    Adapter(
        "torch",
        ("torch.nn.Module.__call__", "torch.autograd.Function.apply", "torch.autograd.graph.saved_tensors_hooks"),
        ("pipeline",),
    ),
    Adapter("torch", _WATCH, ("pipeline", "profile", "leaks", "inplace", "plan")),
    Adapter(
        "torch",
        (
            "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
            "torch.distributed.fsdp.FSDPModule._orig_cls_mro_index",
            "torch.distributed._composable_state._module_state_mapping",
            "torch._C.DisableTorchFunctionSubclass",
            "torch._C._current_graph_task_id",
            "torch._C._will_engine_execute_node",
            "torch._guards.TracingContext",
            *_VERSION,
        ),
        ("fsdp",),
    ),
    Adapter(
        "torch",
        (f"{_FAKE}.FakeTensorMode", f"{_FAKE}.FakeTensor", f"{_FAKE}.unset_fake_temporarily"),
        ("plan",),
    ),
    Adapter(
        "torch",
        (
            "torch.distributed.distributed_c10d._world.pg_map",
            "torch.distributed.ProcessGroup._get_sequence_number_for_group",
        ),
        ("ddp recovery",),
    ),
    Adapter("torch", ("torch.autograd._engine_run_backward", "torch._C._current_graph_task_id"), ("by hand",)),
    # What features do without.
    Adapter("torch", ("torch._C.DisableTorchFunction",), ("pipeline",), "modes of the user see copies of layers"),
    Adapter("lightning", ("lightning.pytorch.tuner.lr_finder._LRFinder",), ("learning rate finder",)),
    Adapter(
        "torch",
        (
            "torch.Tensor._backward_hooks",
            "torch.Tensor._post_accumulate_grad_hooks",
            "torch.nn.modules.module._has_any_global_hook",
            f"{_DYNAMO}.config.trace_autograd_ops",
            f"{_DYNAMO}.variables.builder.OptimizerVariable",
            f"{_DYNAMO}.variables.UserDefinedObjectVariable",
        ),
        ("compile", "capture"),
        _EAGER,
    ),
    Adapter(
        "torch",
        (
            f"{_DYNAMO}.config.skip_nnmodule_hook_guards",
            f"{_DYNAMO}.exc.TorchDynamoException",
            f"{_DYNAMO}.exc.FailOnRecompileLimitHit",
            f"{_DYNAMO}.lookup_backend",
            f"{_DYNAMO}.symbolic_convert.InstructionTranslator",
            f"{_DYNAMO}.eval_frame.cached_backends",
            "torch._C._dynamo.eval_frame.reset_code",
        ),
        ("compile", "compile blocks", "capture"),
        _EAGER,
    ),
    Adapter("torch", ("torch._functorch.config.donated_buffer",), ("compile blocks",), _EAGER),
    Adapter(
        "torch",
        (*_VERSION, *_WATCH, "torch._C._storage_Use_Count", "torch.Tensor._use_count"),
        ("capture",),
        _EAGER,
    ),
    Adapter(
        "torch",
        (
            f"{_FUNCTORCH}._add_batch_dim",
            f"{_FUNCTORCH}._remove_batch_dim",
            f"{_FUNCTORCH}._vmap_increment_nesting",
            f"{_FUNCTORCH}._vmap_decrement_nesting",
            f"{_FUNCTORCH}.maybe_current_level",
            f"{_FUNCTORCH}.maybe_get_level",
        ),
        ("ensemble",),
        "`torch.vmap` is called",
    ),
    Adapter(
        "torch",
        (f"{_FAKE}.DataDependentOutputException", f"{_FAKE}.DynamicOutputShapeException"),
        ("plan",),
        "steps that read values are not predicted",
    ),
    Adapter(
        "torch",
        ("torch.autograd._get_sequence_nr", "torch._C._current_autograd_node"),
        ("profile", "plan"),
        "tensors of a backward count for the device of their arguments",
    ),
)
"""All private names that the package uses."""


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


def missing_names(feature: str, *, with_fallback: bool = False) -> list[str]:
    """Return the private names that a feature needs and the installed versions lack.

    Args:
        feature: A key of `FEATURES`.
        with_fallback: Include names that the feature can do without. Default: False.
    """
    missing = []
    for adapter in ADAPTERS:
        counts = with_fallback or not adapter.fallback
        if feature in adapter.features and counts:
            missing += [name for name in adapter.names if find(name) is None]
    return missing


def check_feature(feature: str) -> None:
    """Check that the installed versions have the private names that a feature cannot do without.

    Args:
        feature: A key of `FEATURES`.

    Raises:
        ConfigurationError: With the feature, the version and a remedy, if a name is missing.
    """
    missing = missing_names(feature)
    if not missing:
        return
    # Names of one package are enough for a remedy.
    package = next(adapter.package for adapter in ADAPTERS if missing[0] in adapter.names)
    raise refusal(FEATURES[feature], package, missing)
