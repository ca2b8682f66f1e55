"""The layers of a module for one device, cut by the plan of the user, of the module or of its models."""

from collections.abc import Mapping, Sequence

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed.device_mesh import DeviceMesh

from equipoise.errors import ConfigurationError
from equipoise.extensions.fsdp.mesh.grid import TENSOR
from equipoise.extensions.fsdp.mesh.plans.cutting import apply_plan, layers_table, reasons_of
from equipoise.extensions.fsdp.mesh.plans.sources import plan_of_models, written_plan
from equipoise.extensions.fsdp.mesh.plans.styles import Style

__all__ = ["cut_by_plan"]


def cut_by_plan(
    module: LightningModule, mesh: DeviceMesh, option: Mapping[str, Style] | None, *, training: bool
) -> None:
    """Cut the layers of a module, and log a table of all that could be cut; all processes call this together.

    Args:
        module: The user's module, whose `configure_model` has cut nothing.
        mesh: The mesh of the run.
        option: The plan of the strategy; None: that of the module, or of a model of transformers in it.
        training: Whether the run trains. In evaluations layers without a plan stay whole.

    Raises:
        ConfigurationError: If a fit has no plan, if an entry of the user's plan names nothing, or is no style, or if
            all layers of the plan stay whole.
    """
    row = mesh[TENSOR]
    # What the user has written comes before what a model brings along.
    plan = written_plan(module, option) or plan_of_models(module)
    if plan is None and training:
        raise ConfigurationError(_refusal(module, row.size()))
    if plan is None:
        rank_zero_info("Layers stay whole in an evaluation without a plan.")
        return
    reasons = reasons_of(module, plan, row.size())
    table = layers_table(module, plan, reasons)
    rank_zero_info(f"Layers cut over {row.size()} processes, by the plan of {plan.origin}:\n{table}")
    uncut = [name for name in plan.styles if name in reasons]
    if len(uncut) == len(plan.styles):
        raise ConfigurationError(
            f"FSDPStrategy(tensor={row.size()}): the plan of {plan.origin} cuts no layer, so each process would compute"
            f" the same. {_reason_of(uncut, reasons)} Give another one as tensor_plan, or leave tensor out."
        )
    apply_plan(module, plan, reasons, row)


def _refusal(module: LightningModule, tensor: int) -> str:
    """Return the message for a fit without a plan."""
    name = type(module).__name__
    return (
        f"FSDPStrategy(tensor={tensor}) has no plan of the layers of {name} that are cut. Give one by"
        " FSDPStrategy(tensor_plan={'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}), with the names of your"
        f" layers; or by a method `{name}.tensor_plan` that returns such a mapping; or cut the layers in"
        " `configure_model`, by `parallelize_module` and `self.device_mesh['tensor_parallel']`. Models of transformers"
        " with a plan of their own, such as Llama, need none. Or leave tensor out."
    )


def _reason_of(uncut: Sequence[str], reasons: Mapping[str, str]) -> str:
    """Return a sentence about the first layer that stays whole."""
    if not uncut:
        return "It names none."
    name = uncut[0]
    return f"{name} stays whole: {reasons[name]}."
