"""Accumulated batches give the gradient of their union, whatever their sizes and weights."""

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import LBFGS
from torch.utils.data import DataLoader

from equipoise import Callback, Strategy, StrategyOptimizer
from equipoise.errors import StepError
from tests.support.equality import assert_equal
from tests.support.trainer_runs import trainer

FEATURES, CLASSES, IGNORED = 5, 3, -100
Batches = list[tuple[Tensor, Tensor]]


class Net(L.LightningModule):
    """A small classifier in float64, the mean over samples or, if `tokens`, over labels that count."""

    def __init__(self, optimizer: str = "sgd", tokens: str | None = None) -> None:
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


def net_with(step: Callable[[Any, int], Any]) -> Net:
    """A net that returns `step(loss, batch_idx)`."""

    class Changed(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return step(super().training_step(batch, batch_idx), batch_idx)

    return Changed()


def make_batches(sizes: list[int], masked: float = 0.0, dtype: torch.dtype = torch.float64) -> Batches:
    """Batches of these sizes; a share of the labels is masked."""
    generator = torch.Generator().manual_seed(sum(sizes))
    batches = []
    for size in sizes:
        labels = torch.randint(0, CLASSES, (size,), generator=generator)
        labels[torch.rand(size, generator=generator) < masked] = IGNORED
        batches.append((torch.randn(size, FEATURES, generator=generator, dtype=torch.float64).to(dtype), labels))
    return batches


def unions(batches: Batches, window: int) -> Batches:
    """One batch for each window; the last may be short."""
    windows = [batches[start : start + window] for start in range(0, len(batches), window)]
    return [(torch.cat([x for x, _ in each]), torch.cat([y for _, y in each])) for each in windows]


def train(module: Net, batches: Any, **options: Any) -> None:
    """Train two epochs."""
    trainer(max_epochs=2, **options).fit(module, DataLoader(batches, batch_size=None))


def train_by_hand(module: Net, batches: Any, step: Callable[[Any, Any, int], None]) -> None:
    """The same by a loop that calls `step(optimizer, batch, number of the batch)`."""
    optimizer = module.configure_optimizers()
    for number, batch in enumerate(batches * 2):
        step(optimizer, batch, number)


def with_weights_of(module: Net, other: Net) -> Net:
    other.load_state_dict(module.state_dict())
    return other


def assert_trains_alike(module: Net, batches: Any, expected: Net, expected_batches: Any, **options: Any) -> None:
    """Accumulating batches, a module becomes what the other one becomes, from the same weights, with other batches."""
    with_weights_of(module, expected)
    train(module, batches, **options)
    train(expected, expected_batches, **{**options, "accumulate_grad_batches": 1})
    assert_equal(expected, module, 1e-12)


@settings(max_examples=12)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    window=st.integers(1, 5),
    tokens=st.sampled_from([None, "number", "tensor"]),
    clip=st.sampled_from([None, 0.05]),
)
def test_windows_of_unequal_batches_and_a_short_last_one_equal_their_unions(
    sizes: list[int], window: int, tokens: str | None, clip: float | None
) -> None:
    """Random sizes, windows and weights; some batches have no label that counts."""
    batches = make_batches(sizes, 0.0 if tokens is None else 0.5)
    for last in {*range(window - 1, len(sizes), window), len(sizes) - 1}:
        batches[last][1][0] = 0  # a window of which nothing counts would step nothing
    module, whole = Net("adam", tokens), Net("adam", tokens)
    options = {"accumulate_grad_batches": window, "gradient_clip_val": clip}
    assert_trains_alike(module, batches, whole, unions(batches, window), **options)


@pytest.mark.parametrize("hook", ["on_before_backward", "backward"])
def test_hooks_around_the_backward_receive_the_share_of_the_loss(hook: str) -> None:
    """A loss that hooks can see is divided itself; the gradients are the same."""
    seen: list[float] = []

    def look(self: Any, loss: Tensor) -> None:
        seen.append(float(loss.detach()))
        if hook == "backward":
            loss.backward()

    looking = type("Looking", (Net,), {hook: look})()
    batches = make_batches([4, 4, 2, 4, 1])
    first = float(looking.training_step(batches[0], 0).detach())
    assert_trains_alike(looking, batches, Net(), unions(batches, 2), accumulate_grad_batches=2)
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


def net_of(make: Callable[[Any], Any]) -> Net:
    """A net with this optimiser."""
    net = Net()
    net.configure_optimizers = lambda: make(net.parameters())  # type: ignore[method-assign]
    return net


def test_an_optimiser_with_a_closure_receives_the_loss_of_the_last_batch_divided_by_the_batches() -> None:
    Searching.losses.clear()
    batches = make_batches([3, 5, 3, 4])
    searches = net_of(lambda parameters: Searching(parameters, lr=0.1, momentum=0.9))
    first_loss = searches.training_step(batches[1], 1).detach() / 2
    assert_trains_alike(searches, batches, Net(), unions(batches, 2), accumulate_grad_batches=2)
    assert torch.equal(Searching.losses[0], first_loss)
    assert not Searching.losses[0].requires_grad


SEARCHES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LBFGS": lambda parameters: LBFGS(parameters, lr=0.1, max_iter=3),
    "SearchingTwice": lambda parameters: SearchingTwice(parameters, lr=0.1),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_an_optimiser_with_a_closure_is_exact_without_a_window_and_refused_within_one(name: str) -> None:
    """The earlier batches of a window are gone when a closure computes the last one again."""
    batches = make_batches([3, 4])
    net = net_of(SEARCHES[name])
    expected = with_weights_of(net, net_of(SEARCHES[name]))

    def step(optimizer: Any, batch: Any, number: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = expected.training_step(batch, 0)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)

    train(net, batches)
    train_by_hand(expected, batches, step)
    assert_equal(expected, net, 1e-12)
    with pytest.raises(StepError, match=f"{name} computes a batch again within an accumulation window"):
        train(net, batches, accumulate_grad_batches=2)


def test_lbfgs_with_one_evaluation_accumulates() -> None:
    batches = make_batches([3, 4, 6])
    module, whole = (net_of(lambda parameters: LBFGS(parameters, max_iter=1)) for _ in range(2))
    assert_trains_alike(module, batches, whole, unions(batches, 2), accumulate_grad_batches=2)


def doubled_by_a_hook(loss: Tensor) -> Tensor:
    loss.register_hook(lambda gradient: gradient.mul_(2))
    return loss


CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "a hook in place": (doubled_by_a_hook, 2.0),
    "float32": (lambda loss: loss.float(), 1.0),
}


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("name", CHANGES)
def test_a_loss_that_differs_from_others_does_not_change_their_gradients(name: str, window: int) -> None:
    change, factor = CHANGES[name]
    changing = net_with(lambda loss, batch_idx: change(loss) if batch_idx in (0, 3) else loss)
    expected = net_with(lambda loss, batch_idx: loss * (factor if batch_idx in (0, 3) else 1.0))
    batches = make_batches([4] * 6)
    with_weights_of(changing, expected)
    for module in (changing, expected):
        train(module, batches, accumulate_grad_batches=window)
    assert_equal(expected, changing, 1e-12)


class Clips(Callback):
    """Sets the limit of the gradients in the second batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.gradient_clip_val, trainer.gradient_clip_algorithm = 0.01, "value"


def test_a_callback_may_change_the_limit_of_gradients_during_an_epoch() -> None:
    batches = make_batches([4, 4])
    module = Net()
    expected = with_weights_of(module, Net())

    def step(optimizer: Any, batch: Any, number: int) -> None:
        optimizer.zero_grad()
        expected.training_step(batch, 0).backward()
        if number > 0:
            nn.utils.clip_grad_value_(expected.parameters(), 0.01)
        optimizer.step()

    train(module, batches, callbacks=[Clips()])
    train_by_hand(expected, batches, step)
    assert_equal(expected, module, 1e-12)


def test_batches_of_weight_zero_and_steps_that_return_none_are_left_out_of_the_mean() -> None:
    """A batch of which nothing counts, and one that is skipped, leave no trace, not even in the weights."""

    class Skipping(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    batches = make_batches([4, 3, 5, 2])
    batches[2] = (batches[2][0].fill_(float("nan")), torch.full((5,), IGNORED))  # weight 0: no backward, no NaN
    whole = unions([batches[0], batches[3]], 2)
    assert_trains_alike(Skipping(tokens="number"), batches, Net(tokens="number"), whole, accumulate_grad_batches=4)


class Odd(Net):
    """Batches whose tensors share no dimension."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch["x"], batch["y"]), batch_idx)


def odd(batches: Batches) -> list[Any]:
    """The same batches with a tensor of another length."""
    return [{"x": x, "y": y, "other": torch.zeros(13)} for x, y in batches]


class Stating(Odd):
    def batch_size(self, batch: Any) -> int:
        return len(batch["x"])


def test_the_batch_size_that_a_module_states_is_the_weight_of_a_batch() -> None:
    batches = make_batches([4, 1, 6])
    assert_trains_alike(Stating(), odd(batches), Net(), unions(batches, 3), accumulate_grad_batches=3)


def test_batches_whose_sizes_cannot_be_inferred_have_equal_weights_with_one_warning() -> None:
    batches = make_batches([4, 1, 6])
    module = Odd()
    expected = with_weights_of(module, Net())

    def step(optimizer: Any, batch: Any, number: int) -> None:
        (expected.training_step(batch, 0) / 3).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match="cannot be inferred.*batch_size.*loss_weight") as caught:
        train(module, odd(batches), accumulate_grad_batches=3)
    assert len(caught) == 1
    train_by_hand(expected, batches, step)
    assert_equal(expected, module, 1e-12)


HALF = {"precision": "16-mixed", "gradient_clip_val": 0.5}


def assert_close(expected: Net, actual: Net) -> None:
    """In halves, where the order of roundings differs."""
    for left, right in zip(actual.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=2e-3, atol=2e-4)


def test_scaled_gradients_of_unequal_batches_are_weighed_as_by_hand() -> None:
    batches = make_batches([8, 8, 8, 2], dtype=torch.float32)
    module = Net().float()
    expected = with_weights_of(module, Net().float())
    scaler = torch.amp.GradScaler("cpu")

    def step(optimizer: Any, batch: Any, number: int) -> None:
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            loss = expected.training_step(batch, 0)
        scaler.scale(loss * (len(batch[1]) / 26)).backward()
        if number % 4 == 3:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    train(module, batches, accumulate_grad_batches=4, **HALF)
    train_by_hand(expected, batches, step)
    assert_close(expected, module)


@pytest.mark.parametrize("without_loss", [0, 1, 2])
def test_a_batch_of_a_window_for_which_training_step_returns_none_under_16_mixed(without_loss: int) -> None:
    """The other batches of the window count, also if the last one has no loss."""
    batches = make_batches([4, 4, 4], dtype=torch.float32)
    module = net_with(lambda loss, batch_idx: None if batch_idx == without_loss else loss).float()
    expected = with_weights_of(module, Net().float())
    train(module, batches, accumulate_grad_batches=3, **HALF)
    del batches[without_loss]
    train(expected, batches, accumulate_grad_batches=2, **HALF)
    assert_close(expected, module)


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


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("32-true", {"step": 4}), ("16-mixed", {"scaled_step": 2, "skip": 2})],
)
def test_a_strategy_hears_of_every_window(precision: str, expected: dict[str, int]) -> None:
    """Also of one without a loss, so that strategies of several processes count the same windows in all of them."""
    Counting.calls.clear()
    module = net_with(lambda loss, batch_idx: None if batch_idx == 0 else loss).float()
    batches = make_batches([4, 4], dtype=torch.float32)
    train(module, batches, strategy=CountingStrategy(), precision=precision)
    assert Counting.calls == expected
