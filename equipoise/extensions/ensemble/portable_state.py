"""Checkpoints of an ensemble: those of the first member, which any strategy can load, with the other members beside."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from equipoise.errors import CheckpointError, ConfigurationError
from equipoise.extensions.ensemble.members.stacked_members import own_memory
from equipoise.extensions.ensemble.run import EnsembleRun
from equipoise.strategies.portable_state import PortableState

__all__ = ["MEMBERS", "MemberStates"]

# The entry of a checkpoint with the weights of all members but the first.
MEMBERS = "ensemble_members"


class MemberStates(PortableState):
    """Full states of all members.

    Args:
        count: The number of members.
        run: The present run; None outside of one.
        states: Function that returns the weights of all members but the first; None: there are none yet.
        keep: Function that receives those of a checkpoint.
        own_state: Function that returns the further state that members need to continue.
        load_own_state: Function that restores what `own_state` has returned.
    """

    def __init__(
        self,
        count: int,
        run: EnsembleRun | None,
        states: Callable[[], list[dict[str, Any]] | None],
        keep: Callable[[list[dict[str, Any]]], None],
        own_state: Callable[[], dict[str, Any]],
        load_own_state: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(own_state, load_own_state)
        self._count = count
        self._run = run
        self._states = states
        self._keep = keep

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of the first member."""
        return own_memory(module.state_dict())

    def further_entries(self, module: nn.Module) -> dict[str, Any]:
        """Return the weights of all other members."""
        states = self._states()
        if states is None:
            return {}
        return {MEMBERS: states}

    def load_further_entries(self, checkpoint: dict[str, Any]) -> None:
        """Keep the weights of all other members for the beginning of the run.

        Raises:
            CheckpointError: If the checkpoint is of another number of members.
        """
        states = checkpoint.get(MEMBERS)
        if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
            raise CheckpointError(
                f"The checkpoint holds one model, but this ensemble has {self._count} members. Load the weights with"
                " `load_from_checkpoint` to begin a new ensemble, or take a checkpoint of one."
            )
        if len(states) + 1 != self._count:
            raise CheckpointError(
                f"The checkpoint holds an ensemble of {len(states) + 1} members, but this one has {self._count}. Take"
                f" EnsembleStrategy(members={len(states) + 1})."
            )
        self._keep(states)

    def connect_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse several optimisers; see `PortableState.connect_optimizers`.

        Raises:
            ConfigurationError: If there are several.
        """
        if len(optimizers) > 1:
            raise ConfigurationError(
                "strategy='ensemble' steps one optimiser for each member, but `configure_optimizers` returned"
                f" {len(optimizers)}. Return one, with a parameter group for each choice of options, or train the"
                " members in runs of their own."
            )

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the first member's optimiser."""
        if self._run is None:
            return super().optimizer_state(optimizer)
        return self._run.optimizer_of(optimizer).member_states()[0]

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load the states of the optimisers of all members; outside of a run, and without them, the first member's."""
        if self._run is None or not self._run.loaded_optimizers:
            super().load_optimizer_state(optimizer, state)
            return
        # There is one optimiser.
        self._run.optimizer_of(optimizer).load_member_states([state, *self._run.loaded_optimizers[0]])
