"""Automatic optimisation, called directly batch by batch."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import LBFGS, SGD, Optimizer

from equipoise import Callback, ConfigurationError, StepError
from equipoise.parallel.batches.splitting import Splitter
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.strategy_optimizer import StrategyOptimizer
from equipoise.trainer.optimization.automatic import AutomaticOptimization
from equipoise.trainer.optimization.steps.batch_weight import BatchWeight
from equipoise.trainer.runtime.run_context import RunContext
from tests.support.contexts import training_context

RATE = 0.5


class Linear(L.LightningModule):
    """The mean of weight · x over the samples of a batch, so that its gradient is the mean of x.

    Args:
        skipped: Numbers of batches for which `training_step` returns None.
    """

    def __init__(self, skipped: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.skipped = skipped
        self.calls: list[str] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        self.calls.append("training_step")
        return None if batch_idx in self.skipped else (batch @ self.weight).mean()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.calls.append("zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.calls.append("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append("before_step")


class Curve(Linear):
    """A quadratic loss around (1, -2), for optimisers that search."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.calls.append("training_step")
        return (self.weight - torch.tensor([1.0, -2.0])).square().sum()


class Setup:
    """An optimisation with its window and its context.

    Args:
        module: The module.
        optimizer: The optimiser. Default: SGD.
        parts: The number of batches of a window.
        scaler: The scaler of the loss. Default: none.
        arguments: Arguments of the Trainer.
    """

    def __init__(
        self,
        module: L.LightningModule,
        optimizer: Optimizer | None = None,
        parts: int = 1,
        scaler: GradScaler | None = None,
        **arguments: Any,
    ) -> None:
        self.module = module
        self.optimizer = SGD(module.parameters(), lr=RATE) if optimizer is None else optimizer
        self.context: RunContext = training_context(module, self.optimizer, **arguments)
        self.context.precision.scaler = scaler
        self.window = AccumulationWindow(parts)
        self.skips = 0
        self.optimization = self._bind()

    def _bind(self) -> AutomaticOptimization:
        optimization = AutomaticOptimization(
            self.context,
            self.window,
            BatchWeight(Splitter(self.module)),
            skip_backward=False,
            count_skipped=self._count_skipped,
        )
        # A LightningOptimizer finds it there.
        self.context.hooks.trainer.parts.fit_loop.optimization = optimization
        return optimization

    def _count_skipped(self) -> None:
        self.skips += 1

    def run(self, *batches: Tensor) -> None:
        """Run batches; windows end with every `parts`th batch and with the last one."""
        for index, batch in enumerate(batches):
            last = (index + 1) % self.window.parts == 0 or index + 1 == len(batches)
            self.optimization((batch,), index, last)


def samples(*rows: tuple[float, float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


FIRST = samples((1.0, 2.0), (3.0, -1.0), (2.0, 5.0))
SECOND = samples((-4.0, 1.0))
THIRD = samples((0.5, 0.25), (1.5, 8.0))


class TestWindow:
    def test_one_batch_is_not_weighed(self) -> None:
        setup = Setup(Linear())
        setup.run(FIRST)
        assert not setup.window.has_reference


class TestClipping:
    def test_a_callback_may_change_the_limit_during_an_epoch(self) -> None:
        module = Linear()
        setup = Setup(module)
        setup.context.state.gradient_clip_val = 0.125
        setup.context.state.gradient_clip_algorithm = "value"
        setup.run(FIRST)
        torch.testing.assert_close(module.weight.data, torch.full_like(module.weight, -RATE * 0.125))


class TestClosure:
    def test_an_optimiser_that_searches_computes_a_batch_several_times(self) -> None:
        module = Curve()
        setup = Setup(module, LBFGS(module.parameters(), max_iter=10))
        setup.run(FIRST)
        count = module.calls.count("training_step")
        assert count > 1
        assert module.calls == ["training_step", "zero_grad", "backward", "before_step"] * count
        expected = torch.tensor([1.0, -2.0], dtype=torch.float64)
        torch.testing.assert_close(module.weight.data, expected, rtol=1e-6, atol=0)

    def test_the_window_counts_such_a_batch_once(self) -> None:
        module = Curve()
        totals: list[Any] = []

        class Watching(SGD):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                for _ in range(3):
                    closure()
                    totals.append(setup.window.total)

        setup = Setup(module, Watching(module.parameters(), lr=RATE), parts=2)
        setup.run(FIRST, SECOND)
        assert totals == [len(FIRST) + len(SECOND)] * 3

    def test_a_loss_in_a_closure_is_divided_by_the_parts_of_the_window(self) -> None:
        losses: list[Any] = []

        class Watching(SGD):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                losses.append(closure())

        module = Curve()
        Setup(module, Watching(module.parameters(), lr=RATE), parts=2).run(FIRST, SECOND)
        torch.testing.assert_close(losses, [torch.tensor(2.5, dtype=torch.float64)])
        assert not losses[0].requires_grad

    def test_an_override_that_runs_no_closure_is_refused(self) -> None:
        class Idle(Linear):
            def optimizer_step(self, *arguments: Any, **options: Any) -> None:
                pass

        setup = Setup(Idle())
        with pytest.raises(Exception, match="did not run its closure"):
            setup.run(FIRST)
        assert setup.context.state.progress.optimizer_step.current.completed == 1


class TestScaler:
    def scaler(self) -> GradScaler:
        return GradScaler("cpu", init_scale=8.0)

    def test_a_window_without_any_loss_is_no_step_of_the_scaler(self) -> None:
        module = Linear(skipped=(0,))
        scaler = self.scaler()
        Setup(module, scaler=scaler).run(FIRST)
        assert torch.equal(module.weight.data, torch.zeros_like(module.weight))
        assert scaler.get_scale() == 8.0
        assert module.calls == ["training_step", "zero_grad", "before_step"]

    def test_an_optimiser_that_searches_is_refused(self) -> None:
        module = Curve()
        with pytest.raises(ConfigurationError, match="LBFGS cannot take"):
            Setup(module, LBFGS(module.parameters()), scaler=self.scaler())


class TestOptimiserOfTheStrategy:
    def test_it_is_set_up_once_and_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        set_up: list[Optimizer] = []

        class Halving(StrategyOptimizer):
            def step(self, closure: Any = None, **options: Any) -> Any:
                for group in self.optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad /= 2
                return super().step(closure, **options)

        def setup_optimizer(optimizer: Optimizer) -> StrategyOptimizer:
            set_up.append(optimizer)
            return Halving(optimizer)

        module = Linear()
        setup = Setup(module)
        monkeypatch.setattr(setup.context.strategy, "setup_optimizer", setup_optimizer)
        setup.optimization = setup._bind()
        setup.run(FIRST, SECOND)
        assert set_up == [setup.optimizer]
        expected = -RATE / 2 * (FIRST.mean(0) + SECOND.mean(0))
        torch.testing.assert_close(module.weight.data, expected, rtol=1e-15, atol=0)
        # The user's optimiser stays the object that the user sees.
        assert setup.context.state.optimizers == [setup.optimizer]


class TestReturnValues:
    @pytest.mark.parametrize(
        ("returned", "message"),
        [
            (3.0, "must return a tensor, a dictionary with the key 'loss', or None"),
            ({"logits": 1}, "without 'loss'; its keys are"),
            ({"loss": 3.0}, "must return the loss as a tensor with its graph"),
        ],
    )
    def test_others_are_refused(self, returned: Any, message: str) -> None:
        class Returning(Linear):
            def training_step(self, batch: Tensor, batch_idx: int) -> Any:
                return returned

        with pytest.raises(StepError, match=message):
            Setup(Returning()).run(FIRST)

    def test_a_weight_of_the_user_replaces_the_number_of_samples(self) -> None:
        class Weighing(Linear):
            def training_step(self, batch: Tensor, batch_idx: int) -> Any:
                return {"loss": (batch @ self.weight).mean(), "loss_weight": (3, 1)[batch_idx]}

        module = Weighing()
        Setup(module, parts=2).run(SECOND, THIRD)
        expected = -RATE * (3 * SECOND.mean(0) + THIRD.mean(0)) / 4
        torch.testing.assert_close(module.weight.data, expected, rtol=1e-15, atol=0)


@pytest.mark.usefixtures("quick_collections")
class TestOutOfMemory:
    class Splits(Callback):
        """Splits a batch in two when memory runs out."""

        def on_out_of_memory(self, trainer: Any, pl_module: Any, event: Any) -> int:
            self.event = event
            return 2

    class Large(Linear):
        """Has memory for two samples."""

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            if len(batch) > 2:
                self.calls.append("out_of_memory")
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().training_step(batch, batch_idx)

    def test_the_next_window_is_not_weighed_again(self) -> None:
        setup = Setup(self.Large(), callbacks=[self.Splits()])
        setup.run(FIRST)
        assert not setup.window.has_reference
        assert not setup.optimization.step.in_micro_batches
