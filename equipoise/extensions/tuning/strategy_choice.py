"""The strategy that `strategy="auto"` means on several devices: the simplest one under which a step fits.

Without a prediction it is `ddp`. Before the first fit, the memory of a step is predicted. If it does not fit under ddp,
another strategy takes its place.
"""

from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.errors import ConfigurationError
from equipoise.extensions.fsdp.strategy import FSDPStrategy
from equipoise.extensions.pipeline.strategy.strategy import PipelineStrategy
from equipoise.extensions.planning.comparison import StrategyPlan, from_simplest, plan_strategies
from equipoise.extensions.planning.description.layers import has_frozen_layers
from equipoise.extensions.planning.description.settings import NOT_PREDICTED, changes_layers
from equipoise.extensions.planning.first_batch import read_ahead
from equipoise.extensions.planning.peaks.memory_prediction import MemoryPrediction
from equipoise.extensions.tuning.trials.step_prediction import devices_of, predict_step
from equipoise.formats import format_bytes
from equipoise.notices import rank_zero_warn
from equipoise.strategies.replicated.balanced import BalancedDataParallelStrategy
from equipoise.strategies.replicated.data_parallel import DataParallelStrategy
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.runtime.request import Request

__all__ = ["choose_strategy", "open_loaders"]


def choose_strategy(trainer: Any, request: Request, present: Strategy) -> Strategy:
    """Return the strategy under which a fit runs: the present one, unless a step does not fit under it.

    One line says which it is, and why.

    Args:
        trainer: A trainer with `strategy="auto"`.
        request: The fit.
        present: Its strategy, for several devices with memory of their own.
    """
    # 1. The prediction. Without one, the strategy stays.
    try:
        prediction = _predicted(trainer, request)
        devices = devices_of(trainer)
    except ConfigurationError as error:
        _report_unpredicted(present, str(error))
        return present
    (plan,) = plan_strategies(prediction, request.module, [present], devices)
    if plan.reason is not None:
        _report_unpredicted(present, plan.reason)
        return present

    # 2. The present strategy, if the step fits.
    batch_size = prediction.batch_size
    if plan.fits:
        rank_zero_info(
            f'strategy="auto" is {plan.strategy}: a batch of {batch_size} is predicted to fit on each of'
            f" {len(devices)} devices, with room for {format_bytes(plan.fullest.room)} more."
        )
        return present

    # 3. The simplest one of the others under which it does.
    candidates = {strategy.name: strategy for strategy in _others_for(request.module)}
    others = plan_strategies(prediction, request.module, candidates.values(), devices)
    for other in from_simplest(others, devices):
        if other.fits:
            rank_zero_info(_why_another(plan, other, batch_size))
            strategy = candidates[other.strategy]
            strategy.connect(present.processes.devices)
            return strategy
    rank_zero_warn(
        f'strategy="auto" is {plan.strategy}, but a step is predicted to fit under no strategy: {_shortage(plan)}'
        f" with a batch of {batch_size}. {_remedy(trainer, request.module)}"
    )
    return present


def _predicted(trainer: Any, request: Request) -> MemoryPrediction:
    """Return the predicted memory of a step.

    Raises:
        ConfigurationError: If it cannot be predicted.
    """
    for name in NOT_PREDICTED:
        if trainer.constructor_arguments.get(name):
            raise ConfigurationError(f"a prediction does not follow {name}")
    batch = read_ahead(partial(open_loaders, request, trainer))
    return predict_step(trainer, request.module, batch, measure=False)


def open_loaders(request: Request, trainer: Any) -> Any:
    """Return the training loaders of a fit, in a copy of this process.

    `prepare_data` is not called: it writes files, which a copy shares.

    Args:
        request: The fit.
        trainer: The object that module and data module have as `trainer` in the copy.
    """
    request.module.trainer = trainer
    loaders = request.loaders.get("train")
    if loaders is not None:
        return loaders
    # They are those of a module, or of a data module.
    owner: Any = request.module
    if request.datamodule is not None:
        owner = request.datamodule
        owner.trainer = trainer
    owner.setup("fit")
    return owner.train_dataloader()


def _others_for(module: LightningModule) -> list[Strategy]:
    """Return the strategies that can take the place of ddp for a module."""
    strategies: list[Strategy] = [DataParallelStrategy(), BalancedDataParallelStrategy(), FSDPStrategy()]
    # A step that calls the optimisers by itself cannot be divided into stages.
    if module.automatic_optimization:
        strategies.append(PipelineStrategy())
    return strategies


def _why_another(plan: StrategyPlan, other: StrategyPlan, batch_size: int) -> str:
    text = (
        f'strategy="auto" is {other.strategy}: under {plan.strategy}, {_shortage(plan)} with a batch of {batch_size};'
        f" {other.strategy} is the simplest strategy with which it is predicted to fit, with room for"
        f" {format_bytes(other.fullest.room)} more."
    )
    if other.batches != plan.batches:
        text += f" A step takes {other.batches} batch of the loader, not {plan.batches}."
    return text


def _shortage(plan: StrategyPlan) -> str:
    fullest = plan.fullest
    return f"{fullest.name} would need {format_bytes(fullest.peak.nbytes)} of {format_bytes(fullest.usable)}"


def _remedy(trainer: Any, module: LightningModule) -> str:
    """Return a sentence on what needs less memory than all strategies."""
    if has_frozen_layers(module) and not any(map(changes_layers, trainer.callbacks)):
        return "Frozen weights need less in four bits: callbacks=[Quantization('nf4')]; see also `equipoise plan`."
    return "See what helps: `equipoise plan`."


def _report_unpredicted(strategy: Strategy, reason: str) -> None:
    reason = reason.rstrip(".")
    rank_zero_info(f'strategy="auto" is {strategy.name}; the memory of a step was not predicted: {reason}.')
