"""Equipoise: train PyTorch models on the devices you have.

`from equipoise import Trainer` is the only change to a program written for Lightning. Names are imported on first
use, and torch with the first of them, so that `import equipoise` costs next to nothing.
"""

from typing import TYPE_CHECKING

from equipoise.names.public import lazy_dir, lazy_getattr, names_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule as LightningDataModule
    from lightning.pytorch import LightningModule as LightningModule

    from equipoise.callbacks import AdapterCheckpoints as AdapterCheckpoints
    from equipoise.callbacks import Callback as Callback
    from equipoise.callbacks import Efficiency as Efficiency
    from equipoise.callbacks import EvaluationResult as EvaluationResult
    from equipoise.callbacks import Float8Training as Float8Training
    from equipoise.callbacks import InplaceActivations as InplaceActivations
    from equipoise.callbacks import MemoryLogger as MemoryLogger
    from equipoise.callbacks import NoGradEvaluation as NoGradEvaluation
    from equipoise.callbacks import OOMRecovery as OOMRecovery
    from equipoise.callbacks import OptunaPruning as OptunaPruning
    from equipoise.callbacks import ProgressBar as ProgressBar
    from equipoise.callbacks import Quantization as Quantization
    from equipoise.callbacks import RunReport as RunReport
    from equipoise.callbacks import RunSummary as RunSummary
    from equipoise.callbacks import StepTimes as StepTimes
    from equipoise.errors import CheckpointError as CheckpointError
    from equipoise.errors import ConfigurationError as ConfigurationError
    from equipoise.errors import StepError as StepError
    from equipoise.errors import WorkerError as WorkerError
    from equipoise.extensions.planning import MemoryPrediction as MemoryPrediction
    from equipoise.extensions.planning import predict_memory as predict_memory
    from equipoise.extensions.tokens import PackedCollate as PackedCollate
    from equipoise.extensions.tokens import TokenBatchSampler as TokenBatchSampler
    from equipoise.memory.out_of_memory import OutOfMemoryEvent as OutOfMemoryEvent
    from equipoise.memory.out_of_memory import Split as Split
    from equipoise.parallel.batches.calibration import SimulatedDevice as SimulatedDevice
    from equipoise.parallel.batches.splitting import Splitter as Splitter
    from equipoise.parallel.strategy_optimizer import StrategyOptimizer as StrategyOptimizer
    from equipoise.strategies import BalancedDataParallelStrategy as BalancedDataParallelStrategy
    from equipoise.strategies import DataParallelStrategy as DataParallelStrategy
    from equipoise.strategies import DDPStrategy as DDPStrategy
    from equipoise.strategies import EnsembleStrategy as EnsembleStrategy
    from equipoise.strategies import FSDPStrategy as FSDPStrategy
    from equipoise.strategies import HogwildStrategy as HogwildStrategy
    from equipoise.strategies import PipelineStrategy as PipelineStrategy
    from equipoise.strategies import SingleDeviceStrategy as SingleDeviceStrategy
    from equipoise.strategies import StepResult as StepResult
    from equipoise.strategies import Strategy as Strategy
    from equipoise.strategies import VirtualDevicesStrategy as VirtualDevicesStrategy
    from equipoise.strategies.distributed.process_strategy import ProcessStrategy as ProcessStrategy
    from equipoise.strategies.portable_state import PortableState as PortableState
    from equipoise.trainer import CLITrainer as CLITrainer
    from equipoise.trainer import Trainer as Trainer
    from equipoise.trainer import merge_shards as merge_shards
    from equipoise.trainer import split_ensemble as split_ensemble
else:
    __getattr__ = lazy_getattr(__name__)
    __dir__ = lazy_dir(__name__)

__all__ = names_of(__name__)
__version__ = "0.1.0"
