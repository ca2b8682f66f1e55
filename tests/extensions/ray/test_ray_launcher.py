"""Input that `launcher=ray` refuses before Ray is needed; tests/extensions/ray runs it."""

import importlib.util

import pytest

ONE_RUN, SWEEP = ("fit", "launcher=ray"), ("fit", "--multirun", "launcher=ray", "module.lr=0.1,0.2")
REFUSED = [
    ((*ONE_RUN, "launcher.workers=0"), "launcher.workers must be an integer of at least 1, not 0"),
    ((*ONE_RUN, "launcher.gpus_per_worker=-1"), "launcher.gpus_per_worker must be a number from 0"),
    ((*ONE_RUN, "launcher.max_failures=-2"), "launcher.max_failures must be an integer of at least -1"),
    ((*ONE_RUN, "launcher.every_n_train_steps=0"), "launcher.every_n_train_steps must be an integer of at least 1"),
    ((*ONE_RUN, "launcher.worker=2"), "did you mean 'launcher.workers'?"),
    ((*ONE_RUN, "trainer.devices=2"), "contradicts trainer.devices=2"),
    ((*SWEEP, "launcher.workers=2"), "launcher.workers=2"),
    ((*SWEEP, "launcher.max_failures=1"), "are for the workers of a run"),
    (("predict", "launcher=ray"), "leave launcher out to predict here"),
]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[arguments[-1] for arguments, _ in REFUSED])
def test_what_the_launcher_cannot_do_is_refused_in_one_message(project, equipoise, arguments, message):
    code, _, err = equipoise(*arguments)
    lines = err.strip().splitlines()
    assert code == 2
    assert message in lines[-1]
    assert len(lines) == 1 + (arguments[0] == "predict")  # which says first whose weights it takes
    assert not (project / "outputs").exists()
    assert not (project / "multirun").exists()


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed.")
def test_the_launcher_says_how_to_install_ray(equipoise):
    code, _, err = equipoise("fit", "launcher=ray")
    assert code == 2
    assert "launcher=ray needs Ray: pip install 'equipoise[ray]'" in err
