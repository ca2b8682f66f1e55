"""Trainer(activation_checkpointing=...): the same weights under every strategy, and nothing of it afterwards."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import BalancedDataParallelStrategy, ConfigurationError, DDPStrategy, PipelineStrategy
from equipoise.memory.profile.ledger import Ledger
from equipoise.parallel.activation_checkpointing import is_checkpointed
from tests.support.pipelines import stay_whole
from tests.support.trainer_runs import refuses, trainer

SAMPLES, BATCH = 24, 8


class Deep(L.LightningModule):
    """Residual blocks with dropout; remembers which of them were checkpointed while it trained and evaluated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(
            nn.Linear(6, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4))
        )
        self.head = nn.Linear(8, 1)
        self.found: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.found |= {name for name, part in self.named_modules() if is_checkpointed(part)}
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def data() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(7)
    samples = TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64),
        torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64),
    )
    return DataLoader(samples, batch_size=BATCH), DataLoader(samples, batch_size=BATCH)


def fit(patterns: list[str] | None, strategy: Any, devices: int, module: Any = None, **options: Any) -> Any:
    module = Deep() if module is None else module
    run = trainer(
        strategy=strategy(),
        devices=["cpu"] * devices if devices > 1 else 1,
        activation_checkpointing=patterns,
        max_epochs=2,
        num_sanity_val_steps=1,
        **{"precision": "64-true", **options},
    )
    torch.manual_seed(9)
    run.fit(module, *data())
    return module, run


STRATEGIES: dict[str, tuple[Any, int]] = {
    "single_device": (lambda: "single_device", 1),
    "dp": (lambda: "dp", 2),
    "balanced": (lambda: BalancedDataParallelStrategy(shares=[3, 5]), 2),
    "balanced, forward alone": (lambda: BalancedDataParallelStrategy(shares=[3, 5], parallelize="forward"), 2),
    "ddp, torch": (lambda: DDPStrategy(engine="torch"), 2),
    "ddp, native": (lambda: DDPStrategy(engine="native"), 2),
    "pipeline": (lambda: PipelineStrategy(cut_before=["net.3"], micro_batches=3), 2),
    "pipeline, processes": (
        lambda: PipelineStrategy(engine="processes", cut_before=["net.3"], micro_batches=3, timeout=300.0),
        2,
    ),
    "pipeline, gpipe": (lambda: PipelineStrategy(cut_before=["net.1"], schedule="gpipe", threads=True), 2),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", STRATEGIES)
def test_weights_are_the_same_to_the_bit(name: str) -> None:
    """Dropout included: both runs draw the same random numbers."""
    strategy, devices = STRATEGIES[name]
    one, plain = fit(None, strategy, devices) if "gpipe" not in name else fit(None, lambda: _in_turn(strategy), devices)
    other, run = fit(["net.1", "net.[2-4]"], strategy, devices)
    assert list(one.state_dict()) == list(other.state_dict())
    for parameter, same in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, same)
    assert plain.callback_metrics == run.callback_metrics
    assert other.found == {"net.1", "net.2", "net.3", "net.4"}
    assert not any(map(is_checkpointed, other.modules()))
    assert all("forward" not in vars(part) for part in other.modules())


class Counted(nn.Module):
    """Writes down the process of every forward that counts for a backward."""

    def __init__(self, file: Path, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm, self.file = nn.Linear(8, 8), norm, file

    def forward(self, value: Tensor) -> Tensor:
        stay_whole(value)
        if self.training and torch.is_grad_enabled():
            with self.file.open("a") as file:
                file.write(f"{os.getpid()}\n")
        return torch.tanh(self.norm(self.linear(value)))


class Written(Deep):
    """Four such layers, normalised over features or over samples."""

    def __init__(self, file: Path, norm: type[nn.Module]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), *(Counted(file, norm(8)) for _ in range(4)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_a_pipeline_over_processes_computes_twice_where_its_stages_lie(norm: type[nn.Module], tmp_path: Path) -> None:
    """As one device within rounding, if samples are not coupled; running means are updated once."""

    def strategy(engine: Any) -> PipelineStrategy:
        return PipelineStrategy(engine=engine, cut_before=["net.2", "net.4"], micro_batches=3, timeout=300.0)

    def run(name: str, patterns: list[str] | None, how: Any, devices: int) -> tuple[Any, Any, Counter[str]]:
        module, done = fit(patterns, how, devices, Written(tmp_path / name, norm))
        return module, done, Counter((tmp_path / name).read_text().split())

    if norm is nn.LayerNorm:
        expected = run("one", None, lambda: "single_device", 1)
    else:
        expected = run("one", None, lambda: strategy("threads"), 3)
    plain = run("plain", None, lambda: strategy("processes"), 3)
    other = run("twice", ["net.[1-4]"], lambda: strategy("processes"), 3)
    for name, value in expected[0].state_dict().items():
        torch.testing.assert_close(other[0].state_dict()[name], value, rtol=1e-12, atol=1e-12, msg=name)
        assert torch.equal(other[0].state_dict()[name], plain[0].state_dict()[name]), name
    assert plain[1].callback_metrics == other[1].callback_metrics
    batches = 2 * (SAMPLES // BATCH) * 3  # epochs, batches, micro-batches
    compared = 3 * 4  # the first process computes each of the four layers while it records, and twice to compare
    whole = 4  # that these layers stay whole shows in a first recording; those that are computed again always do
    assert sorted(plain[2].values()) == [batches, batches + compared + whole, 2 * batches]  # two stages have one layer
    assert sorted(other[2].values()) == [2 * batches, 2 * batches + compared, 4 * batches]
    assert not any(map(is_checkpointed, other[0].modules()))


def _in_turn(strategy: Any) -> PipelineStrategy:
    """Threads draw random numbers in any order, so checkpointed stages on a CPU have none."""
    made: PipelineStrategy = strategy()
    made.threads = False
    return made


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_lower_precisions(precision: str) -> None:
    strategy, devices = STRATEGIES["single_device"]
    options = {"precision": precision}

    class Cast(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step([part.float() for part in batch], batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            return super().validation_step([part.float() for part in batch], batch_idx)

    if precision == "bf16-true":
        Cast = Deep  # type: ignore[misc]
    one, _ = fit(None, strategy, devices, Cast(), **options)
    other, _ = fit(["net.*"], strategy, devices, Cast(), **options)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


class Measured(Deep):
    """Keeps account of the second step."""

    held = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.ledger = Ledger(self)
        self.ledger.start()

    def on_before_backward(self, loss: Tensor) -> None:
        self.ledger.begin("backward")

    def on_train_batch_end(self, *args: Any) -> None:
        self.ledger.stop()
        self.held = self.ledger.peak("cpu", "forward").totals()["activation"]


def test_memory_is_less() -> None:
    strategy, devices = STRATEGIES["single_device"]
    plain, _ = fit(None, strategy, devices, Measured())
    less, _ = fit(["net.*"], strategy, devices, Measured())
    block = BATCH * 8 * 8  # bytes of one activation of a block
    assert plain.held - less.held >= 4 * block


def test_accumulation_and_a_closure() -> None:
    class Lbfgs(Deep):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    strategy, devices = STRATEGIES["single_device"]
    for make, options in ((Deep, {"accumulate_grad_batches": 2}), (Lbfgs, {})):
        one, _ = fit(None, strategy, devices, make(), **options)
        other, _ = fit(["net.*"], strategy, devices, make(), **options)
        assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", ["single_device", "dp", "pipeline"])
def test_an_error_takes_it_back(name: str) -> None:
    class Failing(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx:
                raise ValueError("as it happens")
            return super().training_step(batch, batch_idx)

    module, (strategy, devices) = Failing(), STRATEGIES[name]
    with pytest.raises(ValueError, match="as it happens"):
        fit(["net.*"], strategy, devices, module)
    assert all("forward" not in vars(part) for part in module.modules())


def test_evaluations_know_nothing_of_it() -> None:
    run = trainer(activation_checkpointing=["net.nothing"], precision="64-true")
    run.validate(Deep(), data()[1], verbose=False)


def test_what_matches_nothing_is_refused_before_training() -> None:
    module = Deep()
    strategy, devices = STRATEGIES["single_device"]
    refuses(lambda: fit(["nett.*"], strategy, devices, module), "'nett.*' matches no submodule of Deep", "net")
    assert not module.found
    refuses(lambda: trainer(activation_checkpointing="net.*"), "takes a list of names, such as ['net.*']")
    for wrong in ([3], 3, [""]):
        refuses(lambda wrong=wrong: trainer(activation_checkpointing=wrong), "a list of names, patterns or classes")


def test_the_network_of_a_pipeline_stays_in_parts() -> None:
    with pytest.raises(ConfigurationError, match=r"'net', which is the network .* such as 'net\.\*'"):
        fit(["net"], *STRATEGIES["pipeline"])
