"""Candidates by the limit, and what counts as an improvement."""

from typing import Any

import pytest

from equipoise.extensions.timing.limits import SHORT_STEPS, SLOW_PROCESS, Facts, Limit
from equipoise.extensions.timing.tune.candidates import Candidate, candidates_for
from equipoise.extensions.timing.tune.results import best_of
from equipoise.extensions.timing.tune.rounds import Row
from equipoise.extensions.timing.tune.trial import as_trial

CHECKPOINT = {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint"}
BAR = {"_target_": "lightning.pytorch.callbacks.TQDMProgressBar", "refresh_rate": 1}


def labels(
    part: str, *, share: float = 0.5, device: str = "cpu", facts: Any = (), settings: Any = (), **values: Any
) -> list[str]:
    limit = Limit(part, share, "", "", dict(settings))
    configuration = {"data": {"num_workers": 1}, "callbacks": {}, "strategy": "auto", **values}
    candidates = candidates_for(limit, Facts(num_workers=1, processors=4, **dict(facts)), configuration, device)
    return [candidate.label for candidate in candidates]


def test_numbers_of_workers_are_tried_for_late_data() -> None:
    counts = ["data.num_workers=0", "data.num_workers=2", "data.num_workers=4"]
    assert labels("waiting for data") == counts
    # Workers that start often, and a GPU.
    persistent = "DataLoader(num_workers=4, persistent_workers=True)"
    assert labels("waiting for data", facts={"epoch_steps": 10}) == [*counts, persistent]
    assert labels("waiting for data", device="cuda") == [*counts, "DataLoader(pin_memory=True)"]


@pytest.mark.parametrize(("target", "key"), [("Takes", "+data.num_workers=0"), ("Bare", "DataLoader(num_workers=0)")])
def test_a_key_that_the_configuration_does_not_name(target: str, key: str) -> None:
    assert labels("waiting for data", data={"_target_": f"{__name__}.{target}"})[0] == key


class Takes:
    def __init__(self, num_workers: int = 1) -> None:
        pass


class Bare:
    pass


def test_checkpoints_are_tried_less_often() -> None:
    """Half of the time becomes a tenth with a ninth of the checkpoints."""
    often = {"model_checkpoint": {**CHECKPOINT, "every_n_train_steps": 4}}
    assert labels("checkpoints", callbacks=often) == ["callbacks.model_checkpoint.every_n_train_steps=36"]
    each_epoch = {"model_checkpoint": {**CHECKPOINT, "every_n_train_steps": None, "every_n_epochs": 2}}
    expected = ["callbacks.model_checkpoint.every_n_epochs=18"]
    assert labels("checkpoints", callbacks=each_epoch, facts={"epoch_steps": 10}) == expected
    assert labels("checkpoints", callbacks={"other": None}) == []


def test_each_limit_has_its_candidates() -> None:
    logs = {"log_every_n_steps": 500}
    assert labels("loggers", settings=logs) == ["trainer.log_every_n_steps=500"]
    bar = ["callbacks.bar.refresh_rate=10", "trainer.enable_progress_bar=false"]
    assert labels("callback TQDMProgressBar", callbacks={"bar": BAR}) == bar
    exchange = {"accumulate_grad_batches": 4}
    accumulated = ["trainer.accumulate_grad_batches=4", "trainer.accumulate_grad_batches=2"]
    assert labels("exchange", settings=exchange) == accumulated
    assert labels("copying batches") == []
    assert labels("copying batches", device="cuda") == ["DataLoader(pin_memory=True)"]
    short = ["data.num_workers=0", "trainer.compile=true"]
    assert labels(SHORT_STEPS) == short
    assert labels(SHORT_STEPS, device="cuda") == [*short, "trainer.capture=true"]
    assert labels(SLOW_PROCESS, strategy={"_target_": "equipoise.DDPStrategy"}) == ["strategy.shares=auto"]
    assert labels(SLOW_PROCESS) == []


def row(*seconds: float, reason: str | None = None) -> Row:
    return Row(Candidate(), list(seconds), reason=reason)


def test_an_improvement_is_one_in_each_round() -> None:
    base = row(1.0, 2.0, 1.0)
    assert row(0.5, 1.0, 0.5).speeds(base) == [2.0, 2.0, 2.0]
    assert row(0.5, 1.0, 0.9).is_improvement(base)
    assert not row(0.5, 1.0, 1.1).is_improvement(base)
    assert not row(0.96, 1.9, 0.96).is_improvement(base)
    assert not row(reason="failed").is_improvement(base)
    # A slow moment of the machine slows both: rounds are compared one by one.
    assert not row(1.0, 2.0, 1.0).is_improvement(base)


def test_the_first_of_equally_fast_candidates_is_used() -> None:
    base = row(1.0, 1.0)
    first, second, third = row(0.52, 0.52), row(0.5, 0.5), row(0.6, 0.6)
    assert best_of([base, third, first, second]) is first
    assert best_of([base, row(1.0, 1.0)]) is None
    assert best_of([base]) is None


def test_a_trial_writes_into_its_folder_alone_with_a_seed_and_without_loggers_of_services(tmp_path: Any) -> None:
    values = {
        "trainer": {"max_epochs": 3, "default_root_dir": "elsewhere", "precision": "64-true"},
        "callbacks": {"step_times": {"_target_": "equipoise.StepTimes"}, "a": {**CHECKPOINT, "dirpath": "/b"}},
        "logger": {"wandb": {"_target_": "lightning.pytorch.loggers.WandbLogger"}},
        "seed": None,
        "ckpt_path": "last",
        "test": True,
        "output_dir": "outputs",
    }
    trial, left_out = as_trial(values, tmp_path)
    assert left_out == ["wandb"]
    assert trial["callbacks"] == {"a": {**CHECKPOINT, "dirpath": str(tmp_path / "dirpath")}}
    assert trial["trainer"]["default_root_dir"] == str(tmp_path / "default_root_dir")
    assert (trial["trainer"]["max_epochs"], trial["trainer"]["precision"]) == (1_000_000, "64-true")
    assert (trial["seed"], trial["ckpt_path"], trial["test"], trial["logger"]) == (0, None, False, {})
    assert values["trainer"]["max_epochs"] == 3
