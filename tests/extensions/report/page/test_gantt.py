"""A step of a pipeline in a report: every box where and as long as it was, idle time told, any number of boxes."""

from typing import Any

from equipoise.extensions.common.timeline import Action, Span, Timeline
from equipoise.extensions.report.page.page import render_report
from equipoise.extensions.report.page.record import PipelineStep
from tests.extensions.common.page.parsing import Element
from tests.extensions.report.page.records import page, record


def span(stage: int, micro_batch: int, begin: float, end: float, *, backward: bool = False) -> Span:
    return Span(stage, Action(backward, micro_batch), begin, end)


def step(*spans: Span, stages: int = 2, **given: Any) -> PipelineStep:
    ordered = sorted(spans, key=lambda span: span.begin)
    return PipelineStep(timeline=Timeline(tuple(ordered), stages), **given)


def figure(drawn: PipelineStep) -> Element:
    return page(pipeline=drawn).one("svg", "gantt")


def caption(drawn: PipelineStep) -> str:
    return next(each.text for each in page(pipeline=drawn).all("figcaption") if "stage" in each.text)


BOTH = step(
    span(0, 0, 10.0, 11.0),
    span(1, 0, 11.0, 12.0),
    span(1, 0, 12.0, 14.0, backward=True),
    span(0, 0, 14.0, 16.0, backward=True),
    schedule="1f1b",
)


def test_boxes_lie_where_they_were() -> None:
    boxes = figure(BOTH).all("g", "bar")
    places = [(box.one("rect").attributes["x"], box.one("rect").attributes["width"]) for box in boxes]
    assert places == [("0.000%", "16.667%"), ("16.667%", "16.667%"), ("33.333%", "33.333%"), ("66.667%", "33.333%")]
    assert [box.attributes["class"].split()[-1] for box in boxes] == ["p-forward"] * 2 + ["p-backward"] * 2
    rows = [box.one("rect").attributes["y"] for box in boxes]
    assert rows[0] == rows[3] != rows[1] == rows[2]
    assert [box.one("text").text for box in boxes] == ["0"] * 4
    assert boxes[3].one("title").text == "stage 0: backward of micro-batch 0, 2 s"


def test_the_caption_tells_what_was_idle_and_what_was_computed() -> None:
    for part in ("1f1b, 2 stages, 1 micro-batch", "idle 50% of 6 s", "backward"):
        assert part in caption(BOTH)
    assert "gradients" not in caption(BOTH)
    assert "backward" not in caption(step(span(0, 0, 0.0, 1.0), span(1, 0, 1.0, 2.0)))


def test_boxes_without_a_length_are_drawn() -> None:
    """All at one time, as where a clock is coarse."""
    assert len(figure(step(span(0, 0, 1.0, 1.0), span(1, 0, 1.0, 1.0))).all("g", "bar")) == 2


def test_many_boxes_are_cut_off_and_that_is_told() -> None:
    many = step(*(span(number % 2, number, number, number + 0.9) for number in range(5000)))
    assert len(render_report(record(pipeline=many))) < 10**6
    assert "the first 1,500 of 5,000 boxes" in caption(many)
    assert not any(box.all("text") for box in figure(many).all("g", "bar"))  # no room for a number


def test_a_box_without_room_has_no_number() -> None:
    boxes = figure(step(span(0, 7, 0, 2), span(0, 123, 2, 4), span(0, 124, 4, 100), stages=1)).all("g", "bar")
    assert [[text.text for text in box.all("text")] for box in boxes] == [["7"], [], ["124"]]


def test_without_a_pipeline_there_is_no_section() -> None:
    for drawn in (None, step()):
        assert "The pipeline" not in page(pipeline=drawn).text


def test_devices_with_several_stages_have_one_row_each() -> None:
    """Idle time is told of devices."""
    spans = tuple(span(stage, 0, stage, stage + 1.0) for stage in range(6))
    drawn = PipelineStep(timeline=Timeline(spans, 6, 3), devices=["cuda:0", "<b>"], schedule="looped_bfs")
    assert "looped_bfs, 6 stages on 2 devices, 1 micro-batch" in caption(drawn)
    assert "idle 50%" in caption(drawn)
    assert "paler" in caption(drawn)
    boxes = figure(drawn).all("g", "bar")
    assert [box.one("rect").attributes["y"] for box in boxes] == ["0", "36"] * 3
    titles = [box.one("title").text.split(": ")[0] for box in boxes]
    assert titles == [f"stage {number}, {drawn.devices[number % 2]}" for number in range(6)]
    assert len(figure(drawn).all("rect", "waiting")) == 2


def test_gradients_of_weights_have_boxes_of_their_own() -> None:
    later = Span(0, Action(backward=True, micro_batch=0, weights=True), 3.0, 4.0)
    drawn = step(span(0, 0, 0.0, 1.0), span(0, 0, 2.0, 3.0, backward=True), later, stages=1)
    assert "gradients of weights" in caption(drawn)
    boxes = figure(drawn).all("g", "bar")
    assert [box.attributes["class"].split()[-1] for box in boxes] == ["p-forward", "p-backward", "p-weights"]
    assert boxes[2].one("title").text == "stage 0: gradients of weights of micro-batch 0, 1 s"
