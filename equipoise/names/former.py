"""Former names of public modules, which programs and saved configurations can still use.

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
        "equipoise.callbacks.evaluation_pass": "equipoise.callbacks.evaluation.evaluation_pass",
        "equipoise.callbacks.memory_logger": "equipoise.callbacks.memory.memory_logger",
        "equipoise.callbacks.no_grad_evaluation": "equipoise.callbacks.evaluation.no_grad_evaluation",
        "equipoise.callbacks.progress_bar": "equipoise.callbacks.progress.progress_bar",
        "equipoise.callbacks.run_report": "equipoise.report.run_report",
        "equipoise.callbacks.run_summary": "equipoise.report.run_summary",
        "equipoise.memory.report": "equipoise.report.page.page",
        "equipoise.memory.run_record": "equipoise.report.page.record",
        "equipoise.parallel.calibration": "equipoise.parallel.batches.calibration",
        "equipoise.parallel.checkpointing": "equipoise.parallel.activation_checkpointing",
        "equipoise.strategies.balanced_data_parallel": "equipoise.strategies.replicated.balanced",
        "equipoise.strategies.data_parallel": "equipoise.strategies.replicated.data_parallel",
        "equipoise.trainer.stand_in": "equipoise.safe_loading.stand_in",
        "equipoise.strategies.steps": "equipoise.parallel.step_protocols",
    },
}

FORMER_NAMES: dict[str, str] = {}
for _names in REMOVALS.values():
    FORMER_NAMES |= _names


def find_by_former_names() -> None:
    """Let `import` find modules by their former names, if it finds nothing else."""
    # The last finder is asked only about names that no other finder knows.
    sys.meta_path.append(_Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in FORMER_NAMES:
            return None
        return ModuleSpec(fullname, _Loader())


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        # Python creates an empty module, which `exec_module` replaces.
        return None

    def exec_module(self, module: ModuleType) -> None:
        former = module.__name__
        # FutureWarning: Python shows it wherever the import stands, and not in a main program alone.
        warnings.warn(
            f"{former} is now {FORMER_NAMES[former]}."
            f" The former name will be removed in Equipoise {_removal_of(former)}.",
            FutureWarning,
            stacklevel=2,  # the line with the import: frames of the import system are not counted
        )
        # The module itself, not a copy: its classes must be the same by both names.
        sys.modules[former] = import_module(FORMER_NAMES[former])


def _removal_of(former: str) -> str:
    """Return the version that removes a former name."""
    return next(version for version, names in REMOVALS.items() if former in names)
