"""Units of a sharded module: submodules whose weights are gathered together and freed together.

Chosen by themselves are repeated blocks, which are the layers of a deep network, and then large single layers. Whatever
lies in no unit belongs to the root, whose weights are whole from the first use in a step to the end of its backward.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from equipoise.errors import ConfigurationError
from equipoise.extensions.fsdp.mesh.grid import part_of
from equipoise.extensions.fsdp.mesh.plans.patterns import expression_of
from equipoise.formats import align_columns, format_bytes, format_count

__all__ = ["ROOT", "Unit", "choose_units", "table_of", "unit_of", "units_of_module"]

# The name of the root in tables and messages.
ROOT = "(root)"

# A single layer with more parameters is a unit of its own.
LARGE = 2**20

# Names that an error lists.
_MOST_NAMES = 6


class Unit(NamedTuple):
    """A submodule whose weights are gathered together.

    Attributes:
        name: Its name in the module; empty for the module itself.
        module: The submodule.
    """

    name: str
    module: nn.Module

    @property
    def title(self) -> str:
        """Name for tables and messages."""
        return self.name or ROOT


def choose_units(module: nn.Module, patterns: Sequence[str | type[nn.Module]] | None = None) -> list[Unit]:
    """Return the units of a module, in the order of its submodules, the root last.

    Args:
        module: The module.
        patterns: Names of submodules, patterns of them, in which * stands for anything between two dots, and ** for
            anything, or classes of submodules, of which the module may have none. Default: None, the units are chosen.

    Raises:
        ConfigurationError: If a pattern matches no submodule that can be a unit, or a unit shares a parameter with
            what lies outside of it.

    Example:
        >>> blocks = [nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2)]
        >>> [unit.title for unit in choose_units(nn.Sequential(nn.Linear(3, 2), *blocks))]
        ['1', '2', '(root)']
    """
    names_of_parameters: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of_parameters[id(parameter)].append(name)
    if patterns is None:
        candidates = list(_natural_units(module))
    else:
        candidates = _units_by_name(module, patterns)
    units = []
    for unit in candidates:
        tied = _tied_outside(unit, names_of_parameters)
        if tied is None:
            units.append(unit)
        elif patterns is not None:
            # Torch would shard a tied parameter once for each unit, and thereby untie it.
            inside, outside = tied
            raise ConfigurationError(
                f"{unit.name} cannot be a unit of its own: {inside} and {outside} are the same parameter, and one of"
                " them lies outside. Leave it out of `units`; its weights then stay with what is around both."
            )
    return [*units, Unit("", module)]


def _tied_outside(unit: Unit, names_of_parameters: Mapping[int, Sequence[str]]) -> tuple[str, str] | None:
    """Return two names of one parameter, inside and outside of a unit; None if there is no such parameter."""
    prefix = f"{unit.name}."
    for parameter in unit.module.parameters():
        names = names_of_parameters[id(parameter)]
        inside = [name for name in names if name.startswith(prefix)]
        outside = [name for name in names if not name.startswith(prefix)]
        if outside:
            return inside[0], outside[0]
    return None


def _natural_units(module: nn.Module, name: str = "") -> Iterator[Unit]:
    """Yield repeated blocks and large layers, none of them inside another."""
    children = dict(module.named_children())
    num_of_class = Counter(map(type, children.values()))
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    for child_name, child in children.items():
        full_name = f"{name}.{child_name}".removeprefix(".")
        is_chosen = _size(child) > LARGE
        if list(child.children()):
            is_chosen = is_list and num_of_class[type(child)] > 1
        if is_chosen and _can_be_unit(child):
            yield Unit(full_name, child)
        else:
            yield from _natural_units(child, full_name)


def _can_be_unit(module: nn.Module) -> bool:
    """Return True if a module has parameters, and each use of them is a call of its forward."""
    # Attention reads the weights of its last layer without calling it.
    is_read_directly = isinstance(module, _output_layer_of_attention())
    return _is_called(module) and not is_read_directly


def _is_called(module: nn.Module) -> bool:
    """Return True if a module has parameters and a forward, which a container such as ModuleList has not."""
    return type(module).forward is not nn.Module.forward and _size(module) > 0


@cache
def _output_layer_of_attention() -> type[nn.Module]:
    """Return the class of the layer that `nn.MultiheadAttention` reads without calling it."""
    return type(nn.MultiheadAttention(1, 1, device="meta").out_proj)


def _size(module: nn.Module) -> int:
    """Return the number of elements of all parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def _units_by_name(module: nn.Module, patterns: Sequence[str | type[nn.Module]]) -> list[Unit]:
    """Return the units that patterns and classes name; inner ones come before those around them."""
    submodules = dict(module.named_modules())
    submodules.pop("")
    chosen: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            # A list of classes may be that of a library, for all of its networks, so it may name none.
            for name, part in submodules.items():
                if isinstance(part, pattern) and _can_be_unit(part):
                    chosen.add(name)
            continue
        expression = expression_of(pattern)
        matches = [name for name in submodules if expression.fullmatch(name)]
        usable = [name for name in matches if _is_called(submodules[name])]
        if not usable:
            raise ConfigurationError(_no_match(pattern, matches, submodules))
        chosen.update(usable)

    # A submodule comes after the one that contains it, so the reverse order begins with the innermost.
    inner_first = [Unit(name, submodules[name]) for name in reversed(submodules) if name in chosen]
    inner_first.sort(key=lambda unit: unit.name.count("."), reverse=True)
    return inner_first


def _no_match(pattern: str, matches: Sequence[str], submodules: Mapping[str, nn.Module]) -> str:
    """Return the message for a pattern that names no unit."""
    if matches:
        listed = ", ".join(sorted(matches)[:_MOST_NAMES])
        return (
            f"units={pattern!r} matches {listed}, but a unit needs parameters and a forward. Name the items of a"
            " ModuleList instead, as in 'blocks.*'."
        )
    known = ", ".join(list(submodules)[:_MOST_NAMES])
    return f"units={pattern!r} matches no submodule. Submodules are {known} and so on."


def unit_of(name: str, units: Sequence[Unit]) -> Unit:
    """Return the unit to which a parameter belongs.

    Args:
        name: The name of the parameter.
        units: The units, as `choose_units` returns them.
    """
    around = [unit for unit in units if name.startswith(f"{unit.name}.")]
    return max(around, key=lambda unit: len(unit.name), default=units[-1])


def _is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def units_of_module(module: nn.Module) -> list[Unit]:
    """Return the units that `configure_model` has sharded by itself, inner ones first, the root last; empty if none."""
    sharded = [Unit(name, part) for name, part in module.named_modules() if _is_sharded(part)]
    if not sharded:
        return []
    inner_first = [unit for unit in reversed(sharded) if unit.name]
    return [*inner_first, Unit("", module)]


def table_of(units: Sequence[Unit], processes: int) -> str:
    """Return the units as a table with a line for each.

    Args:
        units: The units, before those are sharded that `configure_model` has not sharded by itself.
        processes: Number of processes that share a unit's weights, or a part of them that is cut already.
    """
    # 1. The parameters of each unit.
    parameters: dict[str, list[Tensor]] = {unit.name: [] for unit in units}
    root = units[-1]
    for name, parameter in root.module.named_parameters():
        unit = unit_of(name, units)
        parameters[unit.name].append(parameter)

    # 2. The cells.
    rows = [("unit", "class", "parameters", "whole", "in each process")]
    for unit in units:
        count = 0
        nbytes = 0
        bytes_here: float = 0
        for tensor in parameters[unit.name]:
            count += tensor.numel()
            nbytes += tensor.numel() * tensor.element_size()
            bytes_here += part_of(tensor).nbytes
        if not _is_sharded(unit.module):
            bytes_here /= processes
        row = (
            unit.title,
            type(unit.module).__name__,
            format_count(count),
            format_bytes(nbytes),
            format_bytes(bytes_here),
        )
        rows.append(row)
    return align_columns(rows)
