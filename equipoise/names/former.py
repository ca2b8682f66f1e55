"""Former names of public modules, which programs and saved configurations can still use."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["FORMER_NAMES", "find_by_former_names"]

FORMER_NAMES = {
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
}


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
        # The module itself, not a copy: its classes must be the same by both names.
        sys.modules[module.__name__] = import_module(FORMER_NAMES[module.__name__])
