"""torchrun with one or two nodes: a node is killed in the middle of an epoch, and later another one joins.

Both nodes are agents of torchrun on this machine, with one process each. The run must end as one of two processes to
which nothing happened.

python benchmarks/kills/nodes.py
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import Trainer

__all__ = ["main"]

SAMPLES, EPOCHS, STEPS = 61, 2, 8
# Numbers of the batches after which the program waits: for a node to leave, and for one to join.
LEAVES, JOINS = 3, 10
SECONDS = 300.0


class Layer(LightningModule):
    """A layer that notes the samples of each batch in a file.

    Args:
        folder: Where the notes go.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels, indices = batch
        note = json.dumps([self.current_epoch, batch_idx, indices.tolist()])
        with (self.folder / f"seen-{os.getpid()}.jsonl").open("a") as file:
            file.write(note + "\n")
        return nn.functional.cross_entropy(self.net(features), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Waits(Callback):
    """Tells how far the run is, and waits after two batches until something has happened.

    Args:
        folder: The folder of the files by which programs tell each other.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Waits once for a node to leave, and once for one to join."""
        if trainer.global_rank:
            return
        at = trainer.current_epoch * STEPS + batch_idx
        with (self.folder / "worlds.txt").open("a") as file:
            file.write(f"{at} {trainer.world_size} {trainer.num_nodes}\n")
        for moment, world, event in ((LEAVES, 2, "left"), (JOINS, 1, "joined")):
            if at == moment and trainer.world_size == world:
                (self.folder / f"waits-{event}").touch()
                _wait(lambda event=event: trainer.received_sigterm or (self.folder / event).exists(), event)


def work(folder: Path, *, waits: bool) -> None:
    """Trains, or resumes from the last checkpoint: what each process of torchrun runs."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    (folder / f"pid-{os.getppid()}").write_text(str(os.getpid()))
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(SAMPLES, 5, dtype=torch.float64, generator=generator)
    labels = torch.randint(3, (SAMPLES,), generator=generator)
    data = TensorDataset(features, labels, torch.arange(SAMPLES))
    module = Layer(folder)
    # Nothing says how many processes and machines there are: that follows from torchrun.
    trainer = Trainer(
        accelerator="cpu",
        precision="64-true",
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(folder, every_n_train_steps=1, save_last=True),
            *([Waits(folder)] if waits else []),
        ],
    )
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True), ckpt_path="last")
    if trainer.is_global_zero:
        torch.save(module.state_dict(), folder / "weights.pt")


# The nodes


def start_node(
    folder: Path, port: int, *, is_host: bool, nodes: str = "1:2", waits: bool = True
) -> "subprocess.Popen[bytes]":
    """Starts an agent of torchrun with one process. That of the host stores where the nodes meet."""
    # Without these two, agents on one machine may miss each other when another one joins.
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    options = [
        f"--nnodes={nodes}",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=elastic",
        "--local-addr=127.0.0.1",
        "--max-restarts=5",
        "--monitor-interval=1",
        f"--rdzv-conf=is_host={int(is_host)},last_call_timeout=10,keep_alive_interval=2,keep_alive_max_attempt=3",
    ]
    program = [__file__, "waits" if waits else "undisturbed", str(folder)]
    output = (folder / "output.txt").open("ab")
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, *program],
        stdout=output,
        stderr=output,
        env={**os.environ, **variables},
    )


def kill_node(node: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Kills an agent and its process, as if the machine had lost its power."""
    node.kill()
    node.wait()
    process = folder / f"pid-{node.pid}"
    if process.exists():
        with suppress(ProcessLookupError):
            os.kill(int(process.read_text()), signal.SIGKILL)


def _wait(condition: Callable[[], bool], event: str) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{event}: nothing for {SECONDS:.0f} s")
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


# The case


def undisturbed(folder: Path) -> None:
    """Runs two nodes to the end."""
    folder.mkdir()
    port = _free_port()
    nodes = [start_node(folder, port, is_host=host, nodes="2", waits=False) for host in (True, False)]
    assert [node.wait(SECONDS) for node in nodes] == [0, 0], (folder / "output.txt").read_text()


def disturbed(folder: Path) -> None:
    """Runs two nodes, of which one leaves; later another one joins."""
    folder.mkdir()
    port = _free_port()
    nodes = [start_node(folder, port, is_host=host) for host in (True, False)]
    try:
        _wait((folder / "waits-left").exists, "two nodes train")
        kill_node(nodes.pop(), folder)
        (folder / "left").touch()
        _wait((folder / "waits-joined").exists, "one node continues")
        nodes.append(start_node(folder, port, is_host=False))
        codes = [node.wait(2 * SECONDS) for node in nodes]
        assert codes == [0, 0], (folder / "output.txt").read_text()
    finally:
        for node in nodes:
            kill_node(node, folder)


def seen_in(folder: Path) -> dict[tuple[int, int], list[int]]:
    """The samples of each step, each of which counts once in its epoch."""
    steps: dict[tuple[int, int], set[int]] = {}
    for path in folder.glob("seen-*.jsonl"):
        for line in path.read_text().splitlines():
            with suppress(ValueError):  # a line that was cut off
                epoch, batch, indices = json.loads(line)
                steps.setdefault((epoch, batch), set()).update(indices)
    for epoch in range(EPOCHS):
        drawn = Counter(index for (of, _), indices in steps.items() if of == epoch for index in indices)
        assert drawn == dict.fromkeys(range(SAMPLES), 1), f"epoch {epoch}: not every sample once"
    return {key: sorted(indices) for key, indices in steps.items()}


def main() -> None:
    """Runs the case, and prints by how many processes the steps were computed, and the difference of the weights."""
    with tempfile.TemporaryDirectory(prefix="nodes-") as root:
        folders = Path(root, "undisturbed"), Path(root, "disturbed")
        undisturbed(folders[0])
        begin = time.monotonic()
        disturbed(folders[1])
        print(f"{time.monotonic() - begin:.0f} s")
        weights = [torch.load(folder / "weights.pt", weights_only=True) for folder in folders]
        difference = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])
        for line in (folders[1] / "worlds.txt").read_text().splitlines():
            step, processes, machines = line.split()
            print(f"step {step}: {processes} processes on {machines} nodes")
        assert seen_in(folders[0]) == seen_in(folders[1]), "other samples in a step"
        print(f"largest difference of a weight: {difference:.1e}")
        assert difference < 1e-12


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(Path(sys.argv[2]), waits=sys.argv[1] == "waits")
    else:
        main()
