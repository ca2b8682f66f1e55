"""The process of a plan, from the values of a configuration to the result.

The data are real, and the first batch is read. The module is built and traced without memory.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import nn

from equipoise.app.build import build
from equipoise.app.command import report
from equipoise.errors import ConfigurationError
from equipoise.extensions.common.planned_devices import PlannedDevice
from equipoise.extensions.planning.command.alternatives import alternatives_to
from equipoise.extensions.planning.command.configured_step import batches_of, predict_configured, settings_of
from equipoise.extensions.planning.comparison import Recommendation, StrategyPlan, plan_strategies, recommend
from equipoise.extensions.planning.description.settings import NOT_PREDICTED, StepSettings
from equipoise.extensions.planning.peaks.memory_prediction import MemoryPrediction
from equipoise.extensions.planning.tracing.batches import size_of_batch
from equipoise.extensions.planning.tracing.planned_batches import PlannedBatches
from equipoise.strategies import Strategy
from equipoise.strategies.by_name import make_strategy, strategy_names

__all__ = ["make_plan"]

# Strategies whose devices hold something else than a step of the module.
_OTHER_STRATEGIES = ("ensemble", "hogwild", "virtual")
# Strategies that on one device compute the step of `single_device`, or none.
_OF_SEVERAL_DEVICES = ("balanced", "ddp", "dp", "fsdp", "pipeline")
# Measured; see docs/planning.md.
_COMPILED = (
    "trainer.compile is not part of the prediction, which is that of eager steps. Where compiled ones were measured,"
    " they computed with 0.65 to 0.9 of the memory beside weights and states. The comparison before they are used takes"
    " more for a moment: RunSummary shows how much."
)
# Batch sizes of a picture: their number, and the largest one in multiples of the configured batch.
_STRETCHES = 16
_FARTHEST = 8


def make_plan(values: Mapping[str, Any], devices: Sequence[PlannedDevice], with_curves: bool) -> dict[str, Any]:
    """Return the plan in values that JSON can hold.

    Args:
        values: The values of the configuration.
        devices: The devices.
        with_curves: Whether to add the peaks of each strategy over the batch size.
    """
    torch.set_num_threads(1)
    # 1. A batch, and the settings.
    seed_everything(values["seed"] or 0, workers=True, verbose=False)
    planned = batches_of(values)
    batch_size = size_of_batch(planned.batches[0])
    settings = settings_of(values, devices)
    strategies = _strategies(values["strategy"], len(devices))

    def steps_with(changed: StepSettings) -> list[tuple[MemoryPrediction, nn.Module]]:
        return [predict_configured(values, batch, changed) for batch in planned.batches]

    def plans_of(steps: Sequence[tuple[MemoryPrediction, nn.Module]]) -> list[list[StrategyPlan]]:
        return [plan_strategies(prediction, module, strategies, devices) for prediction, module in steps]

    def plans_with(changed: StepSettings) -> list[StrategyPlan]:
        return _plans(planned, plans_of(steps_with(changed)))

    # 2. The plans.
    steps = steps_with(settings)
    prediction, module = steps[0]
    plans_of_batches = plans_of(steps)
    plans = _plans(planned, plans_of_batches)
    result: dict[str, Any] = {
        "title": type(module).__name__,
        "batch_size": batch_size,
        "budget": planned.budget,
        "method": prediction.method,
        "notes": [*prediction.notes, *_notes(values["trainer"], planned)],
        "strategies": [{**plain_plan(plan), "largest_batch": plan.largest_batch} for plan in plans],
        "alternatives": [],
        "curves": {},
    }

    # 3. If nothing fits, what helps: smaller batches that are accumulated, and other settings.
    accumulated: list[StrategyPlan] = []
    if not any(plan.fits for plan in plans):
        if settings.accumulate_grad_batches == 1:
            accumulated = plans_with(replace(settings, accumulate_grad_batches=2))
        for changed, overrides in alternatives_to(settings, module, values.get("callbacks")):
            report(f"nothing fits: tracing a step with {' '.join(overrides)}")
            with_less = [plain_plan(plan) for plan in plans_with(changed)]
            result["alternatives"].append({"overrides": overrides, "strategies": with_less})
    advice = recommend(plans, devices, batch_size, accumulated, settings.accumulate_grad_batches, planned.budget)
    result["recommendation"] = asdict(_with_known_keys(advice, values))

    # 4. What the picture needs.
    if with_curves:
        result["curves"] = _curves(plans_of_batches[0], batch_size)
    return result


def _plans(planned: PlannedBatches, plans_of_batches: Sequence[Sequence[StrategyPlan]]) -> list[StrategyPlan]:
    """Return the plan of each strategy with the batch that leaves the least room.

    With a budget of tokens, the largest batch is a number of tokens.
    """
    if not planned.row_tokens:
        return list(plans_of_batches[0])

    def largest_budget(of_strategy: Sequence[StrategyPlan]) -> int:
        return planned.largest_budget([plan.largest_batch for plan in of_strategy])

    plans = []
    for of_strategy in zip(*plans_of_batches, strict=True):
        refused = [plan for plan in of_strategy if plan.reason is not None]
        if refused:
            tightest = refused[0]
        else:
            tightest = min(of_strategy, key=lambda plan: plan.fullest.room)
        plans.append(replace(tightest, find_largest=partial(largest_budget, of_strategy)))
    return plans


def _with_known_keys(advice: Recommendation, values: Mapping[str, Any]) -> Recommendation:
    """Return a recommendation without overrides of keys that the data do not have."""
    overrides = []
    for override in advice.overrides:
        key = override.partition("=")[0].removeprefix("data.")
        if not override.startswith("data.") or key in values["data"]:
            overrides.append(override)
    return replace(advice, overrides=overrides)


def _curves(plans: Sequence[StrategyPlan], batch_size: int) -> dict[str, dict[int, int]]:
    """Return for each strategy the peak of its fullest device by batch size, estimated between traced ones."""
    # 1. From one sample to a little more than what fits.
    most = 2 * batch_size
    for plan in plans:
        if plan.largest_batch <= _FARTHEST * batch_size:
            most = max(most, round(1.2 * plan.largest_batch))
    sizes = sorted({1 + (most - 1) * index // _STRETCHES for index in range(_STRETCHES + 1)})

    # 2. The peaks.
    curves = {}
    for plan in plans:
        if plan.peaks is None:
            continue
        fullest = partial(plan.peaks.fullest, traces=False)
        # A step that runs at one size alone gives no line.
        with suppress(ConfigurationError):
            curves[plan.strategy] = {size: fullest(size).peak.nbytes for size in sizes}
    return curves


def _notes(trainer: Mapping[str, Any], planned: PlannedBatches) -> list[str]:
    notes = []
    if planned.row_tokens:
        notes.append(
            "Batches have a budget of tokens: planned are that with the longest samples and that with the most. The one"
            " that leaves less room is shown."
        )
    for name in NOT_PREDICTED:
        if trainer.get(name):
            notes.append(_COMPILED if name == "compile" else f"trainer.{name} is not part of the prediction.")
    return notes


def _strategies(configured: Any, devices: int) -> list[Strategy]:
    """Return a strategy of each kind that differs on this number of devices; the configured one with its options."""
    chosen = None
    if isinstance(configured, Mapping):
        chosen = build(configured, "strategy")
    left_out = _OTHER_STRATEGIES if devices > 1 else (*_OTHER_STRATEGIES, *_OF_SEVERAL_DEVICES)
    strategies: list[Strategy] = []
    for name in strategy_names():
        if chosen is not None and chosen.name == name:
            strategies.append(chosen)
        elif name not in left_out:
            strategies.append(make_strategy(name))
    return strategies


def plain_plan(plan: StrategyPlan) -> dict[str, Any]:
    """Return a plan as values that JSON can hold."""
    devices = []
    for device in plan.devices:
        values = asdict(device)
        values["fits"] = device.room >= 0
        devices.append(values)
    return {
        "strategy": plan.strategy,
        "fits": plan.fits,
        "batches": plan.batches,
        "note": plan.note,
        "reason": plan.reason,
        "devices": devices,
    }
