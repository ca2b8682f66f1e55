"""The public names and the modules that define them. The packages import a name from here on first use.

A package that offers public names has three parts: `__all__ = names_of(__name__)`, a `__getattr__` and a `__dir__` made
by this module, and the same imports under `TYPE_CHECKING`, from which type checkers and editors learn the types.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["lazy_dir", "lazy_getattr", "names_of"]

_PUBLIC: dict[str, tuple[str, ...]] = {
    "equipoise.callbacks.callback": ("Callback",),
    "equipoise.callbacks.evaluation.evaluation_pass": ("EvaluationResult",),
    "equipoise.callbacks.memory.memory_logger": ("MemoryLogger",),
    "equipoise.callbacks.evaluation.no_grad_evaluation": ("NoGradEvaluation",),
    "equipoise.callbacks.oom_recovery": ("OOMRecovery",),
    "equipoise.callbacks.progress.progress_bar": ("ProgressBar",),
    "equipoise.report.run_report": ("RunReport",),
    "equipoise.report.run_summary": ("RunSummary",),
    "equipoise.errors": ("CheckpointError", "ConfigurationError", "StepError", "WorkerError"),
    "equipoise.memory.out_of_memory": ("OutOfMemoryEvent", "Split"),
    "equipoise.parallel.batches.calibration": ("SimulatedDevice",),
    "equipoise.strategies.replicated.balanced": ("BalancedDataParallelStrategy",),
    "equipoise.strategies.replicated.data_parallel": ("DataParallelStrategy",),
    "equipoise.strategies.ddp.strategy": ("DDPStrategy",),
    "equipoise.strategies.pipeline": ("PipelineStrategy",),
    "equipoise.strategies.single_device": ("SingleDeviceStrategy",),
    "equipoise.step_protocols": ("StepResult",),
    "equipoise.strategies.strategy": ("Strategy",),
    "equipoise.trainer.cli_trainer": ("CLITrainer",),
    "equipoise.trainer.trainer": ("Trainer",),
    "lightning.pytorch": ("LightningDataModule", "LightningModule"),
}
_PACKAGES = ("callbacks", "strategies", "trainer")


def _homes_of(package: str) -> dict[str, str]:
    """Return the module of each name that a package offers: `equipoise` offers all, a package below it its own."""
    inside = f"{package}."
    homes = {}
    for home, names in _PUBLIC.items():
        if package == "equipoise" or home.startswith(inside):
            homes.update(dict.fromkeys(names, home))
    return homes


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
        if package == "equipoise" and name in _PACKAGES:  # as after `import equipoise`, where nobody imported it
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
