"""The strategy that "auto" means on several devices: the simplest under which a step is predicted to fit."""

import multiprocessing
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from equipoise import Trainer
from equipoise.errors import ConfigurationError
from equipoise.extensions.planning import MemoryPrediction, PlannedDevice, first_batch, predict_memory
from equipoise.extensions.planning.comparison import StrategyPlan, plan_strategies
from equipoise.extensions.tuning import strategy_choice
from equipoise.extensions.tuning.strategy_choice import open_loaders
from equipoise.extensions.tuning.trials.step_prediction import describe_elsewhere
from equipoise.strategies import DDPStrategy, FSDPStrategy, Strategy
from equipoise.trainer import auto_strategy_and_finders
from equipoise.trainer import trainer as trainer_module
from equipoise.trainer.auto_strategy_and_finders import choose_strategy
from equipoise.trainer.runtime.request import Request
from tests.support.equality import assert_equal
from tests.support.quiet import QUIET

FEATURES, BATCH_SIZE = 16, 8
OPTIONS = {**QUIET, "max_steps": 2, "max_epochs": -1, "precision": "64-true", "accelerator": "cpu", "devices": 2}


class Wide(L.LightningModule):
    """A perceptron, (batch, 16) → (batch, 1), most of whose memory are its weights."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(
            nn.Linear(FEATURES, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 1),
        ).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.001)


class Untraceable(Wide):
    """Reads values of its batch by numpy."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[0].numpy().max()
        return super().training_step(batch, batch_idx)


def samples() -> TensorDataset:
    return TensorDataset(torch.randn(64, FEATURES, generator=torch.Generator().manual_seed(5), dtype=torch.float64))


def loader() -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=BATCH_SIZE, shuffle=True)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the messages of the choice."""
    messages: list[str] = []
    monkeypatch.setattr(strategy_choice, "rank_zero_info", messages.append)
    return messages


@pytest.fixture(scope="module")
def prediction() -> MemoryPrediction:
    return predict_memory(Wide(), next(iter(loader())), precision="64-true")


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch, prediction: MemoryPrediction) -> Callable[[int], None]:
    """Let devices of the CPU have an amount of memory each. The prediction is that of all tests."""

    def give(nbytes: int) -> None:
        device = PlannedDevice(name="device", kind="cpu", memory=nbytes)
        monkeypatch.setattr(auto_strategy_and_finders, "_KINDS", ("cpu",))
        monkeypatch.setattr(strategy_choice, "devices_of", lambda trainer: [device] * 2)
        monkeypatch.setattr(strategy_choice, "predict_step", lambda *args, **options: prediction)

    return give


def peak_under(prediction: MemoryPrediction, strategy: Strategy) -> int:
    """Return the bytes that the fuller one of two devices needs."""
    device = PlannedDevice(name="device", kind="cpu", memory=0)
    (plan,) = plan_strategies(prediction, Wide(), [strategy], [device, device])
    return plan.fullest.peak.nbytes


def choose(module: L.LightningModule) -> str:
    """Return the name of the strategy that is chosen for a fit."""
    request = Request(TrainerFn.FITTING, module, loaders={"train": loader()})
    return choose_strategy(Trainer(**OPTIONS), request).name


def test_ddp_where_a_step_fits(room: Any, told: list[str], prediction: MemoryPrediction) -> None:
    room(peak_under(prediction, DDPStrategy()))
    assert choose(Wide()) == "ddp"
    (line,) = told
    assert line.startswith('strategy="auto" is ddp: a batch of 8 is predicted to fit on each of 2 devices')


@pytest.mark.thorough
def test_another_strategy_where_a_step_does_not_fit(room: Any, told: list[str], prediction: MemoryPrediction) -> None:
    """The fit has the numbers of one that names the strategy."""
    room(peak_under(prediction, FSDPStrategy()))
    modules = []
    for strategy in ("auto", "fsdp"):
        module = Wide()
        torch.manual_seed(11)
        trainer = Trainer(**OPTIONS, strategy=strategy)
        trainer.fit(module, loader())
        assert trainer.strategy.name == trainer.connected_strategy.name == "fsdp"
        assert trainer.global_step == 2
        modules.append(module)
    assert_equal(*modules)
    (line,) = told
    assert line.startswith('strategy="auto" is fsdp: under ddp, device would need')
    assert "fsdp is the simplest strategy" in line


@pytest.mark.thorough
def test_the_batches_of_a_step_are_told(room: Any, told: list[str], prediction: MemoryPrediction) -> None:
    room(peak_under(prediction, DDPStrategy()) - 1)
    assert choose(Wide()) == "dp"
    assert told[0].endswith("A step takes 1 batch of the loader, not 2.")


@pytest.mark.filterwarnings("ignore:`fit` trains nothing")
def test_the_strategy_is_chosen_once(room: Any, told: list[str], prediction: MemoryPrediction) -> None:
    room(peak_under(prediction, DDPStrategy()) - 1)
    trainer = Trainer(**OPTIONS)
    for _ in range(2):
        trainer.fit(Wide(), loader())
        assert trainer.strategy.name == "dp"
    assert len(told) == 1


def test_ddp_is_chosen_by_the_first_fit_alone(
    room: Any, told: list[str], prediction: MemoryPrediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    room(peak_under(prediction, DDPStrategy()))
    # No run follows, which would start processes.
    monkeypatch.setattr(trainer_module, "search", lambda *_: False)
    trainer = Trainer(**OPTIONS)
    trainer.validate(Wide(), loader())
    assert told == []
    for _ in range(2):
        trainer.fit(Wide(), loader())
    assert len(told) == 1


def test_ddp_is_taken_with_a_warning_where_nothing_fits(room: Any, told: list[str]) -> None:
    room(1000)
    with pytest.warns(UserWarning, match="predicted to fit under no strategy: device would need .* of 1000 B"):
        assert choose(Wide()) == "ddp"
    assert told == []


def test_frozen_weights_in_four_bits_are_proposed(room: Any, told: list[str]) -> None:
    room(1000)
    module = Wide()
    module.net[2].requires_grad_(False)
    with pytest.warns(UserWarning, match="Frozen weights need less in four bits"):
        assert choose(module) == "ddp"


def test_stages_need_automatic_optimisation(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[str] = []

    def noting(*arguments: Any) -> list[StrategyPlan]:
        plans = plan_strategies(*arguments)
        planned.extend(plan.strategy for plan in plans)
        return plans

    room(1000)
    monkeypatch.setattr(strategy_choice, "plan_strategies", noting)
    module = Wide()
    for automatic in (True, False):
        module.automatic_optimization = automatic
        with pytest.warns(UserWarning, match="under no strategy"):
            choose(module)
    assert planned == ["ddp", "dp", "balanced", "fsdp", "pipeline", "ddp", "dp", "balanced", "fsdp"]


@pytest.mark.slow
def test_ddp_is_taken_for_a_step_that_cannot_be_predicted(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_strategy_and_finders, "_KINDS", ("cpu",))
    assert choose(Untraceable()) == "ddp"
    (line,) = told
    assert line.startswith('strategy="auto" is ddp; the memory of a step was not predicted: ')
    assert "test_strategy_choice.py" in line


@pytest.mark.parametrize("options", [{"strategy": "ddp"}, {"devices": 1}, {}], ids=["named", "one device", "CPU"])
def test_nothing_is_predicted(options: dict[str, Any], told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_choice, "read_ahead", lambda open_loaders: pytest.fail("It was read."))
    Trainer(**{**OPTIONS, **options}).fit(Wide(8), loader())
    assert told == []


# The first batch


def read(train: Any = None, module: Any = None, datamodule: Any = None, **options: Any) -> Any:
    loaders = {"train": train}
    request = Request(TrainerFn.FITTING, module or Wide(8), datamodule=datamodule, loaders=loaders)
    return first_batch.read_ahead(partial(open_loaders, request, Trainer(**OPTIONS)), **options)


def test_what_is_read_is_the_batch_of_the_fit() -> None:
    train = loader()
    torch.manual_seed(7)
    (batch,) = read(train)
    (expected,) = next(iter(train))
    # The copy drew the same numbers; here none were drawn.
    assert torch.equal(batch, expected)


def test_of_several_planned_batches_the_first_is_read() -> None:
    class Batches(BatchSampler):
        def planned_batches(self) -> Any:
            return [([3, 5], None), ([7], None)]

    sampler = Batches(range(64), BATCH_SIZE, drop_last=False)
    (batch,) = read(DataLoader(samples(), batch_sampler=sampler))
    assert torch.equal(batch, samples()[[3, 5]][0])


def test_loaders_with_workers_and_structures_of_loaders() -> None:
    with_workers = DataLoader(samples(), batch_size=2, num_workers=2, persistent_workers=True, timeout=30)
    batch = read({"first": with_workers, "second": [loader()]})
    assert batch["first"][0].shape == (2, FEATURES)
    assert batch["second"][0][0].shape == (BATCH_SIZE, FEATURES)
    assert with_workers.num_workers == 2


def test_a_stream_is_not_used_up() -> None:
    class Stream(IterableDataset[Tensor]):
        def __init__(self) -> None:
            self.values = iter(torch.arange(6.0))

        def __iter__(self) -> Any:
            return self.values

    stream = DataLoader(Stream(), batch_size=2)
    assert read(stream).tolist() == [0, 1]
    assert [batch.tolist() for batch in stream] == [[0, 1], [2, 3], [4, 5]]


def test_a_data_module_is_set_up_elsewhere() -> None:
    class Data(L.LightningDataModule):
        calls = 0

        def prepare_data(self) -> None:
            raise AssertionError("It writes files.")

        def setup(self, stage: str) -> None:
            assert stage == "fit"
            assert self.trainer.world_size == 2
            type(self).calls += 1

        def train_dataloader(self) -> Any:
            return loader()

    assert read(datamodule=Data())[0].shape == (BATCH_SIZE, FEATURES)
    assert Data.calls == 0


class Failing(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        raise ArithmeticError("a sample\nof two lines")


class Waiting(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        threading.Event().wait()


class Ending(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        raise SystemExit(1)


class Unreadable(list[int]):
    """A batch that can be pickled, but not read again."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


EMPTY = DataLoader(samples(), batch_size=65, drop_last=True)


@pytest.mark.parametrize(
    ("train", "seconds", "words"),
    [
        (DataLoader(Failing(torch.zeros(4))), 60.0, r"\(ArithmeticError: a sample\)"),
        (DataLoader(Waiting(torch.zeros(4))), 0.01, "not read within 0 seconds"),
        (DataLoader(Ending(torch.zeros(4))), 60.0, "ended without an answer"),
        (EMPTY, 60.0, r"batch, but the loader is empty.* drop_last=True leaves none$"),
        ({"first": loader(), "second": EMPTY}, 60.0, r"batch, but the loader is empty.* drop_last=True leaves none$"),
        (DataLoader(samples(), batch_size=2, collate_fn=Unreadable), 60.0, r"cannot be sent \(ValueError"),
    ],
)
def test_data_that_cannot_be_read_are_refused(train: Any, seconds: float, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        read(train, seconds=seconds)


def test_a_daemon_cannot_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of a pool is a daemon."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=r"cannot be copied .*daemonic"):
        read(loader())


@pytest.mark.slow
def test_a_batch_larger_than_a_pipe() -> None:
    rows = torch.arange(2.0**20)
    assert torch.equal(read(DataLoader(rows, batch_size=len(rows))), rows)


@pytest.mark.thorough
def test_finders_search_under_the_chosen_strategy(
    room: Any, told: list[str], prediction: MemoryPrediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that does not fit under ddp would run out of memory in the search."""
    room(peak_under(prediction, DDPStrategy()) - 1)
    names: list[str] = []

    def noting(trainer: Any, *_: Any) -> bool:
        names.append(trainer.strategy.name)
        return False

    monkeypatch.setattr(trainer_module, "search", noting)
    Trainer(**OPTIONS).fit(Wide(), loader())
    assert names == ["dp"]


def test_it_is_chosen_by_the_next_fit_after_an_interrupt(
    room: Any, told: list[str], prediction: MemoryPrediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    room(peak_under(prediction, DDPStrategy()) - 1)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    trainer = Trainer(**OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(strategy_choice, "read_ahead", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(Wide(), loader())
    trainer.fit(Wide(), loader())
    assert trainer.strategy.name == "dp"


@pytest.mark.slow
def test_devices_are_read_by_another_process() -> None:
    assert [device.name for device in describe_elsewhere(["cpu"])] == ["cpu"]
    with pytest.raises(ConfigurationError, match=r"the memory of cuda:7 cannot be read: There is no device 'cuda:7'"):
        describe_elsewhere(["cuda:7"])
