"""The picture: families of metrics, and what lands in the file."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from equipoise.report.learning_curves import draw_curves, group_curves, split_name

TRAIN, VAL = "#8a94a6", "#1f6fb2"


def has_colour(path: Path, colour: str) -> bool:
    """Whether some pixels of a picture are of a colour."""
    return bool((np.abs(imread(path)[..., :3] - np.array(to_rgb(colour))).max(-1) < 0.01).sum() > 20)


@pytest.mark.parametrize(
    ("name", "family", "where"),
    [
        ("train_loss", "loss", "train"),
        ("val_loss", "loss", "val"),
        ("loss", "loss", ""),
        ("Val/Acc", "accuracy", "val"),
        ("validation.top-5", "top 5", "val"),
        ("training_loss_epoch", "loss", "train"),
        ("loss/val/dataloader_idx_1", "loss", "val 1"),
        ("lr-AdamW", "lr-AdamW", ""),
        ("train", "train", "train"),
        ("val", "val", "val"),
        ("epoch", "epoch", ""),
        ("validity", "validity", ""),
        ("_", "_", ""),
    ],
)
def test_a_name_says_what_and_where(name: str, family: str, where: str):
    assert split_name(name) == (family, where)


def test_values_of_steps_and_of_epochs_are_told_apart():
    curves = {"train_loss_step": {0: 0.9, 1: 0.5}, "train_loss": {1: 0.7}, "val_loss": {1: 1.0}}
    assert list(group_curves(curves)["loss"]) == ["train", "train (epoch)", "val"]
    assert list(group_curves({"acc": {1: 0.5}, "acc_step": {1: 0.5}})["accuracy"]) == ["(epoch)", ""]


class TestPicture:
    def test_training_and_validation_share_an_axis(self, tmp_path: Path):
        path = tmp_path / "new" / "folder" / "curves.png"
        draw_curves({"train_loss": {1: 0.9, 2: 0.5}, "val_loss": {1: 1.0, 1.5: 0.8, 2: 0.7}}, path)
        assert has_colour(path, TRAIN)
        assert has_colour(path, VAL)
        assert (imread(path)[0, 0, :3] == 1).all(), "the ground is white"

    def test_the_ends_of_epochs_are_marked(self, tmp_path: Path):
        curve = {float(step): 0.5 for step in range(1000)}
        pictures = []
        for epoch_ends in ({}, {1: 499, 2: 999}, {epoch: 10 * epoch - 1 for epoch in range(1, 101)}):
            draw_curves({"val_loss": curve}, tmp_path / "curves.png", epoch_ends=epoch_ends)
            pictures.append(imread(tmp_path / "curves.png"))
        plain, two, hundred = pictures
        assert (plain != two).any()
        assert (two != hundred).any()

    def test_every_family_has_an_axis(self, tmp_path: Path):
        widths = []
        for count in (1, 2, 3, 4, 7):
            draw_curves({f"metric{n}": {1: 1.0, 2: 2.0} for n in range(count)}, tmp_path / "curves.png")
            widths.append(imread(tmp_path / "curves.png").shape[:2])
        (one, _), (row, two_wide), (row_of_three, three_wide), (two_rows, _), (three_rows, _) = widths
        assert one == row == row_of_three
        assert two_wide < three_wide
        assert two_rows == 2 * row
        assert three_rows == 3 * row

    def test_a_hundred_metrics_make_no_endless_picture(self, tmp_path: Path):
        draw_curves({f"metric{n}": {1: 1.0} for n in range(100)}, tmp_path / "curves.png")
        assert imread(tmp_path / "curves.png").shape[0] == 4 * 480

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize(
        "curve",
        [
            {1.0: 0.3},
            {1.0: float("nan"), 2.0: 0.5},
            {1.0: 1e-9, 2.0: 1e3},
            {1.0: 0.0, 2.0: 1e3},
            {1.0: -1.0, 2.0: -1.0},
        ],
    )
    def test_odd_values_are_drawn(self, tmp_path: Path, curve: dict[float, float]):
        draw_curves({"val_loss": curve, "train_loss": {1.0: float("inf")}}, tmp_path / "curves.png")
        assert has_colour(tmp_path / "curves.png", VAL)
        assert not has_colour(tmp_path / "curves.png", TRAIN)

    def test_two_curves_of_one_place_keep_their_names(self, tmp_path: Path):
        draw_curves({"val_acc": {1: 0.1, 2: 0.2}, "val_accuracy": {1: 0.3, 2: 0.4}}, tmp_path / "curves.png")
        assert has_colour(tmp_path / "curves.png", VAL)
        assert has_colour(tmp_path / "curves.png", "#c8643c")


@pytest.mark.slow
def test_pyplot_and_the_users_backend_are_left_alone(tmp_path: Path):
    program = (
        "import sys; from pathlib import Path; from equipoise.report.learning_curves import draw_curves;"
        "assert 'matplotlib' not in sys.modules;"
        f"draw_curves({{'loss': {{1: 2.0}}}}, Path({str(tmp_path / 'curves.png')!r}));"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
