"""The public names and the modules that define them; each is imported on first use.

A package with public names has three parts: `__all__ = names_of(__name__)`, a `__getattr__` and a `__dir__` from this
module, and the same imports under `TYPE_CHECKING`, from which type checkers and editors read the types.
"""

import sys
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from equipoise.names.imports import collector_paused
from equipoise.names.tracebacks import shortens_tracebacks, with_short_tracebacks

__all__ = ["lazy_dir", "lazy_getattr", "names_of"]

# By package: the modules that define its names. `equipoise` offers those of the packages in `_COLLECTED` as well.
_PUBLIC: dict[str, dict[str, tuple[str, ...]]] = {
    "equipoise": {
        "equipoise.errors": ("CheckpointError", "ConfigurationError", "StepError", "WorkerError"),
        "equipoise.memory.out_of_memory": ("OutOfMemoryEvent", "Split"),
        "equipoise.parallel.batches.calibration": ("SimulatedDevice",),
        # What strategies of others use and derive from, beside those of `equipoise.strategies`.
        "equipoise.parallel.batches.splitting": ("Splitter",),
        "equipoise.parallel.strategy_optimizer": ("StrategyOptimizer",),
        "equipoise.strategies.distributed.process_strategy": ("ProcessStrategy",),
        "equipoise.strategies.portable_state": ("PortableState",),
        "equipoise.extensions.planning.peaks.memory_prediction": ("MemoryPrediction",),
        "equipoise.extensions.planning.prediction": ("predict_memory",),
        "equipoise.extensions.tokens.packed_collate": ("PackedCollate",),
        "equipoise.extensions.tokens.sampler": ("TokenBatchSampler",),
        "lightning.pytorch": ("LightningDataModule", "LightningModule"),
    },
    "equipoise.callbacks": {
        "equipoise.callbacks.callback": ("Callback",),
        "equipoise.callbacks.evaluation.evaluation_pass": ("EvaluationResult",),
        "equipoise.callbacks.evaluation.no_grad_evaluation": ("NoGradEvaluation",),
        "equipoise.extensions.efficiency.efficiency": ("Efficiency",),
        "equipoise.extensions.savers.inplace_activations": ("InplaceActivations",),
        "equipoise.extensions.quantization.adapter_checkpoints": ("AdapterCheckpoints",),
        "equipoise.extensions.quantization.float8_training": ("Float8Training",),
        "equipoise.extensions.quantization.quantization": ("Quantization",),
        "equipoise.callbacks.memory.memory_logger": ("MemoryLogger",),
        "equipoise.callbacks.oom_recovery": ("OOMRecovery",),
        "equipoise.callbacks.progress.progress_bar": ("ProgressBar",),
        "equipoise.extensions.report.run_report": ("RunReport",),
        "equipoise.extensions.report.run_summary": ("RunSummary",),
        "equipoise.extensions.timing.step_times": ("StepTimes",),
        "equipoise.extensions.tuning.optuna_pruning": ("OptunaPruning",),
    },
    # What strategies and callbacks of others take part in plans with.
    "equipoise.extensions.planning": {
        "equipoise.extensions.planning.comparison": ("StrategyPlan", "plan_strategies", "recommend"),
        "equipoise.extensions.planning.peaks.replay": ("PredictedPeak",),
        "equipoise.extensions.planning.peaks.memory_prediction": ("MemoryPrediction",),
        "equipoise.extensions.common.planned_devices": ("PlannedDevice", "describe_devices"),
        "equipoise.extensions.common.device_loads": (
            "Addition",
            "DeviceLoad",
            "PlannedLoads",
            "PlannedPart",
            "StepFacts",
        ),
        "equipoise.extensions.planning.prediction": ("predict_memory",),
    },
    "equipoise.extensions.report": {
        "equipoise.extensions.report.page.page": ("render_report", "write_report"),
        "equipoise.extensions.report.page.record": ("ReportSection", "RunRecord"),
        "equipoise.extensions.report.run_report": ("RunReport",),
        "equipoise.extensions.report.run_summary": ("RunSummary",),
    },
    "equipoise.extensions.tokens": {
        "equipoise.extensions.tokens.packed_collate": ("PackedCollate",),
        "equipoise.extensions.tokens.sampler": ("TokenBatchSampler",),
    },
    "equipoise.strategies": {
        "equipoise.parallel.step_protocols": ("StepResult",),
        "equipoise.strategies.strategy": ("Strategy",),
        # Messages list the strategies in this order.
        "equipoise.strategies.single_device": ("SingleDeviceStrategy",),
        "equipoise.strategies.replicated.data_parallel": ("DataParallelStrategy",),
        "equipoise.strategies.replicated.balanced": ("BalancedDataParallelStrategy",),
        "equipoise.strategies.ddp.strategy": ("DDPStrategy",),
        "equipoise.extensions.fsdp.strategy": ("FSDPStrategy",),
        "equipoise.extensions.pipeline.strategy.strategy": ("PipelineStrategy",),
        "equipoise.extensions.ensemble.strategy": ("EnsembleStrategy",),
        "equipoise.extensions.hogwild.strategy": ("HogwildStrategy",),
        "equipoise.extensions.virtual.strategy": ("VirtualDevicesStrategy",),
    },
    "equipoise.extensions.equality": {
        "equipoise.extensions.equality.compare": ("compare_runs",),
        "equipoise.extensions.equality.findings": ("Difference",),
        "equipoise.extensions.equality.result": ("RunComparison",),
    },
    "equipoise.extensions.export": {
        "equipoise.extensions.export.export": ("Export", "export_weights"),
        "equipoise.extensions.export.reading": ("read_weights",),
    },
    "equipoise.trainer": {
        "equipoise.extensions.ensemble.split_checkpoint": ("split_ensemble",),
        "equipoise.trainer.cli_trainer": ("CLITrainer",),
        "equipoise.trainer.checkpointing.merging": ("merge_shards",),
        "equipoise.trainer.trainer": ("Trainer",),
    },
}
# Classes that a program takes from there, as it does under Lightning's own trainer.
_LIGHTNING = ("lightning.pytorch", "lightning.pytorch.callbacks", "lightning.pytorch.loggers")
_COLLECTED = ("callbacks", "strategies", "trainer")


def _modules_by_name(package: str) -> dict[str, str]:
    """Return the module that defines each public name of a package."""
    modules = dict(_PUBLIC[package])
    if package == "equipoise":
        for inner in _COLLECTED:
            modules |= _PUBLIC[f"equipoise.{inner}"]
    modules_by_name = {}
    for module, names in modules.items():
        for name in names:
            modules_by_name[name] = module
    return modules_by_name


def names_of(package: str) -> list[str]:
    """Return the public names of a package, in alphabetical order.

    Example:
        >>> names_of("equipoise.trainer")
        ['CLITrainer', 'Trainer', 'merge_shards', 'split_ensemble']
    """
    return sorted(_modules_by_name(package))


def lazy_getattr(package: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which imports a public name on its first use."""
    modules_by_name = _modules_by_name(package)

    @shortens_tracebacks
    def __getattr__(name: str) -> Any:
        # `equipoise.callbacks` works after `import equipoise` alone.
        if package == "equipoise" and name in _COLLECTED:
            return import_module(f"{package}.{name}")
        if name not in modules_by_name:
            if _is_imported() and find_spec(f"{package}.{name}") is None:
                raise ImportError(f"cannot import name {name!r} from {package!r}{_hint(name, modules_by_name)}")
            # Python itself names the nearest attribute.
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_hint(name)}")
        try:
            with collector_paused():
                _check_torch()
                module = import_module(modules_by_name[name])
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("equipoise.extensions"):
                raise
            raise ImportError(
                f"{name} belongs to an extension that is missing from this installation: {error.name}. Install the"
                " whole package of Equipoise."
            ) from None
        value = with_short_tracebacks(getattr(module, name))
        # Where it is defined it must be the same object, to be pickled.
        setattr(module, name, value)
        # The next use finds the name without this function.
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__


def _check_torch() -> None:
    """Check that torch has what every public name but the errors needs."""
    import torch

    if not torch.distributed.is_available():
        raise ImportError(
            f"Equipoise needs torch.distributed, which this build of torch ({torch.__version__}) lacks, as some for"
            " Windows do. Install a build that has it, such as those of https://pytorch.org."
        )


def _is_imported() -> bool:
    """Return True if an import statement asks for a name. From an AttributeError it would not take over the message."""
    # This function, `__getattr__` and its decorator lie below the frame that asks.
    names = [frame.name for frame in traceback.extract_stack(limit=4)]
    return names[0] == "_handle_fromlist"


def _hint(name: str, names: Iterable[str] = ()) -> str:
    """Return the end of a message about an unknown name: where Lightning has it, or the nearest one; may be empty."""
    if not (name[:1].isupper() or name == "seed_everything"):
        return ""
    places = {theirs: place for place in reversed(_LIGHTNING) for theirs in import_module(place).__all__}
    if name in places:
        return f"; it is Lightning's: from {places[name]} import {name}"
    nearest = get_close_matches(name, [*names, *places], n=1)
    if not nearest:
        return ""
    place = places.get(nearest[0])
    return f"; did you mean {nearest[0]!r}{f' of {place}' if place else ''}?"


def lazy_dir(package: str) -> Callable[[], list[str]]:
    """Return a module's `__dir__`, which lists all public names, imported or not."""

    def __dir__() -> list[str]:
        names = set(vars(sys.modules[package]))
        names.update(names_of(package))
        return sorted(names)

    return __dir__
