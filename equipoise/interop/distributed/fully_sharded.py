"""Private names of torch's `fully_shard`, each with the reason why nothing public does.

Without them strategy='fsdp' is refused when it is chosen.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from equipoise.interop.adapters import find
from equipoise.interop.refusal import refusal

__all__ = [
    "begin_as_root",
    "check_names",
    "copy_without_units",
    "follow_backwards",
    "follow_gathering",
    "gather_in_forms",
    "keep_gathered",
    "read_numbers",
    "reduce_at_the_end",
    "shards_and_wholes",
    "unshard_by_hand",
    "unsharded_parameters",
]

# Attributes that `fully_shard` sets in every module that it manages begin with one of these.
_MARKS = ("__composable_api", "_is_fsdp", "_fsdp")


# Attributes that torch sets when a module is sharded: of its state, of a group of parameters, and of a parameter.
_OF_STATE = (
    "_lazy_init",
    "_pre_backward",
    "_pre_forward_hook_handle",
    "_post_forward_hook_handle",
    "_register_root_post_backward_final_callback",
    "_root_post_backward_final_callback",
)
_OF_GROUP = (
    "_to_sharded",
    "_to_sharded_post_forward",
    "_to_unsharded",
    "fsdp_params",
    "is_sharded",
    "post_backward",
    "post_forward_mesh_info",
    "reshard_after_backward",
    "_module_to_pre_save_state_dict_hook_handle",
    "_module_to_pre_load_state_dict_hook_handle",
)
_OF_PARAMETER = ("_post_load_hook_handle", "sharded_param")
# Of the dispatcher of tensors in shards: functions that take the place of its own rules, by operation.
_HANDLERS = "_custom_op_handlers"
# Those of a parameter that is gathered in another form.
_OF_FORMS = ("_sharded_param_data", "padded_sharded_param_size", "_init_extensions")


def check_names(mesh: DeviceMesh) -> None:
    """Check on a small module that torch has the private names of this file, before the user's module is sharded.

    Args:
        mesh: The devices over which modules are sharded.

    Raises:
        ConfigurationError: If a name is missing.
    """
    # On the device meta no random number is drawn.
    probe = nn.Linear(1, 1, device="meta")
    fully_shard(probe, mesh=mesh)
    state: Any = probe._get_fsdp_state()  # type: ignore[operator]
    missing = [f"FSDPState.{name}" for name in _OF_STATE if not hasattr(state, name)]
    if not hasattr(getattr(DTensor, "_op_dispatcher", None), _HANDLERS):
        missing.append(f"DTensor._op_dispatcher.{_HANDLERS}")
    has_groups = hasattr(state, "_fsdp_param_groups") or hasattr(state, "_fsdp_param_group")
    groups = _groups_of(probe) if has_groups else []
    if not groups:
        missing.append("FSDPState._fsdp_param_groups")
    for group in groups:
        missing += [f"FSDPParamGroup.{name}" for name in _OF_GROUP if not hasattr(group, name)]
        for parameter in getattr(group, "fsdp_params", ()):
            missing += [f"FSDPParam.{name}" for name in _OF_PARAMETER if not hasattr(parameter, name)]
            if not hasattr(type(parameter), "unsharded_param"):
                missing.append("FSDPParam.unsharded_param")
    if missing:
        raise refusal("strategy='fsdp'", "torch", dict.fromkeys(missing))


def read_numbers(whole: Callable[[DTensor], Tensor]) -> Callable[[], None]:
    """Let a number that is read from a tensor in shards be that of all processes, as by `float` and `bool`.

    Torch reads the part of this process, such as its term of a sum that is not added up. Nothing public changes that.

    Args:
        whole: Returns a tensor in shards as a whole; called in all processes.

    Returns:
        Function that ends this.
    """
    handlers: dict[Any, Any] = getattr(DTensor._op_dispatcher, _HANDLERS)
    operation = torch.ops.aten._local_scalar_dense.default

    def read(_: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        is_whole = all(placement.is_replicate() for placement in tensor.placements)
        return (tensor.to_local() if is_whole else whole(tensor)).item()

    before = handlers.get(operation)
    handlers[operation] = read

    def end() -> None:
        # A version of torch may have a rule of its own.
        if before is None:
            handlers.pop(operation, None)
        else:
            handlers[operation] = before

    return end


def _groups_of(unit: nn.Module) -> Sequence[Any]:
    """Return torch's groups of parameters of a unit."""
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    # torch 2.11 and older have one group in each unit.
    group = state._fsdp_param_group
    if group is None:
        return []
    return [group]


def begin_as_root(module: nn.Module) -> None:
    """Make a module the root of its units.

    Torch takes the first unit that runs a forward as the root, and refuses the real one afterwards. A hook of the
    user's may call a part of the module before the first step, so the root is settled here. Nothing public does that.

    Args:
        module: The module, to which `fully_shard` was applied last.
    """
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    state._lazy_init()


def unsharded_parameters(unit: nn.Module) -> Iterator[Tensor]:
    """Yield the whole parameters of a unit, which exist since its first forward and are leaves of the graph.

    The module's own attributes show them only while the unit has them, which is over before the backward, where
    gradients of these leaves are computed. Torch shows them nowhere else.

    Args:
        unit: A module to which `fully_shard` was applied.
    """
    for _, gathered in shards_and_wholes(unit):
        yield gathered


def shards_and_wholes(unit: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the shard of each parameter of a unit beside the whole parameter; see `unsharded_parameters`.

    Args:
        unit: A module to which `fully_shard` was applied.
    """
    for group in _groups_of(unit):
        for parameter in group.fsdp_params:
            gathered = getattr(parameter, "unsharded_param", None)
            if gathered is not None:
                yield parameter.sharded_param, gathered


def follow_gathering(
    unit: nn.Module,
    *,
    gathering: Callable[[], None],
    gathered: Callable[[], None],
    freeing: Callable[[], None],
    freed: Callable[[], None],
    partly_freed: Callable[[], None],
) -> None:
    """Call functions around each gathering and freeing of a unit's weights, which torch does in many places.

    Hooks of modules see only some of them: torch frees weights in a backward, and before a state is saved or loaded.

    Args:
        unit: A module to which `fully_shard` was applied.
        gathering: Called before the module has whole weights.
        gathered: Called afterwards.
        freeing: Called before the whole weights are freed.
        freed: Called when the module has shards again.
        partly_freed: Called as well when these lie over some processes alone.
    """
    for group in _groups_of(unit):

        def gather(gather: Callable[[], None] = group._to_unsharded) -> None:
            gathering()
            gather()
            gathered()

        def free(group: Any = group, free: Callable[[], None] = group._to_sharded) -> None:
            if not group.is_sharded:
                freeing()
                free()
                freed()

        def free_partly(free: Callable[[], None] = group._to_sharded_post_forward) -> None:
            freeing()
            free()
            freed()
            partly_freed()

        group._to_unsharded = gather
        group._to_sharded = free
        group._to_sharded_post_forward = free_partly


def follow_backwards(unit: nn.Module, *, begun: Callable[[], None], end: Callable[[Callable[[], None]], None]) -> None:
    """Call functions at the beginning and the end of each backward through a unit; hooks know no end of a backward.

    Args:
        unit: A module to which `fully_shard` was applied.
        begun: Called when the backward comes to the unit, before its weights are gathered.
        end: Called with torch's function, which exchanges what gradients are left, and which it calls.
    """
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]
    begin_backward = state._pre_backward
    end_backward = state._root_post_backward_final_callback

    def begin(gradient: Tensor) -> Any:
        begun()
        return begin_backward(gradient)

    state._pre_backward = begin
    state._root_post_backward_final_callback = lambda: end(end_backward)


def reduce_at_the_end(root: nn.Module) -> None:
    """Let the running backward exchange all gradients at its end, though no output of a unit was in its way.

    Args:
        root: The module that contains all units.
    """
    state: Any = root._get_fsdp_state()  # type: ignore[operator]
    state._register_root_post_backward_final_callback()


def keep_gathered(units: Sequence[nn.Module]) -> Callable[[], None]:
    """Keep the weights of units once they are gathered, as a backward does whose graph has a backward itself.

    `set_reshard_after_forward` would not do: there is no way to ask what it was before.

    Returns:
        A function that exchanges what gradients are left, and lets the units free their weights as before.
    """
    groups = [group for unit in units for group in _groups_of(unit)]
    before = [group.post_forward_mesh_info for group in groups]
    for group in groups:
        group.post_forward_mesh_info = None
        group.reshard_after_backward = False

    def end() -> None:
        for group, info in zip(groups, before, strict=True):
            group.post_backward()
            group.post_forward_mesh_info = info
            group.reshard_after_backward = True

    return end


def gather_in_forms(unit: nn.Module, forms: Mapping[nn.Module, Callable[[Tensor], Any]]) -> None:
    """Let the weights of layers be gathered in another form than that in which their shards lie.

    Torch asks a shard for two methods. They are documented for tensors of a class of one's own, which would have to
    take part in all that reads shards: optimisers, checkpoints, averages. So plain shards get them as attributes.

    Args:
        unit: A module to which `fully_shard` was applied.
        forms: By layer, what returns an object with `fsdp_pre_all_gather` and `fsdp_post_all_gather` from the layer's
            shard, padded to the size of the largest one. Layers of other units are passed over.

    Raises:
        ConfigurationError: If torch lacks a private name.
    """
    makers = {id(layer.weight): make for layer, make in forms.items()}
    for group in _groups_of(unit):
        for parameter in group.fsdp_params:
            make = makers.get(id(parameter.sharded_param))
            if make is None:
                continue
            shard: Any = getattr(parameter.sharded_param, "_local_tensor", None)
            missing = [name for name in _OF_FORMS if not hasattr(parameter, name)]
            if shard is None:
                missing.append("_local_tensor")
            if missing:
                raise refusal("Gathering weights in another form", "torch", missing)
            size = parameter.padded_sharded_param_size
            form = make(parameter._sharded_param_data.view(size))
            shard.fsdp_pre_all_gather = form.fsdp_pre_all_gather
            shard.fsdp_post_all_gather = form.fsdp_post_all_gather
            # It has looked for the methods when the module was sharded.
            parameter._init_extensions()


def unshard_by_hand(units: Sequence[nn.Module], originals: Mapping[str, nn.Parameter], root: nn.Module) -> None:
    """Undo `fully_shard`: classes, hooks, marks and parameters are as they were before.

    Torch has no way back. Without one a module could be trained once only, could be neither copied nor pickled, and the
    parameters that the user's objects refer to would not be those of the module.

    Args:
        units: The modules to which `fully_shard` was applied.
        originals: The parameters as they were, by name; tied ones under each name.
        root: The module that contains all of them.
    """
    for unit in units:
        state: Any = unit._get_fsdp_state()  # type: ignore[operator]
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        for group in _groups_of(unit):
            _remove_hooks(group)
    states: Any = find("torch.distributed._composable_state._module_state_mapping")
    for unit in units:
        unit.__class__ = _former_class(unit)
        # Torch notes which modules have been sharded, also in a place beside them.
        states.pop(unit, None)
    _remove_marks(root)
    modules = dict(root.named_modules(remove_duplicate=False))
    for name, original in originals.items():
        owner, _, attribute = name.rpartition(".")
        # A recurrent layer keeps a second list of its parameters, which it updates here.
        setattr(modules[owner], attribute, original)


def copy_without_units(units: Sequence[nn.Module], root: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a copy of a module in shards, which has no units.

    Torch refuses to copy a unit, and would refuse to copy what it keeps of one.

    Args:
        units: The modules to which `fully_shard` was applied.
        root: The module that contains all of them.
        memo: The memo of `copy.deepcopy`, which may have copies of the parameters.
    """
    # 1. What torch keeps of a unit stands for itself.
    states: list[Any] = [unit._get_fsdp_state() for unit in units]  # type: ignore[operator]
    memo.update((id(state), state) for state in states)

    # 2. The copy, with the classes of before.
    kinds = [type(unit) for unit in units]
    try:
        for unit in units:
            unit.__class__ = _former_class(unit)
        copied = copy.deepcopy(root, memo)
    finally:
        for unit, kind in zip(units, kinds, strict=True):
            unit.__class__ = kind

    # 3. Without what would gather the weights of the original.
    for unit, state in zip(units, states, strict=True):
        attributes = vars(memo[id(unit)])
        attributes.get("_forward_pre_hooks", {}).pop(state._pre_forward_hook_handle.id, None)
        attributes.get("_forward_hooks", {}).pop(state._post_forward_hook_handle.id, None)
    _remove_marks(copied)
    return copied


def _former_class(unit: nn.Module) -> type:
    """Return the class of a unit before: the one that `fully_shard` has made derives from FSDPModule and from it."""
    former: type = type(unit).__mro__[FSDPModule._orig_cls_mro_index]
    return former


def _remove_marks(root: nn.Module) -> None:
    """Remove the attributes that `fully_shard` has set in a module and its submodules."""
    for part in root.modules():
        attributes = vars(part)
        for name in list(attributes):
            if name.startswith(_MARKS):
                del attributes[name]


def _remove_hooks(group: Any) -> None:
    """Remove the hooks that shard a unit before its state is saved or loaded, and look at it afterwards."""
    for handles in (group._module_to_pre_save_state_dict_hook_handle, group._module_to_pre_load_state_dict_hook_handle):
        for handle in handles.values():
            handle.remove()
    for parameter in group.fsdp_params:
        parameter._post_load_hook_handle.remove()
