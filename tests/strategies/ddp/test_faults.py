"""Whatever goes wrong in one process, and wherever, ends the run with one error, and leaves nothing."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from equipoise import DDPStrategy, StepError, WorkerError
from tests.support.failures import Mistake, hangs, is_killed, leaves, raises
from tests.support.pairs import pairwise
from tests.support.programs import Program
from tests.support.trainer_runs import Small, loader, trainer
from tests.support.waiting import blame_early, wait_briefly

HOW: dict[str, tuple[Any, type[Exception], str]] = {
    "raise": (raises, Mistake, "on purpose"),
    "SIGKILL": (is_killed, WorkerError, r"rank 1 of 2 was killed by SIGKILL\. .*out of memory\."),
    "sys.exit": (leaves, WorkerError, r"rank 1 of 2 failed(?s:.*)sys\.exit\(3\)"),
    "hang": (hangs, WorkerError, r"rank 1 of 2 hung(?s:.*)in hangs"),
}


class Faulty(Small):
    """Fails at one place in one process."""

    def __init__(self, place: str, how: Any) -> None:
        super().__init__()
        self.place, self.how = place, how

    def reach(self, place: str) -> None:
        if place != self.place:
            return
        if self.global_rank == 1:
            self.how()
        elif self.how is hangs:
            wait_briefly()

    def setup(self, stage: str) -> None:
        self.reach("setup")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.reach("forward")
        out = self.layer(batch[0])
        if batch_idx == 1:
            out.register_hook(lambda gradient: self.reach("backward"))
        return out.square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.reach("optimiser step")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", self.loss(batch))
        self.reach("validation")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.reach("checkpoint")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else set()
    yield
    if before:  # the first launch opens those of the two servers
        assert len(os.listdir("/proc/self/fd")) - len(before) <= 8


PLACES = ["setup", "forward", "backward", "optimiser step", "validation", "checkpoint"]


@pytest.mark.quick_cases(5)
@pytest.mark.thorough
@pytest.mark.parametrize(("how", "place", "engine"), pairwise(list(HOW), PLACES, ["torch", "native"]))
def test_a_process_that_fails_ends_the_run_and_the_next_one_is_as_new(
    engine: Any, how: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, error, message = HOW[how]
    if function is hangs:
        blame_early(monkeypatch)
    run = trainer(
        strategy=DDPStrategy(timeout=300.0, engine=engine),
        devices=2,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    module = Faulty(place, function)
    with pytest.raises(error, match=message) as caught:
        run.fit(module, loader(4), loader(4))
    if function is raises:
        assert "Raised in rank 1 of 2." in caught.value.__notes__
        assert "in raises" in str(caught.value.__cause__)
    assert run.state.status == "interrupted"
    assert run.lightning_module is module
    for child in psutil.Process().children():
        assert not child.children(), "a worker is left"
    module.place = "nowhere"
    run.fit(module, loader(4), loader(4))
    assert run.state.finished


class FreezesInOne(Small):
    def on_fit_start(self) -> None:
        next(self.parameters()).requires_grad_(self.global_rank == 0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("engine", ["native", "torch"])
def test_a_parameter_that_one_process_freezes_is_named(engine: str) -> None:
    with pytest.raises(StepError, match=r"weight is frozen in some processes alone: ranks 0 and 1 differ"):
        trainer(strategy=DDPStrategy(engine=engine), devices=["cpu", "cpu"]).fit(FreezesInOne(), loader())


SCRIPT = """
import os, sys, threading
import lightning as L, torch
from torch.utils.data import DataLoader, TensorDataset
from equipoise import Trainer
from tests.support.waiting import wait_briefly

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            os.write(1, f"pid {os.getpid()}\\n".encode())
            threading.Event().wait()
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = Trainer(strategy="ddp", devices=2, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(number: int) -> None:
    with Program(SCRIPT, starts_workers=True) as program:
        pids = []
        while len(pids) < 2:
            line = program.stdout.readline()
            assert line, "the script ended by itself"
            if line.startswith("pid"):
                pids.append(int(line.split()[1]))
        others = [psutil.Process(pid) for pid in pids]
        others += psutil.Process(program.pid).children()  # the server
        program.send_signal(number)
        program.finish()
        assert program.returncode == -number
    _, alive = psutil.wait_procs(others, timeout=120)
    assert not alive
