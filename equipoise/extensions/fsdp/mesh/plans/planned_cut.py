"""The layers of a module that was written for one device, cut over rows of processes by a plan."""

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed.device_mesh import DeviceMesh

from equipoise.errors import ConfigurationError
from equipoise.extensions.fsdp.mesh.grid import TENSOR
from equipoise.extensions.fsdp.mesh.plans.cutting import apply_plan, layers_table, reasons_of
from equipoise.extensions.fsdp.mesh.plans.finding import find_plan, written_form
from equipoise.extensions.fsdp.mesh.plans.sources import plan_of_models, written_plan
from equipoise.extensions.fsdp.mesh.plans.styles import Style

__all__ = ["cut_by_plan"]


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
        device: Where this process computes.
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
