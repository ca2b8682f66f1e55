"""Accumulated batches give the gradient of their union, whatever their sizes and weights."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import LBFGS

from equipoise import Callback, OOMRecovery, Strategy, StrategyOptimizer
from equipoise.errors import StepError
from tests.support.trainer_runs import trainer

FEATURES, CLASSES, IGNORED = 5, 3, -100
Batches = list[tuple[Tensor, Tensor]]


class Net(L.LightningModule):
    """A small classifier in float64, the mean over samples or, if `tokens`, over labels that count."""

    def __init__(self, tokens: str | None = None, optimizer: str = "adam") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES)).double()
        self.tokens, self.optimizer = tokens, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, labels = batch
        total = nn.functional.cross_entropy(self.net(features), labels, ignore_index=IGNORED, reduction="sum")
        if self.tokens is None:
            return total / len(labels)
        count = (labels != IGNORED).sum()
        loss = total / count.clamp(min=1)  # finite where nothing counts
        return {"loss": loss, "loss_weight": count if self.tokens == "tensor" else int(count)}

    def configure_optimizers(self) -> Any:
        if self.optimizer == "adam":
            return torch.optim.Adam(self.parameters(), lr=0.02)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def make_batches(sizes: list[int], masked: float = 0.0, seed: int = 0) -> Batches:
    """Batches of these sizes; a share of the labels is masked."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for size in sizes:
        labels = torch.randint(0, CLASSES, (size,), generator=generator)
        labels[torch.rand(size, generator=generator) < masked] = IGNORED
        batches.append((torch.randn(size, FEATURES, generator=generator, dtype=torch.float64), labels))
    return batches


class Loader:
    """Gives batches as they are."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


def train(module: Net, batches: Batches, **options: Any) -> Net:
    """Trains two epochs."""
    trainer(max_epochs=2, **options).fit(module, Loader(batches))
    return module


def union(windows: list[Batches]) -> Batches:
    """One batch for each window."""
    return [(torch.cat([x for x, _ in window]), torch.cat([y for _, y in window])) for window in windows]


def windows_of(batches: Batches, parts: int) -> list[Batches]:
    """The batches of each window; the last may be short."""
    return [batches[start : start + parts] for start in range(0, len(batches), parts)]


def assert_close(left: nn.Module, right: nn.Module) -> None:
    """Within 1e-12, relative to the largest weight."""
    for (name, expected), actual in zip(left.named_parameters(), right.parameters(), strict=True):
        error = (expected - actual).abs().max() / expected.abs().max()
        assert error < 1e-12, f"{name}: relative error {error:.1e}"


def both(sizes: list[int], parts: int, **options: Any) -> tuple[Net, Net]:
    """A run that accumulates, and one on the unions of the windows."""
    masked = options.pop("masked", 0.0)
    batches = make_batches(sizes, masked, seed=sum(sizes))
    for window in windows_of(batches, parts):
        window[-1][1][0] = 0  # a window of which nothing counts would step nothing
    tokens, optimizer = options.pop("tokens", None), options.pop("optimizer", "adam")
    torch.manual_seed(0)
    accumulated = Net(tokens, optimizer)
    whole = Net(tokens, optimizer)
    whole.load_state_dict(accumulated.state_dict())
    train(accumulated, batches, accumulate_grad_batches=parts, **options)
    train(whole, union(windows_of(batches, parts)), **options)
    return accumulated, whole


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    parts=st.integers(1, 5),
    tokens=st.sampled_from([None, "number", "tensor"]),
    clip=st.sampled_from([None, 0.05]),
)
def test_any_sizes_and_weights(sizes: list[int], parts: int, tokens: str | None, clip: float | None) -> None:
    """Random sizes, windows and weights; some batches have no label that counts."""
    masked = 0.0 if tokens is None else 0.5
    assert_close(*both(sizes, parts, tokens=tokens, masked=masked, gradient_clip_val=clip))


@pytest.mark.parametrize("hook", ["on_before_backward", "backward"])
def test_who_looks_sees_the_share(hook: str) -> None:
    """A loss that hooks can see is divided itself; the gradients are the same."""
    seen: list[float] = []

    class Looking(Net):
        pass

    if hook == "backward":

        def backward(self: Any, loss: Tensor) -> None:
            seen.append(float(loss.detach()))
            loss.backward()

        Looking.backward = backward
    else:
        Looking.on_before_backward = lambda self, loss: seen.append(float(loss.detach()))
    batches = make_batches([4, 4, 2, 4, 1])
    torch.manual_seed(0)
    looking, blind = Looking(), Net()
    blind.load_state_dict(looking.state_dict())
    first = float(blind.training_step(batches[0], 0).detach())
    train(looking, batches, accumulate_grad_batches=2)
    train(blind, batches, accumulate_grad_batches=2)
    assert_close(looking, blind)
    assert seen[0] == first / 2


class Searching(torch.optim.SGD):
    """Computes loss and gradients as often as it says before each step, as optimisers do that search.

    Attributes:
        losses: The losses that it received.
    """

    losses: ClassVar[list[Tensor]] = []
    times = 1

    def step(self, closure: Any = None) -> Any:
        self.losses.extend(closure() for _ in range(self.times))
        return super().step()


class SearchingTwice(Searching):
    times = 2


def with_optimizer(make: Callable[[Any], Any]) -> Net:
    net = Net()
    net.configure_optimizers = lambda: make(net.parameters())  # type: ignore[method-assign]
    return net


def test_an_optimiser_with_a_closure_receives_the_loss_of_the_last_batch_divided_by_the_batches() -> None:
    Searching.losses.clear()
    batches = make_batches([3, 5, 3, 4])
    searches = with_optimizer(lambda parameters: Searching(parameters, lr=0.1, momentum=0.9))
    expected = Net(optimizer="sgd")
    expected.load_state_dict(searches.state_dict())
    first_loss = expected.training_step(batches[1], 1).detach() / 2
    for net in (searches, expected):
        train(net, batches, accumulate_grad_batches=2)
    assert_close(searches, expected)
    assert torch.equal(Searching.losses[0], first_loss)
    assert not Searching.losses[0].requires_grad


SEARCHES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LBFGS": lambda parameters: LBFGS(parameters, lr=0.1, max_iter=3),
    "SearchingTwice": lambda parameters: SearchingTwice(parameters, lr=0.1),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_is_exact_without_a_window_and_refused_within_one(name: str) -> None:
    """The earlier batches of a window are gone when a closure computes the last one again."""
    batches = make_batches([3, 4])
    net, expected = with_optimizer(SEARCHES[name]), with_optimizer(SEARCHES[name])
    expected.load_state_dict(net.state_dict())
    train(net, batches)
    optimizer = expected.configure_optimizers()

    def closure(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = expected.training_step(batch, 0)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for batch in batches * 2:
        optimizer.step(partial(closure, batch))
    assert_close(net, expected)
    with pytest.raises(StepError, match=f"{name} computes a batch again within an accumulation window"):
        train(net, batches, accumulate_grad_batches=2)


def test_lbfgs_with_one_evaluation_accumulates() -> None:
    batches = make_batches([3, 4, 6])
    accumulated, whole = (with_optimizer(lambda parameters: LBFGS(parameters, max_iter=1)) for _ in range(2))
    whole.load_state_dict(accumulated.state_dict())
    train(accumulated, batches, accumulate_grad_batches=2)
    train(whole, union(windows_of(batches, 2)))
    assert_close(accumulated, whole)


def doubled_by_a_hook(loss: Tensor) -> Tensor:
    loss.register_hook(lambda gradient: gradient.mul_(2))
    return loss


CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "a hook in place": (doubled_by_a_hook, 2.0),
    "float32": (lambda loss: loss.float(), 1.0),
    "bfloat16": (lambda loss: loss.bfloat16(), 1.0),
}


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("name", CHANGES)
def test_a_loss_that_differs_from_others_does_not_change_their_gradients(name: str, window: int) -> None:
    change, factor = CHANGES[name]

    class Changing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return change(loss) if batch_idx in (0, 3) else loss

    class Expected(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (factor if batch_idx in (0, 3) else 1.0)

    batches = make_batches([4] * 6)
    torch.manual_seed(0)
    changing, expected = Changing(optimizer="sgd"), Expected(optimizer="sgd")
    expected.load_state_dict(changing.state_dict())
    for module in (changing, expected):
        train(module, batches, accumulate_grad_batches=window)
    assert_close(changing, expected)


def test_a_hook_on_the_loss_may_write_into_its_gradient_without_a_trace() -> None:
    class Writing(Net):
        def on_before_backward(self, loss: Tensor) -> None:
            loss.register_hook(lambda gradient: gradient.data.mul_(2))

    class Expected(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * 2.0

    torch.manual_seed(0)
    writing, expected = Writing(optimizer="sgd"), Expected(optimizer="sgd")
    expected.load_state_dict(writing.state_dict())
    for module in (writing, expected):
        train(module, make_batches([4] * 3), accumulate_grad_batches=1)
    assert_close(writing, expected)


class Clips(Callback):
    """Sets the limit of the gradients in the second batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.gradient_clip_val, trainer.gradient_clip_algorithm = 0.01, "value"


def test_a_callback_may_change_the_limit_of_gradients_during_an_epoch() -> None:
    batches = make_batches([4, 4])
    torch.manual_seed(0)
    module, expected = Net(optimizer="sgd"), Net(optimizer="sgd")
    expected.load_state_dict(module.state_dict())
    train(module, batches, callbacks=[Clips()])
    optimizer = expected.configure_optimizers()
    for number, batch in enumerate(batches * 2):
        optimizer.zero_grad()
        expected.training_step(batch, 0).backward()
        if number > 0:
            nn.utils.clip_grad_value_(expected.parameters(), 0.01)
        optimizer.step()
    assert_close(module, expected)


def test_weights_of_zero_and_none() -> None:
    """A batch of which nothing counts, and one that is skipped, leave no trace, not even in the weights."""

    class Skipping(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    batches = make_batches([4, 3, 5, 2])
    batches[2] = (batches[2][0].fill_(float("nan")), torch.full((5,), IGNORED))  # weight 0: no backward, no NaN
    torch.manual_seed(0)
    skipping, whole = Skipping("number", "sgd"), Net("number", "sgd")
    whole.load_state_dict(skipping.state_dict())
    train(skipping, batches, accumulate_grad_batches=4)
    train(whole, union([[batches[0], batches[3]]]))
    assert_close(skipping, whole)


class Odd(Net):
    """Batches whose tensors share no dimension."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch["x"], batch["y"]), batch_idx)


def odd(batches: Batches) -> list[Any]:
    """The same batches with a tensor of another length."""
    return [{"x": x, "y": y, "other": torch.zeros(13)} for x, y in batches]


def test_batch_size_of_the_module() -> None:
    """A module that knows the number of samples is asked."""

    class Knows(Odd):
        def batch_size(self, batch: Any) -> int:
            return len(batch["x"])

    batches = make_batches([4, 1, 6])
    torch.manual_seed(0)
    knows, whole = Knows(), Net()
    whole.load_state_dict(knows.state_dict())
    train(knows, odd(batches), accumulate_grad_batches=3)
    train(whole, union([batches]))
    assert_close(knows, whole)


def test_sizes_that_cannot_be_inferred() -> None:
    """Equal weights, and one warning."""
    batches = make_batches([4, 1, 6])
    torch.manual_seed(0)
    module, expected = Odd(), Net()
    expected.load_state_dict(module.state_dict())
    with pytest.warns(UserWarning, match="cannot be inferred.*batch_size.*loss_weight") as caught:
        train(module, odd(batches), accumulate_grad_batches=3)
    assert len(caught) == 1
    optimizer = expected.configure_optimizers()
    for _ in range(2):
        optimizer.zero_grad()
        for batch in batches:
            (expected.training_step(batch, 0) / 3).backward()
        optimizer.step()
    assert_close(module, expected)


def test_scaled_in_half_precision() -> None:
    """16-mixed with its scaler: unscaled and weighed as by hand, with unequal batches in the window."""
    torch.manual_seed(0)
    batches = [(x.float(), y) for x, y in make_batches([8, 8, 8, 2])]

    module, expected = Net(optimizer="sgd").float(), Net(optimizer="sgd").float()
    expected.load_state_dict(module.state_dict())
    train(module, batches, accumulate_grad_batches=4, precision="16-mixed", gradient_clip_val=0.5)
    scaler, optimizer = torch.amp.GradScaler("cpu"), expected.configure_optimizers()
    for _ in range(2):
        optimizer.zero_grad()
        for features, labels in batches:
            with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
                loss = expected.training_step((features, labels), 0)
            scaler.scale(loss * (len(labels) / 26)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    for left, right in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=2e-3, atol=2e-4)  # halves: the order of roundings differs


@pytest.mark.parametrize("without_loss", [0, 1, 2])
def test_a_batch_without_a_loss_in_half_precision(without_loss: int) -> None:
    """The other batches of the window count, also if the last one has no loss."""

    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == without_loss:
                return None
            return super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    batches = [(x.float(), y) for x, y in make_batches([4, 4, 4])]
    module, expected = Skips(optimizer="sgd").float(), Net(optimizer="sgd").float()
    expected.load_state_dict(module.state_dict())
    train(module, batches, accumulate_grad_batches=3, precision="16-mixed", gradient_clip_val=0.5)
    with_loss = [batch for index, batch in enumerate(batches) if index != without_loss]
    train(expected, with_loss, accumulate_grad_batches=2, precision="16-mixed", gradient_clip_val=0.5)
    for left, right in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=2e-3, atol=2e-4)


class Counting(StrategyOptimizer):
    """Counts the calls of each way to end a window."""

    calls: ClassVar[Counter[str]] = Counter()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["step"] += 1
        return super().step(*args, **kwargs)

    def scaled_step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["scaled_step"] += 1
        return super().scaled_step(*args, **kwargs)

    def skip(self) -> None:
        self.calls["skip"] += 1


class CountingStrategy(Strategy):
    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> StrategyOptimizer:
        return Counting(optimizer)


@pytest.mark.parametrize("callbacks", [[], [OOMRecovery()]], ids=["plain", "recovery"])
@pytest.mark.parametrize(
    ("precision", "expected"),
    [("32-true", {"step": 4}), ("16-mixed", {"scaled_step": 2, "skip": 2})],
)
def test_a_strategy_hears_of_every_window(callbacks: Any, precision: str, expected: dict[str, int]) -> None:
    """Also of one without a loss, so that strategies of several processes count the same windows in all of them."""

    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

    Counting.calls.clear()
    batches = [(x.float(), y) for x, y in make_batches([4, 4])]
    train(Skips().float(), batches, strategy=CountingStrategy(), precision=precision, callbacks=callbacks)
    assert Counting.calls == expected
