"""The public names and the modules that define them; each is imported on first use.

A package that offers public names has three parts: `__all__ = names_of(__name__)`, a `__getattr__` and a `__dir__` made
by this module, and the same imports under `TYPE_CHECKING`, from which type checkers and editors learn the types.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["lazy_dir", "lazy_getattr", "names_of"]

# By package: the modules that define its names. `equipoise` offers those of the packages in `_COLLECTED` as well.
_PUBLIC: dict[str, dict[str, tuple[str, ...]]] = {
    "equipoise": {
        "equipoise.errors": ("CheckpointError", "ConfigurationError", "StepError", "WorkerError"),
        "equipoise.memory.out_of_memory": ("OutOfMemoryEvent", "Split"),
        "equipoise.parallel.batches.calibration": ("SimulatedDevice",),
        "lightning.pytorch": ("LightningDataModule", "LightningModule"),
    },
    "equipoise.callbacks": {
        "equipoise.callbacks.callback": ("Callback",),
        "equipoise.callbacks.evaluation.evaluation_pass": ("EvaluationResult",),
        "equipoise.callbacks.evaluation.no_grad_evaluation": ("NoGradEvaluation",),
        "equipoise.callbacks.memory.memory_logger": ("MemoryLogger",),
        "equipoise.callbacks.oom_recovery": ("OOMRecovery",),
        "equipoise.callbacks.progress.progress_bar": ("ProgressBar",),
        "equipoise.report.run_report": ("RunReport",),
        "equipoise.report.run_summary": ("RunSummary",),
    },
    "equipoise.report": {
        "equipoise.report.page.page": ("render_report", "write_report"),
        "equipoise.report.page.record": ("RunRecord",),
        "equipoise.report.run_report": ("RunReport",),
        "equipoise.report.run_summary": ("RunSummary",),
    },
    "equipoise.strategies": {
        "equipoise.parallel.step_protocols": ("StepResult",),
        "equipoise.strategies.ddp.strategy": ("DDPStrategy",),
        "equipoise.strategies.pipeline": ("PipelineStrategy",),
        "equipoise.strategies.replicated.balanced": ("BalancedDataParallelStrategy",),
        "equipoise.strategies.replicated.data_parallel": ("DataParallelStrategy",),
        "equipoise.strategies.single_device": ("SingleDeviceStrategy",),
        "equipoise.strategies.strategy": ("Strategy",),
    },
    "equipoise.strategies.ddp": {
        "equipoise.strategies.ddp.strategy": ("DDPStrategy",),
    },
    "equipoise.trainer": {
        "equipoise.trainer.cli_trainer": ("CLITrainer",),
        "equipoise.trainer.trainer": ("Trainer",),
    },
}
_COLLECTED = ("callbacks", "strategies", "trainer")


def _homes_of(package: str) -> dict[str, str]:
    """Return the module of each name that a package offers."""
    modules = dict(_PUBLIC[package])
    if package == "equipoise":
        for inner in _COLLECTED:
            modules |= _PUBLIC[f"equipoise.{inner}"]
    return {name: module for module, names in modules.items() for name in names}


def names_of(package: str) -> list[str]:
    """Return the public names of a package, in alphabetical order.

    Args:
        package: Its full name.

    Example:
        >>> names_of("equipoise.trainer")
        ['CLITrainer', 'Trainer']
    """
    return sorted(_homes_of(package))


def lazy_getattr(package: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which imports a public name when it is asked for the first time.

    Args:
        package: The full name of the package.
    """
    homes = _homes_of(package)

    def __getattr__(name: str) -> Any:
        if package == "equipoise" and name in _COLLECTED:  # as after `import equipoise`, where nobody imported it
            return import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__


def lazy_dir(package: str) -> Callable[[], list[str]]:
    """Return a module's `__dir__`, which lists the public names whether they were imported or not.

    Args:
        package: The full name of the package.
    """

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names_of(package)})

    return __dir__
