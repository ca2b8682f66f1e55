"""The plan of a module that has none: what may be cut is tried on the first batch."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from equipoise.errors import ConfigurationError
from equipoise.extensions.fsdp.mesh.plans.candidates import Candidate, as_patterns, candidates_of
from equipoise.extensions.fsdp.mesh.plans.cutting import reasons_of
from equipoise.extensions.fsdp.mesh.plans.sources import Plan, named_layers, named_numbers
from equipoise.extensions.fsdp.mesh.plans.styles import DIVIDED, Style
from equipoise.extensions.fsdp.mesh.plans.trials import Trials, attempt
from equipoise.extensions.planning.first_batch import read_ahead
from equipoise.interop.lightning.classes import takes_iterator
from equipoise.parallel.communication.object_exchange import gather_objects

__all__ = ["find_plan", "written_form"]


def find_plan(module: LightningModule, row: DeviceMesh, device: torch.device) -> Plan:
    """Return a plan of the layers that compute the same where they are cut; all processes call this together.

    Args:
        module: The user's module, in a fit, after its `configure_model`.
        row: The processes that compute a batch together.
        device: Where this process computes.

    Raises:
        ConfigurationError: In all processes, if nothing can be tried.
    """
    tensor = row.size()
    # 1. Groups of layers in the first batch. What the first process finds counts in all.
    try:
        batch = gather_objects(attempt(partial(_first_batch, module)))[0]
        trials = attempt(partial(Trials, module, row, device, batch))
        groups = gather_objects(attempt(trials.groups))[0]
    except ConfigurationError as error:
        raise ConfigurationError(
            f"FSDPStrategy(tensor={tensor}) has no plan, and cannot try on the first batch which layers can be cut:"
            f" {error}. Optimisers, and what hooks of a fit such as `on_fit_start` make, do not exist yet. Give a plan,"
            " as in tensor_plan={'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}, or leave tensor out."
        ) from error

    # 2. Those that can be cut.
    plan = Plan("trials on the first batch", {}, [], {})
    for candidate in candidates_of(module, groups, tensor):
        # What is said of fewer layers is said more exactly.
        reasons = _try(module, candidate, plan, trials, tensor)
        plan.reasons.update(reasons)
    for name in plan.styles:
        plan.reasons.pop(name, None)
    return plan


def _first_batch(module: Any) -> Any:
    """Return the first batch in the first process, which reads it ahead.

    Raises:
        ConfigurationError: If no step can be computed with copies of the module.
    """
    if not module.automatic_optimization:
        raise ConfigurationError("`training_step` runs backwards and optimisers by hand")
    if takes_iterator(module, "training_step"):
        raise ConfigurationError("`training_step` pulls its batches by itself")
    if any(parameter.is_meta or is_lazy(parameter) for parameter in module.parameters()):
        raise ConfigurationError("weights have no values yet")
    if dist.get_rank():
        return None
    return read_ahead(module.trainer.parts.source_of("train").dataloader)


def _try(module: LightningModule, candidate: Candidate, plan: Plan, trials: Trials, tensor: int) -> dict[str, str]:
    """Add the layers of a candidate to a plan, or return why they stay whole, by their names.

    Args:
        module: The user's module.
        candidate: The candidate.
        plan: The plan, which receives them.
        trials: Compute the first batch.
        tensor: The number of processes that compute a batch together.
    """
    # 1. What needs no trial.
    for name in candidate.styles:
        if name in plan.styles:
            return dict.fromkeys(candidate.styles, f"{name} is cut with other layers")
    apart = Plan(plan.origin, candidate.styles, [], {})
    reasons = reasons_of(module, apart, tensor)
    for name in reasons:
        of_others = dict.fromkeys(candidate.styles, f"{name} stays whole")
        return {**of_others, **reasons}

    # 2. Trials.
    first_reason = ""
    for numbers in candidate.numbers:
        divided = apart._replace(divided=numbers)
        reason = trials.reason(divided)
        if reason is None:
            plan.styles.update(candidate.styles)
            # Two candidates may have a number in common, which is divided once.
            for number in numbers:
                if number not in plan.divided:
                    plan.divided.append(number)
            return {}
        first_reason = first_reason or reason
    return dict.fromkeys(candidate.styles, first_reason)


def written_form(module: LightningModule, plan: Plan) -> dict[str, Style]:
    """Return a plan that was found as users write one: names of blocks that are alike as patterns.

    Args:
        module: The user's module.
        plan: The plan.
    """
    written: dict[str, Style] = {}
    for style in dict.fromkeys(plan.styles.values()):
        names = [name for name, of_layer in plan.styles.items() if of_layer == style]
        patterns = as_patterns(names, partial(named_layers, module))
        written.update(dict.fromkeys(patterns, style))
    patterns = as_patterns(plan.divided, partial(named_numbers, module))
    written.update(dict.fromkeys(patterns, DIVIDED))
    return written
