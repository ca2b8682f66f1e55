"""Trainer(activation_checkpointing=...): the same weights under every strategy, and nothing of it afterwards."""

import os
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import BalancedDataParallelStrategy, ConfigurationError, DDPStrategy, PipelineStrategy
from equipoise.interop.torch.autograd import is_in_backward
from equipoise.memory.profile.ledger import Ledger
from equipoise.parallel.activation_checkpointing import is_checkpointed
from tests.support.equality import assert_equal
from tests.support.pipelines import stay_whole
from tests.support.trainer_runs import refuses, trainer

BATCHES, BATCH = 3, 8


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
        return self.head(self.net(x.to(self.net[0].weight.dtype)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.found |= {name for name, part in self.named_modules() if is_checkpointed(part)}
        loss = self(batch[0]).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    samples = torch.randn(BATCHES * BATCH, 6, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(samples), batch_size=BATCH)


def one_device() -> str:
    return "single_device"


def fit(
    patterns: list[str] | None,
    strategy: Any = lambda: "single_device",
    devices: int = 1,
    make: Any = Deep,
    **options: Any,
) -> Any:
    """Return the trained module and the values that it logged."""
    module = make()
    options = {"max_epochs": 2, "num_sanity_val_steps": 1, "precision": "64-true", **options}
    run = trainer(strategy=strategy(), devices=["cpu"] * devices, activation_checkpointing=patterns, **options)
    torch.manual_seed(9)
    run.fit(module, data(), data())
    return module, dict(run.callback_metrics)


STRATEGIES: dict[str, tuple[Any, int]] = {
    "single_device": (one_device, 1),
    "dp": (lambda: "dp", 2),
    "balanced, forward alone": (lambda: BalancedDataParallelStrategy(shares=[3, 5], parallelize="forward"), 2),
    "ddp, native": (lambda: DDPStrategy(engine="native"), 2),
    "pipeline": (lambda: PipelineStrategy(cut_before=["net.3"], micro_batches=3), 2),
    "pipeline, processes": (
        lambda: PipelineStrategy(engine="processes", cut_before=["net.3"], micro_batches=3, timeout=300.0),
        2,
    ),
    "pipeline, gpipe": (lambda: PipelineStrategy(cut_before=["net.1"], schedule="gpipe", threads=True), 2),
}


@pytest.mark.quick_cases(3)
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_weights_with_checkpointed_activations_are_the_same_to_the_bit(name: str) -> None:
    """Dropout included: both runs draw the same random numbers."""
    strategy, devices = STRATEGIES[name]
    plain = fit(None, (lambda: _in_turn(strategy)) if "gpipe" in name else strategy, devices)
    module, logged = fit(["net.1", "net.[2-4]"], strategy, devices)
    assert_equal(plain, (module, logged))
    assert module.found == {"net.1", "net.2", "net.3", "net.4"}
    assert not any(map(is_checkpointed, module.modules()))
    assert all("forward" not in vars(part) for part in module.modules())


class Counted(nn.Module):
    """Writes down the process of every forward that counts for a backward."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.linear, self.norm, self.file = nn.Linear(8, 8), nn.BatchNorm1d(8), file

    def forward(self, value: Tensor) -> Tensor:
        stay_whole(value)
        if self.training and torch.is_grad_enabled():
            with self.file.open("a") as file:
                file.write(f"{os.getpid()}\n")
        return torch.tanh(self.norm(self.linear(value)))


class Written(Deep):
    """Four such layers, normalised over samples."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), *(Counted(file) for _ in range(4)))


@pytest.mark.thorough
def test_a_pipeline_over_processes_computes_twice_where_its_stages_lie(tmp_path: Path) -> None:
    """Running means are updated once."""

    def run(name: str, patterns: list[str] | None) -> tuple[Any, Any, list[int]]:
        options = {"engine": "processes", "cut_before": ["net.2", "net.4"], "micro_batches": 3, "timeout": 300.0}
        made = fit(patterns, lambda: PipelineStrategy(**options), 3, lambda: Written(tmp_path / name), max_epochs=1)
        return *made, sorted(Counter((tmp_path / name).read_text().split()).values())

    *plain, once = run("plain", None)
    *other, twice = run("twice", ["net.[1-4]"])
    assert_equal(plain, other)
    batches = BATCHES * 3  # micro-batches; two stages have one layer, and one has two
    # The first process, which has one, computes more while it records: so it is the last, and then the second.
    assert once[:2] == [batches, 2 * batches]
    assert twice[::2] == [2 * batches, 4 * batches]


def _in_turn(strategy: Any) -> PipelineStrategy:
    """Threads draw random numbers in any order, so checkpointed stages on a CPU have none."""
    made: PipelineStrategy = strategy()
    made.threads = False
    return made


class Lbfgs(Deep):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Deep, {"precision": "bf16-mixed"}),
        (Deep, {"precision": "bf16-true"}),
        (Deep, {"accumulate_grad_batches": 2}),
        (Lbfgs, {}),
    ],
    ids=["bf16-mixed", "bf16-true", "accumulated", "a closure"],
)
def test_weights_are_the_same_to_the_bit_with_options(make: Any, options: dict[str, Any]) -> None:
    assert_equal(fit(None, make=make, **options), fit(["net.*"], make=make, **options))


class Called(nn.Tanh):
    """Writes down the phase of each call."""

    phases: ClassVar[list[str]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.phases.append("backward" if is_in_backward() else "forward")
        return super().forward(x)


class Measured(Deep):
    """Keeps account of the second step."""

    held = 0

    def __init__(self) -> None:
        super().__init__()
        self.net[1][1] = Called()  # type: ignore[index]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.ledger = Ledger(self)
        self.ledger.start()

    def on_before_backward(self, loss: Tensor) -> None:
        self.ledger.begin("backward")

    def on_train_batch_end(self, *args: Any) -> None:
        self.ledger.stop()
        self.held = self.ledger.peak("cpu", "forward").totals()["activation"]


def test_checkpointed_activations_are_not_held_and_computed_again_in_the_backward() -> None:
    Called.phases.clear()
    plain, less = (fit(patterns, make=Measured, max_epochs=1)[0] for patterns in (None, ["net.*"]))
    block = BATCH * 8 * 8  # bytes of one activation of a block
    assert plain.held - less.held >= 4 * block
    assert Called.phases.count("backward") == BATCHES


@pytest.mark.parametrize("name", ["single_device", "pipeline"])
def test_activation_checkpointing_ends_with_an_error(name: str) -> None:
    class Failing(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx:
                raise ValueError("as it happens")
            return super().training_step(batch, batch_idx)

    module = Failing()
    with pytest.raises(ValueError, match="as it happens"):
        fit(["net.*"], *STRATEGIES[name], make=lambda: module)
    assert all("forward" not in vars(part) for part in module.modules())


def test_evaluations_checkpoint_no_activations() -> None:
    run = trainer(activation_checkpointing=["net.nothing"], precision="64-true")
    run.validate(Deep(), data(), verbose=False)


def test_what_matches_nothing_is_refused_before_training() -> None:
    module = Deep()
    refuses(lambda: fit(["nett.*"], make=lambda: module), "'nett.*' matches no submodule of Deep", "net")
    assert not module.found
    refuses(lambda: trainer(activation_checkpointing="net.*"), "takes a list of names, such as ['net.*']")
    for wrong in ([3], 3, [""]):
        refuses(lambda wrong=wrong: trainer(activation_checkpointing=wrong), "a list of names, patterns or classes")


def test_the_network_of_a_pipeline_stays_in_parts() -> None:
    with pytest.raises(ConfigurationError, match=r"'net', which is the network .* such as 'net\.\*'"):
        fit(["net"], *STRATEGIES["pipeline"])
