"""Training steps whose forward saves its tensors on the host; see `Trainer(offload_activations=True)`."""

from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule

from equipoise.errors import ConfigurationError
from equipoise.extensions.savers.interop import OFFLOAD
from equipoise.extensions.savers.offloading import Offloading
from equipoise.interop.adapters import check_feature
from equipoise.notices import rank_zero_warn
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.optimization.steps.step_extension import Context, StepExtension

if TYPE_CHECKING:
    from equipoise.trainer.state.run_state import RunState

__all__ = ["OffloadedForward"]


class OffloadedForward(StepExtension):
    """Lets tensors that a forward saves wait on the host: `Trainer(offload_activations=True)`."""

    def check_run(
        self, state: "RunState", module: LightningModule, strategy: Strategy, hooks: Hooks, precision: Precision
    ) -> None:
        """Check that saved tensors can be offloaded, and warn where that has no effect.

        Raises:
            ConfigurationError: If they cannot.
        """
        check_feature(OFFLOAD)
        # Hooks of this thread do not reach several devices, which compute in threads of their own, nor the processes of
        # a pipeline. Strategies that compute micro-batches by themselves have an attribute of this name.
        if len(strategy.devices) > 1 or hasattr(strategy, "micro_batches"):
            raise ConfigurationError(
                f"offload_activations reaches forwards on one device of this process, but strategy={strategy.name!r}"
                " computes them in parts. Leave it out, or choose 'single_device' or 'ddp'."
            )
        if strategy.portable.is_sharded:
            raise ConfigurationError(
                "offload_activations would copy the weights that units gather to the host as well, since"
                f" strategy={strategy.name!r} gathers them within the forward. Leave it out, or compute activations"
                " again instead: Trainer(activation_checkpointing=[...])."
            )
        if state.compiles_steps or state.captures_steps:
            argument, step = ("capture", "captured") if state.captures_steps else ("compile", "compiled")
            raise ConfigurationError(
                f"offload_activations does not reach into a {step} step. Leave out {argument} or offload_activations."
            )
        if strategy.root_device.type == "cpu":
            rank_zero_warn("offload_activations has no effect on a CPU: its memory is that of the host.")

    def forward_context(self, state: "RunState", module: LightningModule, strategy: Strategy) -> Context | None:
        """Return the context of a training step's forward; None on a CPU, whose memory is that of the host."""
        least_bytes = state.offload_least_bytes
        device = strategy.root_device
        if least_bytes is None or device.type == "cpu":
            return None
        return Offloading(module, device, least_bytes=least_bytes).forward
