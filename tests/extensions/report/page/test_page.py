"""The page of a report, taken apart by a parser: what it holds, that nothing in it runs, and how large it can get."""

import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import equipoise
from equipoise.extensions.common.timeline import Action, Span, Timeline
from equipoise.extensions.report import render_report, write_report
from equipoise.extensions.report.page.record import PipelineStep, RunEvent
from equipoise.extensions.report.page.sections import curves_section
from equipoise.memory.devices import DeviceInfo
from equipoise.memory.records import CATEGORIES, MemoryPoint
from tests.extensions.common.page.parsing import check_closed, parse, sections
from tests.extensions.report.page.records import composition, holder, page, record

PHASES = ("batch to device", "forward", "backward", "optimizer step", "evaluation")
ATTACK = '"></title></script></style><script>alert(1)</script><img src=x onerror=\'a()\' alt="b">&amp;'


def point(step: int, device: str = "cuda:0", phase: str = "forward", **given: Any) -> MemoryPoint:
    values = {"seconds": step / 10, "allocated": 2**30, "reserved": 2**31, "peak": 2**30 + step, **given}
    return MemoryPoint(step=step, device=device, phase=phase, **values)


def rich(name: str = "net") -> dict[str, Any]:
    """Every part, with a name of one's choice wherever there can be one."""
    return {
        "title": name,
        "origin": {name: name, "command": name},
        "facts": {name: name},
        "curves": {name: {name: {1.0: 0.5, 2.0: 0.25}, "train": {1.0: 0.5}}},
        "throughput": [(1.0, 100.0), (2.0, 200.0)],
        "throughput_unit": name,
        "memory": [point(1, name, name), point(2, name, name)],
        "compositions": [composition(holder(name, 10, name=name, dtype=name), holder(f"{name}.x", 5), device=name)],
        "pipeline": PipelineStep(
            timeline=Timeline((Span(0, Action(backward=False, micro_batch=0), 0.0, 1.0),), 1),
            devices=[name],
            schedule=name,
            note=name,
        ),
        "events": [RunEvent(seconds=1.0, step=1, kind=name, text=name)],
        "devices": [DeviceInfo(device=name, name=name, memory_total=2**40, memory_free=None)],
        "configuration": f"{name}: {name}\nkey: {name}",
        "outcome": "failed",
        "error": f"Traceback\n{name}",
    }


class TestCurves:
    def test_of_many_epochs_the_ends_of_some_are_marked(self):
        section = parse(curves_section({"loss": {"val": {0: 1.0, 999: 0.5}}}, {n: 10 * n - 1 for n in range(1, 101)}))
        marked = [boundary.one("text").text for boundary in section.all("g", "boundary")]
        assert marked == ["epoch 20", "epoch 40", "epoch 60", "epoch 80", "epoch 100"]

    def test_one_step_is_at_one_place_in_all_figures(self):
        curves = {"loss": {"train": {0: 1.0, 99: 0.5}}, "accuracy": {"val": {49: 0.5}}}
        pictures = parse(curves_section(curves, {1: 49})).all("svg", "plot")
        assert {(picture.attributes["data-low"], picture.attributes["data-high"]) for picture in pictures} == {
            ("0", "99")
        }


class TestPage:
    def test_every_section_is_there(self):
        found = sections(page(**rich()))
        assert list(found) == [
            "What was run",
            "What went wrong",
            "In short",
            "Learning curves",
            "Throughput",
            "Memory",
            "The peak",
            "The pipeline",
            "Events",
            "Devices",
            "Configuration",
        ]

    def test_what_is_missing_is_left_out_or_says_why(self):
        found = sections(page())
        assert list(found) == ["Learning curves", "Throughput", "Memory"]
        assert "MemoryLogger()" in found["Memory"].text
        assert "MemoryLogger(detail='modules')" in sections(page(memory=[point(1)]))["The peak"].text

    def test_the_head_says_what_it_was_and_how_it_went(self):
        header = page(title="ConvNet", outcome="interrupted").one("header")
        assert "ConvNet interrupted" in header.text
        assert "Began 14 Mar 2026, 09:26:53, ended 10:56:53 (1 h 30 min)" in header.text
        # The class gives it its colour.
        assert header.one("span", "interrupted").text == "interrupted"

    def test_the_line_of_the_user_comes_first_and_the_rest_is_folded(self):
        trace = (
            "Traceback (most recent call last):\n"
            '  File "/project/train.py", line 3, in <module>\n    trainer.fit(net)\n'
            f'  File "{equipoise.__path__[0]}/trainer/trainer.py", line 9, in fit\n    run()\n'
            '  File "/project/net.py", line 12, in training_step\n    loss = x / <0>\n'
            f'  File "{torch.__path__[0]}/_tensor.py", line 4, in div\n    raise Error\n'
            '  File "/env/lib/python3.12/site-packages/other/a.py", line 4, in b\n    c()\n'
            "ValueError: not < this\n"
        )
        error = sections(page(outcome="failed", error=trace))["What went wrong"]
        assert error.one("p", "cause").text == "ValueError: not < this"
        assert error.one("p", "place").text == "/project/net.py, line 12, in training_step"
        line, whole = (each.text for each in error.all("pre"))
        assert line == "loss = x / <0>"
        assert whole == trace.strip()
        assert "open" not in error.one("details").attributes

    def test_a_message_of_several_lines_is_shown_whole(self):
        frame = '  File "a.py", line 1, in b\n    c(x)\n      ^^\n'
        trace = f"Traceback (most recent call last):\n{frame}E: one\n  two\nthree\n"
        error = sections(page(error=trace))["What went wrong"]
        assert error.one("p", "cause").text == "E: one\n  two\nthree"
        assert error.all("pre")[0].text == "c(x)"

    def test_a_huge_error_is_cut_in_its_middle(self):
        error = sections(page(error="first\n" + "x\n" * 200_000 + "last"))["What went wrong"].one("pre").text
        assert error.startswith("first\n")
        assert error.endswith("\nlast")
        assert len(error) < 50_000

    def test_what_a_terminal_would_colour_is_plain(self):
        error = sections(page(error="\x1b[31mred\x1b[0m \x00\ud800\ntwo"))["What went wrong"]
        assert error.one("p", "cause").text == "red \ufffd\ufffd\ntwo"
        assert not error.all("details")  # a message alone has no traceback below it

    def test_only_our_own_script_and_style_may_run_and_nothing_is_fetched(self):
        check_closed(render_report(record(**rich())))

    def test_text_of_others_stays_text(self):
        harmless, hostile = (page(**rich(name)) for name in ("a.b", ATTACK))
        assert [each.name for each in hostile if each.name in ("script", "style", "img")] == ["style", "script"]
        assert hostile.text.count(ATTACK) >= 15
        first, second = (
            [each.name for each in document if each.name != "svg"][:20] for document in (harmless, hostile)
        )
        assert first == second

    def test_pictures_have_titles(self):
        for picture in page(**rich()).all("svg"):
            if picture.attributes.get("role") == "img":
                assert picture.content[0].name == "title"
                assert picture.content[0].text

    def test_values_that_are_not_finite_and_long_names_are_drawn(self):
        name = "a_very_long_name_" * 20
        curves = {
            name: {"train": {1.0: math.nan}, "val": {1.0: math.inf}},
            "one": {"val": {1.0: 0.5}},
            "loss": {"train": {1.0: 1e308, 2.0: -1e308, 3.0: 5e-324}},
            "none": {"val": {}},
        }
        document = page(
            curves=curves,
            throughput=[(0.0, math.nan)],
            memory=[point(0, name, name, peak=None, reserved=None, allocated=0)],
            compositions=[composition(), composition(holder(name, 0)), composition(holder(f"{name}.{name}", 1))],
            events=[RunEvent(seconds=0.0, step=0, kind="", text="")],
            configuration="\n\n- x\n: y",
        )
        for element in document:
            for value in element.attributes.values():
                assert "nan" not in value or element.attributes.get("data-y") == value or name in value
        assert "No value is a finite number." in document.text


class TestFile:
    def test_write_report_of_another_program_renames_a_page_when_it_is_whole(self, tmp_path: Path):
        path = tmp_path / "new" / "report.html"
        write_report(record(title="first"), path)
        write_report(record(title="zweiter \u00fc \ud83d"), path)
        assert "zweiter \u00fc \ufffd" in path.read_text(encoding="utf-8")
        assert [each.name for each in path.parent.iterdir()] == ["report.html"]

    def test_a_page_that_cannot_be_renamed_leaves_nothing(self, tmp_path: Path):
        (tmp_path / "report.html").mkdir()
        with pytest.raises(OSError, match=re.escape("report.html")):
            write_report(record(), tmp_path / "report.html")
        assert [each.name for each in tmp_path.iterdir()] == ["report.html"]

    @pytest.mark.slow
    def test_a_huge_run_stays_below_a_megabyte(self):
        steps = range(4000)
        devices = [f"rank {rank} cuda:0" for rank in range(8)]
        memory = [point(step, device, phase) for step in steps for device in devices for phase in PHASES]
        holders = [holder(f"model.layers.{n % 300}.part{n % 7}", n) for n in range(5000)]
        text = render_report(
            record(
                memory=memory,
                compositions=[composition(*holders, device=device) for device in devices],
                curves={f"metric{n}": {"val": {x / 7: random.random() for x in steps}} for n in range(40)},
                throughput=[(float(x), random.random()) for x in range(100_000)],
                events=[RunEvent(seconds=float(x), step=x, kind="out of memory", text="x" * 300) for x in range(9000)],
                configuration="key: value\n" * 100_000,
            )
        )
        assert len(text.encode()) < 1_000_000
        found = sections(parse(text))
        assert len(found["Memory"].all("figure")) == 8
        assert "24 of 40 shown" in found["Learning curves"].text
        assert "the first and the last 100 of 9,000" in found["Events"].text
        assert "99,000 more lines" in found["Configuration"].text


class TestSections:
    @pytest.mark.parametrize(("command", "shown"), [("equipoise fit a=1", 1), ("equipoise fit a=1,2 --multirun", 2)])
    def test_overrides_that_the_command_ends_with_are_not_said_twice(self, command: str, shown: int):
        document = page(origin={"run": "outputs/x", "overrides": "a=1", "command": command})
        assert [code.text for code in document.all("code", "copied")] == ["a=1", command][-shown:]

    def test_the_configuration_is_told_as_it_is_and_long_words_may_be_divided(self):
        text = "a: lightning.pytorch.Trainer\nb: 0.5\n# <b>\nc: /tmp/x y.z\n"
        section = sections(page(configuration=text))["Configuration"]
        assert section.one("pre").text == text
        # Two in the class, one in the path, one in the file, none in the number.
        assert len(section.all("wbr")) == 4

    def test_curves_name_their_last_values(self):
        curves = {"loss": {"val": {2.0: 0.25, 1.0: 0.5}, "train": {1.0: 1.5}}, "accuracy": {"": {1.0: 0.98764}}}
        figures = sections(page(curves=curves))["Learning curves"].all("figure")
        assert [figure.one("h3").text for figure in figures] == ["loss", "accuracy"]
        assert [entry.text for entry in figures[0].all("li")] == ["train 1.5", "val 0.25"]
        assert [entry.text for entry in figures[1].all("li")] == ["0.9876"]
        lines = figures[0].all("g", "line")
        assert [(line.attributes["data-x"], line.attributes["data-y"]) for line in lines] == [
            ("1", "1.5"),
            ("1 2", "0.5 0.25"),
        ]

    def test_memory_has_a_figure_for_each_device_and_a_line_for_each_phase(self):
        memory = [
            point(step, device, phase, peak=(1 + index) * 2**30 + step * 2**20)
            for step in range(3)
            for device in ("cuda:0", "cuda:1")
            for index, phase in enumerate(PHASES)
        ]
        figures = sections(page(memory=memory))["Memory"].all("figure")
        assert [figure.one("h3").content[0] for figure in figures] == ["cuda:0", "cuda:1"]
        assert [line.attributes["data-label"] for line in figures[0].all("g", "line")] == ["reserved", *PHASES]
        assert figures[1].one("span", "note").text == "peak 5.0 GiB, evaluation of step 2"

    def test_a_line_that_tells_nothing_is_a_sentence(self):
        sizes = {"reserved": None, "peak": None}
        memory = [point(step, "cpu", phase, allocated=2**30 + step, **sizes) for step in range(3) for phase in PHASES]
        section = sections(page(memory=memory))["Memory"]
        assert not section.all("figure")
        assert "cpu: 1.0 GiB in all 15 readings" in section.text
        # The chart of another device stays.
        (figure,) = sections(page(memory=[*memory, point(1)]))["Memory"].all("figure")
        assert figure.one("h3").content[0] == "cuda:0"

    def test_a_cpu_has_no_peak_and_nothing_reserved(self):
        memory = [point(step, "cpu", allocated=(1 + step) * 2**20, reserved=None, peak=None) for step in range(3)]
        (figure,) = sections(page(memory=memory))["Memory"].all("figure")
        assert [entry.text for entry in figure.all("li")] == ["forward 3.0 MiB"]

    def test_the_top_says_what_was_run(self):
        origin = {"run": "outputs/1", "overrides": "module.lr=0.1", "command": "equipoise fit", "commit": "a" * 40}
        pairs = sections(page(origin=origin))["What was run"].one("dl", "origin")
        assert [name.text for name in pairs.all("dt")] == [*origin]
        assert [text.text for text in pairs.all("dd")] == [*origin.values()]

    def test_the_fullest_device_is_open(self):
        maps = [composition(holder("a", size), device=f"cuda:{size}") for size in (1, 3, 2)]
        shown = sections(page(compositions=maps))["The peak"].all("details", "peak")
        assert [each.all("b")[0].text for each in shown] == [
            "cuda:3",
            "cuda:2",
            "cuda:1",
        ]
        assert ["open" in each.attributes for each in shown] == [True, False, False]

    def test_categories_are_told_with_their_share(self):
        sizes = {category: 2**20 * (index + 1) for index, category in enumerate(CATEGORIES)}
        holders = [holder("a", size, category=category) for category, size in sizes.items()]
        entries = sections(page(compositions=[composition(*holders)]))["The peak"].one("ul", "legend").all("li")
        assert [entry.text.split(" ")[0] for entry in entries] == [name.split(" ")[0] for name in reversed(CATEGORIES)]
        assert entries[0].text == "temporary 7.0 MiB 25%"

    def test_events_stand_in_the_table_and_on_the_time_lines(self):
        events = [
            RunEvent(seconds=30.0, step=1234, kind="out of memory", text="It did not fit."),
            RunEvent(seconds=45.0, step=2345, kind="leak", text="It grew."),
        ]
        document = page(events=events, throughput=[(0.0, 1.0), (60.0, 1.0)], memory=[point(0), point(600)])
        rows = sections(document)["Events"].one("tbody").all("tr")
        assert [[cell.text for cell in row.all("td")] for row in rows] == [
            ["30 s", "1,234", "out of memory", "It did not fit."],
            ["45 s", "2,345", "leak", "It grew."],
        ]
        marks = document.all("g", "e-out-of-memory")
        assert len(marks) == 2
        assert marks[1].one("line").attributes["x1"] == "50.00%"

    def test_devices_stand_in_a_table_with_what_is_known_of_them(self):
        gpu = DeviceInfo(
            device="cuda:0",
            name="A GPU",
            index=0,
            memory_total=80 * 2**30,
            memory_free=2**30,
            compute_capability=(9, 0),
            cores=132,
        )
        cpu = DeviceInfo(device="cpu", name="A CPU", memory_total=2**40, memory_free=None)
        rows = sections(page(devices=[cpu, gpu]))["Devices"].one("tbody").all("tr")
        assert [[cell.text for cell in row.all("td")] for row in rows] == [
            ["cpu", "A CPU", "1.0 TiB", "", "", ""],
            ["cuda:0", "A GPU", "80.0 GiB", "1.0 GiB", "132", "9.0"],
        ]
        assert "Compute capability" not in sections(page(devices=[cpu]))["Devices"].text
