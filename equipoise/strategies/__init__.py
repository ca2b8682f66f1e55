"""Ways to compute a step on the devices: one interface, one file or folder per implementation."""

from typing import TYPE_CHECKING

from equipoise.names.public import lazy_dir, lazy_getattr, names_of

if TYPE_CHECKING:
    from equipoise.extensions.ensemble.strategy import EnsembleStrategy as EnsembleStrategy
    from equipoise.extensions.fsdp.strategy import FSDPStrategy as FSDPStrategy
    from equipoise.extensions.hogwild.strategy import HogwildStrategy as HogwildStrategy
    from equipoise.extensions.pipeline.strategy.strategy import PipelineStrategy as PipelineStrategy
    from equipoise.extensions.virtual.strategy import VirtualDevicesStrategy as VirtualDevicesStrategy
    from equipoise.parallel.step_protocols import StepResult as StepResult
    from equipoise.strategies.ddp.strategy import DDPStrategy as DDPStrategy
    from equipoise.strategies.replicated.balanced import BalancedDataParallelStrategy as BalancedDataParallelStrategy
    from equipoise.strategies.replicated.data_parallel import DataParallelStrategy as DataParallelStrategy
    from equipoise.strategies.single_device import SingleDeviceStrategy as SingleDeviceStrategy
    from equipoise.strategies.strategy import Strategy as Strategy
else:
    __getattr__ = lazy_getattr(__name__)
    __dir__ = lazy_dir(__name__)

__all__ = names_of(__name__)
