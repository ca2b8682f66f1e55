"""Full states of modules and optimisers, which any other strategy can load; the default is torch's."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

__all__ = ["PortableState"]


class PortableState:
    """Reads and loads full states; called in every process.

    This class is for modules and optimisers that are in this process as a whole. Strategies that distribute them over
    processes override it.
    """

    def prepare(self) -> None:
        """Wait until no process changes what is to be read; called before a checkpoint is collected."""

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the module's full state."""
        return module.state_dict()

    def load_module_state(self, module: nn.Module, state: dict[str, Any], strict: bool = True) -> None:
        """Load a state that `module_state` has returned."""
        module.load_state_dict(state, strict=strict)

    def further_entries(self, module: nn.Module) -> dict[str, Any]:
        """Return entries that a checkpoint has beside the module's state, also if it holds weights only."""
        return {}

    def load_further_entries(self, checkpoint: dict[str, Any]) -> None:
        """Load the entries that `further_entries` has returned, after the module's state.

        Args:
            checkpoint: The whole checkpoint.
        """

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimiser's full state."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a state that `optimizer_state` has returned, moved to the devices of the parameters."""
        optimizer.load_state_dict(state)
