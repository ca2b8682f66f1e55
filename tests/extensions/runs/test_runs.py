"""`equipoise runs`: what is found and read, also of runs that are damaged, killed or not ours, and how it is shown."""

import contextlib
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import rich
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console

import equipoise
from equipoise import RunReport
from equipoise.__main__ import main
from equipoise.app.earlier_runs.configurations import flat_configuration
from equipoise.extensions.runs.command import page_of_sweep
from tests.extensions.runs.run_files import WriteRun
from tests.support.callback_runs import Small, loader, trainer
from tests.support.projects import write

BOTH = pytest.mark.parametrize("cls", [L.Trainer, equipoise.Trainer])
# Each of nine lists holds the one before it nine times.
LINES = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
REPEATED = "\n".join(["a0: &a0 [x]", *LINES])


@pytest.fixture(autouse=True)
def wide_console(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print where the test reads, without a terminal."""
    monkeypatch.setattr(rich, "get_console", lambda: Console(force_terminal=False))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["runs", *arguments]) == 0
    return capsys.readouterr().out


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(shown(capsys, "--json", *arguments))["runs"]
    return runs


def names(runs: list[dict[str, Any]]) -> list[str]:
    return [Path(run["folder"]).name for run in runs]


class Fails(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 3:
            raise ValueError("it <broke>\nfor a reason")
        return super().training_step(batch, batch_idx)


class TestOfRealFits:
    @BOTH
    def test_a_finished_and_a_failed_fit_are_listed(self, cls: type, tmp_path: Path, monkeypatch: Any, capsys: Any):
        monkeypatch.chdir(tmp_path)
        for name, module in (("a", Small()), ("b", Fails())):
            options = {"logger": CSVLogger(f"outputs/{name}", "", ""), "log_every_n_steps": 1}
            run = trainer(cls, max_epochs=2, callbacks=[RunReport()], enable_progress_bar=False, **options)
            with contextlib.suppress(ValueError):
                run.fit(module, loader(4), loader(1))
        capsys.readouterr()
        first, second = listed(capsys)
        assert (first["state"], first["epochs"], first["steps"], first["error"]) == ("finished", 2, 8, "")
        assert (second["state"], second["steps"]) == ("failed", 3)
        assert second["error"] == "ValueError: it <broke>"
        assert first["metrics"]["loss"] == {
            "best": 0.0 if cls is equipoise.Trainer else 3.0,
            "last": 7.0,
            "mode": "min",
        }
        assert first["metrics"]["val_loss"] == {"best": 10.0, "last": 11.0, "mode": "min"}
        assert first["peak_memory"]["cpu"] > 0
        assert first["origin"]["equipoise"] == equipoise.__version__
        assert 0 < first["seconds"] < 60

    def test_the_report_says_what_was_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.chdir(tmp_path)
        git = ["git", "-c", "user.name=a", "-c", "user.email=b"]
        for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
            Path("code.py").write_text("1\n")
            subprocess.run([*git, *command], check=True)
        commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        monkeypatch.setattr("sys.argv", ["equipoise", "module.name=a b"])
        for text, is_changed in (("1\n", False), ("2\n", True)):
            Path("code.py").write_text(text)
            trainer(equipoise.Trainer, max_epochs=1, callbacks=[RunReport()]).fit(Small(), loader(2))
            facts = json.loads(Path("run.json").read_text())
            assert facts["command"] == "equipoise fit 'module.name=a b'"
            assert (facts["commit"], facts["changed"]) == (commit, is_changed)
        page = Path("report.html").read_text()
        assert f"{commit}, with changes that are not committed" in page


class TestFound:
    def test_other_folders_and_links_are_no_runs(self, write_run: WriteRun, tmp_path: Path, capsys: Any):
        write_run("a")
        others = {
            "conf": "defaults: [a]\n",
            "evaluated": "stage: test\n",
            "smoke": "stage: fit\ntrainer: {fast_dev_run: 2}\n",
        }
        write(tmp_path / "outputs", {f"{name}/config.yaml": text for name, text in others.items()})
        (tmp_path / "outputs" / "link").symlink_to(tmp_path / "outputs" / "a")
        assert names(listed(capsys)) == ["a"]
        assert names(listed(capsys, "outputs", "outputs/a")) == ["a"]

    def test_files_of_a_loggers_folder_belong_to_the_run(self, write_run: WriteRun, capsys: Any):
        folder = write_run("a")
        for version in ("version_9", "version_10"):
            (folder / "tensorboard" / version).mkdir(parents=True)
            text = (folder / "run.json").read_text().replace('"steps": 20', f'"steps": {version[8:]}')
            (folder / "tensorboard" / version / "run.json").write_text(text)
        (folder / "run.json").unlink()
        (run,) = listed(capsys)
        assert (Path(run["folder"]).name, run["steps"]) == ("a", 10)

    def test_a_text_that_is_cut_says_so(self, write_run: WriteRun, capsys: Any):
        write_run("a", error="x" * 501)
        write_run("b", error="y" * 500)
        assert sorted(run["error"] for run in listed(capsys)) == ["x" * 499 + "…", "y" * 500]

    def test_runs_without_a_report_are_read_from_their_metrics(self, tmp_path: Path, monkeypatch: Any, capsys: Any):
        folder = tmp_path / "lightning_logs" / "version_0"
        folder.mkdir(parents=True)
        rows = ["step,epoch,val_loss,lr", "9,0,0.5,", "9,0,,0.1", "19,1,nan,", "29,1,0.75,", "39,1,0."]
        (folder / "metrics.csv").write_text("\n".join(rows))
        (folder / "hparams.yaml").write_text("width: 8\n")
        monkeypatch.chdir(tmp_path)
        (run,) = listed(capsys, "lightning_logs")
        assert (run["state"], run["steps"], run["epochs"]) == ("unknown", 30, 2)
        # The last row was cut off.
        assert run["metrics"]["val_loss"] == {"best": 0.5, "last": 0.75, "mode": "min"}

    def test_a_run_that_was_killed_keeps_what_its_loggers_did_not_receive(self, write_run: WriteRun, capsys: Any):
        curves = {"val_loss": [[9], [0.5]], "lr-SGD": [[9], [0.1]]}
        folder = write_run("a", state="running", curves=curves)
        (folder / "metrics.csv").write_text("step,epoch,val_loss\n9,0,0.5\n19,1,0.25\n")
        (run,) = listed(capsys)
        assert {name: metric["last"] for name, metric in run["metrics"].items()} == {"val_loss": 0.25, "lr-SGD": 0.1}

    def test_what_a_sweep_knows_of_a_job_that_told_nothing(self, write_run: WriteRun, capsys: Any):
        folder = write_run("3")
        (folder / "run.json").unlink()
        row = f"3,failed,0.1,1.5,cpu,{folder},TypeError: no"
        (folder.parent / "results.csv").write_text(f"job,state,lr,seconds,device,folder,error\n{row}\n")
        (run,) = listed(capsys)
        assert (run["state"], run["error"], run["seconds"]) == ("failed", "TypeError: no", 1.5)

    @pytest.mark.parametrize(
        ("file", "text", "reason"),
        [
            ("run.json", "{", "Expecting"),
            ("run.json", "[" * 100_000, ""),
            ("run.json", '{"state": "<script>"}', "names no state"),
            ("run.json", "{}", "it has no 'state'"),
            ("run.json", json.dumps({"state": "failed", "error": "", "began": "x" * 100_000}), "Invalid isoformat"),
            ("config.yaml", "a: [", "while parsing"),
            ("config.yaml", "!!python/object/apply:os.system ['touch owned']", "could not determine a constructor"),
            ("config.yaml", REPEATED, "10,000 values"),
            ("config.yaml", "a: &a [*a]", ""),
            ("metrics.csv", "a,b\n1,2\n", "step"),
            ("metrics.csv", "step,loss\nx,2\n", "could not convert"),
        ],
    )
    def test_a_damaged_file_is_one_line(self, write_run: WriteRun, capsys: Any, file: str, text: str, reason: str):
        write_run("good")
        folder = write_run("bad")
        if file == "metrics.csv":
            (folder / "run.json").unlink()
        (folder / file).write_text(text)
        told = json.loads(shown(capsys, "--json"))
        assert set(names(told["runs"])) == {"good", "bad"}
        (failure,) = told["unreadable"]
        assert Path(failure["path"]) == Path("outputs/bad", file)
        assert reason in failure["reason"]
        assert len(failure["reason"].splitlines()) == 1
        assert len(failure["reason"]) <= 500
        assert not Path("owned").exists()
        assert "Not read: outputs/bad/" in shown(capsys)

    @pytest.mark.parametrize("name", ["seconds", "epochs", "steps", "peak_memory", "began", "times", "curves"])
    def test_a_value_that_cannot_be_is_damage(self, write_run: WriteRun, capsys: Any, name: str):
        forms = {"peak_memory": lambda value: {"cpu": value}, "curves": lambda value: {"loss": [[0], [value]]}}
        values = {"huge": 10**400, "none": None, "list": [], "text": "<b>", "inf": "inf", "nan": "nan"}
        for run, value in values.items():
            write_run(run, **{name: forms.get(name, lambda value: value)(value)})
        told = json.loads(shown(capsys, "--json"))
        assert set(names(told["runs"])) == values.keys()
        # Numbers of a curve that are not finite are texts.
        damaged = values.keys() - ({"inf", "nan"} if name == "curves" else set())
        assert {Path(failure["path"]).parent.name for failure in told["unreadable"]} == damaged
        assert "outputs/huge" in shown(capsys, "--html=runs.html")

    def test_a_folder_that_cannot_be_listed_is_one_line(self, write_run: WriteRun, capsys: Any, monkeypatch: Any):
        write_run("a")
        real = os.scandir

        def scandir(path: Any) -> Any:
            if Path(path).name == "a":
                raise PermissionError(13, "Permission denied")
            return real(path)

        monkeypatch.setattr(os, "scandir", scandir)
        assert "Not read: outputs/a: Permission denied" in shown(capsys)


class TestShown:
    def test_only_what_differs_is_in_the_table(self, write_run: WriteRun, capsys: Any):
        write_run("a", lr=0.1)
        write_run("b", lr=0.2, state="failed", error="ValueError: [bold]no[/bold]", curves={})
        text = shown(capsys)
        *_, first, second = (line.split() for line in text.splitlines()[1:6])
        assert "module.lr" in text.partition("─")[0]
        assert "outputs/b: ValueError: [bold]no[/bold]" in text
        assert first == ["a", "finished", "0.9000", "0.1", "0.2500", "0.8000", "2", "20", "1:00", "1.0", "GiB"]
        assert second[:5] == ["b", "failed", "-", "0.2", "-"]
        assert "save_dir" not in text

    def test_a_run_that_is_named_by_its_time_is_shown_as_day_and_time(self, write_run: WriteRun, capsys: Any):
        write_run("2026-01-31/10-20-30-123456", lr=0.1)
        assert shown(capsys).splitlines()[4].split()[:4] == ["31", "Jan", "10:20:30", "finished"]

    def test_a_run_and_its_error_are_a_line_each(self, write_run: WriteRun, capsys: Any):
        write_run("a_name_that_says_much_too_much", lr=0.2, error="ValueError: " + "no " * 200)
        lines = shown(capsys).splitlines()
        assert lines[4].split()[0] == "a_name_that_says_much_to…"
        assert lines[-1].endswith("…")

    @pytest.mark.parametrize(
        ("order", "expected"),
        [
            ("", ["b", "a", "c", "d"]),
            ("--sort=val_loss", ["a", "b", "c", "d"]),
            ("--sort=-val_loss", ["c", "b", "a", "d"]),
            ("--sort=val_accuracy", ["c", "b", "a", "d"]),
            ("--sort=module.lr", ["d", "b", "c", "a"]),
            ("--sort=time", ["c", "b", "a", "d"]),
        ],
    )
    def test_runs_are_sorted(self, write_run: WriteRun, capsys: Any, order: str, expected: list[str]):
        for number, (name, lr) in enumerate([("a", 0.5), ("b", 1e-3), ("c", 0.1), ("d", 1e-5)]):
            curves = {"val_loss": [[0, 1], [number + 1, "nan"]], "val_accuracy": [[0], [number / 8]]}
            began = f"2026-01-01T10:00:0{[1, 0, 2, 3][number]}+00:00"
            write_run(name, lr, curves=curves if name != "d" else {}, began=began, seconds=100.0 - 10 * number)
        if order == "--sort=time":
            expected = ["d", "c", "b", "a"]
        assert names(listed(capsys, *filter(None, [order]))) == expected

    def test_a_value_that_is_not_finite_is_a_text_in_json(self, write_run: WriteRun, capsys: Any):
        write_run("a", curves={"val_loss": [[0], ["nan"]]})
        text = shown(capsys, "--json")
        assert "NaN" not in text
        assert json.loads(text)["runs"][0]["metrics"]["val_loss"] == {"best": "nan", "last": "nan", "mode": "min"}

    def test_folders_without_runs_are_no_error(self, tmp_path: Path, monkeypatch: Any, capsys: Any):
        monkeypatch.chdir(tmp_path)
        assert "There are no runs in outputs and multirun, which do not exist here." in shown(capsys)
        assert "There are no runs in ." in shown(capsys, ".", "--html=runs.html")
        assert "There are none." in Path("runs.html").read_text()

    @pytest.mark.parametrize(
        ("argument", "message"),
        [
            ("nowhere", "There is no folder 'nowhere'"),
            ("--sort=val_lose", "did you mean 'val_loss'?"),
            ("--sort", "--sort takes a value"),
            ("--html=outputs", "--html=outputs cannot be written"),
            ("--csv", "not --csv"),
        ],
    )
    def test_arguments_that_are_refused(self, write_run: WriteRun, capsys: Any, argument: str, message: str):
        write_run("a")
        assert main(["runs", argument]) == 2
        assert message in capsys.readouterr().err

    def test_a_sweep_gets_a_page(self, write_run: WriteRun, tmp_path: Path):
        write_run("0")
        assert page_of_sweep(tmp_path / "outputs") is None
        write_run("1", lr=0.2)
        assert page_of_sweep(tmp_path / "outputs") == tmp_path / "outputs" / "runs.html"
        assert 'href="0/report.html"' not in (tmp_path / "outputs" / "runs.html").read_text()

    def test_a_run_is_running_while_its_process_lives(self, write_run: WriteRun, capsys: Any):
        began = psutil.Process().create_time()
        write_run("a", state="running", host=platform.node(), process=os.getpid(), process_began=began)
        write_run("b", state="running", host=platform.node(), process=2**31 - 1)
        write_run("c", state="running", host="another machine", process=2**31 - 1)
        # Another process has the number of one that has ended.
        write_run("d", state="running", host=platform.node(), process=os.getpid(), process_began=began - 100)
        # The values of a run under way are those that it logged last.
        metrics = Path("outputs/b/metrics.csv")
        metrics.write_text("step,epoch,loss\n29,2,0.125\n")
        os.utime(metrics, (1767261690, 1767261690))
        runs = listed(capsys)
        assert [run["state"] for run in runs] == ["running", "interrupted", "running", "interrupted"]
        assert runs[3]["error"] == "Its process has ended without a word."
        assert (runs[1]["seconds"], runs[1]["steps"], runs[1]["epochs"]) == (90.0, 30, 3)


def test_a_configuration_is_flat():
    values = {"a": {"b": [1, None, True], "c": [{"d": "x/y"}], "e": {}}, "output_dir": "x", 7: 1.5}
    flat = {"a.b": "[1, null, true]", "a.c.0.d": "FOLDER/y", "a.e": "{}", "7": "1.5"}
    assert flat_configuration(values) == flat
