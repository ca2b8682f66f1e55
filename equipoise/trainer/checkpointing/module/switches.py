"""Switches of a module, which its `state_dict` leaves out: which parameters are trained, and modes of submodules.

Callbacks turn them in a training, as those do that finetune a part. A checkpoint holds what was turned since the
training began: what was set before is set by the same code again.
"""

from dataclasses import dataclass, field

from torch import nn

from equipoise.interop.lightning.modules import untoggled_parameters
from equipoise.interop.torch.modules import uncompiled_name

__all__ = ["Switches"]

# Values of switches by kind and name.
_Values = dict[str, dict[str, bool]]

# Attributes of submodules. Lightning's callbacks for finetuning turn the second one as well.
_OF_SUBMODULES = ("training", "track_running_stats")


@dataclass(eq=False)
class Switches:
    """Switches that a training has turned in its module.

    Attributes:
        at_start: All switches when the training began; None before.
        turned: What the run had turned from which this one continues, until the training begins.
        modes: The modes of submodules before a validation, which changes them; None outside of one.
    """

    at_start: _Values | None = None
    turned: _Values = field(default_factory=dict)
    modes: dict[str, bool] | None = None

    def resume(self, turned: _Values) -> None:
        """Note what the run had turned from which this one continues.

        Args:
            turned: The result of `turned_in`.
        """
        self.turned = turned

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
    # 1. Parameters. An optimiser that is toggled has frozen others for the time of a step.
    toggled = untoggled_parameters(module)
    of_parameters = {}
    for name, parameter in module.named_parameters():
        trained = toggled.get(parameter, parameter.requires_grad)
        of_parameters[uncompiled_name(name)] = trained
    switches: _Values = {"requires_grad": of_parameters}

    # 2. Submodules, of which few have the second attribute.
    for kind in _OF_SUBMODULES:
        values = {}
        for name, submodule in module.named_modules():
            value = getattr(submodule, kind, None)
            if isinstance(value, bool):
                values[uncompiled_name(name)] = value
        switches[kind] = values
    return switches


def _turn(module: nn.Module, switches: _Values) -> None:
    """Set switches of a module; parts that it has not are passed over."""
    # 1. Parameters.
    of_parameters = switches.get("requires_grad", {})
    for name, parameter in module.named_parameters():
        trained = of_parameters.get(uncompiled_name(name))
        if trained is not None:
            parameter.requires_grad_(trained)

    # 2. Submodules.
    for kind in _OF_SUBMODULES:
        values = switches.get(kind, {})
        for name, submodule in module.named_modules():
            value = values.get(uncompiled_name(name))
            if value is not None:
                setattr(submodule, kind, value)
