"""Batches travel on a stream of their own: nothing else changes, nothing waits, and the streams are in order."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from equipoise import BalancedDataParallelStrategy, PipelineStrategy, Strategy
from equipoise.trainer.data import prefetch as prefetching
from tests.simulated.configurations.saving import Saving
from tests.simulated.devices.installation import extension
from tests.support.pipelines import quiet

FEATURES, CLASSES, SAMPLES = 5, 3, 44
MAIN = 0  # the number of the stream on which devices compute


class Drawing(L.LightningModule):
    """Draws random numbers in each step, on the host and on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Dropout(0.3), nn.Linear(7, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, classes = batch.values() if isinstance(batch, dict) else batch
        loss = nn.functional.cross_entropy(self(features * (1 + 0.1 * self.noise())), classes)
        self.log("loss", loss)
        return loss

    def forward(self, features: Tensor) -> Any:
        return self.net(features)

    def noise(self) -> Any:
        return torch.randn(())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))


class Trace(L.Callback):
    """Notes the hooks of training, with what they see of the batch, and of the generators."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def note(self, name: str, index: int, batch: Any) -> None:
        values = [] if batch is None else [each.sum().item() for each in batch if isinstance(each, Tensor)]
        on_devices = [state.sum().item() for state in torch.cuda.get_rng_state_all()]
        self.events.append((name, index, values, torch.get_rng_state().sum().item(), on_devices))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.note("start", batch_idx, batch)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("end", batch_idx, batch)

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.note("validation", batch_idx, batch)


class Run(NamedTuple):
    """Result of a run."""

    weights: dict[str, Tensor]
    events: list[tuple[Any, ...]]
    generators: list[Tensor]


def samples(count: int = SAMPLES) -> TensorDataset:
    draw = torch.Generator().manual_seed(5)
    features = torch.randn(count, FEATURES, generator=draw, dtype=torch.float64)
    return TensorDataset(features, torch.randint(CLASSES, (count,), generator=draw))


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(samples(), **{"batch_size": 8, "shuffle": True, **options})


def train(
    prefetch: Any,
    loader: Callable[[], Any] = shuffled,
    module: type[Drawing] = Drawing,
    callbacks: tuple[L.Callback, ...] = (),
    ckpt_path: Path | None = None,
    **options: Any,
) -> Run:
    """Train on simulated devices from a fixed seed."""
    L.seed_everything(3, verbose=False)
    trace = Trace()
    network = module()
    settings = {"strategy": "single_device", "devices": ["cpu"], "max_epochs": 2, **options}
    trainer = quiet(prefetch=prefetch, callbacks=[trace, *callbacks], num_sanity_val_steps=0, **settings)
    trainer.fit(network, loader(), DataLoader(samples(10), batch_size=4), ckpt_path=ckpt_path)
    weights = {name: value.cpu() for name, value in network.state_dict().items()}
    return Run(weights, trace.events, [torch.get_rng_state(), *torch.cuda.get_rng_state_all()])


def assert_same(one: Run, other: Run) -> None:
    assert one.events == other.events
    for name, value in one.weights.items():
        assert torch.equal(value, other.weights[name]), name
    for mine, theirs in zip(one.generators, other.generators, strict=True):
        assert torch.equal(mine, theirs)


class AllSamples(IterableDataset[Any]):
    """Samples without a length, which draw from the global generator when they are read."""

    def __iter__(self) -> Iterator[Any]:
        for features, label in samples():
            yield features + torch.randn(FEATURES), label


class Drawn(TensorDataset):
    """Its samples draw from the global generator when they are read."""

    def __getitem__(self, index: int) -> Any:
        features, label = super().__getitem__(index)
        return features + torch.randn(FEATURES), label


class Ready:
    """Batches that are ready, after a change.

    Args:
        change: Returns the batch for features and classes.
    """

    def __init__(self, change: Callable[[Tensor, Tensor], Any]) -> None:
        self.batches = [change(*batch) for batch in DataLoader(samples(), batch_size=8)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


LOADERS: dict[str, Callable[[], Any]] = {
    "rows": shuffled,
    "workers": lambda: shuffled(num_workers=1),
    "without length": lambda: DataLoader(AllSamples(), batch_size=8),
    "drawn": lambda: DataLoader(Drawn(*samples().tensors), batch_size=8, shuffle=True),
    "dictionaries": lambda: Ready(lambda x, y: {"x": x, "y": y}),
    "expanded": lambda: Ready(lambda x, y: (x[:1].expand(8, -1), y[:1].expand(8))),
}
TWO: dict[str, Any] = {"devices": ["cpu", "cpu"]}
STRATEGIES: dict[str, Callable[[], dict[str, Any]]] = {
    "accumulation": lambda: {"accumulate_grad_batches": 4},
    "limits": lambda: {"limit_train_batches": 3, "max_steps": 5},
    "dp": lambda: {"strategy": "dp", **TWO},
    "balanced": lambda: {"strategy": BalancedDataParallelStrategy(shares=[2, 1]), **TWO},
    "pipeline": lambda: {"strategy": PipelineStrategy(micro_batches=2, cut_before=["net.2"]), **TWO},
    "16-mixed": lambda: {"precision": "16-mixed"},
}

# Nothing else changes


@pytest.mark.parametrize("loader", LOADERS)
def test_a_run_is_the_same(loader: str) -> None:
    assert_same(train(True, LOADERS[loader]), train(False, LOADERS[loader]))


class Narrow(Drawing):
    """Takes any precision, and draws on devices alone: threads of several devices draw from the host in any order."""

    def noise(self) -> Any:
        return 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([batch[0].to(self.net[0].weight.dtype), batch[1]], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step([batch[0].to(self.net[0].weight.dtype), batch[1]], batch_idx)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_computes_the_same(strategy: str) -> None:
    runs = [train(prefetch, module=Narrow, **STRATEGIES[strategy]()) for prefetch in (True, False)]
    assert_same(*runs)


@pytest.mark.parametrize("loader", ["drawn", "workers"])
def test_a_resumed_run_is_the_same(loader: str, tmp_path: Path) -> None:
    path = tmp_path / "of_step_2.ckpt"
    whole = train(True, LOADERS[loader], callbacks=(Saving(path, 2),), accumulate_grad_batches=2)
    resumed = train(True, LOADERS[loader], ckpt_path=path, accumulate_grad_batches=2)
    # What the callback has noted before the checkpoint is in it.
    assert_same(whole, resumed)
    assert_same(resumed, train(False, LOADERS[loader], ckpt_path=path, accumulate_grad_batches=2))


# What changes


class Streams(L.Callback):
    """Notes which stream has written each batch, and whether it waited for the step before."""

    def __init__(self) -> None:
        self.writers: list[int] = []
        self.waited: list[bool] = []

    def note(self, batch: Any) -> None:
        tensor = batch[0]
        stream = extension().last_writer(tensor)
        self.writers.append(stream)
        self.waited.append(extension().is_behind(tensor.device.index, stream, MAIN))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.note(batch)

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.note(batch)


def streams_of(prefetch: Any, loader: Callable[[], Any] = shuffled, **options: Any) -> Streams:
    streams = Streams()
    L.seed_everything(3, verbose=False)
    settings = {"strategy": "single_device", "devices": ["cpu"], "callbacks": [streams], **options}
    trainer = quiet(prefetch=prefetch, num_sanity_val_steps=0, **settings)
    trainer.fit(Drawing(), loader())
    return streams


def test_prefetch_copies_batches_ahead_without_waiting_for_the_step_before() -> None:
    beside = streams_of(True)
    assert len(beside.writers) == 6
    assert len(set(beside.writers)) == 1
    assert MAIN not in beside.writers
    # Before the first step the host has waited for the module.
    assert beside.waited[1:] == [False] * 5
    in_turn = streams_of(False)
    assert in_turn.writers == [MAIN] * 6


def test_evaluations_are_prefetched() -> None:
    streams = Streams()
    trainer = quiet(prefetch=True, strategy="single_device", devices=["cpu"], callbacks=[streams])
    trainer.validate(Drawing(), DataLoader(samples(20), batch_size=8), verbose=False)
    assert len(streams.writers) == 3
    assert MAIN not in streams.writers


@pytest.mark.parametrize(("pinned", "least"), [(False, 1 << 16), (True, 1 << 20)])
def test_small_batches_are_copied_in_turn_by_default(pinned: bool, least: int) -> None:
    size_of_sample = 8 * FEATURES + 8
    for count, is_beside in ((least // size_of_sample, False), (least // size_of_sample + 1, True)):
        loader = DataLoader(samples(count), batch_size=count, pin_memory=pinned)
        (writer,) = streams_of("auto", loader=lambda loader=loader: loader).writers
        assert (writer != MAIN) is is_beside


class Counts(L.Callback):
    """Notes from batch to batch for which reasons the host waited, and how many kernels each device launched."""

    def __init__(self) -> None:
        self.reasons: list[list[str]] = []
        self.launches: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.reasons.append(extension().take_reasons())
        self.launches.append([extension().launches(index) for index in range(extension().device_count())])

    def of_steps(self) -> tuple[list[list[str]], list[list[int]]]:
        """The reasons and launches from each batch to the next."""
        pairs = zip(self.launches[1:], self.launches[:-1], strict=True)
        launches = [[after - before for after, before in zip(*pair, strict=True)] for pair in pairs]
        return self.reasons[1:], launches


@pytest.mark.parametrize("strategy", ["single_device", "dp"])
@pytest.mark.parametrize("pinned", [True, False])
def test_no_step_waits_or_launches_more(strategy: str, pinned: bool) -> None:
    def steps(prefetch: bool) -> tuple[list[list[str]], list[list[int]]]:
        counts = Counts()
        count = 1 if strategy == "single_device" else 2
        options: dict[str, Any] = {"strategy": strategy, "devices": ["cpu"] * count, "callbacks": [counts]}
        streams_of(prefetch, loader=lambda: shuffled(pin_memory=pinned), **options)
        return counts.of_steps()

    reasons, launches = steps(True)
    reasons_in_turn, launches_in_turn = steps(False)
    assert launches == launches_in_turn
    assert reasons == [[]] * 5
    # Memory that is not pinned: two tensors for each device.
    waits = 0 if pinned else 2 * (1 if strategy == "single_device" else 2)
    assert reasons_in_turn == [["copy from the CPU"] * waits] * 5


def test_a_batch_without_memory_of_its_own_is_copied_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(False)

    def copy(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(prefetching, "_copied", copy)
    assert streams_of(True).writers == [MAIN] * 6
    assert_same(train(True), expected)


# The user's own code


class Hooked(Drawing):
    """Changes batches before and after their copy, and draws from the device."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch[0].mul_(2)
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.randn_like(batch[0]), batch[1]]


class Keeping(Drawing):
    """Uses the batch before last, which it has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append(batch[0][:2])
        if len(self.batches) > 2:
            self.batches.pop(0)
        return super().training_step(batch, batch_idx) + 0.1 * self(self.batches[0]).square().mean()


@pytest.mark.parametrize("module", [Hooked, Keeping])
def test_modules_may_have_hooks_around_the_copy_and_keep_batches(module: type[Drawing]) -> None:
    assert_same(train(True, module=module), train(False, module=module))


class Copying(Drawing):
    """Copies batches by itself."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return [each.to(device) for each in batch]


def test_a_copy_of_the_user_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        automatic = train("auto", module=Copying)
    notes = [record.message for record in caplog.records if "prefetch" in record.message]
    assert notes == ["prefetch is off: `transfer_batch_to_device` is overridden, so the copy is the user's own."]
    assert_same(automatic, train(False, module=Copying))
    with pytest.warns(UserWarning, match=r"prefetch=True has no effect here: `transfer_batch_to_device`"):
        train(True, module=Copying)


class Pair(NamedTuple):
    features: Tensor
    classes: Tensor


class Own(list[Tensor]):
    """A batch that copies itself."""

    def to(self, device: torch.device, **options: Any) -> "Own":
        return Own(each.to(device) for each in self)


def test_named_tuples_are_prefetched() -> None:
    streams = streams_of(True, loader=lambda: Ready(Pair))
    assert MAIN not in streams.writers


def test_batches_that_copy_themselves_are_left_alone() -> None:
    with pytest.warns(UserWarning, match=r"prefetch=True has no effect here: .*\.Own in a batch") as caught:
        streams = streams_of(True, loader=lambda: Ready(lambda x, y: Own([x, y])))
    assert streams.writers == [MAIN] * 6
    assert len([warning for warning in caught if "prefetch" in str(warning.message)]) == 1


class OwnCopies(Strategy):
    """Copies each half of a batch by itself, and puts them together again."""

    name = "own_copies"

    def batch_to_devices(self, batch: Any, transfer: Any) -> Any:
        places = (slice(4), slice(4, None))
        halves = [transfer([tensor[place] for tensor in batch], self.devices[0]) for place in places]
        return ([torch.cat(tensors) for tensors in zip(*halves, strict=True)],)


def test_strategies_of_the_users_need_to_know_nothing() -> None:
    assert_same(train(True, strategy=OwnCopies()), train(False, strategy=OwnCopies()))


def test_a_run_on_a_stream_of_the_users() -> None:
    side = torch.cuda.Stream(torch.device("cuda:0"))
    with torch.cuda.stream(side):
        assert_same(train(True), train(False))
