"""Settings of a planned step: what of a trainer's arguments decides about its memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from equipoise.callbacks.callback import Callback
from equipoise.errors import ConfigurationError
from equipoise.extensions.common.device_loads import PlannedPart
from equipoise.interop.lightning.callbacks import copies_weights
from equipoise.precision import make_precision
from equipoise.validation import check_whole

__all__ = ["NOT_PREDICTED", "StepSettings", "changes_layers", "planned_callbacks"]

# Arguments of the trainer that change the memory of a step in a way that a trace does not follow.
NOT_PREDICTED = ("step_in_backward", "offload_activations", "compile", "capture")


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Settings of a step, with the names of the trainer's arguments.

    Attributes:
        precision: The precision; see `Trainer`. Default: "32-true".
        accumulate_grad_batches: Batches of an accumulation window. Default: 1.
        activation_checkpointing: Patterns of submodules that compute their activations twice. Default: none.
        device: "cuda" for optimisers that step all parameters together, as they do on GPUs by default. Default: "cpu".
        callbacks: Callbacks that change the memory of a step; see `planned_callbacks`. Default: none.
        part: Makes the part of each sample that is computed; see `PlannedLoads`. Default: None, whole samples.

    Raises:
        ConfigurationError: If a value is out of range.
    """

    precision: str | int = "32-true"
    accumulate_grad_batches: int = 1
    activation_checkpointing: Sequence[str] = ()
    device: Literal["cpu", "cuda"] = "cpu"
    callbacks: Sequence[Any] = ()
    part: Callable[[nn.Module], PlannedPart] | None = None

    def __post_init__(self) -> None:
        make_precision(self.precision, "cpu")
        check_whole("accumulate_grad_batches", self.accumulate_grad_batches, least=1)
        if self.device not in ("cpu", "cuda"):
            raise ConfigurationError(f"device must be 'cpu' or 'cuda' for a plan, not {self.device!r}.")
        if isinstance(self.activation_checkpointing, str):
            raise ConfigurationError(
                "activation_checkpointing is a list of patterns, such as ['encoder.*'], not"
                f" {self.activation_checkpointing!r}."
            )

    @property
    def weight_copies(self) -> int:
        """Number of copies of the weights that the callbacks keep."""
        return sum(copies_weights(callback) for callback in self.callbacks)


def planned_callbacks(precision: str | int, callbacks: Sequence[Any]) -> tuple[Any, ...]:
    """Return the callbacks of a run that change layers or keep a copy of the weights, with those of its precision."""
    complete = make_precision(precision, "cpu").complete
    if complete is not None:
        callbacks = complete(callbacks)
    return tuple(callback for callback in callbacks if changes_layers(callback) or copies_weights(callback))


def changes_layers(callback: Any) -> bool:
    """Return True for a callback that changes the layers of a module; see `Callback.on_configure_model_end`."""
    # Callbacks of Lightning have no such hook, and ours inherit one that does nothing.
    hook = getattr(type(callback), "on_configure_model_end", None)
    return hook not in (None, Callback.on_configure_model_end)
