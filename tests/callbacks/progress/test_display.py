"""Lines of the display: counts and times, for every width."""

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from equipoise.callbacks.progress.display import Display
from equipoise.callbacks.progress.layout import Layout
from equipoise.callbacks.progress.track import Track
from tests.support.terminal import Terminal

# Narrow, wide, combining and control characters, and such as no font shows. All of Unicode takes seconds to draw from.
TEXT = st.sampled_from("aZ0 [ä文😀\u0301\n\t\x1b\x07\u200b\u202e\u2028\ue000\ud800\u0378")


def half_done() -> Track:
    """412 of 1095 batches in ten seconds."""
    track = Track("Epoch 3/10", 1095, 0.0)
    track.update(412, 10.0)
    return track


class TestTrack:
    def test_the_rate_is_that_of_the_last_ten_seconds(self):
        track = Track("", 100, 0.0)
        track.update(1, 30.0)  # a slow first batch
        assert track.rate == pytest.approx(1 / 30)
        track.update(11, 40.0)
        track.update(16, 45.0)
        assert track.rate == pytest.approx(1.0)
        assert track.remaining == pytest.approx(84.0)

    def test_a_finished_track_has_the_rate_of_its_whole_time(self):
        track = Track("", 4, 0.0)
        track.update(1, 30.0)
        track.update(4, 40.0)
        track.finish(40.0)
        assert track.rate == pytest.approx(0.1)
        assert track.remaining is None
        assert track.elapsed(99.0) == 40.0

    def test_pauses_do_not_count(self):
        track = Track("", 10, 0.0)
        track.update(1, 1.0)
        track.pause(1.0)
        track.resume(101.0)
        track.update(5, 105.0)
        assert (track.rate, track.remaining, track.elapsed(105.0)) == (1.0, 5.0, 5.0)


class TestLayout:
    @pytest.mark.parametrize(
        ("width", "expected"),
        [
            (120, ["Epoch 3/10  ━━━━━━━━━━━{19}   412/1095  41.2 it/s  0:10<0:17  loss 0.3124  acc 0.9100"]),
            (85, ["Epoch 3/10  ━━━╸{6}   412/1095  41.2 it/s  0:10<0:17  loss 0.3124  acc 0.9100"]),
            (75, ["Epoch 3/10  ━━━━━━━━━━━{19}   412/1095  41.2 it/s  0:10<0:17", "  loss 0.3124  acc 0.9100"]),
            (40, ["Epoch 3/10  ━━{4}   412/1095  0:17 left", "  loss 0.3124  acc 0.9100"]),
            (22, ["Epoch 3/10   412/1095", "  loss 0.3124  acc 0.…"]),
            (12, ["Epoch 3/10 …", "  loss 0.31…"]),
        ],
    )
    def test_as_much_is_shown_as_fits(self, width: int, expected: list[str]):
        text = Layout().compose([half_done()], {"loss": 0.3124, "acc": 0.91}, width=width, now=10.0)
        rest = {f"{{{count}}}": "─" * count for count in (19, 6, 4)}
        for short, long in rest.items():
            expected = [line.replace(short, long) for line in expected]
        assert text.plain.split("\n") == expected

    @given(
        width=st.integers(1, 140),
        label=st.text(TEXT, max_size=30),
        metrics=st.dictionaries(
            st.text(TEXT, max_size=20), st.one_of(st.floats(), st.text(TEXT, max_size=20), st.integers()), max_size=5
        ),
        total=st.one_of(st.just(math.inf), st.integers(0, 10**6)),
        done=st.integers(0, 10**6),
        ascii_only=st.booleans(),
    )
    def test_no_line_is_wider_than_the_terminal(self, width, label, metrics, total, done, ascii_only):
        track = Track(label, total, 0.0)
        track.update(done, 3.0)
        layout = Layout(ascii_only=ascii_only)
        layout.compose([half_done()], {"loss": 1}, width=12, now=3.0)  # a terminal may become wider
        text = layout.compose([track, half_done()], metrics, width=width, now=3.0)
        lines = text.plain.split("\n")
        assert len(lines) in (2, 3)
        assert all(cell_len(line) <= width for line in lines)
        assert all(line.isprintable() for line in lines)

    def test_metrics_do_not_jump_back_and_forth_between_lines(self):
        layout, track = Layout(), half_done()
        short, long = {"loss": 1}, {"loss": "x" * 30}

        def lines(metrics: dict, width: int) -> int:
            return len(layout.compose([track], metrics, width=width, now=10.0).plain.split("\n"))

        assert [lines(short, 80), lines(long, 80), lines(short, 80), lines(short, 81)] == [1, 2, 2, 1]

    def test_what_is_not_finite_stands_out(self):
        text = Layout().compose([half_done()], {"loss": math.nan, "acc": 0.5}, width=120, now=10.0)
        styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
        assert styles["nan"] == "bold red"
        assert "red" not in styles.get("0.5000", "")

    def test_a_terminal_without_unicode_gets_ascii(self):
        text = Layout(ascii_only=True).compose([half_done()], {"loss": "x" * 99}, width=60, now=10.0)
        assert text.plain.isascii()
        assert "###-------" in text.plain
        assert text.plain.endswith("...")


class _Bytes(io.BytesIO):
    """Bytes that a terminal or a file takes."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


class TestDisplay:
    def test_a_dumb_terminal_is_no_place_to_animate(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("TERM", "dumb")
        assert not Display(Console(file=Terminal(40), force_terminal=True)).animated

    @pytest.mark.parametrize("terminal", [True, False])
    def test_an_encoding_that_lacks_a_character_is_no_error(self, terminal: bool):
        raw = _Bytes(terminal=terminal)
        file = io.TextIOWrapper(raw, encoding="ascii")
        display = Display(
            Console(file=file, force_terminal=terminal, width=40, legacy_windows=False, color_system=None)
        )
        assert display.ascii_only
        if terminal:
            display.show(Text("größe 1"))
            display.close(keep=True)
        else:
            display.write("größe 1\n")
        assert b"gr??e 1" in raw.getvalue()

    @pytest.mark.parametrize("missing", [None, "IPython", "ipywidgets"])
    def test_a_notebook_is_animated_where_it_has_widgets(self, monkeypatch: pytest.MonkeyPatch, missing: str | None):
        found = object()
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else found)
        file = io.StringIO()
        display = Display(Console(file=file, force_jupyter=True))
        assert display.animated == (missing is None)
        if missing is not None:
            display.write("one line\n")
            assert file.getvalue() == "one line\n"
