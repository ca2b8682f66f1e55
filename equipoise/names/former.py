"""Former names of public modules and packages, which programs and saved configurations can still use.

An import by one of them works and warns, until the version that removes the name; see docs/stability.md.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["FORMER_NAMES", "REMOVALS", "find_by_former_names"]

# By the version that removes them: former names, and those of today.
REMOVALS = {
    "0.3": {
        "equipoise.app.sweeps.pool": "equipoise.extensions.pool.launcher",
        "equipoise.app.sweeps.ray_launcher": "equipoise.extensions.ray.ray_launcher",
        "equipoise.callbacks.evaluation_pass": "equipoise.callbacks.evaluation.evaluation_pass",
        "equipoise.callbacks.memory.inplace_activations": "equipoise.extensions.savers.inplace_activations",
        "equipoise.callbacks.memory_logger": "equipoise.callbacks.memory.memory_logger",
        "equipoise.callbacks.no_grad_evaluation": "equipoise.callbacks.evaluation.no_grad_evaluation",
        "equipoise.callbacks.progress_bar": "equipoise.callbacks.progress.progress_bar",
        "equipoise.callbacks.run_report": "equipoise.extensions.report.run_report",
        "equipoise.callbacks.run_summary": "equipoise.extensions.report.run_summary",
        "equipoise.integrations": "equipoise.extensions.ray",
        "equipoise.memory.report": "equipoise.extensions.report.page.page",
        "equipoise.memory.run_record": "equipoise.extensions.report.page.record",
        "equipoise.parallel.calibration": "equipoise.parallel.batches.calibration",
        "equipoise.parallel.checkpointing": "equipoise.parallel.activation_checkpointing",
        "equipoise.parallel.savers": "equipoise.extensions.savers",
        "equipoise.planning": "equipoise.extensions.planning",
        "equipoise.report": "equipoise.extensions.report",
        "equipoise.strategies.balanced_data_parallel": "equipoise.strategies.replicated.balanced",
        "equipoise.strategies.data_parallel": "equipoise.strategies.replicated.data_parallel",
        "equipoise.strategies.ensemble": "equipoise.extensions.ensemble",
        "equipoise.strategies.fsdp": "equipoise.extensions.fsdp",
        "equipoise.strategies.hogwild": "equipoise.extensions.hogwild",
        "equipoise.strategies.pipeline": "equipoise.extensions.pipeline.strategy",
        "equipoise.trainer.stand_in": "equipoise.safe_loading.stand_in",
        "equipoise.strategies.steps": "equipoise.parallel.step_protocols",
    },
}

FORMER_NAMES: dict[str, str] = {}
for _names in REMOVALS.values():
    FORMER_NAMES |= _names


def find_by_former_names() -> None:
    """Let `import` find modules by their former names."""
    # First, since the finder of files would load a file of a moved folder a second time, by its former name.
    sys.meta_path.insert(0, _Finder())


def _present_name(name: str) -> str | None:
    """Return the present name of a module that has moved, by itself or with its package; None for any other."""
    package = name
    while package.startswith("equipoise."):
        if package in FORMER_NAMES:
            return FORMER_NAMES[package] + name.removeprefix(package)
        package = package.rpartition(".")[0]
    return None


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        present_name = _present_name(fullname)
        if present_name is None:
            return None
        return ModuleSpec(fullname, _Loader(present_name))


class _Loader(Loader):
    def __init__(self, present_name: str) -> None:
        self._present_name = present_name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        # Python creates an empty module, which `exec_module` replaces.
        return None

    def exec_module(self, module: ModuleType) -> None:
        former = module.__name__
        # FutureWarning: Python shows it wherever the import stands, and not in a main program alone.
        warnings.warn(
            f"{former} is now {self._present_name}."
            f" The former name will be removed in Equipoise {_removal_of(former)}.",
            FutureWarning,
            stacklevel=2,  # the line with the import: frames of the import system are not counted
        )
        # The module itself, not a copy: its classes must be the same by both names.
        sys.modules[former] = import_module(self._present_name)


def _removal_of(former: str) -> str:
    """Return the version that removes a former name, or that of the package in which the module was."""
    return next(
        version
        for version, names in REMOVALS.items()
        if any(former == name or former.startswith(f"{name}.") for name in names)
    )
