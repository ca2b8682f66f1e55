"""Full states of modules and optimisers, which any other strategy can load, and the strategy's own state."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.parallel.optimizer_parameters import optimizer_parameters

if TYPE_CHECKING:
    from equipoise.strategies.checkpoint_folders import CheckpointFolders

__all__ = ["LoadState", "PortableState", "SaveState", "gradients_of", "load_gradients"]

SaveState = Callable[[], dict[str, Any]]
LoadState = Callable[[dict[str, Any]], None]


class PortableState:
    """Returns and loads full states; called in every process.

    This class is for modules and optimisers that are in this process as a whole. Strategies that distribute them over
    processes override it.

    Args:
        own_state: Function that returns the strategy's own state, with which a resumed run continues: a dictionary of
            objects that a checkpoint can hold. Default: None, it has none.
        load_own_state: Function that restores what `own_state` has returned, as far as it applies: another strategy
            or other devices may have saved it. Default: None.

    Attributes:
        is_sharded: Whether weights are in shards in a run. Then a checkpoint's weights are loaded after
            `Strategy.setup`, and a forward gathers them, so that all processes run it equally often. They may be
            placeholders for tensors of a sharded checkpoint. Default: False.
        folders: Writes checkpoints as folders, to which each process writes its own part. Default: None, the main
            process writes files.
    """

    is_sharded: ClassVar[bool] = False
    folders: "CheckpointFolders | None" = None

    # A subclass need not call the constructor.
    _own_state: SaveState | None = None
    _load_own_state: LoadState | None = None

    def __init__(
        self,
        own_state: SaveState | None = None,
        load_own_state: LoadState | None = None,
    ) -> None:
        self._own_state = own_state
        self._load_own_state = load_own_state

    def strategy_state(self) -> dict[str, Any]:
        """Return the strategy's own state."""
        if self._own_state is None:
            return {}
        return self._own_state()

    def load_strategy_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `strategy_state` has returned, of this strategy or of another one."""
        if self._load_own_state is not None:
            self._load_own_state(state)

    def connect_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Receive the optimisers of a fit, once they are made and before their states are loaded.

        Args:
            optimizers: The optimisers that `configure_optimizers` returned.
        """

    def prepare(self) -> None:
        """Wait until no process changes the state any more; called before a checkpoint is collected."""

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

    def averaging(self) -> AbstractContextManager[None]:
        """Return a context in which callbacks compute with the weights and their copies of them."""
        return nullcontext()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimiser's full state."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a state that `optimizer_state` has returned, moved to the devices of the parameters."""
        optimizer.load_state_dict(state)

    def gradients(self, optimizers: Sequence[Optimizer], *, window_is_open: bool) -> list[Tensor | None]:
        """Return the gradients of an unfinished accumulation window that this process adds to those of others.

        Args:
            optimizers: The optimisers.
            window_is_open: Whether this process has added a part to the window.

        Returns:
            The gradients of all parameters of the optimisers, in order; empty if there is no open window.
        """
        if not window_is_open:
            return []
        return gradients_of(optimizers)

    def load_gradients(self, optimizers: Sequence[Optimizer], gradients: Sequence[Tensor | None]) -> None:
        """Set gradients that `gradients` has returned, on the device of each parameter.

        Args:
            optimizers: The optimisers.
            gradients: The gradients. Parameters beyond them keep theirs.
        """
        load_gradients(optimizers, gradients)


def gradients_of(optimizers: Iterable[Optimizer]) -> list[Tensor | None]:
    """Return the gradients of all parameters of optimisers, in order."""
    gradients: list[Tensor | None] = []
    for optimizer in optimizers:
        gradients.extend(parameter.grad for parameter in optimizer_parameters(optimizer))
    return gradients


def load_gradients(optimizers: Iterable[Optimizer], gradients: Iterable[Tensor | None]) -> None:
    """Set the gradients of the parameters of optimisers, on the device of each.

    Args:
        optimizers: Any optimisers of torch.
        gradients: Gradients that `gradients_of` returned. Parameters beyond them keep theirs.
    """
    parameters: list[nn.Parameter] = []
    for optimizer in optimizers:
        parameters.extend(optimizer_parameters(optimizer))
    for parameter, gradient in zip(parameters, gradients, strict=False):
        if gradient is not None:
            gradient = gradient.to(parameter.device)
        parameter.grad = gradient
