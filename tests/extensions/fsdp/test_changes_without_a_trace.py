"""Changes of weights that torch does not count, or that no tensor in shards can do, under fsdp."""

from typing import Any

import pytest
import torch

from tests.extensions.fsdp.programs import Net, errors_of, fit, fsdp, in_processes, weights_of
from tests.support.equality import assert_equal


class Divided(Net):
    """Rounds a weight between the steps, and halves one by a function of its elements within them."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.first.weight *= 100
            self.first.weight //= 2
            self.first.weight %= 3

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.last.weight.detach().apply_(lambda value: value / 2)
        return super().training_step(batch, batch_idx)


class ByElement(Net):
    """Calls a function for each element of a weight, where it is in shards."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.last.weight.data.apply_(lambda value: value / 2)


def run() -> Any:
    sharded, _ = fit(Divided, fsdp(), 2, count=24)
    return weights_of(sharded), errors_of({"by element": lambda: fit(ByElement, fsdp(), 2)})


@pytest.mark.slow
def test_weights_are_those_of_one_device_or_the_change_is_refused() -> None:
    weights, errors = in_processes(2, run)
    assert_equal(weights_of(fit(Divided, count=24)[0]), weights, 1e-12)
    assert "`apply_` calls a function for each element" in errors["by element"]
    assert "weight.copy_(function(weight))" in errors["by element"]
