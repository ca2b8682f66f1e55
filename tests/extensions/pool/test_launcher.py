"""`--multirun launcher=pool`: jobs in processes of their own, each on a device."""

import csv
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from equipoise.extensions.pool.launcher import PoolLauncher
from equipoise.parallel.workers import availability
from tests.support.programs import EQUIPOISE, Program
from tests.support.projects import write

ROOT = Path(__file__).parents[3]
POOL = ("fit", "--multirun", "launcher=pool", "launcher.devices=[cpu,cpu]", "seed=0")

# A module that writes down its process and device, fails for one learning rate, and is killed for another.
PROBE = """
    import os
    import signal
    import torch
    from pathlib import Path
    from tiny.module import Line

    class Probe(Line):
        def on_train_start(self):
            folder = Path(self.trainer.default_root_dir)
            (folder / "process").write_text(f"{os.getpid()} {self.trainer.strategy.root_device}")
            print("printed by the job")
            if self.lr == 0.5:
                raise RuntimeError("half is too much")
            if self.lr == 0.6:
                os.kill(os.getpid(), signal.SIGKILL)
    """
PROBE_CONF = """
    _target_: tiny.probe.Probe
    lr: 0.1
    sizes: [1, 1]
    settings: {bias: true}
    """
PROBES = {"tiny/probe.py": PROBE, "conf/module/probe.yaml": PROBE_CONF}


@pytest.fixture
def probed(project):
    write(project, PROBES)
    return project


def results(project):
    (path,) = project.glob("multirun/*/*/results.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_each_job_has_a_process_and_a_device_and_gives_what_it_gives_alone(probed, equipoise):
    code, out, err = equipoise(*POOL, "module=probe", "module.lr=0.1,0.2,0.3")
    assert code == 0, err
    rows = results(probed)
    assert [(row["job"], row["module.lr"], row["state"]) for row in rows] == [
        ("0", "0.1", "done"),
        ("1", "0.2", "done"),
        ("2", "0.3", "done"),
    ]
    processes = set()
    for row in rows:
        folder = Path(row["folder"])
        process, device = (folder / "process").read_text().split()
        processes.add(process)
        assert device == "cpu"
        assert "printed by the job" in (folder / "job.log").read_text()
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert (config["launcher"], config["trainer"]["devices"]) == (None, 1)
    assert len(processes) == 3
    assert str(os.getpid()) not in processes
    assert "printed by the job" not in out
    assert out.count("val_loss") == 4  # a line for each job, and the closing table
    assert "Sweep: 3 done" in out

    # The same jobs one after the other, in this process.
    code, _, err = equipoise("fit", "--multirun", "seed=0", "hydra.sweep.dir=alone", "module.lr=0.1,0.2,0.3")
    assert code == 0, err
    for row in rows:
        with Path("alone", row["job"], "metrics.csv").open() as file:
            values = [line["val_loss"] for line in csv.DictReader(file) if line["val_loss"]]
        assert float(row["val_loss"]) == pytest.approx(float(values[-1]), rel=1e-12)


@pytest.mark.slow
def test_a_job_that_fails_or_is_killed_does_not_end_the_others(probed, equipoise):
    values = ("module.lr=0.5,0.1,0.6", "hydra.sweeper.max_batch_size=2", "objective=val_loss")
    code, out, err = equipoise(*POOL, "module=probe", *values)
    assert code == 1
    assert err.startswith("equipoise: 2 of 3 jobs failed: 0, 2.")
    assert "Traceback" not in err
    assert "Sweep: 1 done, 2 failed" in out
    assert "Job 0: RuntimeError: half is too much" in out
    rows = results(probed)
    assert [row["state"] for row in rows] == ["failed", "done", "failed"]
    assert rows[0]["error"] == "RuntimeError: half is too much"
    assert "SIGKILL" in rows[2]["error"]
    assert "Traceback" in Path(rows[0]["folder"], "job.log").read_text()
    # The value that the sweep optimises is shown alone; the file has all.
    assert "val_loss" in out
    assert "train_loss" not in out
    assert float(rows[1]["train_loss"]) > 0


@pytest.mark.slow
def test_another_stage_and_a_failed_configuration(project, equipoise):
    code, out, _ = equipoise("validate", *POOL[1:], "module.lr=0.1", "trainer.limit_val_batches=1,-2")
    assert code == 1
    states = {row["trainer.limit_val_batches"]: row["state"] for row in results(project)}
    assert states == {"1": "done", "-2": "failed"}
    assert "limit_val_batches" in out


REFUSED = [
    (("launcher.devices=[cuda:7]",), "The device cuda:7 does not exist"),
    (("launcher.devices=[]",), "devices=[] is neither a count"),
    (("launcher.devises=[cpu]",), "no key 'launcher.devises' in the configuration; did you mean 'launcher.devices'?"),
    (("trainer.devices=2",), "contradicts trainer.devices=2"),
    (("trainer.num_nodes=2",), "contradicts trainer.num_nodes=2"),
    (("trainer.accelerator=mps",), "trainer.accelerator=mps does not fit launcher.devices"),
]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[overrides[0] for overrides, _ in REFUSED])
def test_refused_before_the_first_job(project, equipoise, overrides, message):
    code, _, err = equipoise(*POOL, "module.lr=0.1,0.2", *overrides)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not (project / "multirun").exists()


def test_a_pool_without_a_sweep_is_refused(project, equipoise):
    code, _, err = equipoise("fit", "launcher=pool")
    assert code == 2
    assert "add --multirun" in err
    assert not (project / "outputs").exists()


def test_refused_where_no_process_can_be_started(project, equipoise, monkeypatch):
    monkeypatch.setattr(availability, "get_all_start_methods", lambda: ["spawn"])
    code, _, err = equipoise(*POOL, "module.lr=0.1,0.2")
    assert code == 2
    assert "launcher=pool needs a fork server" in err
    assert "Leave launcher out, and the jobs run one after the other" in err
    assert not (project / "multirun").exists()


def test_an_unknown_launcher_is_refused(project, equipoise):
    code, _, err = equipoise("fit", "--multirun", "launcher=pol")
    assert code == 2
    assert "did you mean 'pool'?" in err


@pytest.mark.slow
def test_a_program_of_the_users_own(project):
    """Its function runs in the processes of the jobs; what it returns reaches the sweeper."""
    write(
        project,
        {
            "mine.py": """
                import os

                import hydra
                from equipoise.app import run

                @hydra.main(version_base="1.3", config_path="conf", config_name="config")
                def main(config):
                    value = run(config)["val_loss"]
                    print("process", os.getpid(), "value", value)
                    return value

                main()
                """
        },
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "mine.py", *POOL[1:], "module.lr=0.1,0.2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Sweep: 2 done" in done.stdout
    for row in results(project):
        log = Path(row["folder"], "job.log").read_text()
        assert float(re.search(r"process \d+ value (\S+)", log)[1]) == pytest.approx(float(row["val_loss"]))


IMPATIENT = """
from equipoise.extensions.pool import launcher

launcher._LEAVING = 1.0  # seconds
"""


@pytest.mark.slow
def test_ctrl_c_ends_the_jobs_and_keeps_what_is_done(project):
    """The third job never ends; it tells that it has begun, and the sweep is interrupted then."""
    write(
        project,
        {
            **PROBES,
            "tiny/endless.py": """
                import os
                import threading
                from pathlib import Path
                from tiny.module import Line

                class Endless(Line):
                    def on_train_batch_end(self, outputs, batch, batch_idx):
                        if self.lr == 0.3:
                            with open("begun", "w") as pipe:
                                pipe.write(str(os.getpid()))
                            while True:
                                threading.Event().wait(1)
                """,
            "conf/module/endless.yaml": PROBE_CONF.replace("tiny.probe.Probe", "tiny.endless.Endless"),
        },
    )
    os.mkfifo("begun")
    arguments = [*POOL, "launcher.devices=[cpu]", "module=endless", "module.lr=0.1,0.3,0.2"]
    with Program(IMPATIENT + EQUIPOISE, *arguments, folder=project, starts_workers=True) as program:
        with open("begun") as pipe:
            job = int(pipe.read())
        program.send_signal(signal.SIGINT)
        out, err = program.finish()
        assert program.returncode == 130, err
    assert "Sweep: 1 done, 2 interrupted" in out
    assert [row["state"] for row in results(project)] == ["done", "interrupted", "interrupted"]
    with pytest.raises(ProcessLookupError):
        os.kill(job, 0)


def test_devices_of_a_pool():
    assert PoolLauncher(devices=2).names == ["cpu", "cpu"]
    assert PoolLauncher().names == ["cpu"]
