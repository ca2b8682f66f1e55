"""A module whose parameters are in shards for the time of a run, and the way back."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook as register_modules
from torch.nn.modules.module import register_module_parameter_registration_hook as register_parameters
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from equipoise.errors import ConfigurationError, StepError
from equipoise.extensions.fsdp.mesh.configuration.module_changes import whole_parameters
from equipoise.extensions.fsdp.mesh.grid import copy_marks, part_of
from equipoise.extensions.fsdp.state.gathering import whole
from equipoise.extensions.fsdp.state.loaded_shards import take_shards
from equipoise.extensions.fsdp.units import Unit
from equipoise.extensions.fsdp.within_steps.user_steps import UserSteps
from equipoise.interop.distributed.fully_sharded import (
    begin_as_root,
    check_names,
    copy_without_units,
    gather_in_forms,
    shards_and_wholes,
    unshard_by_hand,
)
from equipoise.interop.torch.modules import has_gradient_hooks
from equipoise.notices import rank_zero_warn
from equipoise.parallel.communication.tensor_copies import copy_from_first, give_memory

__all__ = ["ShardedModule"]

# The user's steps, in each of which the root's weights are whole.
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# Lightning's methods that switch `requires_grad` of the parameters of optimisers, which are shards.
_SWITCHES = ("toggle_optimizer", "untoggle_optimizer")
_HALVES = (torch.float16, torch.bfloat16)
_REPLACED = (*_STEPS, *_SWITCHES, "__deepcopy__")


class ShardedModule:
    """A module in shards, from its construction to `restore`.

    The user's parameters stay the same objects: the module has others in a run, and gets its own back. Meanwhile they
    have their shape but no memory, and every value reads as NaN.

    `copy.deepcopy` returns a module with copies of the shards, such as an average of the weights needs. It computes
    nothing. Both load whole tensors, of which each process takes its part.

    Args:
        units: The units; the module itself is the last.
        mesh: The processes, in one dimension, or in two where the module has several replicas.
        options: Arguments of torch's `fully_shard`.
        by_hand: Whether the module optimises by hand.
        divide_by: The number by which summed gradients are divided.
        forms: The layers whose weights are gathered in another form; see `gather_in_forms`.

    Attributes:
        module: The module.
        units: The units.
        steps: Follows what the user's steps do with parameters.
        on_copied: Called with each new copy. Default: None.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        mesh: DeviceMesh,
        options: Mapping[str, Any],
        *,
        by_hand: bool,
        divide_by: float,
        forms: Mapping[nn.Module, Callable[[Tensor], Any]],
    ) -> None:
        self.module = units[-1].module
        self.units = units
        self._originals = dict(self.module.named_parameters(remove_duplicate=False))
        for name, parameter in self._originals.items():
            if has_gradient_hooks(parameter):
                raise ConfigurationError(
                    f"{name} has a hook on its gradient, which would not be called under strategy='fsdp': other"
                    " parameters stand in its place in a run. Change gradients in `on_before_optimizer_step` instead."
                )
            if not parameter.ndim:
                raise ConfigurationError(
                    f"{name} is a parameter without a dimension, of which strategy='fsdp' makes no shards. Give it one:"
                    " nn.Parameter(torch.ones(1)). Or take strategy='ddp'."
                )
        unsharded = set(map(id, self._originals.values()))
        # Methods that are attributes of the object and not of its class.
        self._own_methods = {name: vars(self.module)[name] for name in _REPLACED if name in vars(self.module)}
        self._sharded: list[nn.Module] = []
        self.on_copied: Callable[[nn.Module], None] | None = None
        self._copies: WeakSet[nn.Module] = WeakSet()
        self._hooks: list[RemovableHandle] = []
        try:
            check_names(mesh)
            for unit in units:
                self._shard(unit, mesh, options, unsharded)
                gather_in_forms(unit.module, forms)
                sharded: Any = unit.module
                # Both are settings of one unit alone, not of those inside of it.
                sharded.set_gradient_divide_factor(divide_by)
                # Otherwise torch asks gloo for a product with a sum, which gloo does not have.
                sharded.set_force_sum_reduction_for_comms(True)
            copy_from_first(self.module.buffers())
            begin_as_root(self.module)
            self._gather_once()
            after_the_run = whole_parameters(self._originals)
            self.steps = UserSteps(self._sharded, by_hand=by_hand, processes=divide_by)
            self._hooks += self.steps.hooks
            self._wrap_steps()
            self._wrap_switches()
            self._wrap_copying_and_loading()
            self._watch_growth(after_the_run)
        except BaseException:
            self._put_back()
            raise
        self._originals = after_the_run
        for original in self._originals.values():
            _release_memory(original)

    def _shard(self, unit: Unit, mesh: DeviceMesh, options: Mapping[str, Any], unsharded: set[int]) -> None:
        """Shard what no unit inside of this one has sharded, with the values of rank 0.

        The user's `configure_model` may have sharded it already. Its parameters are removed from the unsharded ones.
        """
        if not isinstance(unit.module, FSDPModule):
            parameters = [parameter for parameter in unit.module.parameters() if id(parameter) in unsharded]
            _fill_meta(unit)
            cut = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
            copy_from_first(parameter for parameter in parameters if not isinstance(parameter, DTensor))
            if cut:
                # Each process of a row has a part of its own.
                copy_from_first(map(part_of, cut), mesh.get_group())
            before = dict(unit.module.named_parameters(remove_duplicate=False))
            fully_shard(unit.module, mesh=mesh, **options)
            # Optimisers may group parameters by attributes.
            for name, parameter in unit.module.named_parameters(remove_duplicate=False):
                copy_marks(parameter, before[name])
        unsharded.difference_update(map(id, unit.module.parameters()))
        self._sharded.append(unit.module)

    def _watch_growth(self, after_the_run: Mapping[str, nn.Parameter]) -> None:
        """Refuse parameters that no unit has from now on.

        Args:
            after_the_run: The parameters that take the place of the shards in the end.
        """
        forms = [form for unit in self._sharded for pair in shards_and_wholes(unit) for form in pair]
        # Some layers, such as an LSTM, register the form that torch shows now.
        self._known = set(map(id, [*forms, *self.module.parameters(), *after_the_run.values()]))
        self._hooks += [register_parameters(self._refuse_growth), register_modules(self._refuse_growth)]

    def _refuse_growth(self, module: nn.Module, name: str, part: Any) -> None:
        """Refuse a parameter, or a layer, that the module gets within a run."""
        if part is None:
            return
        parameters = list(part.parameters()) if isinstance(part, nn.Module) else [part]
        is_unknown = any(id(parameter) not in self._known for parameter in parameters)
        # Pruning registers the parameter itself, under another name.
        is_renamed = bool(parameters) and not hasattr(module, name)
        if (is_unknown or is_renamed) and any(inner is module for inner in self.module.modules()):
            raise StepError(
                f"The module gets {name!r} within a run, as a layer, or a parameter of `torch.nn.utils.prune` or of a"
                " parametrization. Under strategy='fsdp' it would belong to no unit. Add it in `__init__` or"
                " `configure_model`, or take strategy='ddp'."
            )

    def _wrap_steps(self) -> None:
        """Let the user's steps gather the root's weights, as its forward would."""
        for name in _STEPS:
            step = getattr(self.module, name, None)
            if step is not None:
                vars(self.module)[name] = self.steps.watched(step, is_training=name == "training_step")
                register_fsdp_forward_method(self.module, name)

    def _gather_once(self) -> None:
        """Gather each unit, so that its whole parameters exist; torch cannot first do that within inference mode."""
        for unit in self._sharded:
            assert isinstance(unit, FSDPModule)
            unit.unshard()
            unit.reshard()

    def _wrap_copying_and_loading(self) -> None:
        """Let copies have shards, as torch refuses copies, and let states that are loaded be whole."""
        vars(self.module)["__deepcopy__"] = self.copy
        for unit in self._sharded[:-1]:
            # Torch refuses to copy a unit. A part of the module is copied as its parameters are.
            vars(unit)["__deepcopy__"] = partial(self._copied, unit)

        def take_parts(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            self.free_gathered()
            take_shards(module, state, prefix)

        # A function is not copied with the module, as a method would be with this object. Torch annotates nothing here.
        hook = self.module.register_load_state_dict_pre_hook(take_parts)  # type: ignore[no-untyped-call]
        self._hooks.append(hook)

    def copy(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the module, with copies of the shards.

        Args:
            memo: The memo of `copy.deepcopy`.
        """
        self.free_gathered()
        for parameter in self.module.parameters():
            memo[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        mesh = getattr(self.module, "device_mesh", None)
        memo[id(mesh)] = mesh
        copied = self._copied(self.module, memo)
        if any(parameter.dtype in _HALVES for parameter in copied.parameters()):
            # On one device, an average is made before the module is converted. In half precision it would stand still.
            copied.float()
        self._copies.add(copied)
        if self.on_copied is not None:
            self.on_copied(copied)
        return copied

    def _copied(self, part: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of a part of the module, or of the whole, without what is there for a run."""
        inside = set(part.modules())
        units = [unit for unit in self._sharded if unit in inside]
        replaced = []
        for unit in units:
            attributes = vars(unit)
            names = _REPLACED if unit is self.module else ("__deepcopy__",)
            replaced.append({name: attributes.pop(name) for name in names if name in attributes})
        if part is self.module:
            vars(part).update(self._own_methods)
        try:
            return copy_without_units(units, part, memo)
        finally:
            for unit, attributes in zip(units, replaced, strict=True):
                vars(unit).update(attributes)

    def forget_copies(self, attributes: dict[str, Any]) -> None:
        """Replace the modules among the attributes of an object that are or contain a copy by None."""
        for name, value in attributes.items():
            if isinstance(value, nn.Module) and any(part in self._copies for part in value.modules()):
                attributes[name] = None

    def _wrap_switches(self) -> None:
        """Let whole weights follow where the user switches `requires_grad` of an optimiser's shards."""
        for name in _SWITCHES:
            if hasattr(self.module, name):
                setattr(self.module, name, self._followed(getattr(self.module, name)))

    def _followed(self, switch: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that passes on what it switches."""

        @wraps(switch)
        def followed(*args: Any, **kwargs: Any) -> Any:
            result = switch(*args, **kwargs)
            for unit in self._sharded:
                for shard, gathered in shards_and_wholes(unit):
                    gathered.requires_grad_(shard.requires_grad)
            return result

        return followed

    def free_gathered(self) -> None:
        """Free the whole weights that units have, so that they are gathered anew."""
        for unit in self._sharded:
            assert isinstance(unit, FSDPModule)
            unit.reshard()

    def restore(self, optimizers: Sequence[Optimizer], *, gather: bool) -> None:
        """Give the module and the optimisers their own parameters, whole again.

        Args:
            optimizers: The optimisers of the run.
            gather: Whether all processes take part, so that values can be gathered. False: values are lost.
        """
        try:
            if gather:
                self._gather(optimizers)
        finally:
            self._put_back()

    def _gather(self, optimizers: Sequence[Optimizer]) -> None:
        """Bring the values of all processes into the user's parameters and into the states of optimisers."""
        self.free_gathered()
        originals: dict[int, nn.Parameter] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if id(parameter) in originals:
                continue
            original = self._originals[name]
            original.data = whole(parameter)
            original.requires_grad_(parameter.requires_grad)
            originals[id(parameter)] = original
        for optimizer in optimizers:
            _exchange_parameters(optimizer, originals)

    def _put_back(self) -> None:
        """Undo the sharding, also one that is incomplete."""
        for name in _REPLACED:
            vars(self.module).pop(name, None)
        for unit in self._sharded:
            vars(unit).pop("__deepcopy__", None)
        vars(self.module).update(self._own_methods)
        for hook in self._hooks:
            hook.remove()
        unshard_by_hand(self._sharded, self._originals, self.module)
        self._sharded = []


def _exchange_parameters(optimizer: Optimizer, originals: dict[int, nn.Parameter]) -> None:
    """Let an optimiser step the user's parameters, with whole states."""
    for group in optimizer.param_groups:
        group["params"] = [originals.get(id(parameter), parameter) for parameter in group["params"]]
    states = dict(optimizer.state)
    optimizer.state.clear()
    for parameter, state in states.items():
        optimizer.state[originals.get(id(parameter), parameter)] = {key: whole(value) for key, value in state.items()}


def _release_memory(parameter: nn.Parameter) -> None:
    """Free the memory of a parameter. Its shape stays, and its values read as NaN."""
    missing = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
    element = torch.full((), missing, dtype=parameter.dtype, device=parameter.device)
    parameter.data = element.expand(parameter.shape)


def _fill_meta(unit: Unit) -> None:
    """Give the tensors of a unit that are on the meta device memory and first values, as their layers choose them."""
    for name, part in unit.module.named_modules(prefix=unit.name):
        tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        missing = [tensor for tensor in tensors if tensor.is_meta and not isinstance(tensor, DTensor)]
        if not missing:
            continue
        for tensor in missing:
            # A whole number has no value that shows that it is missing.
            value = float("nan") if tensor.is_floating_point() else 0
            give_memory(tensor, torch.full_like(tensor, value, device="cpu"))
        reset = getattr(part, "reset_parameters", None)
        if reset is None:
            rank_zero_warn(
                f"{name} ({type(part).__name__}) is on the meta device and has no `reset_parameters`: its weights are"
                " not a number until a checkpoint is loaded."
            )
        else:
            reset()
