"""Equipoise: train PyTorch models on the devices you have.

`from equipoise import Trainer` is the only change to a program written for Lightning. Names are imported on first
use, so that `import equipoise` costs little more than `import torch`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch as _torch  # noqa: F401  the one import that every use of the package pays for

if TYPE_CHECKING:
    from equipoise.callbacks.callback import Callback
    from equipoise.callbacks.evaluation_pass import EvaluationResult
    from equipoise.callbacks.memory_logger import MemoryLogger
    from equipoise.callbacks.no_grad_evaluation import NoGradEvaluation
    from equipoise.callbacks.oom_recovery import OOMRecovery
    from equipoise.callbacks.progress_bar import ProgressBar
    from equipoise.callbacks.run_report import RunReport
    from equipoise.callbacks.run_summary import RunSummary
    from equipoise.errors import CheckpointError, ConfigurationError, StepError, WorkerError
    from equipoise.memory.out_of_memory import OutOfMemoryEvent, Split
    from equipoise.parallel.calibration import SimulatedDevice
    from equipoise.strategies.balanced_data_parallel import BalancedDataParallelStrategy
    from equipoise.strategies.data_parallel import DataParallelStrategy
    from equipoise.strategies.ddp import DDPStrategy
    from equipoise.strategies.pipeline import PipelineStrategy
    from equipoise.strategies.single_device import SingleDeviceStrategy
    from equipoise.strategies.steps import StepResult
    from equipoise.strategies.strategy import Strategy
    from equipoise.trainer.trainer import Trainer

__all__ = [
    "BalancedDataParallelStrategy",
    "Callback",
    "CheckpointError",
    "ConfigurationError",
    "DDPStrategy",
    "DataParallelStrategy",
    "EvaluationResult",
    "MemoryLogger",
    "NoGradEvaluation",
    "OOMRecovery",
    "OutOfMemoryEvent",
    "PipelineStrategy",
    "ProgressBar",
    "RunReport",
    "RunSummary",
    "SimulatedDevice",
    "SingleDeviceStrategy",
    "Split",
    "StepError",
    "StepResult",
    "Strategy",
    "Trainer",
    "WorkerError",
]

__version__ = "0.1.0"

_HOME = {
    "BalancedDataParallelStrategy": "equipoise.strategies.balanced_data_parallel",
    "Callback": "equipoise.callbacks.callback",
    "CheckpointError": "equipoise.errors",
    "ConfigurationError": "equipoise.errors",
    "DDPStrategy": "equipoise.strategies.ddp",
    "DataParallelStrategy": "equipoise.strategies.data_parallel",
    "MemoryLogger": "equipoise.callbacks.memory_logger",
    "EvaluationResult": "equipoise.callbacks.evaluation_pass",
    "NoGradEvaluation": "equipoise.callbacks.no_grad_evaluation",
    "OOMRecovery": "equipoise.callbacks.oom_recovery",
    "OutOfMemoryEvent": "equipoise.memory.out_of_memory",
    "PipelineStrategy": "equipoise.strategies.pipeline",
    "ProgressBar": "equipoise.callbacks.progress_bar",
    "RunReport": "equipoise.callbacks.run_report",
    "RunSummary": "equipoise.callbacks.run_summary",
    "SimulatedDevice": "equipoise.parallel.calibration",
    "SingleDeviceStrategy": "equipoise.strategies.single_device",
    "Split": "equipoise.memory.out_of_memory",
    "StepError": "equipoise.errors",
    "StepResult": "equipoise.strategies.steps",
    "Strategy": "equipoise.strategies.strategy",
    "Trainer": "equipoise.trainer.trainer",
    "WorkerError": "equipoise.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'equipoise' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
