"""`equipoise watch`: values while a run trains, and a server that gives this machine pages and nothing else."""

import http.client
import json
import math
import platform
import signal
import socket
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from equipoise import Callback, RunReport, Trainer
from equipoise.extensions.report import run_report
from equipoise.extensions.report.run_file import live_values
from equipoise.extensions.report.run_file.live_values import LiveValues
from equipoise.extensions.runs.found import FoundRun, find_runs
from equipoise.extensions.runs.reading import Reading, read_run
from equipoise.extensions.runs.run import Run
from equipoise.extensions.runs.watch import plain_files, watched_runs
from equipoise.extensions.runs.watch.command import watch
from equipoise.extensions.runs.watch.server import WatchServer
from equipoise.extensions.runs.watch.watched_runs import WatchedRuns
from tests.extensions.common.page.parsing import parse
from tests.extensions.runs.run_files import WriteRun, content
from tests.support.callback_runs import Small, loader
from tests.support.programs import Program
from tests.support.trainer_runs import refuses, trainer


def only_run(folder: Path) -> Run:
    (found,) = find_runs([folder])
    assert isinstance(found, FoundRun)
    run, unreadable = read_run(found)
    assert run is not None
    assert not unreadable
    return run


class Logs(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("number", float(self.global_step))
        return super().training_step(batch, batch_idx)


class Looks(Callback):
    """Looks at the files of the run after each step, as another program would."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        done = trainer.global_step
        if not done:
            return
        run = only_run(Path(trainer.default_root_dir))
        assert run.state == "running"
        assert run.steps == done
        assert run.curves["number"] == {step: step for step in range(done)}
        assert len(run.times) == done + 1
        assert list(run.times.values()) == sorted(run.times.values())


def fitted(folder: Path, callback: Callback, **options: Any) -> Trainer:
    callbacks = [RunReport(), callback]
    run: Trainer = trainer(log_every_n_steps=1, default_root_dir=folder, callbacks=callbacks, **options)
    run.fit(Logs(), loader(4, 2), loader(2, 2))
    return run


class TestLiveValues:
    def test_values_can_be_read_as_soon_as_they_are_logged(self, tmp_path: Path):
        ended = fitted(tmp_path, Looks(), max_epochs=3)
        run = only_run(tmp_path)
        assert run.state == "finished"
        assert len(run.curves["number"]) == ended.global_step > 3
        assert not (tmp_path / "live.jsonl").exists()

    def test_the_file_of_live_values_stays_small(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        wholes = []

        def write_whole() -> None:
            wholes.append((tmp_path / "live.jsonl").read_text().count("\n"))
            live.clear()

        # Each value comes a second after the one before.
        monkeypatch.setattr(live_values, "monotonic", count().__next__)
        live = LiveValues(tmp_path, 0.0, write_whole)
        for step in range(2250):
            live.add(step, {"loss": 0.5, "accuracy": 0.25})
        assert wholes == [2000, 2000]
        assert (tmp_path / "live.jsonl").read_text().count("\n") == 500

    def test_the_whole_file_is_not_written_at_every_moment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        wholes: list[int] = []
        monkeypatch.setattr(live_values, "monotonic", lambda: 5.0)
        live = LiveValues(tmp_path, 0.0, lambda: wholes.append(0))
        for step in range(2500):
            live.add(step, {"loss": 0.5})
        assert wholes == []

    def test_a_file_that_cannot_be_written_is_left_alone(self, tmp_path: Path):
        live = LiveValues(tmp_path / "missing", 0.0, lambda: None)
        live.add(0, {"loss": 0.5})
        live.clear()
        live.remove()

    def test_a_link_is_not_followed(self, tmp_path: Path):
        (tmp_path / "other.txt").write_text("content")
        (tmp_path / "live.jsonl").symlink_to("other.txt")
        live = LiveValues(tmp_path, 0.0, lambda: None)
        live.add(0, {"loss": 0.5})
        assert (tmp_path / "other.txt").read_text() == "content"

    def test_values_stay_where_the_report_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        class Fills(Looks):
            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                def fail(*arguments: Any, **options: Any) -> None:
                    raise OSError("No space left on device")

                monkeypatch.setattr(run_report, "write_run_file", fail)

        with pytest.warns(UserWarning, match="The report could not be written: OSError: No space"):
            fitted(tmp_path, Fills(), max_epochs=1)
        assert only_run(tmp_path).curves["number"] == {0: 0, 1: 1, 2: 2, 3: 3}

    def test_a_killed_run_keeps_its_last_values(self, write_run: WriteRun):
        folder = write_run("run", state="running", process=2**22 + 1)
        lines = [["val_loss", 29, 0.125, 90.0], ["new", 29, "nan", 90.0]]
        text = "".join(f"{json.dumps(line)}\n" for line in lines) + '["val_loss", 39'
        (folder / "live.jsonl").write_text(text)
        run = only_run(folder)
        assert run.curves["val_loss"] == {9.0: 0.5, 19.0: 0.25, 29.0: 0.125}
        assert math.isnan(run.curves["new"][29.0])
        assert (run.steps, run.seconds) == (30, 90.0)
        assert run.times[30.0] == 90.0

    def test_values_of_epochs_have_the_name_that_the_whole_file_gives_them(self, write_run: WriteRun):
        curves = {"loss": [[9], [0.5]], "loss_step": [[4], [0.75]], "no_epoch": [[9], [1.0]]}
        folder = write_run("run", state="running", curves=curves)
        (folder / "metrics.csv").write_text("step,epoch,loss_epoch,loss_step\n9,0,0.5,\n14,1,,0.25\n19,1,0.125,\n")
        (folder / "live.jsonl").write_text('["loss_epoch", 29, 0.0625, 90.0]\n["no_epoch", 29, 2.0, 90.0]\n')
        assert only_run(folder).curves == {
            "loss": {9.0: 0.5, 19.0: 0.125, 29.0: 0.0625},
            "loss_step": {14.0: 0.25},
            "no_epoch": {9.0: 1.0, 29.0: 2.0},
        }


@pytest.fixture
def served(write_run: WriteRun) -> Iterator[WatchServer]:
    """Return a server for two runs below the working folder, of which the first one has a report."""
    first = write_run("one")
    (first / "report.html").write_text("<p>the report</p>")
    write_run("two", state="running")
    with WatchServer(WatchedRuns([Path("outputs/one"), Path("outputs/two")]), 0) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: WatchServer, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


class TestServer:
    def test_the_page_changes_with_the_files(self, served: WatchServer):
        status, headers, text = ask(served)
        assert status == 200
        assert "connect-src" in text
        # A browser does not ask for a picture of the page.
        assert parse(text).one("link").attributes == {"rel": "icon", "href": "data:,"}
        rows = parse(text).one("table", "runs").one("tbody").all("tr")
        assert [row.all("td")[1].text for row in rows] == ["running", "finished"]
        # 1. Nothing has changed.
        version = headers["ETag"]
        assert ask(served, **{"If-None-Match": version})[0] == 304
        # 2. A value was logged.
        Path("outputs/two/live.jsonl").write_text('["val_loss", 29, 0.0625, 90.0]\n')
        status, headers, text = ask(served, **{"If-None-Match": version})
        assert status == 200
        assert headers["ETag"] != version
        assert "0.0625" in text
        # 3. The run has ended.
        Path("outputs/two/run.json").write_text(json.dumps(content()))
        rows = parse(ask(served)[2]).one("table", "runs").one("tbody").all("tr")
        assert [row.all("td")[1].text for row in rows] == ["finished", "finished"]

    def test_a_run_that_is_under_way_or_has_written_is_read_again(
        self, write_run: WriteRun, monkeypatch: pytest.MonkeyPatch
    ):
        read: list[str] = []

        def note(run_files: FoundRun) -> Reading:
            read.append(run_files.folder.name)
            return read_run(run_files)

        monkeypatch.setattr(watched_runs, "read_run", note)
        ended = write_run("ended")
        under_way = write_run("under_way", state="running")
        runs = WatchedRuns([])
        runs.page()
        assert sorted(read) == ["ended", "under_way"]
        (under_way / "live.jsonl").write_text('["val_loss", 29, 0.0625, 90.0]\n')
        runs.page()
        assert read[2:] == ["under_way"]
        (ended / "run.json").write_text(json.dumps(content(steps=1000)))
        assert b"1,000" in runs.page().html
        assert sorted(read[3:]) == ["ended", "under_way"]

    def test_a_file_that_could_not_be_read_is_read_again(self, write_run: WriteRun, monkeypatch: pytest.MonkeyPatch):
        path = write_run("ended") / "run.json"
        monkeypatch.setattr(watched_runs, "_SILENCE", 0.0)
        runs = WatchedRuns([])
        read_text = Path.read_text
        with monkeypatch.context() as network:

            def fail(self: Path, *args: Any, **options: Any) -> str:
                if self.name == path.name:
                    raise OSError("Stale file handle")
                return read_text(self, *args, **options)

            network.setattr(Path, "read_text", fail)
            assert b"Stale file handle" in runs.page().html
        assert b"Stale file handle" not in runs.page().html

    def test_reports_are_served_without_access_to_other_pages(self, served: WatchServer):
        link = parse(ask(served)[2]).one("table", "runs").one("a").attributes["href"]
        status, headers, text = ask(served, f"/{link}")
        assert (status, text) == (200, "<p>the report</p>")
        assert headers["Content-Security-Policy"] == "sandbox allow-scripts"
        Path("outputs/one/report.html").unlink()
        assert ask(served, f"/{link}")[0] == 404

    def test_no_link_is_followed(self, served: WatchServer, monkeypatch: pytest.MonkeyPatch):
        link = parse(ask(served)[2]).one("table", "runs").one("a").attributes["href"]
        Path("secret").mkdir()
        Path("secret/report.html").write_text("secret")
        # 1. The report becomes a link after the folder was listed; the page is that of before.
        page = served.runs.page()
        monkeypatch.setattr(served.runs, "page", lambda: page)
        Path("outputs/one/report.html").unlink()
        Path("outputs/one/report.html").symlink_to("../../secret/report.html")
        assert ask(served, f"/{link}")[0] == 404
        # 2. Its folder does.
        Path("outputs/one").rename("outputs/elsewhere")
        Path("outputs/one").symlink_to("../secret")
        assert ask(served, f"/{link}")[0] == 404

    @pytest.mark.parametrize("folders", [[], [Path("outputs")], [Path("outputs/one"), Path("outputs/two")]])
    def test_a_watched_folder_may_be_a_link(self, write_run: WriteRun, folders: list[Path]):
        for name in ("one", "two"):
            (write_run(name) / "report.html").write_text(name)
        Path("outputs").rename("elsewhere")
        Path("outputs").symlink_to("elsewhere")
        reports = WatchedRuns(folders).page().reports.values()
        contents = {plain_files.read_below(folder, path, 10) for folder, path in reports}
        assert contents == {b"one", b"two"}

    def test_a_damaged_run_does_not_end_the_page(self, served: WatchServer):
        Path("outputs/two/live.jsonl").write_text('["x", 1e17, 1, 1]\n')
        assert ask(served)[0] == 200
        Path("outputs/two/run.json").write_text(json.dumps(content(state="running", times=[["nan"], [0]])))
        assert ask(served)[0] == 200
        curves = {"small": [[0, 1], [0, 5e-324]]}
        Path("outputs/two/run.json").write_text(json.dumps(content(curves=curves)))
        assert ask(served)[0] == 200

    def test_the_results_of_a_sweep_are_watched(self, served: WatchServer):
        own = content(state="running", process=2**22 + 1, host=platform.node())
        Path("outputs/two/run.json").write_text(json.dumps(own))
        ask(served)
        Path("outputs/results.csv").write_text("folder,state,error,seconds\noutputs/two,failed,out of memory,3\n")
        assert "out of memory" in ask(served)[2]

    def test_nothing_else_can_be_read(self, served: WatchServer):
        encoded = ("/%2e%2e/one/report.html", "//etc/passwd")
        for path in ("/one/run.json", "/../one/report.html", "/one", "/two/report.html", *encoded):
            assert ask(served, path)[0] == 404, path

    def test_nothing_can_be_written(self, served: WatchServer):
        assert [ask(served, method=method)[0] for method in ("POST", "PUT", "DELETE")] == [501] * 3

    def test_a_page_of_another_site_cannot_ask_under_its_name(self, served: WatchServer):
        assert ask(served, Host="evil.example")[0] == 403
        assert ask(served, Host="evil.example:8265")[0] == 403
        assert ask(served, Host="localhost:9000")[0] == 200

    def test_only_this_machine_is_answered(self, served: WatchServer):
        assert served.socket.getsockname()[0] == "127.0.0.1"
        # All of 127.0.0.0/8 is this machine, but only one address of it is listened to.
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", served.server_port), 60):
            pass

    def test_folders_without_runs_have_a_page_and_a_sweep_that_begins_later_is_shown(self, write_run: WriteRun):
        runs = WatchedRuns([])
        assert b"There are none." in runs.page().html
        write_run("first")
        Path("outputs").rename("multirun")
        assert b"multirun/first" in runs.page().html


class TestCommand:
    def test_the_command_ends_with_an_interrupt(self, tmp_path: Path):
        source = "from equipoise.extensions.runs.watch.command import watch; watch(['--port=0'])"
        with Program(source, folder=tmp_path) as program:
            assert program.stdout.readline().startswith("Runs: http://127.0.0.1:")
            program.send_signal(signal.SIGINT)
            assert program.finish()[0] == "Ended.\n"
            assert program.returncode == 0

    def test_a_port_that_is_taken_is_refused(self, served: WatchServer, tmp_path: Path):
        port = f"--port={served.server_port}"
        refuses(lambda: watch([str(tmp_path), port]), f"{port} cannot be used: ", "in use")

    @pytest.mark.parametrize(
        ("argument", "words"),
        [
            ("--port=70000", "a number from 0 to 65535"),
            ("--port", "a number from 0 to 65535"),
            ("--port=x", "a number from 0 to 65535"),
            ("--port=-1", "a number from 0 to 65535"),
            ("elsewhere", "no folder 'elsewhere' on this machine: equipoise watch takes"),
        ],
    )
    def test_arguments_that_are_refused(self, argument: str, words: str):
        refuses(lambda: watch([argument]), words)
