"""Input that `launcher=ray` refuses before Ray is needed; tests/extensions/ray runs it."""

import importlib.util

import pytest

RUN = [
    (("launcher.workers=0",), "launcher.workers must be an integer of at least 1, not 0"),
    (("launcher.gpus_per_worker=-1",), "launcher.gpus_per_worker must be a number from 0"),
    (("launcher.max_failures=-2",), "launcher.max_failures must be an integer of at least -1"),
    (("launcher.every_n_train_steps=0",), "launcher.every_n_train_steps must be an integer of at least 1"),
    (("launcher.worker=2",), "did you mean 'launcher.workers'?"),
    (("trainer.devices=2",), "contradicts trainer.devices=2"),
]
SWEEP = [
    (("launcher.workers=2",), "launcher.workers=2"),
    (("launcher.max_failures=1",), "are for the workers of a run"),
]


@pytest.mark.parametrize(("overrides", "message"), RUN, ids=[overrides[0] for overrides, _ in RUN])
def test_a_run_that_is_refused(project, equipoise, overrides, message):
    code, _, err = equipoise("fit", "launcher=ray", *overrides)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not (project / "outputs").exists()


@pytest.mark.parametrize(("overrides", "message"), SWEEP, ids=[overrides[0] for overrides, _ in SWEEP])
def test_a_sweep_that_is_refused(project, equipoise, overrides, message):
    code, _, err = equipoise("fit", "--multirun", "launcher=ray", "module.lr=0.1,0.2", *overrides)
    assert code == 2
    assert message in err
    assert not (project / "multirun").exists()


def test_predictions_of_workers_would_overwrite_each_other(project, equipoise):
    code, _, err = equipoise("predict", "launcher=ray")
    assert code == 2
    assert "leave launcher out to predict here" in err


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed.")
def test_without_ray(project, equipoise):
    code, _, err = equipoise("fit", "launcher=ray")
    assert code == 2
    assert "launcher=ray needs Ray: pip install 'equipoise[ray]'" in err
