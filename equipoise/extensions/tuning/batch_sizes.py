"""The search for the largest batch size before a fit: predicted first, then confirmed by real steps.

Lightning doubles the size until a step runs out of memory. Here traces without memory predict the peak of every
device, so the first size of which real steps run is one that should fit.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.errors import ConfigurationError
from equipoise.extensions.planning.comparison import StrategyPlan, plan_strategies
from equipoise.extensions.tuning.interop import BatchSizeSettings, batch_size_settings, keep_batch_size
from equipoise.extensions.tuning.trials.batch_size_attribute import BatchSizeAttribute
from equipoise.extensions.tuning.trials.step_prediction import devices_of, predict_step
from equipoise.extensions.tuning.trials.trial import MakeTrainer, copy_of, run_trial
from equipoise.formats import format_bytes, format_count
from equipoise.interop.lightning.loaders import combine
from equipoise.memory.out_of_memory import is_out_of_memory
from equipoise.notices import rank_zero_warn
from equipoise.trainer.runtime.request import Request

__all__ = ["FINDER", "check_processes", "check_settings", "find_batch_size"]

FINDER = "BatchSizeFinder"
# Steps of an epoch below which a size is warned of: it fits, but training needs steps.
_FEW_STEPS = 10
# Part of a size that did not fit with which the search continues.
_NEXT = 0.9


class _FirstBatch(Callback):
    """Keeps the first batch, and the number of samples of the training set.

    Attributes:
        batch: The batch, on the CPU.
        samples: Number of samples, of several loaders of the longest one; None if unknown.
    """

    def __init__(self) -> None:
        self.batch: Any = None
        self.samples: int | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keep the first batch."""
        if batch_idx:
            return
        loaders = combine(trainer.train_dataloader, "max_size_cycle")[0].flattened
        for loader in loaders:
            batch_sampler = getattr(loader, "batch_sampler", None)
            if hasattr(batch_sampler, "planned_batches"):
                raise ConfigurationError(
                    f"{FINDER} searches a number of samples, but {type(batch_sampler).__name__} divides batches by"
                    " another measure. `equipoise plan` names its largest value."
                )
        self.batch = move_data_to_device(batch, "cpu")
        samplers: list[Any] = [getattr(loader, "sampler", None) for loader in loaders]
        if all(hasattr(sampler, "__len__") for sampler in samplers):
            self.samples = max(map(len, samplers))


def find_batch_size(trainer: Any, make: MakeTrainer, request: Request, finder: Any) -> None:
    """Search the largest batch size, give it to the module or data module, and keep it in the finder.

    Raises:
        ConfigurationError: If a setting is impossible, if there is no attribute for the size, if loaders were passed,
            if the memory of a step cannot be predicted, or if not even the first size fits.
    """
    # 1. Everything that can be wrong without a step.
    settings = batch_size_settings(finder)
    check_settings(settings)
    _check_run(trainer, request)
    attribute = BatchSizeAttribute(settings.attribute, request.module, request.datamodule)

    def try_size(size: int, steps: int, callbacks: list[Callback]) -> None:
        module = copy_of(request.module, FINDER)
        with attribute.set_for_trial(module, size):
            run_trial(trainer, make, request, module, steps=steps, callbacks=callbacks)

    # 2. A small step, whose batch is traced.
    rank_zero_info("Searching the largest batch size that fits ...")
    first = _FirstBatch()
    try_size(settings.first, 1, [first])
    plan = _predicted(trainer, request, first.batch)

    # 3. Real steps with sizes that should fit, the largest first.
    sizes = _sizes_to_try(settings, plan, first.samples, getattr(finder, "least_steps", 1))
    size = _first_that_fits(sizes, lambda size: try_size(size, settings.steps, []))
    attribute.set(request.module, size)
    keep_batch_size(finder, size)
    rank_zero_info(
        f"Batch size set to {size}. The prediction: {format_count(plan.largest_batch)} samples fit ({_room(plan)})."
        f" {settings.steps} real steps ran with {size}."
    )
    _report_steps(first.samples, size)


def _report_steps(samples: int | None, size: int) -> None:
    """Say how many steps an epoch has, if the data limit them rather than the memory."""
    if samples is None:
        return
    steps = math.ceil(samples / size)
    text = f"An epoch of {samples:,} samples has {steps:,} {'step' if steps == 1 else 'steps'} with batches of {size:,}"
    if steps < _FEW_STEPS:
        rank_zero_warn(f"{text}. Give a smaller number, or BatchSizeFinder(max_val=...), if it needs more to train.")
    else:
        rank_zero_info(f"{text}.")


def check_settings(settings: BatchSizeSettings) -> None:
    """Check the arguments of a BatchSizeFinder.

    Raises:
        ConfigurationError: If one is out of range.
    """
    counts = {
        "init_val": settings.first,
        "steps_per_trial": settings.steps,
        "max_trials": settings.most_trials,
    }
    for name, count in counts.items():
        if count < 1:
            raise ConfigurationError(f"{FINDER}: {name}={count}, but it must be at least 1.")
    if settings.largest < settings.first:
        raise ConfigurationError(
            f"{FINDER}: max_val={settings.largest} is smaller than init_val={settings.first}, so no size is left."
        )


def _check_run(trainer: Any, request: Request) -> None:
    if request.loaders.get("train") is not None:
        raise ConfigurationError(
            f"{FINDER} sets the batch size of loaders that the module or data module makes, but loaders were passed to"
            " `fit`. Make them in train_dataloader()."
        )
    check_processes(trainer)


def check_processes(trainer: Any) -> None:
    """Check that one program searches, not each of several processes.

    Raises:
        ConfigurationError: If a launcher has started several.
    """
    processes = trainer.strategy.processes
    if processes.world_size > 1 and not processes.spawns:
        raise ConfigurationError(
            f"{FINDER} cannot search in processes that torchrun, Slurm or Ray have started. Search in one process of"
            " the machine with the least memory, or call `equipoise plan`."
        )


def _predicted(trainer: Any, request: Request, batch: Any) -> StrategyPlan:
    """Return the predicted memory of a step under the trainer's strategy."""
    prediction = predict_step(trainer, request.module, batch, measure=True)
    (plan,) = plan_strategies(prediction, request.module, [trainer.connected_strategy], devices_of(trainer))
    if plan.reason is not None:
        raise ConfigurationError(f"{FINDER}: {plan.reason}. Set the batch size by hand.")
    return plan


def _sizes_to_try(settings: BatchSizeSettings, plan: StrategyPlan, samples: int | None, least_steps: int) -> list[int]:
    """Return the sizes that may be confirmed, the largest first.

    Args:
        settings: Arguments of the search.
        plan: The predicted memory of a step.
        samples: Number of samples of an epoch; None if unknown.
        least_steps: Steps that an epoch keeps, unless already the first size leaves fewer.

    Raises:
        ConfigurationError: If the first size of the search does not fit.
    """
    # 1. The largest size.
    largest = min(plan.largest_batch, settings.largest)
    if samples is not None:
        largest = min(largest, max(samples // least_steps, min(samples, settings.first)))
    if samples is not None and samples < settings.first:
        raise ConfigurationError(
            f"{FINDER}: the training set has {samples} samples, fewer than init_val={settings.first}. Choose a smaller"
            " init_val."
        )
    if largest < settings.first:
        raise ConfigurationError(
            f"{FINDER}: {plan.largest_batch} samples are predicted to fit ({_room(plan)}), fewer than init_val="
            f"{settings.first}. See what helps: `equipoise plan`."
        )

    # 2. Powers of two of the first one, or ever smaller ones.
    sizes = _powers(settings.first, largest)
    if not settings.doubles:
        if largest == plan.largest_batch:
            # One sample fits, so the margin leaves at least that.
            largest = max(1, int(largest * (1 - settings.margin)))
        sizes = _falling(largest)
    return [*sizes][: settings.most_trials]


def _powers(first: int, largest: int) -> Iterator[int]:
    size = first
    while 2 * size <= largest:
        size *= 2
    while size >= first:
        yield size
        size //= 2


def _falling(largest: int) -> Iterator[int]:
    size = largest
    while size >= 1:
        yield size
        size = int(size * _NEXT)


def _first_that_fits(sizes: list[int], run: Callable[[int], None]) -> int:
    """Return the first size with which real steps run.

    Raises:
        ConfigurationError: If none does.
    """
    for size in sizes:
        try:
            run(size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            rank_zero_info(f"A batch of {size} was predicted to fit, but ran out of memory.")
        else:
            return size
    raise ConfigurationError(
        f"{FINDER}: real steps ran out of memory with each of {len(sizes)} sizes, down to {sizes[-1]}. Other programs"
        " may use the memory; set the batch size by hand."
    )


def _room(plan: StrategyPlan) -> str:
    """Return the memory of the devices in words."""
    return ", ".join(f"{device.name}: {format_bytes(device.usable)}" for device in plan.devices)
