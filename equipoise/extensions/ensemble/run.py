"""State of an ensemble that exists during a run only."""

from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from equipoise.extensions.ensemble.computation.choice import Choice
from equipoise.extensions.ensemble.computation.together import Together
from equipoise.extensions.ensemble.gradients import WeightsOfMembers
from equipoise.extensions.ensemble.members.stacked_members import StackedMembers, StackedParameter, gradient_state
from equipoise.extensions.ensemble.optimizers import MemberOptimizer, OptimizerState
from equipoise.extensions.ensemble.outputs import MemberLogs
from equipoise.parallel.batches.splitting import Splitter

__all__ = ["EnsembleRun"]


@dataclass
class EnsembleRun:
    """State of a run.

    Attributes:
        members: The members' modules and tensors.
        together: Computes the training steps of all members together.
        choice: The way in which they are run.
        logs: Logs the values of all members.
        splitter: Counts the samples of batches.
        weights: The weights of the losses in the window.
        optimizers: The optimisers, by the identity of the user's.
        loaded_optimizers: States of a checkpoint for all members but the first, for each optimiser.
        loaded_gradients: Gradients of a checkpoint, of an open window.
        computed: The members that had a loss in the present step, if it was computed together.
        is_window_open: True between the steps of a window.
    """

    members: StackedMembers
    together: Together
    choice: Choice
    logs: MemberLogs
    splitter: Splitter
    weights: WeightsOfMembers = field(default_factory=WeightsOfMembers)
    optimizers: dict[int, MemberOptimizer] = field(default_factory=dict)
    loaded_optimizers: list[Any] = field(default_factory=list)
    loaded_gradients: list[Any] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    is_window_open: bool = False

    def optimizer_of(self, optimizer: Optimizer) -> MemberOptimizer:
        """Return one of the user's optimisers for all members."""
        key = id(optimizer)
        if key not in self.optimizers:
            self.optimizers[key] = MemberOptimizer(optimizer, self.members)
        return self.optimizers[key]

    def other_optimizer_states(self) -> list[list[OptimizerState]]:
        """Return, for each optimiser, the states of all members but the first."""
        return [optimizer.member_states()[1:] for optimizer in self.optimizers.values()]

    def load_gradients(self) -> None:
        """Restore the gradients of a checkpoint that was written in an open window."""
        if self.loaded_gradients:
            self.members.load_gradients(self._window_parameters(), self.loaded_gradients)
            self.loaded_gradients = []

    def _window_parameters(self) -> list[StackedParameter]:
        """Return the parameters of the optimisers, in the order in which checkpoints have their gradients."""
        return [parameter for optimizer in self.optimizers.values() for parameter in optimizer.parameters()]

    def state(self) -> dict[str, Any]:
        """Return what the optimisers of the other members, and an open window, need to continue."""
        state: dict[str, Any] = {"optimizers": self.other_optimizer_states()}
        if self.is_window_open:
            state["gradients"] = gradient_state(self._window_parameters())
            state["weights"] = self.weights.state_dict()
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until it is needed."""
        self.loaded_optimizers = state.get("optimizers", [])
        self.loaded_gradients = state.get("gradients", [])
        if "weights" in state:
            self.weights.load_state_dict(state["weights"])
