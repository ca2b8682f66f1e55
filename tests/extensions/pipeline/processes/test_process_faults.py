"""Whatever goes wrong in a stage of its own process ends the run with one error, soon, and leaves nothing."""

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.utils.data import DataLoader, TensorDataset

from equipoise import PipelineStrategy, Trainer, WorkerError
from equipoise.parallel.workers import launch
from tests.extensions.pipeline.processes.programs import Faulty, check_joined, nobody_is_left, script_in
from tests.strategies.programs import start_script, torchrun, wait_for
from tests.support.failures import Mistake, hangs, is_killed, raises
from tests.support.networks.layers import Task, network
from tests.support.ports import unused_port
from tests.support.programs import Program
from tests.support.quiet import QUIET


def make_trainer(devices: int = 3, plan: Any = None, timeout: float = 300.0, **options: Any) -> Trainer:
    plan = {"cut_before": ["net.1", "net.2"], **(plan or {})}
    strategy = PipelineStrategy(engine="processes", timeout=timeout, micro_batches=2, **plan)
    given = {**QUIET, "max_epochs": 1, "num_sanity_val_steps": 0, **options}
    return Trainer(strategy=strategy, devices=["cpu"] * devices, **given)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=2)


LOOP = {"cut_before": ["net.1", "net.2", "net.3"], "schedule": "interleaved_1f1b"}


@pytest.mark.quick_cases(4)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("place", "stage", "devices", "plan"),
    [
        *(("forward", 0, 3, {}), ("backward", 1, 3, {}), ("validation", 2, 3, {})),
        *(("backward", 0, 2, LOOP), ("validation", 1, 2, LOOP), ("forward", 3, 2, LOOP)),
    ],
)
def test_an_error_in_a_stage_ends_the_run(place: str, stage: int, devices: int, plan: Any) -> None:
    """The last process, of one stage or two, is that of the trainer."""
    run = make_trainer(devices, plan)
    with pytest.raises(Mistake, match="on purpose") as caught:
        run.fit(Faulty(place, raises, stage, stages=4 if plan else 3), loader(), loader())
    told = "".join(getattr(caught.value, "__notes__", []))
    is_in_worker = stage % devices < devices - 1
    assert (f"stage {stage}, on cpu, in a process of its own" in told) == is_in_worker
    assert run.state.status == "interrupted"
    nobody_is_left()


def looks_up(self: Any, features: Tensor, indices: Tensor) -> Tensor:
    """Look up rows, of which there are five."""
    hidden = self.first(features).relu()
    hidden = hidden + self.rows(indices)
    return self.last(hidden)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("engine", "cut"), [("threads", "net.rows"), ("processes", "net.last")])
def test_an_error_of_torch_names_the_line_of_the_user(engine: Any, cut: str) -> None:
    """In the last stage as in one of a process of its own, where the calls are built anew."""
    strategy = PipelineStrategy(engine=engine, micro_batches=2, cut_before=[cut])
    run = Trainer(strategy=strategy, devices=["cpu"] * 2, **{**QUIET, "max_epochs": 1})
    looking = network(looks_up, first=nn.Linear(3, 8), rows=nn.Embedding(5, 8), last=nn.Linear(8, 1))
    batches = [(torch.randn(4, 3), torch.tensor([0, 1, 2, last])) for last in (3, 4, 5)]
    with pytest.raises(IndexError) as caught:
        run.fit(Task(looking, lambda module, batch: module.net(*batch).mean()), DataLoader(batches, batch_size=None))
    assert "`hidden = hidden + self.rows(indices)`" in "".join(caught.value.__notes__)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("place", "stage"), [("forward", 0), ("backward", 2)])
def test_a_process_that_is_killed_is_named(place: str, stage: int) -> None:
    with pytest.raises(WorkerError, match=f"rank {2 - stage} of 3 was killed by SIGKILL"):
        make_trainer().fit(Faulty(place, is_killed, stage), loader())
    nobody_is_left()


@pytest.mark.slow
def test_a_process_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait no longer than they were told, and the one that hangs is named, with the place.

    That no checkpoint can be written any more is a consequence.
    """
    # The processes wait for a cause as long as their timeout allows.
    monkeypatch.setattr(launch, "_UNTIL_CAUSE", 1e6)
    options = {"callbacks": [OnExceptionCheckpoint(tmp_path)], "enable_checkpointing": True}
    with pytest.raises(WorkerError, match=r"rank 2 of 3 hung(?s:.*)in hangs"):
        make_trainer(timeout=10.0, **options).fit(Faulty("forward", hangs, 0), loader())
    nobody_is_left()


@pytest.mark.thorough
def test_an_exception_leaves_a_checkpoint(tmp_path: Path) -> None:
    """A checkpoint of the whole module, in the midst of which everything is still there."""
    keeper = OnExceptionCheckpoint(tmp_path, "left")
    with pytest.raises(Mistake):
        make_trainer(callbacks=[keeper], enable_checkpointing=True).fit(Faulty("forward", raises, 0, at=5), loader())
    state = torch.load(tmp_path / "left.ckpt", weights_only=True)
    assert state["global_step"] == 2
    assert all(torch.isfinite(value).all() for value in state["state_dict"].values())


# Processes that somebody else has started


@pytest.mark.slow
def test_scripts_of_torchrun_wait_in_fit_and_continue_with_the_same_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--standalone", "--nproc-per-node", "3"]
    assert not torchrun(monkeypatch, script_in(tmp_path), [str(tmp_path), "3", "1", "processes"], options)
    check_joined(tmp_path, 3)


@pytest.mark.thorough
def test_processes_on_two_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of torchrun that know of one another, on one."""
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    options += ["--master-port", str(unused_port()), "--node-rank"]
    calls = [[*options, node] for node in ("0", "1")]
    assert not torchrun(monkeypatch, script_in(tmp_path), [str(tmp_path), "1", "2", "processes"], *calls)
    check_joined(tmp_path, 2)


@pytest.mark.thorough
def test_torchrun_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--standalone", "--nproc-per-node", "2"]
    arguments = [str(tmp_path), "2", "1", "processes", "fails"]
    (error,) = torchrun(monkeypatch, script_in(tmp_path), arguments, options)
    assert isinstance(error, ChildFailedError)
    assert "on purpose" in str(error)


LOSES_A_PROCESS = """
import sys, torch
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
from equipoise import PipelineStrategy, Trainer
from tests.extensions.pipeline.processes.programs import Faulty
from tests.support.failures import is_killed
from tests.support.quiet import QUIET

strategy = PipelineStrategy(engine="processes", micro_batches=2, cut_before=["net.1"])
options = {**QUIET, "max_epochs": 1, "num_sanity_val_steps": 0}
trainer = Trainer(strategy=strategy, devices=1, num_nodes=2, accelerator="cpu", **options)
try:
    trainer.fit(Faulty("forward", is_killed, 0, stages=2), DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=2))
except RuntimeError as error:
    Path(sys.argv[1]).write_text("".join([str(error), *getattr(error, "__notes__", [])]))
"""


@pytest.mark.thorough
def test_releasing_leaves_the_stage_of_a_lost_machine_alone(tmp_path: Path) -> None:
    """The error is the only one: the values of that stage are in no process any more."""
    script, message = tmp_path / "script.py", tmp_path / "message.txt"
    script.write_text(LOSES_A_PROCESS)
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port())}
    main, lost = [start_script(script, [str(message)], RANK=rank, NODE_RANK=rank, **place) for rank in ("0", "1")]
    wait_for([main])
    lost.join()
    assert "closed" in message.read_text() or "reset" in message.read_text()
    assert "Releasing" not in message.read_text()


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
