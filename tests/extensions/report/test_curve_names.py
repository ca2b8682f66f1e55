"""Quantities and run stages in the names of metrics."""

import pytest

from equipoise.extensions.report.curve_names import group_curves, split_name


@pytest.mark.parametrize(
    ("name", "family", "where"),
    [
        ("train_loss", "loss", "train"),
        ("val_loss", "loss", "val"),
        ("Val/Acc", "accuracy", "val"),
        ("validation.top-5", "top 5", "val"),
        ("training_loss_epoch", "loss", "train"),
        ("loss/val/dataloader_idx_1", "loss", "val 1"),
        ("lr-AdamW", "lr-AdamW", ""),
        ("val", "val", "val"),
        ("epoch", "epoch", ""),
        ("validity", "validity", ""),
    ],
)
def test_a_name_says_what_and_where(name: str, family: str, where: str):
    assert split_name(name) == (family, where)


def test_values_of_steps_and_of_epochs_are_told_apart():
    curves = {"train_loss_step": {0: 0.9, 1: 0.5}, "train_loss": {1: 0.7}, "val_loss": {1: 1.0}}
    assert list(group_curves(curves)["loss"]) == ["train", "train (epoch)", "val"]
    assert list(group_curves({"acc": {1: 0.5}, "acc_step": {1: 0.5}})["accuracy"]) == ["(epoch)", ""]


def test_losses_come_first_and_learning_rates_last():
    curves = {"lr-SGD": {1: 0.1}, "lr-SGD/pg1": {1: 0.1}, "val_acc": {1: 0.5}, "train_loss": {1: 0.9}}
    assert list(group_curves(curves)) == ["loss", "accuracy", "lr-SGD", "lr-SGD/pg1"]


def test_two_curves_of_one_place_keep_their_names():
    curves = group_curves({"val_acc": {1: 0.1}, "val_accuracy": {1: 0.3}})
    assert curves == {"accuracy": {"val": {1: 0.1}, "val_accuracy": {1: 0.3}}}
