"""The forward of the blocks of one kind: eager until a trial of each has agreed, then compiled."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import nn

from equipoise.extensions.common.replaced_forwards import wants_own_forwards
from equipoise.extensions.compiled.blocks.block_trial import first_difference, separated, why_not_tried
from equipoise.extensions.compiled.blocks.choice import Block
from equipoise.extensions.compiled.comparison.failures import reason_of
from equipoise.extensions.compiled.interop.compiling import CompiledForward, CompilerError
from equipoise.notices import rank_zero_warn, warn

__all__ = ["BlockForward"]


class BlockForward:
    """The forward of blocks of one kind, which stands in their place for the time of a run.

    It becomes a bound method of each block, so that copies of a block compute with their own parameters.

    Args:
        blocks: The blocks. All have the same class and structure.
        options: Arguments of `CompiledForward`.
        begin_batch: Decides about all blocks of the network between two batches.
        measured: Context of a trial, for its time and memory.
        at_once: Whether blocks are compared in their first call. False: between two steps, while nothing else runs.
        rank: The number of this process, for messages. Default: None, it is the only one.

    Attributes:
        blocks: The blocks.
        begin_batch: Decides about all blocks of the network between two batches.
        reason: The reason why the blocks stay eager; None if there is none so far.
        is_tried: True if a block was compared.
    """

    # It stands in the place of another forward; see `has_replaced_forward`.
    replaces_forward = True
    # The name by which a bound method is pickled: what is sent elsewhere has the forward of its class.
    __name__ = "forward"

    def __init__(
        self,
        blocks: Sequence[Block],
        options: Mapping[str, Any],
        begin_batch: Callable[[], None],
        *,
        measured: Callable[[], AbstractContextManager[Any]],
        at_once: bool,
        rank: int | None = None,
    ) -> None:
        self.blocks = list(blocks)
        self.begin_batch = begin_batch
        self.reason: str | None = None
        self.is_tried = False
        self._measured = measured
        self._eager: Callable[..., Any] = type(self.blocks[0].module).forward
        self._compiled = CompiledForward(self._eager, **options)
        # By identity: the blocks that are not compared yet. Copies of a block are not.
        self._untried = {id(block.module) for block in self.blocks}
        # Calls that are compared between two steps.
        self._calls: list[tuple[nn.Module, tuple[Any, Any]]] = []
        self._at_once = at_once
        self._rank = rank
        self._may_try = True
        self._is_used = False
        for block in self.blocks:
            vars(block.module)["forward"] = MethodType(self, block.module)

    @property
    def programs(self) -> int:
        """The number of graphs that were compiled."""
        return self._compiled.programs

    @property
    def name(self) -> str:
        """The blocks, for messages."""
        first = self.blocks[0]
        name = first.name or "the module's own forward"
        more = f" and {len(self.blocks) - 1} more" if len(self.blocks) > 1 else ""
        return f"{name}{more} ({type(first.module).__name__})"

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute the forward of a block."""
        if not torch.is_grad_enabled() or wants_own_forwards():
            return self._eager(block, *args, **kwargs)
        if self._is_used:
            try:
                return self._compiled(block, *args, **kwargs)
            except CompilerError as error:
                # Other values than those of the trial.
                self.decide(str(error))
                # It may be another process than the first, which alone gives the other warnings.
                where = "" if self._rank is None else f" in process {self._rank}"
                warn(f"Compiled blocks: {self.name} stays eager{where} from now on, because {self.reason}.")
        elif self._may_try and id(block) in self._untried:
            self._untried.discard(id(block))
            if self._at_once:
                self._try(block, args, kwargs)
            else:
                self._note(block, args, kwargs)
        return self._eager(block, *args, **kwargs)

    def decide(self, reason: str | None) -> None:
        """Use the compiled forward from now on, or the eager one for a reason.

        Args:
            reason: The reason; None: the compiled forward is used.
        """
        self._may_try = False
        self._calls = []
        self._is_used = reason is None
        self._compiled.is_tried = False
        self.reason = reason

    def compare(self) -> None:
        """Compare the blocks that were called since the last time, unless they were compared in these calls."""
        calls = self._calls
        self._calls = []
        for block, (args, kwargs) in calls:
            if self._may_try:
                self._try(block, args, kwargs)

    def warn(self) -> None:
        """Warn that the blocks stay eager."""
        rank_zero_warn(f"Compiled blocks: {self.name} stays eager, because {self.reason}.")

    def close(self) -> None:
        """Give the blocks their own forward again, and release the programs."""
        self.decide("the run has ended")
        for block in self.blocks:
            if getattr(vars(block.module).get("forward"), "__func__", None) is self:
                del vars(block.module)["forward"]
        self._compiled.close()

    def _try(self, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compare the compiled forward of a block with the eager one. A reason against it ends all trials."""
        reason = why_not_tried(block, args, kwargs)
        if reason is None:
            self.is_tried = True
            reason = self._why_different(block, args, kwargs)
        self._refuse(reason)

    def _note(self, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note a call of a block, to be compared later."""
        self._refuse(why_not_tried(block, args, kwargs))
        if self._may_try:
            arguments, _ = separated(args, kwargs)
            self._calls.append((block, arguments))

    def _refuse(self, reason: str | None) -> None:
        if reason is not None:
            self.reason = reason
            self._may_try = False

    def _why_different(self, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        try:
            with self._measured(), warnings.catch_warnings():
                # Those of the compiler itself.
                warnings.simplefilter("ignore")
                difference = first_difference(block, self._eager, self._compiled, args, kwargs)
        except CompilerError as error:
            return str(error)
        except Exception as error:
            # The eager forward follows. What is wrong with the block itself is raised there.
            return reason_of(error, "compiled")
        return None if difference is None else f"a compiled one differs: {difference}"
