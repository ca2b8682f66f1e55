"""Choices that make training need less memory."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from equipoise.trainer.settings import arguments as check

__all__ = ["Savers"]

# Bytes from which on a tensor is offloaded, where the user names no number: smaller ones cost time and save little.
_LEAST_OFFLOADED = 2**20


@dataclass
class Savers:
    """The memory savers of a trainer's runs, checked.

    Attributes:
        activation_checkpointing: Submodules that compute their activations again in the backward.
        steps_in_backward: Whether each parameter is stepped within the backward.
        offload_least_bytes: Bytes from which on tensors that are saved for the backward wait on the host; None: none.
    """

    activation_checkpointing: list[str | type[nn.Module]] | None = None
    steps_in_backward: bool = False
    offload_least_bytes: int | None = None

    def choose_savers(self, activation_checkpointing: Any, step_in_backward: Any, offload_activations: Any) -> None:
        """Set the choices; see the Trainer's arguments of these names.

        Raises:
            ConfigurationError: If a value is none of those that are allowed.
        """
        self.activation_checkpointing = check.check_patterns("activation_checkpointing", activation_checkpointing)
        self.steps_in_backward = check.check_flag("step_in_backward", step_in_backward)
        self.offload_least_bytes = _least_bytes(offload_activations)


def _least_bytes(choice: Any) -> int | None:
    """Return the least size of offloaded tensors in bytes; None for no offloading."""
    if isinstance(choice, bool):
        return _LEAST_OFFLOADED if choice else None
    least: int = check.check_size("offload_activations", choice)
    return least
