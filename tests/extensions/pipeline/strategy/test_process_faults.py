"""Whatever goes wrong in a stage of its own process ends the run with one error, soon, and leaves nothing."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.utils.data import DataLoader, TensorDataset

from equipoise import PipelineStrategy, Trainer, WorkerError
from equipoise.parallel.workers import launch
from tests.strategies.ddp.test_faults import Mistake, hangs, is_killed, raises
from tests.strategies.programs import start_script, torchrun, wait_for
from tests.support.pipelines import stay_whole
from tests.support.ports import unused_port
from tests.support.programs import Program
from tests.support.quiet import QUIET


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, how: Callable[[], None]) -> Tensor:
        ctx.how = how
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.how()
        return gradients[0], None


class Layer(nn.Module):
    """Fails in one of its calls; which, is counted where it runs."""

    def __init__(self, place: str, how: Callable[[], None], at: int) -> None:
        super().__init__()
        self.linear, self.place, self.how, self.at, self.calls = nn.Linear(3, 3), place, how, at, 0
        self.evaluations = 0

    def forward(self, value: Tensor) -> Tensor:
        stay_whole(value)
        self.calls += self.training
        self.evaluations += not self.training
        # The main process records the first call of an evaluation.
        now = self.calls == self.at if self.training else self.evaluations == 2
        if now and self.place == ("forward" if self.training else "validation"):
            self.how()
        made = self.linear(value)
        return FailsBackward.apply(made, self.how) if now and self.training and self.place == "backward" else made


class Faulty(L.LightningModule):
    def __init__(self, place: str, how: Callable[[], None], stage: int, at: int = 3, stages: int = 3) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Layer(place if each == stage else "", how, at) for each in range(stages)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer(devices: int = 3, plan: Any = None, timeout: float = 300.0, **options: Any) -> Trainer:
    plan = {"cut_before": ["net.1", "net.2"], **(plan or {})}
    strategy = PipelineStrategy(engine="processes", timeout=timeout, micro_batches=2, **plan)
    given = {**QUIET, "max_epochs": 1, "num_sanity_val_steps": 0, **options}
    return Trainer(strategy=strategy, devices=["cpu"] * devices, **given)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=2)


LOOP = {"cut_before": ["net.1", "net.2", "net.3"], "schedule": "interleaved_1f1b"}


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("place", ["forward", "backward", "validation"])
@pytest.mark.parametrize(
    ("stage", "devices", "plan"), [*((stage, 3, {}) for stage in range(3)), *((stage, 2, LOOP) for stage in range(4))]
)
def test_an_error(place: str, stage: int, devices: int, plan: Any) -> None:
    """The last process, of one stage or two, is that of the trainer."""
    run = make_trainer(devices, plan)
    with pytest.raises(Mistake, match="on purpose") as caught:
        run.fit(Faulty(place, raises, stage, stages=4 if plan else 3), loader(), loader())
    told = "".join(getattr(caught.value, "__notes__", []))
    is_in_worker = stage % devices < devices - 1
    assert (f"stage {stage}, on cpu, in a process of its own" in told) == is_in_worker
    assert run.state.status == "interrupted"
    nobody_is_left()


class Looking(nn.Module):
    """Look up rows, of which there are five."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rows, self.last = nn.Linear(3, 8), nn.Embedding(5, 8), nn.Linear(8, 1)

    def forward(self, features: Tensor, indices: Tensor) -> Tensor:
        hidden: Tensor = self.first(features).relu()
        hidden = hidden + self.rows(indices)
        return self.last(hidden)


class LookingModule(Faulty):
    def __init__(self) -> None:
        super().__init__("", raises, 0)
        self.net = Looking()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(*batch).square().mean()


@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("cut", ["net.rows", "net.last"])
def test_an_error_of_torch_names_the_line_of_the_user(engine: Any, cut: str) -> None:
    """In the last stage as in one of a process of its own, where the calls are built anew."""
    strategy = PipelineStrategy(engine=engine, micro_batches=2, cut_before=[cut])
    run = Trainer(strategy=strategy, devices=["cpu"] * 2, **{**QUIET, "max_epochs": 1})
    batches = [(torch.randn(4, 3), torch.tensor([0, 1, 2, last])) for last in (3, 4, 5)]
    with pytest.raises(IndexError) as caught:
        run.fit(LookingModule(), DataLoader(batches, batch_size=None))
    assert "`hidden = hidden + self.rows(indices)`" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_process_that_is_killed(place: str, stage: int) -> None:
    with pytest.raises(WorkerError, match=f"rank {2 - stage} of 3 was killed by SIGKILL"):
        make_trainer().fit(Faulty(place, is_killed, stage), loader())
    nobody_is_left()


def test_the_first_process_is_killed() -> None:
    with pytest.raises(WorkerError, match="rank 0 of 3 was killed by SIGKILL"):
        make_trainer().fit(Faulty("forward", is_killed, 2), loader())
    nobody_is_left()


@pytest.mark.slow
def test_a_process_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait no longer than they were told, and the one that hangs is named, with the place.

    That no checkpoint can be written any more is a consequence.
    """
    # The processes wait for a cause as long as their timeout allows.
    monkeypatch.setattr(launch, "_UNTIL_CAUSE", 1e6)
    options = {"callbacks": [OnExceptionCheckpoint(tmp_path)], "enable_checkpointing": True}
    with pytest.raises(WorkerError, match=r"rank 2 of 3 hung(?s:.*)in hangs"):
        make_trainer(timeout=10.0, **options).fit(Faulty("forward", hangs, 0), loader())
    nobody_is_left()


def test_what_an_exception_leaves(tmp_path: Path) -> None:
    """A checkpoint of the whole module, in the midst of which everything is still there."""
    keeper = OnExceptionCheckpoint(tmp_path, "left")
    with pytest.raises(Mistake):
        make_trainer(callbacks=[keeper], enable_checkpointing=True).fit(Faulty("forward", raises, 0, at=5), loader())
    state = torch.load(tmp_path / "left.ckpt", weights_only=True)
    assert state["global_step"] == 2
    assert all(torch.isfinite(value).all() for value in state["state_dict"].values())


def nobody_is_left() -> None:
    for child in psutil.Process().children():
        assert not child.children(), "a worker is left"


# Processes that somebody else has started


SCRIPT = """
import json, os, sys
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from equipoise import PipelineStrategy, Trainer

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    def training_step(self, batch, batch_idx):
        if fails and batch_idx == 1:
            raise RuntimeError("on purpose")
        return self.net(batch[0]).square().mean()
    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).square().mean())
    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])[:, 0]
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

folder, devices, nodes, engine = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
fails = "fails" in sys.argv
torch.manual_seed(0)
module, data = Module(), TensorDataset(torch.randn(13, 3))
strategy = "single_device" if engine == "none" else PipelineStrategy(engine=engine)
trainer = Trainer(strategy=strategy, devices=devices, num_nodes=nodes, accelerator="cpu", max_epochs=2, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                  precision="64-true")
trainer.fit(module, DataLoader(data, batch_size=4), DataLoader(data, batch_size=4))
val = float(trainer.callback_metrics["val"])
predicted = torch.cat(trainer.predict(module, DataLoader(data, batch_size=4))).tolist()
weights = [parameter.tolist() for parameter in module.parameters()]
rank = int(os.environ.get("RANK", 0))
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump({"weights": weights, "val": val, "predicted": predicted, "rank": trainer.global_rank}, file)
"""


def script_in(folder: Path) -> Path:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return script


def results(folder: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def check_joined(folder: Path, count: int) -> None:
    """All scripts end with the same module and results, those of one device."""
    found, alone = results(folder), folder / "alone"
    alone.mkdir()
    wait_for([start_script(script_in(folder), [str(alone), "1", "1", "none"])])
    (expected,) = results(alone)
    assert [result["rank"] for result in found] == list(range(count))
    for result in found:
        for actual, weight in zip(result["weights"], expected["weights"], strict=True):
            torch.testing.assert_close(torch.tensor(actual), torch.tensor(weight), rtol=1e-12, atol=1e-12)
        assert result["val"] == pytest.approx(expected["val"], rel=1e-12)
        assert result["predicted"] == pytest.approx(expected["predicted"], rel=1e-12)


@pytest.mark.slow
def test_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--standalone", "--nproc-per-node", "3"]
    assert not torchrun(monkeypatch, script_in(tmp_path), [str(tmp_path), "3", "1", "processes"], options)
    check_joined(tmp_path, 3)


def test_two_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of torchrun that know of one another, on one."""
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    options += ["--master-port", str(unused_port()), "--node-rank"]
    calls = [[*options, node] for node in ("0", "1")]
    assert not torchrun(monkeypatch, script_in(tmp_path), [str(tmp_path), "1", "2", "processes"], *calls)
    check_joined(tmp_path, 2)


def test_torchrun_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--standalone", "--nproc-per-node", "2"]
    arguments = [str(tmp_path), "2", "1", "processes", "fails"]
    (error,) = torchrun(monkeypatch, script_in(tmp_path), arguments, options)
    assert isinstance(error, ChildFailedError)
    assert "on purpose" in str(error)


# Signals


INTERRUPTED = """
import os, threading
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from equipoise import PipelineStrategy, Trainer

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            os.write(1, b"here\\n")
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = Trainer(strategy=PipelineStrategy(engine="processes"), devices=["cpu", "cpu"], max_epochs=-1, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(64, 3)), batch_size=4))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all(number: int) -> None:
    with Program(INTERRUPTED, starts_workers=True) as program:
        assert program.stdout.readline() == "here\n"
        children = psutil.Process(program.pid).children(recursive=True)
        program.send_signal(number)
        program.finish()
        assert number == signal.SIGTERM or program.returncode != 0  # after which the loop ends, in order
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive
