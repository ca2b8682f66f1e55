"""Switches of a module, which its `state_dict` leaves out: which parameters are trained, and modes of submodules.

Callbacks turn them in a training, as those do that finetune a part. A checkpoint holds what was turned since the
training began: what was set before is set by the same code again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from equipoise.interop.lightning.modules import untoggled_parameters
from equipoise.interop.torch.modules import uncompiled_name

__all__ = ["Switches"]

# Values of switches by kind and name.
_Values = dict[str, dict[str, bool]]


@dataclass(eq=False)
class Switches:
    """Switches that a training has turned in its module.

    Attributes:
        at_start: All switches when the training began; None before.
        turned: The switches that the resumed run had turned, until the training begins.
        modes: The modes of submodules before a validation, which changes them; None outside of one.
    """

    at_start: _Values | None = None
    turned: _Values = field(default_factory=dict)
    modes: dict[str, bool] | None = None

    def begin(self, module: nn.Module) -> None:
        """Note the switches as they are when a training begins, and turn those that a former run had turned."""
        self.at_start = _switches_of(module)
        _turn(module, self.turned)

    def enter_validation(self, module: nn.Module) -> None:
        """Note the modes that a validation is about to change."""
        self.modes = _switches_of(module)["training"]

    def leave_validation(self) -> None:
        """Note that the modes are again those of the training."""
        self.modes = None

    def turned_in(self, module: nn.Module) -> _Values:
        """Return the switches that are not as they were when the training began."""
        if self.at_start is None:
            return self.turned
        # 1. The present ones. A validation has modes of its own.
        present = _switches_of(module)
        if self.modes is not None:
            present["training"] = self.modes

        # 2. Those that differ. A part that was added since counts as it is.
        turned: _Values = {}
        for kind, values in present.items():
            before = self.at_start.get(kind, {})
            for name, value in values.items():
                if before.get(name, value) != value:
                    turned.setdefault(kind, {})[name] = value
        return turned


def _switches_of(module: nn.Module) -> _Values:
    # An optimiser that is toggled has frozen parameters of others for the time of a step.
    toggled = untoggled_parameters(module)
    switches: _Values = {}
    for kind, name, part in _parts_with_switches(module):
        present = getattr(part, kind)
        switches.setdefault(kind, {})[name] = toggled.get(part, present)
    return switches


def _turn(module: nn.Module, switches: _Values) -> None:
    """Set switches of a module; parts that it has not are passed over."""
    for kind, name, part in _parts_with_switches(module):
        value = switches.get(kind, {}).get(name)
        if value is not None:
            setattr(part, kind, value)


def _parts_with_switches(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield kind and name of each switch, and the parameter or submodule that has it as an attribute."""
    for name, parameter in module.named_parameters():
        yield "requires_grad", uncompiled_name(name), parameter
    for name, submodule in module.named_modules():
        yield "training", uncompiled_name(name), submodule
