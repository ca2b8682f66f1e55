"""Watch a run under ddp: how late a value is seen, and what that costs the steps.

python benchmarks/watch/main.py            two processes, about 100 seconds

The page is asked for once a second, as the browser does, in every second stretch of ten seconds.
"""

import http.client
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import Callback, RunReport, Trainer

SECONDS = 80.0
STRETCH = 10.0
SERVER = "from equipoise.extensions.runs.watch.command import watch; import sys; watch(sys.argv[1:])"


class Net(LightningModule):
    """A perceptron that logs its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        # The moment in which the value is logged, by the clock of the machine.
        self.log("logged_at", time.time() % 1000)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Times(Callback):
    """Notes when each step of rank 0 ended, and ends the run in time."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        """Note the time."""
        self.ends.append(time.time())
        if self.ends[-1] - self.ends[0] > SECONDS:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the times."""
        if trainer.is_global_zero:
            Path(self.folder, "ends.json").write_text(json.dumps(self.ends))


def train(folder: str) -> None:
    """Train until the time is over."""
    torch.set_num_threads(1)
    loader = DataLoader(TensorDataset(torch.randn(40_000, 256), torch.randint(10, (40_000,))), batch_size=32)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        log_every_n_steps=50,
        default_root_dir=folder,
        callbacks=[RunReport(), Times(folder)],
    )
    trainer.fit(Net(), loader)


def ask(port: int, version: str | None) -> tuple[str | None, str]:
    """Return the version of the page and the page; an empty one if nothing has changed."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"If-None-Match": version} if version else {}
    connection.request("GET", "/", headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.getheader("ETag"), text if answer.status == 200 else ""


def newest(text: str) -> float:
    """Return the time at which the newest value of the page was logged; 0 without one."""
    _, _, figure = text.partition("<h3>logged_at")
    values = re.search(r'data-y="([-+.0-9e ]+)"', figure)
    if values is None:
        return 0.0
    return float(values[1].split()[-1])


def main() -> None:
    """Measure, and print."""
    folder = tempfile.mkdtemp()
    run = subprocess.Popen([sys.executable, __file__, "train", folder], stdout=subprocess.DEVNULL)
    while not Path(folder, "run.json").exists():
        time.sleep(0.1)
    server = subprocess.Popen([sys.executable, "-c", SERVER, folder, "--port=0"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    port = int(server.stdout.readline().split(":")[3].split("/")[0])
    version, late, watched = None, [], []
    begun = time.time()
    try:
        while run.poll() is None:
            stretch = int((time.time() - begun) / STRETCH)
            if stretch % 2 == 0:
                asked = time.time()
                version, text = ask(port, version)
                answered = time.time()
                watched.append((asked, answered))
                if text and newest(text):
                    # A value of just now is late by the pause until the next question as well.
                    late.append((answered - newest(text)) % 1000)
            time.sleep(1.0)
        listening = [c.laddr for c in psutil.Process(server.pid).net_connections() if c.status == "LISTEN"]
    finally:
        server.terminate()
        server.wait(30)
        if run.poll() is None:
            run.kill()
    ends = json.loads(Path(folder, "ends.json").read_text())
    steps: dict[bool, list[float]] = {True: [], False: []}
    for before, after in pairwise(ends):
        if after > begun and after - before < 1.0:
            steps[int((after - begun) / STRETCH) % 2 == 0].append(after - before)
    with_page, without = (statistics.mean(steps[is_watched]) for is_watched in (True, False))
    answers = [answered - asked for asked, answered in watched]
    print(f"newest value of the page: {statistics.median(late):.2f} s old in the median, {max(late):.2f} s at most")
    print(f"an answer takes {1000 * statistics.median(answers):.0f} ms in the median")
    print(f"mean step: {1000 * with_page:.3f} ms watched, {1000 * without:.3f} ms not, {with_page / without:.3f} times")
    print(f"addresses that the server listens to: {listening}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2])
    else:
        main()
