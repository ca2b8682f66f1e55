"""Callbacks. They use only public names of the trainer, as a callback of your own would."""

from typing import TYPE_CHECKING

from equipoise.names.public import lazy_dir, lazy_getattr, names_of

if TYPE_CHECKING:
    from equipoise.callbacks.callback import Callback as Callback
    from equipoise.callbacks.evaluation.evaluation_pass import EvaluationResult as EvaluationResult
    from equipoise.callbacks.evaluation.no_grad_evaluation import NoGradEvaluation as NoGradEvaluation
    from equipoise.callbacks.memory.memory_logger import MemoryLogger as MemoryLogger
    from equipoise.callbacks.oom_recovery import OOMRecovery as OOMRecovery
    from equipoise.callbacks.progress.progress_bar import ProgressBar as ProgressBar
    from equipoise.extensions.efficiency.efficiency import Efficiency as Efficiency
    from equipoise.extensions.quantization.adapter_checkpoints import AdapterCheckpoints as AdapterCheckpoints
    from equipoise.extensions.quantization.float8_training import Float8Training as Float8Training
    from equipoise.extensions.quantization.quantization import Quantization as Quantization
    from equipoise.extensions.report.run_report import RunReport as RunReport
    from equipoise.extensions.report.run_summary import RunSummary as RunSummary
    from equipoise.extensions.savers.inplace_activations import InplaceActivations as InplaceActivations
    from equipoise.extensions.timing.step_times import StepTimes as StepTimes
    from equipoise.extensions.tuning.optuna_pruning import OptunaPruning as OptunaPruning
else:
    __getattr__ = lazy_getattr(__name__)
    __dir__ = lazy_dir(__name__)

__all__ = names_of(__name__)
