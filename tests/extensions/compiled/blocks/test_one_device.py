"""Compiled blocks on one device, in manual optimisation or by options: equal to eager ones, or eager with a reason."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from equipoise import PipelineStrategy, RunSummary
from equipoise.extensions.compiled.blocks.choice import choose_blocks
from tests.extensions.compiled.blocks.networks import AOT, Counting, CountingBlock, Pairs, Plain, Whole
from tests.extensions.fsdp.programs import STEP, assert_close, fit, weights_of
from tests.support.trainer_runs import refuses


class NoisyBlock(CountingBlock):
    """Draws random numbers, and keeps statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.dropout(self.norm(super().forward(hidden)), 0.3, self.training)


class Noisy(Counting):
    """Optimises by hand; a step goes twice through one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.blocks = nn.ModuleList(NoisyBlock() for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss * 0.5)
        optimizer.step()


class InRun(Callback):
    """Looks at the module in the midst of a training: its names, a copy, and what a pickle holds."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.copies: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 8:
            self.names = list(module.state_dict())
            block = module.blocks[0]
            self.copies = [copy.deepcopy(block), pickle.loads(pickle.dumps(block))]
            with torch.no_grad():
                self.expected = block.eval()(torch.ones(2, 7, dtype=torch.float64))
            block.train().calls.pop()


@pytest.fixture(autouse=True)
def reset() -> Any:
    yield
    torch.compiler.reset()


@pytest.mark.thorough
def test_manual_optimisation_with_random_numbers_equals_eager_blocks_and_keeps_names() -> None:
    looks = InRun()
    torch.manual_seed(5)
    eager, of_eager = fit(Noisy, count=48)
    numbers = torch.rand(3)
    torch.manual_seed(5)
    compiled, of_compiled = fit(Noisy, count=48, compile=AOT, callbacks=[looks, RunSummary(table=False)])
    assert torch.equal(torch.rand(3), numbers)
    assert_close(weights_of(eager), weights_of(compiled), 1e-12)
    # 2 blocks in the first of 4 steps; none in those of the second epoch.
    assert float(of_eager.callback_metrics["calls"]) == 8
    assert float(of_compiled.callback_metrics["calls"]) == 0
    # Names are those without the compiler, copies compute by themselves, and nothing is left in the blocks.
    assert looks.names == list(eager.state_dict())
    for copied in looks.copies:
        assert torch.equal(copied.eval()(torch.ones(2, 7, dtype=torch.float64)), looks.expected)
    assert all("forward" not in vars(part) for part in compiled.modules())
    assert of_compiled.run_state.summary_rows["compiled blocks"] == "2, by 1 programs"
    assert "time to first compiled step" in of_compiled.run_state.summary_rows
    assert of_compiled.run_state.summary_rows["memory to be compiled"].endswith("B at the peak")


class Checkpointed(Counting):
    """Computes the activations of its blocks again in the backward."""

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return self.last(hidden)


@pytest.mark.thorough
def test_blocks_within_activation_checkpointing_of_the_user() -> None:
    eager, of_eager = fit(Checkpointed, count=48)
    compiled, of_compiled = fit(Checkpointed, count=48, compile=AOT)
    assert_close(weights_of(eager), weights_of(compiled), 1e-12)
    # 3 blocks in each of 4 steps, twice.
    assert float(of_eager.callback_metrics["calls"]) == 24
    assert float(of_compiled.callback_metrics["calls"]) == 0


class Watched(Counting):
    """Registers a hook within a block when half of the training is done."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 4:
            self.blocks[1].inner.register_forward_hook(lambda *args: self.seen.append(self.global_step))


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "devices"), [("single_device", ["cpu"]), ("dp", ["cpu", "cpu"])])
def test_a_hook_that_is_added_in_the_run_is_called(strategy: str, devices: list[str]) -> None:
    compiled, _ = fit(Watched, strategy, len(devices), count=48, batch_size=STEP, compile=AOT)
    # Those of evaluations, which are eager, come on top.
    assert {4, 5, 6, 7} <= set(compiled.seen)


# What stays eager


class HookedInside(Plain):
    def on_fit_start(self) -> None:
        self.blocks[1].up.register_forward_hook(lambda *args: None)


class Cache:
    """An object that a forward may change."""


class CachingBlock(CountingBlock):
    def forward(self, hidden: Tensor, cache: Any = None) -> Tensor:
        return super().forward(hidden)


class Caching(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CachingBlock() for _ in range(2))

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        for block in self.blocks:
            hidden = block(hidden, cache=Cache())
        return self.last(hidden)


class Elsewhere:
    """Counts calls of all blocks, outside of them."""

    def __init__(self) -> None:
        self.calls = 0


class ChangingBlock(CountingBlock):
    def __init__(self, elsewhere: Elsewhere) -> None:
        super().__init__()
        self.elsewhere = elsewhere

    def forward(self, hidden: Tensor) -> Tensor:
        self.elsewhere.calls += 1
        return hidden + super().forward(hidden) / self.elsewhere.calls


class Changing(Plain):
    """Its blocks compute with a number that each call changes."""

    def __init__(self) -> None:
        super().__init__()
        elsewhere = Elsewhere()
        self.blocks = nn.ModuleList(ChangingBlock(elsewhere) for _ in range(2))


class OwnBlock(CountingBlock):
    """Changes an attribute, and a list of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.inner.seen = []  # type: ignore[assignment]

    def forward(self, hidden: Tensor) -> Tensor:
        self.number += 1
        self.inner.seen.append(hidden.shape[0])  # type: ignore[operator, union-attr]
        return hidden + super().forward(hidden) / self.number


class Own(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OwnBlock() for _ in range(2))


@pytest.mark.thorough
def test_a_comparison_sets_back_what_a_block_changes_in_itself() -> None:
    eager, _ = fit(Own, count=48, max_epochs=1)
    compiled, trainer = fit(Own, count=48, max_epochs=1, compile=AOT)
    assert trainer.run_state.summary_rows["compiled blocks"].startswith("2, by ")
    assert_close(weights_of(eager), weights_of(compiled), 1e-12)
    for block, other in zip(eager.blocks, compiled.blocks, strict=True):
        assert (block.number, block.inner.seen) == (other.number, other.inner.seen)


class Exchanging(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.SyncBatchNorm(7)) for _ in range(2))


class OtherGradient(CountingBlock):
    def forward(self, hidden: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return super().forward(hidden.detach()) + hidden - hidden.detach()
        return super().forward(hidden)


class Wrong(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OtherGradient() for _ in range(2))


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (HookedInside, {}, r"blocks.0 and 2 more \(Block\) stays eager, because there is a hook on its submodule up"),
        (Caching, {}, r"blocks.0 and 1 more \(CachingBlock\) stays eager, because it receives a Cache"),
        (Changing, {}, r"blocks.0 and 1 more .* its Python code changes L\['self'\].elsewhere.calls, which a"),
        (Exchanging, {}, r"blocks.0 and 1 more .* its SyncBatchNorm 1 exchanges"),
        (Wrong, {}, r"blocks.0 and 1 more .* differs: the gradient of its input 0 differs by \d.\de[+-]\d\d of the"),
        (Plain, {"activation_checkpointing": ["blocks.*"]}, "activation_checkpointing computes its submodules"),
    ],
)
def test_a_block_that_cannot_be_compiled_stays_eager_with_the_reason(
    kind: Callable[[], Any], options: dict[str, Any], reason: str
) -> None:
    eager, _ = fit(kind, count=48)
    with pytest.warns(UserWarning, match=reason):
        compiled, _ = fit(kind, count=48, compile=AOT, **options)
    assert_close(weights_of(eager), weights_of(compiled), 1e-12)


# A step that cannot be compiled as a whole


class Printing(Counting):
    """Its step does something at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)


class Looking(Callback):
    """Has a hook between forward and backward."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        pass


@pytest.mark.thorough
@pytest.mark.usefixtures("lowering")
@pytest.mark.parametrize(
    ("kind", "callbacks", "eager_calls", "reason"),
    [
        # Two steps of the shape, and the trial, come first. The compiler's own call is not counted.
        (Printing, [], 4, r"Compiled steps: the training step stays eager, because its Python code changes .*steps"),
        (Counting, [Looking()], 1, r"Compiled steps: the training step stays eager, because the hook on_before_backw"),
    ],
)
def test_repeated_blocks_of_a_step_that_stays_eager_are_compiled(
    kind: Callable[[], Any],
    callbacks: list[Callback],
    eager_calls: int,
    reason: str,
) -> None:
    eager, _ = fit(kind, count=96, max_epochs=1)
    with pytest.warns(UserWarning, match=reason):
        compiled, trainer = fit(kind, count=96, max_epochs=1, callbacks=callbacks, compile=True)
    assert_close(weights_of(eager), weights_of(compiled), 1e-12)
    assert trainer.run_state.summary_rows["compiled blocks"] == "3, by 1 programs"
    assert float(trainer.callback_metrics["calls"]) == 3 * eager_calls
    assert all("forward" not in vars(part) for part in compiled.modules())


# The choice


def names_of(*parts: nn.Module, **options: Any) -> list[str]:
    module = parts[0] if len(parts) == 1 else nn.ModuleDict({f"part{n}": part for n, part in enumerate(parts)})
    return [block.name for block in choose_blocks(module, **options)]


def test_repeated_blocks_are_chosen_or_else_whole_parts() -> None:
    assert names_of(Pairs()) == [f"blocks.{number}" for number in range(4)]
    # No repeated blocks: the whole part; no parts: the module's own forward.
    assert names_of(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), nn.Linear(2, 2)) == ["part0"]
    assert names_of(Whole()) == [""]
    # A pipeline cuts all that is not repeated.
    assert names_of(Whole(), only_repeated=True) == []
    assert len(names_of(Plain(), only_repeated=True)) == 3
    # A block that occurs twice, and one that has a forward of its own already.
    shared = nn.Sequential(nn.Linear(2, 2))
    own = nn.Sequential(nn.Linear(2, 2))
    own.forward = lambda value: value  # type: ignore[method-assign]
    assert names_of(nn.ModuleList([shared, shared, own]), nn.Identity()) == ["part0.0"]


# What is refused


NO_BLOCKS = "compile=True compiles blocks of the network, but strategy='{}'"
WHOLE = "compile='auto' measures whole steps, but "
NOT_TAKEN = "compile: torch does not take these options. "


@pytest.mark.parametrize(
    ("kind", "strategy", "processes", "chosen", "words"),
    [
        (Plain, "ensemble", 1, True, [NO_BLOCKS.format("ensemble")]),
        (Plain, "hogwild", 2, True, [NO_BLOCKS.format("hogwild")]),
        (Plain, "virtual", 2, True, [NO_BLOCKS.format("virtual")]),
        (Plain, PipelineStrategy(engine="processes"), 2, True, [NO_BLOCKS.format("pipeline")]),
        (Plain, PipelineStrategy(schedule="interleaved_zero_bubble"), 2, True, [NO_BLOCKS.format("pipeline")]),
        (Noisy, "single_device", 1, "auto", [WHOLE + "the module optimises by"]),
        (Plain, "ddp", 2, "auto", [WHOLE + "strategy='ddp'"]),
        (Plain, "pipeline", 2, "auto", [WHOLE + "strategy='pipeline'"]),
        (Plain, "single_device", 1, "inductor", ['compile must be "auto", True or False']),
        (Plain, "single_device", 1, {"mode": "default"}, ["compile has no option 'mode'. Its options are backend,"]),
        (Plain, "single_device", 1, {"backend": 3}, ["compile: backend must be"]),
        (Plain, "single_device", 1, {"dynamic": "yes"}, ["compile: dynamic must be"]),
        (Plain, "single_device", 1, {"options": [1]}, ["compile: options must be"]),
        (Plain, "single_device", 1, {"backend": "indoctor"}, ["compile: there is no backend 'indoctor'"]),
        (Plain, "single_device", 1, {"options": {"max_autotun": True}}, [NOT_TAKEN, "max_autotun"]),
        (Plain, "single_device", 1, {"options": {"max_autotune": "yes"}}, [NOT_TAKEN, "max_autotune"]),
        (
            *(Plain, "single_device", 1, {**AOT, "options": {"max_autotune": True}}),
            ["compile: options are settings of the backend 'inductor', not of"],
        ),
    ],
)
def test_strategies_without_blocks_and_unknown_options_are_refused(
    kind: Any, strategy: Any, processes: int, chosen: Any, words: list[str]
) -> None:
    refuses(lambda: fit(kind, strategy, processes, compile=chosen), *words)
