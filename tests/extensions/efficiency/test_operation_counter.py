"""Counting cannot make a step fail, nor change what it computes."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from equipoise import Efficiency
from equipoise.extensions.efficiency.operation_counter import OperationCounter
from tests.extensions.efficiency.runs import IN, OF_A_SAMPLE, Net, fitted, loader


class Jagged(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        nested = torch.nested.nested_tensor([batch[0][:3], batch[0][3:]], layout=torch.jagged)
        return self.net(nested).values().square().mean()


class Branches(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        def sine(inputs: torch.Tensor) -> torch.Tensor:
            return self.net(inputs).sin()

        def cosine(inputs: torch.Tensor) -> torch.Tensor:
            return self.net(inputs).cos()

        result: torch.Tensor = torch.cond(batch[0].sum() > 0, sine, cosine, (batch[0],))
        # Without Dynamo the branch would have no gradient, and the rest would.
        return result.square().mean() + self.net[0](batch[0]).mean()


class Loops(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        def goes_on(count: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return count < 3

        def shrink(count: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return count + 1, values * 0.9

        with torch.no_grad():
            _, values = while_loop(goes_on, shrink, (torch.tensor(0), batch[0]))
        return self.net(values).square().mean()


class CompiledPart(Net):
    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(self.net, backend="aot_eager", fullgraph=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.compiled(batch[0]).square().mean()


def weights_after(module_class: type[Net], callback: Efficiency | None) -> torch.Tensor:
    torch.manual_seed(3)
    module = module_class().double()
    data = loader(24, 8)
    data.dataset.tensors = (torch.randn(24, IN, dtype=torch.float64),)  # type: ignore[attr-defined]
    fitted(callback, module, data, callbacks=[callback] if callback else [], max_epochs=1)  # type: ignore[arg-type]
    return torch.cat([each.detach().flatten() for each in module.parameters()])


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("module_class", "reason"),
    [
        (Jagged, "the step computes products of the tensor class NestedTensor"),
        (Branches, "the step computes 'cond', whose parts are not seen"),
        (Loops, "the step computes 'while_loop', whose parts are not seen"),
        (CompiledPart, ""),
    ],
)
def test_nested_tensors_cond_and_loops_are_not_counted_and_compute_the_same(module_class: type[Net], reason: str):
    callback = Efficiency()
    assert torch.equal(weights_after(module_class, callback), weights_after(module_class, None))
    assert callback.why_not_counted == reason


def test_a_compiled_part_is_counted():
    callback = Efficiency()
    fitted(callback, CompiledPart(), loader(40, 8))
    assert callback.usage.operations == 7 * 8 * OF_A_SAMPLE


def test_an_error_of_a_formula_is_a_reason(monkeypatch: pytest.MonkeyPatch):
    def broken(*args: Any, **kwargs: Any) -> int:
        raise ValueError("no such shape")

    monkeypatch.setitem(flop_registry, torch.ops.aten.mm, broken)
    with OperationCounter() as counter:
        product = torch.eye(3) @ torch.eye(3)
    assert torch.equal(product, torch.eye(3))
    assert counter.why_not == "the formula of aten.mm.default raised ValueError: no such shape"


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_it_counts_as_the_counter_of_torch(context: Any):
    net = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    inputs = torch.randn(3, 5, 16)
    with context(), OperationCounter() as counter:
        net(inputs)
    with context(), FlopCounterMode(display=False) as expected:
        net(inputs)
    assert counter.count == expected.get_total_flops() > 0


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_of_a_cpu_counts_as_its_products(is_causal: bool):
    """Torch's counter knows no formula of the kernel that a CPU takes, but those of the products that it replaces."""
    queries, keys, values = (torch.randn(3, 2, 5, 8, requires_grad=True) for _ in range(3))
    counts = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(backend), OperationCounter() as counter:
            attended = scaled_dot_product_attention(queries, keys, values, is_causal=is_causal)
            forward = counter.count
            attended.sum().backward()
        assert not counter.why_not
        counts.append((forward, counter.count))
    # Two products in the forward; the kernel's backward computes the first of them again.
    product = 2 * 3 * 2 * 5 * 5 * 8
    assert counts == [(2 * product, 7 * product), (2 * product, 6 * product)]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="Recurrent layers are products of matrices.")
def test_products_without_a_formula_are_named():
    with OperationCounter() as counter:
        nn.LSTM(4, 4)(torch.randn(3, 2, 4))
    assert counter.why_not == "the step computes 'mkldnn_rnn_layer', of which torch has no formula"
