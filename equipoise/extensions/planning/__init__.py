"""Prediction of memory before the first step: the peak of a device with any batch size."""

from typing import TYPE_CHECKING

from equipoise.names.public import lazy_dir, lazy_getattr, names_of

if TYPE_CHECKING:
    from equipoise.extensions.common.device_loads import Addition as Addition
    from equipoise.extensions.common.device_loads import DeviceLoad as DeviceLoad
    from equipoise.extensions.common.device_loads import PlannedLoads as PlannedLoads
    from equipoise.extensions.common.device_loads import PlannedPart as PlannedPart
    from equipoise.extensions.common.device_loads import StepFacts as StepFacts
    from equipoise.extensions.common.planned_devices import PlannedDevice as PlannedDevice
    from equipoise.extensions.common.planned_devices import describe_devices as describe_devices
    from equipoise.extensions.planning.comparison import StrategyPlan as StrategyPlan
    from equipoise.extensions.planning.comparison import plan_strategies as plan_strategies
    from equipoise.extensions.planning.comparison import recommend as recommend
    from equipoise.extensions.planning.peaks.memory_prediction import MemoryPrediction as MemoryPrediction
    from equipoise.extensions.planning.peaks.replay import PredictedPeak as PredictedPeak
    from equipoise.extensions.planning.prediction import predict_memory as predict_memory
else:
    __getattr__ = lazy_getattr(__name__)
    __dir__ = lazy_dir(__name__)

__all__ = names_of(__name__)
