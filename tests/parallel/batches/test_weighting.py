"""The weighted loss gives Σ wᵢgᵢ / Σ wᵢ; the bits of `(loss / n).backward()` for equal parts in full windows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise.interop.torch import foreach
from equipoise.parallel.batches.weighting import AccumulationWindow, Weight, weighted_mean
from tests.support.equality import assert_equal

KINDS: dict[str, Callable[[float], Weight]] = {
    "int": int,
    "float": float,
    "tensor": torch.tensor,
    "float32 tensor": lambda w: torch.tensor(w, dtype=torch.float32),
    "int64 tensor": lambda w: torch.tensor(int(w)),
    "0-dim of a sum": lambda w: torch.ones(int(w), dtype=torch.bfloat16).float().sum(),
}
CPU = torch.device("cpu")
kinds = st.sampled_from(list(KINDS))
seeds = st.integers(0, 2**32 - 1)


def make_model(seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def losses(model: nn.Module, x: Tensor) -> Tensor:
    """One loss per sample."""
    return model(x).pow(2).sum(dim=1)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def run_window(
    model: nn.Module, window: AccumulationWindow, parts: list[Tensor], weights: list[Weight]
) -> list[Tensor]:
    """Return the result of a step for a window."""
    model.zero_grad()
    for x, weight in zip(parts, weights, strict=True):
        if not isinstance(weight, Tensor) and weight == 0:
            continue  # known on the host: no backward
        factor = window.add(weight)
        loss = losses(model, x).sum() / max(len(x), 1)
        (loss if factor is None else loss * factor).backward()
    factor = window.correction()
    if factor is not None:
        foreach.multiply_([p.grad for p in model.parameters() if p.grad is not None], factor)
    window.reset()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


@settings(deadline=None)
@given(
    seed=seeds,
    nominal=st.integers(1, 6),
    windows=st.lists(st.lists(st.tuples(st.integers(0, 9), kinds), min_size=1, max_size=6), min_size=1, max_size=4),
)
@example(seed=0, nominal=4, windows=[[(0, "int")], [(0, "int64 tensor")], [(3, "int"), (0, "tensor")]])
@example(seed=0, nominal=2, windows=[[(0, "tensor"), (0, "tensor")], [(5, "float"), (2, "tensor")]])
def test_windows_of_unequal_parts_equal_one_device(
    seed: int, nominal: int, windows: list[list[tuple[int, str]]]
) -> None:
    """Parts of 0 to 9 samples, weights of every kind mixed, short and long windows, one window for all."""
    model, window = make_model(seed), AccumulationWindow(nominal)
    for sizes in windows:
        parts = [torch.randn(size, 3, dtype=torch.float64) for size, _ in sizes]
        actual = run_window(model, window, parts, [KINDS[kind](size) for size, kind in sizes])
        model.zero_grad()
        whole = torch.cat(parts)
        (losses(model, whole).sum() / max(len(whole), 1)).backward()
        assert_equal(gradients(model), actual, 1e-12)


@settings(deadline=None)
@given(
    seed=seeds,
    parts=st.integers(1, 16),
    weight=st.integers(1, 10**6) | st.floats(1e-3, 1e3),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    windows=st.integers(1, 3),
    as_tensors=st.booleans(),
)
@example(seed=0, parts=10, weight=0.1, dtype=torch.float64, windows=2, as_tensors=False)  # 0.1 added ten times is not 1
def test_equal_parts_in_full_windows_to_the_bit(
    seed: int, parts: int, weight: float, dtype: torch.dtype, windows: int, as_tensors: bool
) -> None:
    assume(not as_tensors or isinstance(weight, int))
    model, window = make_model(seed, dtype), AccumulationWindow(parts)
    weights: list[Weight] = [torch.tensor(weight) if as_tensors else weight] * parts
    for _ in range(windows):
        batches = [torch.randn(4, 3).to(dtype) for _ in range(parts)]
        actual = run_window(model, window, batches, weights)
        model.zero_grad()
        for x in batches:
            loss = losses(model, x).sum() / len(x)
            (loss / parts).backward()
        assert all(map(torch.equal, actual, gradients(model)))


def test_nothing_is_multiplied_where_nothing_has_to_be() -> None:
    window = AccumulationWindow()
    assert window.add(7) is None
    assert window.correction() is None
    window.reset()
    assert window.correction() is None  # a window in which every part was skipped
    window = AccumulationWindow(parts=4)
    assert [window.add(7) for _ in range(4)] == [0.25] * 4
    assert window.correction() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_the_total_weight_is_not_rounded(dtype: torch.dtype) -> None:
    weights = [*[torch.tensor(120, dtype=dtype)] * 3, torch.tensor(1, dtype=dtype)]
    window = AccumulationWindow(parts=3)
    for weight in weights:
        window.add(weight)
    assert window.total == 361  # bfloat16 would say 360, int8 105
    window.reset()
    for _ in range(1000):
        window.add(torch.tensor(127, dtype=dtype))
    assert window.total == 127_000
    mean, total = weighted_mean([torch.tensor(1.0)] * 4, weights, CPU)
    assert (mean.item(), float(total)) == (pytest.approx(1, rel=1e-6), 361)


def test_large_weights_do_not_overflow_half_precision() -> None:
    window = AccumulationWindow(parts=2)
    loss = torch.tensor(3.0, dtype=torch.float16)
    weights = [10**6, 3 * 10**6]
    assert [(loss * window.add(weight)).item() for weight in weights] == [1.5, 4.5]
    values = [torch.tensor(value, dtype=torch.float16) for value in (3.0, 5.0)]
    for given_weights in (weights, [torch.tensor(weight) for weight in weights]):
        mean, _ = weighted_mean(values, given_weights, CPU)
        assert (mean.dtype, mean.item()) == (torch.float16, 4.5)


def test_the_graph_of_a_weight_is_let_go() -> None:
    window = AccumulationWindow()
    weight = torch.tensor(2.0, requires_grad=True) * 2
    mean, total = weighted_mean([torch.tensor(3.0), torch.tensor(1.0)], [weight, 4], CPU)
    assert mean.item() == 2
    assert not any(value.requires_grad for value in (window.add(weight), window.total, mean, total))


@settings(deadline=None)
@given(seen=st.integers(0, 2), kind=kinds, later=kinds)
def test_factors_after_a_resumption_have_the_same_bits(seen: int, kind: str, later: str) -> None:
    """Wherever in a window the checkpoint was saved, and whatever weights the steps have after it."""
    window, resumed = AccumulationWindow(parts=3), AccumulationWindow(parts=3)
    for weight in (7, 5, 7):
        window.add(KINDS[kind](weight))
    window.reset()
    for weight in (7, 6)[:seen]:
        window.add(KINDS[kind](weight))
    state = window.state_dict()
    assert not any(isinstance(value, Tensor) for value in state.values())
    resumed.load_state_dict(state)
    for weight in (7, 4, 3):
        expected, actual = window.add(KINDS[later](weight)), resumed.add(KINDS[later](weight))
        assert float(1 if actual is None else actual) == float(1 if expected is None else expected)
    assert float(resumed.correction() or 1) == float(window.correction() or 1)
    assert float(resumed.total) == float(window.total)


# The mean of parts that were computed apart


@settings(deadline=None)
@given(
    seed=seeds,
    parts=st.lists(st.tuples(st.integers(0, 5), kinds, st.booleans()), min_size=1, max_size=5),
)
def test_the_mean_of_parts_is_that_of_the_whole(seed: int, parts: list[tuple[int, str, bool]]) -> None:
    """With its gradients; parts of weight 0, and those that were skipped, are as if they were not there."""
    model = make_model(seed)
    inputs = [torch.randn(size, 3, dtype=torch.float64) for size, _, _ in parts]
    means = [losses(model, x).sum() / max(len(x), 1) for x in inputs]
    values = [None if skipped else mean for mean, (_, _, skipped) in zip(means, parts, strict=True)]
    weights = [KINDS[kind](size) for size, kind, _ in parts]
    mean, total = weighted_mean(values, weights, CPU)
    kept = [x for x, (_, _, skipped) in zip(inputs, parts, strict=True) if not skipped]
    whole = torch.cat([torch.zeros(0, 3, dtype=torch.float64), *kept])
    assert float(total) == len(whole)
    if mean is None:
        assert len(whole) == 0
        return
    assert mean.dtype is torch.float64
    expected = losses(model, whole).sum() / max(len(whole), 1)
    mean.backward()
    actual = gradients(model)
    model.zero_grad()
    expected.backward()
    assert_equal([expected.detach(), gradients(model)], [mean.detach(), actual], 1e-12)


def test_parts_known_to_weigh_nothing_are_not_looked_at() -> None:
    """A masked mean over nothing is no number."""
    nan = torch.tensor(torch.nan)
    mean, total = weighted_mean([nan, torch.tensor(2.0), None], [0, 3, 5], CPU)
    assert (mean.item(), total) == (2, 3)
    assert weighted_mean([nan, None], [0.0, 2], CPU) == (None, 0)


def test_a_mean_lies_on_the_device_that_was_asked_for() -> None:
    """The meta device stands for any other."""
    meta = torch.device("meta")
    for weight in (2, torch.tensor(2), torch.tensor(2, device="meta")):
        mean, _ = weighted_mean([torch.tensor(1.0), torch.tensor(2.0, device="meta")], [1, weight], meta)
        assert mean.device == meta


@pytest.mark.parametrize("weight", [4, torch.tensor(4.0)])
def test_a_piece_counts_for_its_share_of_the_batch(weight: Any) -> None:
    """Also where it is the first part ever seen: the factor is never above that of the whole batch."""
    window = AccumulationWindow()
    window.micro_batch = (4, 11)
    factors = [float(window.add(weight)), float(window.add(weight)), float(window.add(weight * 3 / 4))]
    assert factors == pytest.approx([4 / 11, 4 / 11, 3 / 11])
    assert window.correction() in (None, 1)
    window.reset()
    window.micro_batch = None
    assert float(window.add(weight * 11 / 4) or 1) == 1
