"""The memory savers that are measured: how each changes a configuration, and the override that does the same."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

__all__ = ["SAVERS", "Saver", "Trial", "combined"]

# A configuration as plain values.
Values = dict[str, Any]

# Stands for the submodules that the trial chooses, once it has built the module.
BLOCKS = "activation_checkpointing"


@dataclass
class Trial:
    """A configuration with a saver.

    Attributes:
        values: The configuration.
        overrides: The overrides that turn it on, to be added after `equipoise fit`.
        reason: The reason why it does not apply. Default: None, it does.
        chooses_blocks: Whether repeated blocks of the module compute their activations again.
        needs_device: Whether it has no effect on a CPU.
    """

    values: Values
    overrides: list[str] = field(default_factory=list)
    reason: str | None = None
    chooses_blocks: bool = False
    needs_device: bool = False

    def set(self, group: str, key: str, value: Any, text: str | None = None) -> None:
        """Set a value of a group of the configuration.

        Args:
            group: The group, such as "trainer".
            key: The key in the group.
            value: The value.
            text: The value in an override. Default: `value` as a text.
        """
        self.values[group][key] = value
        if text is None:
            text = str(value)
        self.overrides.append(f"{group}.{key}={text}")


@dataclass(frozen=True)
class Saver:
    """A memory saver.

    Attributes:
        name: Its name in the table.
        apply: Function that changes a trial.
    """

    name: str
    apply: Callable[[Trial], None]

    def trial(self, values: Mapping[str, Any]) -> Trial:
        """Return a configuration with this saver, without a change of the given one."""
        trial = Trial(deepcopy(dict(values)))
        self.apply(trial)
        return trial


def _nothing(trial: Trial) -> None:
    """Take the configuration as it is."""


def _step_in_backward(trial: Trial) -> None:
    if trial.values["trainer"].get("step_in_backward"):
        trial.reason = "the configuration has it already"
    trial.set("trainer", "step_in_backward", True, "true")


def _inplace_activations(trial: Trial) -> None:
    callback = {"_target_": "equipoise.InplaceActivations"}
    # Added to the callbacks of the configuration, whichever they are.
    trial.values["callbacks"]["inplace_activations"] = callback
    trial.overrides.append(f"+callbacks.inplace_activations._target_={callback['_target_']}")


def _offload_activations(trial: Trial) -> None:
    if trial.values["trainer"].get("offload_activations"):
        trial.reason = "the configuration has it already"
    trial.needs_device = True
    trial.set("trainer", "offload_activations", True, "true")


def _activation_checkpointing(trial: Trial) -> None:
    if trial.values["trainer"].get(BLOCKS):
        trial.reason = "the configuration has it already"
    trial.chooses_blocks = True


def _bf16_mixed(trial: Trial) -> None:
    precision = trial.values["trainer"].get("precision")
    if precision not in (None, 32, "32", "32-true"):
        trial.reason = f"the configuration computes in {precision} already"
    trial.set("trainer", "precision", "bf16-mixed")


def _accumulation(trial: Trial) -> None:
    """Halve the batches, and let two of them contribute to a step."""
    size = (trial.values.get("data") or {}).get("batch_size")
    if not isinstance(size, int) or size < 2 or size % 2:
        trial.reason = "there is no data.batch_size that could be halved"
        return
    batches = 2 * (trial.values["trainer"].get("accumulate_grad_batches") or 1)
    trial.set("data", "batch_size", size // 2)
    trial.set("trainer", "accumulate_grad_batches", batches)


def _low_bit_state(trial: Trial) -> None:
    trial.reason = "configure_optimizers chooses it, such as torchao.optim.AdamW8bit; see docs/memory.md"


# The first is what the others are compared with.
SAVERS = (
    Saver("as configured", _nothing),
    Saver("step in backward", _step_in_backward),
    Saver("in-place activations", _inplace_activations),
    Saver("activation checkpointing", _activation_checkpointing),
    Saver("offloaded activations", _offload_activations),
    Saver("bf16-mixed", _bf16_mixed),
    Saver("accumulation of half batches", _accumulation),
    Saver("8-bit optimiser state", _low_bit_state),
)


def combined(savers: list[Saver]) -> Saver:
    """Return several savers as one."""

    def apply(trial: Trial) -> None:
        for saver in savers:
            saver.apply(trial)

    return Saver("all with equal numbers", apply)
