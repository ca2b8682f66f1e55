"""Training on two machines with a network between them, and what happens when it, or a machine, fails.

python benchmarks/two_machines/main.py speed      steps a second by hand and through the trainer
python benchmarks/two_machines/main.py same       results beside those of one device
python benchmarks/two_machines/main.py faults     a link that breaks, a machine that dies
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from network import ADDRESSES, INTERFACE, Network, measured, network
from rich.console import Console
from rich.table import Table

PROGRAM = str(Path(__file__).with_name("programs.py"))
STRATEGIES = ("ddp", "ddp-2MiB", "fsdp", "pipeline")
WAYS = ("alone", "exchange", "by hand", "trainer")
# Without the last one, torchrun waits in vain for a machine that comes back.
VARIABLES = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LIMIT = 400.0  # seconds for which a disturbed job is waited for; its processes wait for one another for 150
AT_STEP = 12  # of 40, at which something happens
OFF = 10.0  # seconds for which a machine that died is off

console = Console(width=160)


class Job:
    """A program under torchrun on both machines, with files in a folder that both see.

    Args:
        both: The machines.
        task: What the program does.
        strategies: The strategies with which it does so.
        folder: The folder.
        restarts: How often torchrun starts the processes again.
    """

    def __init__(self, both: Network, task: str, strategies: list[str], folder: Path, restarts: int = 0) -> None:
        self.both, self.folder, self.restarts = both, folder, restarts
        self.arguments = [task, str(folder), *strategies]
        folder.mkdir()
        self.agents = [self.start(machine) for machine in range(2)]

    def start(self, machine: int) -> "subprocess.Popen[bytes]":
        """Start torchrun on a machine, in a working folder of its own."""
        place = self.folder / f"machine{machine}"
        place.mkdir(exist_ok=True)
        # The name of the machine leads to no address in its namespace, so torchrun is told which machine is the first.
        options = [
            *("--nnodes=2", "--nproc-per-node=1", f"--max-restarts={self.restarts}", "--rdzv-backend=c10d"),
            *(f"--rdzv-endpoint={ADDRESSES[0]}:29500", f"--local-addr={ADDRESSES[machine]}"),
            f"--rdzv-conf=is_host={int(machine == 0)},keep_alive_interval=2,read_timeout=150",
        ]
        program = [sys.executable, "-m", "torch.distributed.run", *options, PROGRAM, *self.arguments]
        with (place / "output.txt").open("ab") as output:
            return subprocess.Popen(
                self.both.command(machine, program),
                stdout=output,
                stderr=output,
                cwd=place,
                env={**os.environ, **VARIABLES},
            )

    def wait_for_step(self, step: int) -> None:
        """Wait until a step has begun."""
        notes = self.folder / "steps.txt"
        end = time.monotonic() + LIMIT
        while not notes.exists() or len(notes.read_text().splitlines()) < step:
            if time.monotonic() > end or any(agent.poll() for agent in self.agents):
                raise RuntimeError(f"no step {step}: {self.folder}")
            time.sleep(0.05)

    def end(self) -> list[float | None]:
        """Wait for both machines, and return after how many seconds each failed; None: it ended in order.

        What has not ended after LIMIT is killed, and counts as failed after an infinite time.
        """
        begin = time.monotonic()
        failed: list[float | None] = [None, None]
        running = {0, 1}
        while running and time.monotonic() < begin + LIMIT:
            for machine in list(running):
                code = self.agents[machine].poll()
                if code is not None:
                    running.discard(machine)
                    failed[machine] = time.monotonic() - begin if code else None
            time.sleep(0.05)
        for machine in running:
            self.both.kill(machine)
            self.agents[machine].wait()
            failed[machine] = math.inf
        return failed

    def result(self) -> Any:
        """Return what the first machine wrote; None if it wrote nothing."""
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def longest_step(self) -> float:
        """Return the longest time between two steps."""
        times = [float(line) for line in (self.folder / "steps.txt").read_text().splitlines()]
        return max(later - earlier for earlier, later in pairwise(times))


# Questions


def speed(both: Network, strategies: list[str], root: Path) -> None:
    """Print the time of a step, and what of the exchange is hidden behind the computation."""
    job = Job(both, "speed", strategies, root / "speed")
    job.end()
    turns: dict[tuple[str, str], list[list[float]]] = {}
    for strategy, way, *values in job.result():
        turns.setdefault((strategy, way), []).append(values)
    table = Table("strategy", *(f"{way}, ms" for way in WAYS), "by hand / trainer", "MB", "hidden")
    for strategy in strategies:
        times = [median(seconds for seconds, _ in turns[strategy, way]) for way in WAYS]
        alone, exchange, *both_ways = times
        pairs = zip(turns[strategy, "by hand"], turns[strategy, "trainer"], strict=True)
        ratio = median(one[0] / other[0] for one, other in pairs)
        sent = median(size for _, size in turns[strategy, "trainer"]) / 1e6
        hidden = " / ".join(f"{max(alone + exchange - whole, 0) / exchange:.0%}" for whole in both_ways)
        hidden = "-" if strategy == "pipeline" else hidden
        table.add_row(strategy, *(f"{seconds * 1e3:.0f}" for seconds in times), f"{ratio:.3f}", f"{sent:.1f}", hidden)
    console.print(table)


def same(both: Network, strategies: list[str], root: Path) -> None:
    """Print how far weights are from those of one device."""
    job = Job(both, "same", strategies, root / "same")
    job.end()
    for strategy, difference in job.result().items():
        console.print(f"{strategy}: largest difference of a weight from one device: {difference:.1e}")


def faults(both: Network, strategies: list[str], root: Path) -> None:
    """Print how fits end that something disturbs."""
    table = Table("strategy", "fault", "longest step, s", "ended after, s", "difference")
    for strategy in strategies:
        expected: list[float] = []
        for name, disturb in FAULTS.items():
            folder = root / f"{strategy}-{name.replace(' ', '-')}"
            job = Job(both, "disturbed", [strategy], folder, restarts=3 if disturb is dies else 0)
            job.wait_for_step(AT_STEP)
            disturb(job)
            ends = ["in order" if after is None else f"{after:.0f}" for after in job.end()]  # inf: not at all
            both.pull(out=False)
            result = job.result()
            expected = expected or result
            difference = "-"
            if result:
                difference = f"{max(abs(one - other) for one, other in zip(result, expected, strict=True)):.1e}"
            table.add_row(strategy, name, f"{job.longest_step():.1f}", ", ".join(ends), difference)
    console.print(table)


def breaks(seconds: float | None) -> Callable[[Job], None]:
    """A link that is out for some time; None: for good."""

    def disturb(job: Job) -> None:
        job.both.pull(out=True)
        if seconds is not None:
            time.sleep(seconds)
            job.both.pull(out=False)

    return disturb


def dies(job: Job) -> None:
    """The second machine loses its power, comes back, and torchrun is started on it again."""
    job.both.pull(out=True)
    job.both.kill(1)
    job.agents[1].wait()
    time.sleep(OFF)
    job.both.pull(out=False)
    job.agents[1] = job.start(1)


FAULTS: dict[str, Callable[[Job], None]] = {
    "none": lambda job: None,
    "link out 5 s": breaks(5.0),
    "link out 60 s": breaks(60.0),
    "link out for good": breaks(None),
    "machine dies": dies,
}


QUESTIONS = {"speed": speed, "same": same, "faults": faults}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=list(QUESTIONS))
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--folder", type=Path, help="keep outputs and checkpoints there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="two-machines-") as temporary, network() as both:
        root = options.folder or Path(temporary)
        root.mkdir(exist_ok=True)
        seconds, rate, share = measured(both)
        console.print(f"{seconds * 1e3:.2f} ms, {rate * 8e-9:.2f} Gbit/s, the relay at {share:.0%} of a processor")
        QUESTIONS[options.question](both, options.strategies, root)


if __name__ == "__main__":
    main()
