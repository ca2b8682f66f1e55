"""Programs whose classes live in the script itself, and programs that are asked to end."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.programs import Program

BATCHES = """
import os
from typing import NamedTuple
import torch

os.write(1, f"imported as {__name__}\\n".encode())  # whole, also if two processes write at the same time

class Batch(NamedTuple):
    x: torch.Tensor

class Outer:
    class Planned(Exception):
        pass

class Data(torch.utils.data.Dataset):
    def __len__(self): return 12
    def __getitem__(self, index):
        if index == 11: raise Outer.Planned("on purpose")  # in the third batch of the second process
        return torch.ones(3)

def collate(samples):
    return Batch(torch.stack(samples))

if __name__ == "__main__":  # workers of loaders that import the script need no more than what is above
    import lightning as L
    from equipoise import DDPStrategy, Trainer

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(3, 1)
        def training_step(self, batch, batch_idx):
            assert type(batch) is Batch
            if (self.global_rank, batch_idx) == (0, 0):
                os.write(1, b"a batch\\n")
            return self.net(batch.x).square().mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for method in ("fork", "spawn", "forkserver"):
        trainer = Trainer(strategy=DDPStrategy(timeout=60.0), devices=2, accelerator="cpu", max_epochs=1, logger=False,
                          enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1, collate_fn=collate,
                                             multiprocessing_context=method)
        try:
            trainer.fit(Module(), loader)
        except Outer.Planned as error:
            print(method, "caught", str(error).splitlines()[-1].removeprefix("__mp_main__."), flush=True)
"""


@pytest.mark.slow
def test_classes_of_the_script_come_out_of_the_workers_of_a_loader(tmp_path: Path) -> None:
    """However the workers are started; those that are forked, and processes of the strategy, import no script."""
    script = tmp_path / "script.py"
    script.write_text(BATCHES)
    done = subprocess.run([sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, timeout=900)
    told = done.stdout.splitlines()
    assert told[:3] == ["imported as __main__", "a batch", "fork caught Outer.Planned: on purpose"], done.stderr
    assert [line for line in told[3:] if line != "imported as __mp_main__"] == [
        *("a batch", "spawn caught Outer.Planned: on purpose"),
        *("a batch", "forkserver caught Outer.Planned: on purpose"),
    ], done.stderr


HANGS = """
import os, threading
import equipoise.parallel.workers.launch as launching

launching._TERMINATING = 0.5  # seconds, in the place of a minute

def hang(rank):
    os.write(1, b"here\\n")
    while True:
        threading.Event().wait(1)

def before(rank):
    import signal
    signal.signal(signal.SIGTERM, lambda *_: None)  # as a trainer's, which waits for the end of the batch
    hang(rank)

launching.launch(before, 2)
"""


def wait_for_workers(program: Program) -> None:
    """Wait until both workers have reported that they are here."""
    assert [program.stdout.readline() for _ in range(2)] == ["here\n"] * 2


@pytest.mark.slow
def test_a_sigterm_ends_a_program_whose_processes_hang() -> None:
    with Program(HANGS, starts_workers=True) as program:
        wait_for_workers(program)
        others = psutil.Process(program.pid).children(recursive=True)
        program.send_signal(signal.SIGTERM)
        _, told = program.finish()
        assert program.returncode == 1
    assert "rank 0 of 2 did not end within 0.5 seconds after SIGTERM" in told
    assert "in hang" in told
    _, alive = psutil.wait_procs(others, timeout=600)
    assert not alive
