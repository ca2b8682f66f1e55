"""Tables and results.csv of a sweep, from results as they come."""

import csv
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from equipoise.app.sweeps import tables
from equipoise.app.sweeps.collection import collected_results, current_results
from equipoise.app.sweeps.progress import Progress
from equipoise.app.sweeps.results import JobResult, JobState, SweepResults
from equipoise.app.sweeps.tables import SweepDisplay, closing_table, live_table, print_closing_table
from equipoise.errors import SweepError
from tests.support.terminal import Terminal


def job(number, lr, **options):
    return JobResult(number, (f"module.lr={lr}", "seed=0", "+note=[a,b]"), Path(f"sweep/{number}"), **options)


@pytest.fixture
def results(tmp_path):
    """One job of each state."""
    jobs = [job(number, lr) for number, lr in enumerate((0.1, 0.2, 0.3, 0.4))]
    done, failed, running, _ = jobs
    done.begin("cuda:0")
    done.note(Progress({"val_loss": 0.5, "accuracy": 0.75}, epoch=3, step=9))
    done.note(Progress({"val_loss": 0.25, "accuracy": 0.875}))
    done.finish(0.25)
    failed.begin("cuda:1")
    failed.fail(ValueError("too [large]\nand a second line"))
    running.begin("cuda:0")
    running.note(Progress({"val_loss": 1.0}, epoch=1, step=3))
    results = SweepResults()
    results.add(jobs, tmp_path)
    return results


def printed(renderable):
    file = io.StringIO()
    Console(file=file, width=120).print(renderable)
    return file.getvalue()


def test_the_live_table_shows_every_job_as_it_is(results):
    lines = printed(live_table(results)).splitlines()
    assert "2 of 4 jobs have ended" in lines[0]
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()][1:]
    assert [row[:3] for row in rows] == [
        ["0", "0.1", "done"],
        ["1", "0.2", "failed"],
        ["2", "0.3", "running"],
        ["3", "0.4", "waiting"],
    ]
    done, failed, running, waiting = rows
    assert done[-3:] == ["3", "0.8750", "0.2500"]
    assert failed[-3:] == ["-", "-", "-"]
    assert running[-3:] == ["1", "-", "1.000"]
    assert waiting[3:5] == ["-", "-"]


def test_a_long_sweep_shows_what_runs(tmp_path):
    results = SweepResults()
    results.add([job(number, number) for number in range(100)], tmp_path)
    for each in results.jobs[:60]:
        each.begin("cpu")
        if each.number != 5:
            each.finish(None)
    text = printed(live_table(results))
    assert "59 of 100 jobs have ended, 76 are not shown" in text
    shown = [line.split()[0] for line in text.splitlines() if line.strip()[:1].isdigit()][1:]
    assert shown[0] == "5"
    assert len(shown) == 24
    assert "59" in shown


def test_the_closing_table_and_the_file_hold_all_results(results, tmp_path):
    results.jobs[2].interrupt()
    results.jobs[3].interrupt()
    text = printed(closing_table(results))
    assert "Sweep: 1 done, 1 failed, 2 interrupted" in text
    assert "seed" not in text  # the same in all jobs
    file = io.StringIO()
    print_closing_table(results, Console(file=file, width=120))
    assert "Job 1: ValueError: too [large]" in file.getvalue()
    assert "second line" not in file.getvalue()
    with (tmp_path / "results.csv").open() as rows_file:
        rows = list(csv.DictReader(rows_file))
    assert [row["state"] for row in rows] == ["done", "failed", "interrupted", "interrupted"]
    assert (rows[0]["module.lr"], float(rows[0]["val_loss"]), float(rows[0]["accuracy"])) == ("0.1", 0.25, 0.875)
    assert rows[1]["error"] == "ValueError: too [large]"
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]


def test_only_what_the_sweep_optimises_is_in_the_table(results):
    results.jobs[0].objectives = ("val_loss",)
    assert "accuracy" not in printed(closing_table(results))
    assert results.metric_names == ["val_loss", "accuracy"]


def test_without_a_terminal_there_is_a_line_for_each_job(results, tmp_path):
    file = io.StringIO()
    display = SweepDisplay(results, Console(file=file))
    with display.shown():
        display.end(results.jobs[0])
        assert (tmp_path / "results.csv").exists()
        display.end(results.jobs[1])
    first, second = file.getvalue().splitlines()
    assert first.startswith("Job 0 done after ")
    assert first.endswith("module.lr=0.1; accuracy 0.8750; val_loss 0.2500")
    assert second.endswith("module.lr=0.2; ValueError: too [large]")


def test_a_terminal_shows_the_live_table_until_the_end(results, monkeypatch):
    terminal = Terminal(120)
    monkeypatch.setattr(sys, "stdout", terminal)
    display = SweepDisplay(results, Console(file=terminal, force_terminal=True, width=120, height=50, _environ={}))
    with display.shown():
        display.end(results.jobs[0])
    assert "2 of 4 jobs have ended" in terminal.sent
    assert terminal.text == ""


@collected_results()
def run_two_batches(folder):
    """As a sweeper does that chooses jobs one by one."""
    results = current_results()
    first, second = job(0, 0), job(1, 1)
    results.add([first], folder)
    first.finish(None)
    results.add([second], folder)
    second.fail(RuntimeError("broken"))
    results.keep_failure(second)


def test_results_of_several_batches_are_one_table(tmp_path, capsys):
    with pytest.raises(SweepError, match="1 of 2 jobs failed: 1"):
        run_two_batches(tmp_path)
    assert capsys.readouterr().out.count("Sweep: 1 done, 1 failed") == 1
    assert current_results() is None


def interrupt_a_sweep(folder, interrupted):
    with collected_results() as results:
        results.add([interrupted], folder)
        interrupted.interrupt()
        raise KeyboardInterrupt


def test_an_interrupt_leaves_its_table(tmp_path, capsys):
    interrupted = job(0, 0)
    with pytest.raises(KeyboardInterrupt):
        interrupt_a_sweep(tmp_path, interrupted)
    assert "Sweep: 1 interrupted" in capsys.readouterr().out
    assert interrupted.state is JobState.INTERRUPTED


def test_pages_of_extensions_are_named_and_a_broken_one_is_told_of(results, tmp_path, monkeypatch):
    def broken(folder):
        raise OSError("no room")

    pages = {"a": lambda folder: folder / "a.html", "b": lambda folder: None, "c": broken}
    monkeypatch.setattr(tables, "names_of_extensions", lambda group: list(pages))
    monkeypatch.setattr(tables, "load_extension", lambda group, name: pages[name])
    file = io.StringIO()
    with pytest.warns(UserWarning, match=r"The page 'c' of the sweep is missing: OSError: no room"):
        print_closing_table(results, Console(file=file, width=500))
    assert file.getvalue().endswith(f"Page: {tmp_path / 'a.html'}\n")
