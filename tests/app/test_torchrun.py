"""`equipoise fit` in processes that torchrun has started: one run, with one folder and one checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.projects import write

ROOT = Path(__file__).parents[2]

# Two processes, over the loopback interface alone.
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")

# A module that logs a line in each process, whose file Hydra makes with the first.
LOGGED = """
    import logging
    from tiny.module import Line

    class Logged(Line):
        def on_fit_start(self):
            logging.getLogger("tiny").warning("rank %d has begun", self.global_rank)
    """


# Commands one after the other: a process imports everything once for all of them.
COMMANDS = """
import json, sys
from equipoise.__main__ import main

for arguments in json.loads(sys.argv[1]):
    if code := main(arguments):
        sys.exit(code)
"""


def torchrun(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module or a script in two processes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", *TORCHRUN, *arguments]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_all_processes_use_one_folder(project: Path) -> None:
    files = {
        "tiny/logged.py": LOGGED,
        "conf/module/logged.yaml": "{_target_: tiny.logged.Logged, lr: 0.1, sizes: [1, 1], settings: {bias: true}}",
    }
    write(project, files)
    done = torchrun(project, "-m", "equipoise", "fit", "module=logged", "callbacks=[model_checkpoint]", "seed=0")
    assert done.returncode == 0, done.stderr
    # 1. The folder is that of rank 0, and the other process has left none.
    (folder,) = project.glob("outputs/*/*")
    assert yaml.safe_load((folder / "config.yaml").read_text())["output_dir"] == str(folder)
    (checkpoint,) = folder.glob("checkpoints/*.ckpt")
    # 2. Both train: eight samples in batches of four are one step of two processes.
    assert checkpoint.name == "epoch=0-step=1.ckpt"
    # 3. Both log into its file.
    log = (folder / "equipoise.log").read_text()
    assert "rank 0 has begun" in log
    assert "rank 1 has begun" in log

    # 4. The next run resumes from its checkpoint, in a folder of its own that it uses again.
    again = ["module=logged", "ckpt_path=last", "hydra.run.dir=again"]
    fit = ["fit", *again, "trainer.max_epochs=2", "callbacks=[model_checkpoint]"]
    write(project, {"commands.py": COMMANDS})
    done = torchrun(project, "commands.py", json.dumps([fit, ["predict", *again]]))
    assert done.returncode == 0, done.stderr
    assert (project / "again" / "checkpoints" / "epoch=1-step=2.ckpt").is_file()
    assert done.stdout.count("Predictions: ") == 1
    assert torch.cat(torch.load(project / "again" / "predictions.pt")).shape == (8, 1)
    assert (project / "again" / "metrics_0.csv").is_file()
    assert not (project / "again" / "metrics_1.csv").exists()


REFUSED = [
    (("--multirun", "module.lr=0.1,0.2"), "--multirun runs the jobs of a sweep from one process, but this is one of 2"),
    (("launcher=ray",), "RayLauncher starts its processes by itself, but this is one of 2"),
]


@pytest.mark.whole_package
@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[arguments[0] for arguments, _ in REFUSED])
def test_refused_in_several_processes(
    arguments: tuple[str, ...], message: str, project: Path, equipoise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    code, _, err = equipoise("fit", *arguments)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert sorted(path.name for path in project.iterdir()) == ["conf", "tiny"]


@pytest.mark.thorough
def test_independent_processes_have_runs_of_their_own(
    project: Path, equipoise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need not meet, so nothing says where."""
    for rank in ("0", "1"):
        for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
        code, _, err = equipoise("fit", "strategy=single_device", "strategy.independent=true", "trainer.devices=1")
        assert code == 0, err
    assert len(list(project.glob("outputs/*/*/config.yaml"))) == 2
