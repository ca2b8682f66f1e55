"""Choices that make steps faster."""

from dataclasses import dataclass
from typing import Any, Literal

from equipoise.errors import ConfigurationError
from equipoise.trainer.data.transfer.prefetch import PrefetchChoice
from equipoise.trainer.settings import arguments as check

__all__ = ["Speed"]


@dataclass
class Speed:
    """The choices of a trainer's runs, checked.

    Attributes:
        prefetch: Whether the next batch travels to the device ahead of its step.
        compiles_steps: Whether training steps are compiled. "auto": where that is faster.
        captures_steps: Whether training steps are captured as CUDA graphs.
        fuses_optimizers: Whether optimisers step all parameters by one kernel.
    """

    prefetch: PrefetchChoice = "auto"
    compiles_steps: Literal["auto"] | bool = False
    captures_steps: bool = False
    fuses_optimizers: bool = False

    def choose_speed(self, prefetch: Any, compile: Any, capture: Any, fused_optimizer: Any) -> None:
        """Set the choices; see the Trainer's arguments of these names.

        Raises:
            ConfigurationError: If a value is none of those that are allowed, or two of them contradict each other.
        """
        self.prefetch = check.check_auto_flag("prefetch", prefetch)
        self.compiles_steps = check.check_auto_flag("compile", compile)
        self.captures_steps = check.check_flag("capture", capture)
        if self.compiles_steps and self.captures_steps:
            raise ConfigurationError(
                f"compile={compile!r} and capture=True are two ways to the same step. Leave one of them out."
            )
        self.fuses_optimizers = check.check_flag("fused_optimizer", fused_optimizer)
