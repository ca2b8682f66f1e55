"""Notice a loss that the replicated `forward` computes itself, one for each part of a batch.

With `parallelize="forward"` the scalars of the parts are stacked, as `nn.DataParallel` stacks them. Their plain mean is
the mean over the batch only where all parts weigh the same. Parts of unequal size and masked losses do not.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.errors import StepError
from equipoise.notices import rank_zero_warn
from equipoise.tree import entries_of

__all__ = ["ScalarOutputs"]

_ADVICE = (
    "Compute the loss from the outputs, after the call of the module, or take parallelize='step', which weighs the"
    " losses of the parts."
)


class ScalarOutputs:
    """Watches the outputs of a replicated `forward` in training.

    Attributes:
        stacked: Places in the output of scalars that were stacked and that lead to parameters. Empty after the warning.
    """

    def __init__(self) -> None:
        self.stacked: list[str] = []
        self._has_looked = False

    def watch(self, outputs: Sequence[Any], gathered: Any) -> None:
        """Look at the first outputs with a graph; warn once if the loss takes a stacked scalar."""
        if self._has_looked or len(outputs) < 2 or not torch.is_grad_enabled():
            return
        self._has_looked = True
        scalars = {path for path, tensor in entries_of(outputs[0]) if tensor.ndim == 0 and tensor.requires_grad}
        for path, tensor in entries_of(gathered):
            if path in scalars:
                self.stacked.append(path)
                tensor.register_hook(self._warn)  # type: ignore[no-untyped-call]

    def check(self, loss: Tensor | None) -> None:
        """Refuse a loss that is no scalar because `forward` computed it in parts.

        Args:
            loss: The loss that the training step returned.

        Raises:
            StepError: If the loss holds one value for each part.
        """
        if loss is None or loss.numel() < 2 or not self.stacked:
            return
        raise StepError(
            f"The loss is of shape {list(loss.shape)}: `forward` computed one loss for each of {len(loss)} parts of the"
            f" batch. Their plain mean is wrong where parts differ in size or in masked entries. {_ADVICE}"
        )

    def _warn(self, gradient: Tensor) -> None:
        """Run in the backward, so only if the loss takes the scalars."""
        if not self.stacked:
            return
        places = ", ".join(f"its output{path}" for path in self.stacked)
        self.stacked = []
        rank_zero_warn(
            f"The loss takes scalars that `forward` computed for each part of the batch ({places}). Their plain mean is"
            f" the loss of the batch only where all parts weigh the same. {_ADVICE}"
        )
