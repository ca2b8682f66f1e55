"""`requires_grad` of the root's weights, where the user's step switches it by hand."""

from torch import nn

from equipoise.errors import StepError
from equipoise.interop.distributed.fully_sharded import shards_and_wholes

__all__ = ["RootSwitches"]


class RootSwitches:
    """Lets the root's shards follow its whole weights, which are the module's within a step.

    Torch does the reverse whenever it gathers the weights, so what a step has switched would be lost with them.

    Args:
        root: The module, which torch has sharded or will.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        # Of the shards, as they were at the beginning of the step or at the last look.
        self._before: list[bool] = []

    def begin(self) -> None:
        """Note how the shards are at the beginning of a step."""
        self._before = [shard.requires_grad for shard, _ in shards_and_wholes(self._root)]

    def follow(self, *, are_gathered: bool) -> None:
        """Switch the shards as the whole weights.

        Args:
            are_gathered: Whether the module has whole weights. False: it has shards, which these follow.

        Raises:
            StepError: If the shards were switched alone, which the forward cannot have noticed.
        """
        pairs = list(shards_and_wholes(self._root))
        for (shard, gathered), before in zip(pairs, self._before, strict=False):
            if not are_gathered:
                continue
            if shard.requires_grad == gathered.requires_grad:
                continue
            if shard.requires_grad != before:
                raise StepError(
                    "`requires_grad` of an optimiser's parameters was switched within `training_step`. Under"
                    " strategy='fsdp' these are shards, and the step computes with whole weights. Switch the module's"
                    " parameters, as by `self.layer.requires_grad_(False)`, or use `toggle_optimizer`."
                )
            shard.requires_grad_(gathered.requires_grad)
        self._before = [shard.requires_grad for shard, _ in pairs]
