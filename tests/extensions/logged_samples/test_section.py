"""Images, texts and histograms that a run has logged to TensorBoard, in its report."""

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from equipoise.extensions.logged_samples import section as section_module
from equipoise.extensions.logged_samples.section import section
from equipoise.extensions.logged_samples.tensorboard_samples import logged_samples
from equipoise.extensions.report import ReportSection
from tests.extensions.report.page.records import page
from tests.support.callback_runs import Small, loader
from tests.support.trainer_runs import trainer

pytest.importorskip("tensorboard")


class LogsImages(Small):
    """Logs an image in each validation, another one in each epoch."""

    def on_validation_epoch_end(self) -> None:
        image = torch.full((3, 4, 4), 0.1 * self.current_epoch)
        self.logger.experiment.add_image("confusion <b>", image, self.global_step)

    def on_train_end(self) -> None:
        self.logger.experiment.add_image("noise", torch.rand(3, 64, 64))
        for text in ("first", "written <b>"):
            self.logger.experiment.add_text("story", text, self.global_step)


def fitted(folder: Path, logger: Any) -> ReportSection | None:
    """Return the section as the report would have it."""
    run = trainer(max_epochs=2, logger=logger, default_root_dir=folder)
    module = LogsImages() if isinstance(logger, TensorBoardLogger) else Small()
    run.fit(module, loader(2, 2), loader(1, 2))
    return section(run, module)


def test_the_last_image_of_each_name_is_shown(tmp_path: Path):
    found = fitted(tmp_path, TensorBoardLogger(tmp_path))
    assert list(found.images) == ["confusion <b>", "noise"]
    pictures = parse_pictures(found)
    assert [picture["alt"] for picture in pictures] == ["confusion <b>", "noise"]
    kind, _, text = pictures[0]["src"].partition(",")
    assert kind == "data:image/png;base64"
    image = base64.b64decode(text)
    assert image.startswith(b"\x89PNG")
    assert image == found.images["confusion <b>"]


def parse_pictures(found: ReportSection) -> list[dict[str, str]]:
    return [element.attributes for element in page(sections=[found]).all("img")]


def test_a_histogram_is_a_line_of_columns(tmp_path: Path):
    logger = TensorBoardLogger(tmp_path)
    # Twice as many values below one as above, and two histograms of one name.
    values = torch.cat([torch.linspace(0, 1, 2001), torch.linspace(1, 2, 1001)[1:]])
    for name, content in [("spread", torch.zeros(3)), ("spread", values), ("same", torch.ones(5))]:
        logger.experiment.add_histogram(name, content, bins="fd")
    lines = dict(logged_samples(SimpleNamespace(loggers=[logger])))
    least, columns, most, *count = lines["spread"].split()
    assert (least, most, count) == ("0.0", "2.000", ["(3,001", "values)"])
    assert (len(columns), set(columns[:11]) <= set("▇█"), set(columns[13:]) <= set("▄▅")) == (24, True, True)
    assert lines["same"] == "1.000 (5 values)"


def test_the_last_text_of_each_name_is_shown(tmp_path: Path):
    found = fitted(tmp_path, TensorBoardLogger(tmp_path))
    assert found.table == [("Name", "Content"), ("story", "written <b>")]
    document = page(sections=[found])
    assert "written <b>" in [cell.text for cell in document.all("td")]


def test_other_loggers_have_no_section(tmp_path: Path):
    assert fitted(tmp_path, CSVLogger(tmp_path)) is None


def test_what_is_too_large_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(section_module, "_MOST_BYTES", 1000)
    found = fitted(tmp_path, TensorBoardLogger(tmp_path))
    assert list(found.images) == ["confusion <b>"]
    assert found.text.endswith("Too many or too large for this page: 1; TensorBoard shows them.")


@pytest.mark.parametrize("limit", ["_MOST_TEXTS", "_LONGEST_TEXT"])
def test_a_text_that_is_left_out_is_counted(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(section_module, limit, 0)
    found = fitted(tmp_path, TensorBoardLogger(tmp_path))
    assert found.table == []
    assert found.text.endswith("Too many or too large for this page: 1; TensorBoard shows them.")


def test_only_images_are_drawn():
    found = ReportSection("Images", images={"script": b"<svg onload='alert(1)'>", "gif": b"GIF89a"})
    assert [picture["alt"] for picture in parse_pictures(found)] == ["gif"]
