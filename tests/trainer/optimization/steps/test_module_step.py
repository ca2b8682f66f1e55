"""A step of the user's module, called directly."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from equipoise import StepError
from equipoise.interop.lightning.self_log import bind_log
from equipoise.parallel.step_protocols import StepResult
from equipoise.trainer.logging.collection import Collection
from equipoise.trainer.optimization.steps.module_step import ModuleStep
from tests.support.contexts import training_context


class Doubling(L.LightningModule):
    """Returns twice its batch, plus the index of the batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return 2 * batch + batch_idx


class TestFunctionOfTheStrategy:
    @pytest.fixture
    def step(self) -> ModuleStep:
        return ModuleStep(training_context(Doubling()), "training_step")

    def test_without_one_the_step_is_plain(self, step: ModuleStep) -> None:
        assert step.is_plain
        assert step.run(torch.tensor(3.0)) == 6

    def test_the_forward_runs_inside_it(self, step: ModuleStep) -> None:
        batches = []

        def around(compute: Callable[[], Any], batch: Any) -> Any:
            batches.append(batch)
            return compute() + 1

        step.run_inside(around)
        assert not step.is_plain
        assert step.run(torch.tensor(3.0)) == 7
        assert batches == [torch.tensor(3.0)]

    def test_a_later_one_replaces_it(self, step: ModuleStep) -> None:
        step.run_inside(lambda compute, batch: compute() + 1)
        step.run_inside(lambda compute, batch: compute() + 10)
        assert step.run(torch.tensor(3.0)) == 16


class TestBatch:
    def test_the_method_receives_the_numbers_of_the_batch_and_the_loader(self) -> None:
        class Indexed(L.LightningModule):
            def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
                return batch, batch_idx, dataloader_idx

        step = ModuleStep(training_context(Indexed()), "validation_step")
        step.begin_batch(4)
        assert step.run("one loader") == ("one loader", 4, 0)
        step.begin_batch(5, 2)
        assert step.run("several") == ("several", 5, 2)

    def test_micro_batches_end(self) -> None:
        step = ModuleStep(training_context(Doubling()), "training_step")
        step.begin_micro_batches()
        assert step.in_micro_batches
        step.end_micro_batches()
        assert not step.in_micro_batches


class TestParts:
    def test_the_method_of_a_replica_runs(self) -> None:
        class Scaling(L.LightningModule):
            def __init__(self, factor: float) -> None:
                super().__init__()
                self.factor = factor

            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                return self.factor * batch + batch_idx

        step = ModuleStep(training_context(Scaling(1.0)), "training_step")
        step.begin_batch(1)
        result = step.run_on(Scaling(10.0), torch.tensor(3.0), 2)
        assert (result.outputs, result.weight) == (torch.tensor(31.0), 2)

    def test_losses_are_merged_by_weight_and_outputs_in_order(self) -> None:
        step = ModuleStep(training_context(Doubling()), "training_step")
        losses = [torch.tensor(value, dtype=torch.float64) for value in (1.0, 4.0)]
        results = [StepResult(losses[0], 3, losses[0]), StepResult(losses[1], 1, losses[1])]
        merged = step.merge(results, [3, 1], torch.device("cpu"), original=lambda metric: metric)
        assert merged.loss == (3 * 1.0 + 4.0) / 4
        assert merged.weight == 4
        assert list(merged.outputs.outputs) == losses

    def test_an_error_about_devices_names_the_tensor(self) -> None:
        class Broken(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(2))

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                raise RuntimeError("Expected all tensors to be on the same device, but found at least two.")

        module = Broken()
        step = ModuleStep(training_context(module), "training_step")
        batch = {"x": torch.zeros(2), "mask": torch.zeros(2, device="meta")}
        for run in (lambda: step.run(batch), lambda: step.run_on(module, batch, 2)):
            with pytest.raises(StepError, match=r"mask.* is on meta"):
                run()


class Logging(L.LightningModule):
    """Logs its batch as a mean, a sum and a maximum, and with a batch size if it has one."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("mean", batch)
        self.log("sum", batch, reduce_fx="sum")
        self.log("max", batch, reduce_fx="max")


class TestLogs:
    @pytest.fixture
    def step(self) -> ModuleStep:
        module = Logging()
        self.context = training_context(module)
        self.context.logs.enter(Collection(training=True))
        self.context.logs.begin_batch(torch.zeros(4))
        bind_log(module, [])
        return ModuleStep(self.context, "training_step")

    def run_parts(self, step: ModuleStep, weights: list[Any]) -> dict[str, float]:
        parts = [step.run_on(step.module, torch.tensor(value), 1).logged for value in (1.0, 4.0)]
        assert self.context.logs.pending == []
        step.log_together(parts, weights, torch.device("cpu"), original=lambda metric: metric)
        self.context.logs.end_batch()
        return {name: value.item() for name, value in self.context.logs.logged_metrics.items()}

    def test_values_of_parts_are_logged_once_by_their_reductions(self, step: ModuleStep) -> None:
        assert self.run_parts(step, [3, 1]) == {"mean": 1.75, "sum": 5.0, "max": 4.0}

    def test_parts_without_weight_are_left_out(self, step: ModuleStep) -> None:
        assert self.run_parts(step, [0, 2]) == {"mean": 4.0, "sum": 4.0, "max": 4.0}

    def test_a_weight_that_is_a_tensor_is_not_read(self, step: ModuleStep) -> None:
        assert self.run_parts(step, [torch.tensor(1.0), torch.tensor(3.0)]) == {"mean": 3.25, "sum": 5.0, "max": 4.0}
