"""Tracebacks of errors that reach a user's script: the user's frames, and none of ours."""

import traceback

import pytest
import torch

from equipoise import Trainer
from equipoise.errors import CheckpointError, ConfigurationError, StepError
from equipoise.names.tracebacks import shortened
from tests.support.trainer_runs import Small, loader, trainer


def names_of(error):
    """The functions of a traceback, the outermost first, and how many frames are of the package."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/equipoise/" in frame.filename]
    return [frame.name for frame in frames if frame not in ours], len(ours)


class Fails(Small):
    def training_step(self, batch, batch_idx):
        return self.divide(batch_idx)

    def divide(self, batch_idx):
        return 1 / batch_idx


class FailsInTorch(Small):
    def training_step(self, batch, batch_idx):
        return self.layer(torch.zeros(2, 17))


class NoLoss(Small):
    def training_step(self, batch, batch_idx):
        return {"los": 1}


class LogsWrongly(Small):
    def training_step(self, batch, batch_idx):
        self.log("loss", "text")


def failure_of(module, error, **options):
    with pytest.raises(error) as caught:
        trainer(**options).fit(module, loader())
    return caught.value


def test_an_error_that_explains_itself_has_the_scripts_line_alone():
    names, ours = names_of(failure_of(NoLoss(), StepError))
    assert (names, ours) == (["failure_of"], 0)
    with pytest.raises(ConfigurationError) as caught:
        Trainer(max_epochs="many")
    assert names_of(caught.value) == (["test_an_error_that_explains_itself_has_the_scripts_line_alone"], 0)


def test_equipoise_full_traceback_shows_all_frames(monkeypatch):
    monkeypatch.setenv("EQUIPOISE_FULL_TRACEBACK", "1")
    assert names_of(failure_of(NoLoss(), StepError))[1] > 5


def test_a_traceback_keeps_the_users_frames():
    assert names_of(failure_of(Fails(), ZeroDivisionError)) == (["failure_of", "training_step", "divide"], 0)
    names, _ = names_of(failure_of(LogsWrongly(), ValueError))
    assert names[:2] == ["failure_of", "training_step"]
    names, _ = names_of(failure_of(FailsInTorch(), RuntimeError))
    assert names[:2] == ["failure_of", "training_step"]
    assert names[-1] == "forward"  # what the user's line calls stays whole


@pytest.mark.whole_package
def test_the_cause_of_an_error_that_explains_itself(tmp_path):
    from equipoise.extensions.export import read_weights

    with pytest.raises(CheckpointError, match="does not exist") as caught:
        read_weights(tmp_path / "missing.safetensors")
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert names_of(caught.value.__cause__) == ([], 0)


def test_a_fault_of_ours_stays_whole(monkeypatch):
    monkeypatch.setattr("equipoise.trainer.loops.fit_loop.FitLoop.run", None)
    error = failure_of(Small(), TypeError)
    assert names_of(error)[1] > 4
    assert shortened(error) is error


@pytest.mark.parametrize(("module", "error"), [(NoLoss, StepError), (Fails, ZeroDivisionError)])
def test_an_error_of_a_worker_is_shown_once(module, error):
    caught = failure_of(module(), error, strategy="ddp", devices=2)
    assert names_of(caught) == (["failure_of"], 0)
    text = "".join(traceback.format_exception(caught))
    assert text.count(f"{error.__name__}: ") == (1 if error is StepError else 2)
    assert text.count("in _carry_out") == 0
    assert ("in divide" in text) == (module is Fails)
