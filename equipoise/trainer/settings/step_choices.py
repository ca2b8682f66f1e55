"""Choices about the steps of a training: what makes them faster, and what makes them need less memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.trainer.settings import arguments as check

__all__ = ["PrefetchChoice", "StepChoices"]

PrefetchChoice = Literal["auto"] | bool

# Bytes from which on a tensor is offloaded, where the user names no number: smaller ones cost time and save little.
_LEAST_OFFLOADED = 2**20


@dataclass
class StepChoices:
    """The choices of a trainer's runs, checked.

    Attributes:
        prefetch: Whether the next batch travels to the device ahead of its step.
        compiles_steps: Whether training steps are compiled. "auto": where that is faster.
        block_options: Options with which blocks of the network are compiled; None: as a strategy needs it.
        captures_steps: Whether training steps are captured as CUDA graphs.
        fuses_optimizers: Whether optimisers step all parameters by one kernel.
        activation_checkpointing: Submodules that compute their activations again in the backward.
        steps_in_backward: Whether each parameter is stepped within the backward.
        offload_least_bytes: Bytes from which on tensors that are saved for the backward wait on the host; None: none.
    """

    prefetch: Literal["auto"] | bool = "auto"
    compiles_steps: Literal["auto"] | bool = False
    block_options: Mapping[str, Any] | None = None
    captures_steps: bool = False
    fuses_optimizers: bool = False
    activation_checkpointing: list[str | type[nn.Module]] | None = None
    steps_in_backward: bool = False
    offload_least_bytes: int | None = None

    def choose_speed(self, prefetch: Any, compile: Any, capture: Any, fused_optimizer: Any) -> None:
        """Set what makes steps quicker; see the Trainer's arguments of these names.

        Raises:
            ConfigurationError: If a value is none of those that are allowed, or two of them contradict each other.
        """
        self.prefetch = check.check_auto_flag("prefetch", prefetch)
        self.block_options = check.check_compile_options(compile)
        self.compiles_steps = True if self.block_options is not None else check.check_auto_flag("compile", compile)
        self.captures_steps = check.check_flag("capture", capture)
        if self.compiles_steps and self.captures_steps:
            raise ConfigurationError(
                f"compile={compile!r} and capture=True are two ways to the same step. Leave one of them out."
            )
        self.fuses_optimizers = check.check_flag("fused_optimizer", fused_optimizer)

    def choose_savers(self, activation_checkpointing: Any, step_in_backward: Any, offload_activations: Any) -> None:
        """Set what saves memory; see the Trainer's arguments of these names.

        Raises:
            ConfigurationError: If a value is none of those that are allowed.
        """
        self.activation_checkpointing = check.check_patterns("activation_checkpointing", activation_checkpointing)
        self.steps_in_backward = check.check_flag("step_in_backward", step_in_backward)
        if isinstance(offload_activations, bool):
            self.offload_least_bytes = _LEAST_OFFLOADED if offload_activations else None
        else:
            self.offload_least_bytes = check.check_size("offload_activations", offload_activations)
