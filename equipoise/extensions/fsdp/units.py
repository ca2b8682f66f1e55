"""Units of a sharded module: the submodules whose weights all processes gather together, and free together.

Chosen by themselves are repeated blocks, which are the layers of a deep network, and then large single layers. Whatever
lies in no unit belongs to the root, whose weights are whole from the first use in a step to the end of its backward.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from torch import Tensor, nn

from equipoise.errors import ConfigurationError
from equipoise.formats import format_bytes, format_count

__all__ = ["ROOT", "Unit", "choose_units", "table_of", "unit_of"]

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
    names_of_parameters = _names_of_parameters(module)
    units = []
    if patterns is None:
        for unit in _natural_units(module):
            # Torch would shard a tied parameter once for each unit, and thereby untie it.
            if _tied_outside(unit, names_of_parameters) is None:
                units.append(unit)
    else:
        units = _units_by_name(module, patterns)
        for unit in units:
            tied = _tied_outside(unit, names_of_parameters)
            if tied is not None:
                raise ConfigurationError(
                    f"{unit.name} cannot be a unit of its own: {tied[0]} and {tied[1]} are the same parameter, and one"
                    " of them lies outside. Leave it out of `units`; its weights then stay with what is around both."
                )
    return [*units, Unit("", module)]


def _names_of_parameters(module: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, by its identity."""
    names = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return names


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
    children = list(module.named_children())
    num_of_class = Counter(type(child) for _, child in children)
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    for child_name, child in children:
        unit = Unit(f"{name}.{child_name}" if name else child_name, child)
        is_layer = not any(True for _ in child.children())
        is_repeated_block = is_list and not is_layer and num_of_class[type(child)] > 1
        if _can_be_unit(child) and (is_repeated_block or (is_layer and _size(child) > LARGE)):
            yield unit
        else:
            yield from _natural_units(child, unit.name)


def _can_be_unit(module: nn.Module) -> bool:
    """Return True if a module has parameters, and each use of them is a call of its forward."""
    # Containers such as ModuleList have no forward. Attention reads the weights of its last layer without calling it.
    has_forward = type(module).forward is not nn.Module.forward
    is_read_directly = isinstance(module, _output_layer_of_attention())
    return has_forward and not is_read_directly and _size(module) > 0


@cache
def _output_layer_of_attention() -> type[nn.Module]:
    """Return the class of the layer that `nn.MultiheadAttention` reads without calling it."""
    attention = nn.MultiheadAttention(1, 1, device="meta")
    return type(attention.out_proj)


def _size(module: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def _units_by_name(module: nn.Module, patterns: Sequence[str | type[nn.Module]]) -> list[Unit]:
    """Return the units that patterns and classes name; inner ones come before those around them."""
    submodules = dict(module.named_modules())
    submodules.pop("")
    chosen: set[str] = set()
    for pattern in patterns:
        matches = _matches(pattern, submodules)
        usable = {name for name in matches if type(submodules[name]).forward is not nn.Module.forward}
        usable = {name for name in usable if _size(submodules[name]) > 0}
        # A list of classes may be that of a library, for all of its networks.
        if not usable and isinstance(pattern, str):
            raise ConfigurationError(_no_match(pattern, matches, submodules))
        chosen |= usable
    # A submodule comes after the one that contains it, so the reverse order begins with the innermost.
    inner_first = [Unit(name, submodules[name]) for name in reversed(submodules) if name in chosen]
    return sorted(inner_first, key=lambda unit: -unit.name.count("."))


def _matches(pattern: str | type[nn.Module], submodules: Mapping[str, nn.Module]) -> set[str]:
    """Return the names of the submodules that a pattern names, or which are of a class."""
    if isinstance(pattern, str):
        expression = _expression(pattern)
        return {name for name in submodules if expression.fullmatch(name)}
    return {name for name, module in submodules.items() if isinstance(module, pattern) and _can_be_unit(module)}


def _expression(pattern: str) -> re.Pattern[str]:
    """Return a pattern of names as a regular expression."""
    escaped = re.escape(pattern)
    return re.compile(escaped.replace(r"\*\*", ".*").replace(r"\*", "[^.]*"))


def _no_match(pattern: str, matches: set[str], submodules: Mapping[str, nn.Module]) -> str:
    """Return the message for a pattern that names no unit."""
    if matches:
        return (
            f"units={pattern!r} matches {', '.join(sorted(matches)[:_MOST_NAMES])}, but a unit needs parameters and a"
            " forward. Name the items of a ModuleList instead, as in 'blocks.*'."
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


def table_of(units: Sequence[Unit], processes: int) -> str:
    """Return the units as a table with a line for each.

    Args:
        units: The units, before they are sharded.
        processes: Number of processes that share a unit's weights.
    """
    tensors: dict[str, list[Tensor]] = {unit.name: [] for unit in units}
    for name, parameter in units[-1].module.named_parameters():
        tensors[unit_of(name, units).name].append(parameter)
    rows = [("unit", "class", "parameters", "whole", "in each process")]
    for unit in units:
        count = sum(parameter.numel() for parameter in tensors[unit.name])
        nbytes = sum(parameter.nbytes for parameter in tensors[unit.name])
        sizes = (format_count(count), format_bytes(nbytes), format_bytes(nbytes / processes))
        rows.append((unit.title, type(unit.module).__name__, *sizes))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
