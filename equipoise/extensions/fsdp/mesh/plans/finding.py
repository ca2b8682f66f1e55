"""The layers of a module that was written for one device, cut by a plan: a written one, or one that trials find."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from equipoise.errors import ConfigurationError
from equipoise.extensions.fsdp.mesh.grid import TENSOR
from equipoise.extensions.fsdp.mesh.plans.candidates import Candidate, as_patterns, candidates_of
from equipoise.extensions.fsdp.mesh.plans.cutting import apply_plan, layers_table, reasons_of
from equipoise.extensions.fsdp.mesh.plans.sources import Plan, layers_of, numbers_of, plan_of_models, written_plan
from equipoise.extensions.fsdp.mesh.plans.styles import DIVIDED, Style
from equipoise.extensions.fsdp.mesh.plans.trials import Trials, attempt
from equipoise.extensions.planning.first_batch import read_ahead
from equipoise.interop.lightning.classes import takes_iterator
from equipoise.parallel.communication.object_exchange import gather_objects

__all__ = ["cut_by_plan", "find_plan", "written_form"]


def cut_by_plan(
    module: LightningModule,
    mesh: DeviceMesh,
    option: Mapping[str, Style] | None,
    device: torch.device,
    *,
    training: bool,
) -> None:
    """Cut the layers of a module, and log a table of all that could be cut; all processes call this together.

    Args:
        module: The user's module, whose `configure_model` has cut nothing.
        mesh: The mesh of the run.
        option: The plan of the strategy; None: that of the module, or of a model of transformers in it, else one that
            is found.
        device: The device of this process.
        training: Whether the run trains. In evaluations no plan is found, and layers without one stay whole.

    Raises:
        ConfigurationError: If the user's plan has an entry that names nothing, or is no style, or if all layers of the
            plan stay whole.
    """
    # What the user has written comes before what a model brings along.
    plan = written_plan(module, option)
    if plan is None:
        plan = plan_of_models(module)
    row = mesh[TENSOR]
    reasons = {}
    form = ""
    if plan is None and training:
        plan = find_plan(module, row, device)
        reasons = plan.reasons
        plan = plan._replace(reasons={})
        form = f"\nThe same without trials: tensor_plan={written_form(module, plan)}"
    if plan is None:
        rank_zero_info("Layers stay whole in an evaluation without a plan, which only a fit finds.")
        return
    reasons = {**reasons, **reasons_of(module, plan, row.size())}
    table = layers_table(module, plan, reasons)
    rank_zero_info(f"Layers cut over {row.size()} processes, by the plan of {plan.origin}:\n{table}{form}")
    uncut = [name for name in plan.styles if name in reasons]
    if len(uncut) == len(plan.styles):
        raise ConfigurationError(
            f"FSDPStrategy(tensor={row.size()}): the plan of {plan.origin} cuts no layer, so each process would compute"
            f" the same. {_reason_of(uncut, reasons)} Give another one as tensor_plan, or leave tensor out."
        )
    apply_plan(module, plan, reasons, row)


def _reason_of(uncut: Sequence[str], reasons: Mapping[str, str]) -> str:
    """Return a sentence about the first layer that stays whole."""
    if not uncut:
        return "It names none."
    name = uncut[0]
    return f"{name} stays whole: {reasons[name]}."


def find_plan(module: LightningModule, row: DeviceMesh, device: torch.device) -> Plan:
    """Return a plan of the layers that compute the same where they are cut; all processes call this together.

    Args:
        module: The user's module, in a fit, after its `configure_model`.
        row: The processes that compute a batch together.
        device: The device of this process.

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
    """Add the layers of a candidate to a plan, or return why they stay whole, by their names."""
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
    layers = layers_of(module)
    for style in dict.fromkeys(plan.styles.values()):
        names = [name for name, of_layer in plan.styles.items() if of_layer == style]
        patterns = as_patterns(names, layers)
        written.update(dict.fromkeys(patterns, style))
    patterns = as_patterns(plan.divided, numbers_of(module))
    written.update(dict.fromkeys(patterns, DIVIDED))
    return written
