"""Steps whose network has compiled blocks: they are compared in the first batch, and all processes decide alike."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from equipoise.extensions.compiled.blocks.choice import Block, choose_blocks, kind_of
from equipoise.extensions.compiled.blocks.compiled_block import BlockForward
from equipoise.extensions.compiled.comparison.costs import TrialCosts
from equipoise.extensions.compiled.interop.compiling import block_settings, why_not_compiled
from equipoise.extensions.compiled.interop.features import COMPILE_BLOCKS
from equipoise.notices import rank_zero_warn
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.optimization.steps.automatic_step import AutomaticStep
from equipoise.trainer.optimization.steps.step_extension import Context
from equipoise.trainer.state.run_state import RunState

__all__ = ["BlockSteps", "BlocksInstead", "CompiledBlocks", "deciding_context"]

# Values of a strategy's `may_compile_blocks`. Parts of a step run in threads, so blocks are compared between two
# steps; and no stage begins within a block, so only repeated ones are compiled.
_BETWEEN_STEPS = "between steps"
_REPEATED = "repeated, between steps"

# Number of batches in which blocks are compared when they are first called. Later ones stay eager.
_BATCHES_OF_TRIALS = 3


class CompiledBlocks:
    """The compiled blocks of a run's module, which is on its devices or in shards.

    Args:
        state: The settings.
        module: The user's module.
        strategy: The strategy.
        precision: The precision.
        options: Arguments of `CompiledForward`.
        only_repeated: Whether repeated blocks alone are compiled. Default: if the strategy needs it.
        costs: Notes what comparisons cost. Default: new ones.
    """

    def __init__(
        self,
        state: RunState,
        module: LightningModule,
        strategy: Strategy,
        precision: Precision,
        options: Mapping[str, Any],
        *,
        only_repeated: bool = False,
        costs: TrialCosts | None = None,
    ) -> None:
        way = getattr(strategy, "may_compile_blocks", True)
        at_once = way not in (_BETWEEN_STEPS, _REPEATED)
        self._processes = strategy.processes
        self._forward_context = precision.forward_context or nullcontext
        self._rows = state.summary_rows
        self._costs = costs or TrialCosts(strategy.root_device, self._rows, "compiled")
        self._batches = 0
        self._closing = ExitStack()
        kinds: dict[Hashable, list[Block]] = defaultdict(list)
        for block in choose_blocks(module, only_repeated=only_repeated or way == _REPEATED):
            kinds[kind_of(block.module)].append(block)
        if not kinds:
            rank_zero_warn(
                f"Compiled blocks: {type(module).__name__} stays eager, because it has no"
                f" {'repeated ' * (way == _REPEATED)}submodule with submodules and parameters of its own."
            )
        self._closing.enter_context(block_settings())
        self._forwards = [
            BlockForward(
                blocks,
                options,
                self.begin_batch,
                measured=self._costs.measured,
                at_once=at_once,
                rank=self._processes.rank if self._processes.world_size > 1 else None,
            )
            for blocks in kinds.values()
        ]
        for forward in self._forwards:
            self._closing.callback(forward.close)
        # Those that are still compared; the same in all processes.
        self._undecided = list(self._forwards)

    def begin_batch(self) -> None:
        """Decide, with all processes, about the blocks that were compared in the batch before."""
        if not self._undecided:
            return
        self._batches += 1
        if self._batches == 1:
            self._costs.begin()
            return
        # 1. What the processes have found. One without a batch has compared nothing.
        with self._forward_context(), torch.enable_grad():
            for forward in self._undecided:
                forward.compare()
        local = [(forward.is_tried, forward.reason) for forward in self._undecided]
        of_processes = self._processes.gather_objects(local)

        # 2. The decision of each kind.
        left = []
        for forward, *results in zip(self._undecided, *of_processes, strict=True):
            reasons = [reason for _, reason in results if reason is not None]
            if reasons:
                forward.decide(reasons[0])
                forward.warn()
            elif any(is_tried for is_tried, _ in results):
                forward.decide(None)
            elif self._batches <= _BATCHES_OF_TRIALS:
                left.append(forward)
            else:
                forward.decide("no training step has called it")
        self._undecided = left
        if not left:
            self._report()

    def close(self) -> None:
        """Give all blocks their own forward again."""
        self._undecided = []
        self._closing.close()

    def _report(self) -> None:
        used = [forward for forward in self._forwards if forward.reason is None]
        if not used:
            return
        programs = sum(forward.programs for forward in used)
        blocks = sum(len(forward.blocks) for forward in used)
        names = ", ".join(forward.name for forward in used)
        self._rows["compiled blocks"] = f"{blocks}, by {programs} programs"
        self._costs.report()
        rank_zero_info(
            f"Compiled blocks: {blocks}, by {programs} programs, compiled and compared in {self._costs.seconds:.1f} s:"
            f" {names}. They compute the same as the eager ones."
        )


def deciding_context(module: nn.Module) -> Context | None:
    """Return a context of a training step that decides about the blocks of a module; None if it has none.

    It is for manual optimisation, where every process has a batch in each step.
    """
    forwards = [getattr(vars(part).get("forward"), "__func__", None) for part in module.modules()]
    of_blocks = [forward for forward in forwards if isinstance(forward, BlockForward)]
    if not of_blocks:
        return None
    begin_batch = of_blocks[0].begin_batch

    @contextmanager
    def decided() -> Iterator[None]:
        begin_batch()
        yield

    return decided


class BlockSteps:
    """Compiles the blocks of a run's module, and creates the training step of each epoch.

    Args:
        state: The settings.
        module: The user's module.
        strategy: The strategy.
        precision: The precision.
    """

    def __init__(self, state: RunState, module: LightningModule, strategy: Strategy, precision: Precision) -> None:
        self._blocks: CompiledBlocks | None = None
        reason = _why_no_blocks(state)
        if reason is None:
            self._blocks = CompiledBlocks(state, module, strategy, precision, state.block_options or {})
        else:
            rank_zero_warn(f"Compiled blocks: the network stays eager, because {reason}.")

    def __call__(self, *args: Any, **kwargs: Any) -> AutomaticStep:
        """Return the step of an epoch; the arguments are those of `AutomaticStep`."""
        if self._blocks is None:
            return AutomaticStep(*args, **kwargs)
        return _BlockStep(self._blocks, *args, **kwargs)

    def close(self) -> None:
        """Give all blocks their own forward again."""
        if self._blocks is not None:
            self._blocks.close()


class BlocksInstead:
    """Repeated blocks that are compiled from now on where a step as a whole is not; none before the first batch.

    Args:
        make: Makes them.
    """

    def __init__(self, make: Callable[[], CompiledBlocks]) -> None:
        self._make = make
        # Made between two batches: a trial that is under way would set back what it puts into the blocks.
        self._blocks: CompiledBlocks | None = None

    @classmethod
    def of(
        cls, state: RunState, module: LightningModule, strategy: Strategy, precision: Precision, costs: TrialCosts
    ) -> "BlocksInstead | None":
        """Return those of a run's module; None if it has none that can be compiled."""
        # Other parts would be compiled for one call each, which nobody has asked for.
        if _why_no_blocks(state) is None and choose_blocks(module, only_repeated=True):
            parts = (state, module, strategy, precision)
            return cls(partial(CompiledBlocks, *parts, {}, only_repeated=True, costs=costs))
        return None

    def begin_batch(self) -> None:
        """Begin a batch, and decide about the blocks that were compared in the batch before."""
        if self._blocks is None:
            self._blocks = self._make()
        self._blocks.begin_batch()

    def close(self) -> None:
        """Give all blocks their own forward again."""
        if self._blocks is not None:
            self._blocks.close()


def _why_no_blocks(state: RunState) -> str | None:
    reason = why_not_compiled(COMPILE_BLOCKS)
    if reason is None and state.activation_checkpointing:
        return "activation_checkpointing computes its submodules by a forward of its own"
    return reason


class _BlockStep(AutomaticStep):
    """A training step of a network with compiled blocks.

    Args:
        blocks: The blocks. All others are arguments of `AutomaticStep`.
    """

    def __init__(self, blocks: CompiledBlocks, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin_batch = blocks.begin_batch

    def begin_batch(self, *indices: int) -> None:
        """Begin a batch of the training loader, also in a process that has none."""
        self._begin_batch()
        AutomaticStep.begin_batch(self, *indices)
