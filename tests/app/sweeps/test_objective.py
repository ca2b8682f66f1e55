"""Sweeps whose sweeper reads what a trial returns: the value, and what is refused before the first trial."""

import csv
import importlib
import sys

import pytest
import yaml
from hydra.core.plugins import Plugins

from equipoise.app.sweeps.objective import is_sweep
from tests.support.projects import write

FILES = {
    "hydra_plugins/seeker.py": """
        import yaml
        from hydra.core.plugins import Plugins
        from hydra.plugins.sweeper import Sweeper

        class Seeker(Sweeper):
            '''Tries two learning rates, one after the other, and writes down what came back.'''

            def __init__(self, direction):
                self.direction = direction

            def setup(self, *, hydra_context, task_function, config):
                self.launcher = Plugins.instance().instantiate_launcher(
                    config=config, hydra_context=hydra_context, task_function=task_function
                )

            def sweep(self, arguments):
                fixed = [each for each in arguments if not each.startswith("module.lr=")]
                values = []
                for index, lr in enumerate((0.1, 0.2)):
                    (done,) = self.launcher.launch([[*fixed, f"module.lr={lr}"]], initial_job_idx=index)
                    values.append(done.return_value)
                with open("values.yaml", "w") as file:
                    yaml.safe_dump(values, file)
        """,
    "conf/hydra/sweeper/seeker.yaml": """
        _target_: hydra_plugins.seeker.Seeker
        direction: minimize
        """,
}
SEEK = ("fit", "--multirun", "hydra/sweeper=seeker", "module.lr=interval(0.1,0.2)", "seed=0")
MONITOR = ("callbacks=[model_checkpoint]", "callbacks.model_checkpoint.monitor=val_loss")


@pytest.fixture
def seeker(project, monkeypatch):
    """A sweeper plugin beside the project, known to Hydra as an installed one is."""
    write(project, FILES)
    monkeypatch.syspath_prepend(project)
    plugin = importlib.import_module("hydra_plugins.seeker").Seeker
    plugins = Plugins.instance()
    plugins.register(plugin)
    yield project
    del plugins.class_name_to_class["hydra_plugins.seeker.Seeker"]
    for kind in plugins.plugin_type_to_subclass_list.values():
        if plugin in kind:
            kind.remove(plugin)
    for name in ("hydra_plugins", "hydra_plugins.seeker"):
        sys.modules.pop(name, None)


def returned(project):
    return yaml.safe_load((project / "values.yaml").read_text())


def last_values(project, name):
    """The last value of each trial, as its metrics.csv has it."""
    paths = sorted(project.glob("multirun/*/*/*/metrics.csv"))
    tables = [csv.DictReader(path.read_text().splitlines()) for path in paths]
    return [[float(row[name]) for row in table if row[name]][-1] for table in tables]


@pytest.mark.thorough
@pytest.mark.parametrize(("choice", "name"), [(("objective=train_loss",), "train_loss"), (MONITOR, "val_loss")])
def test_a_sweeper_gets_the_value_that_is_named_or_that_the_checkpoint_monitors(seeker, equipoise, choice, name):
    code, _, err = equipoise(*SEEK, *choice)
    assert code == 0, err
    assert returned(seeker) == pytest.approx(last_values(seeker, name), rel=1e-6)
    assert len(set(returned(seeker))) == 2


@pytest.mark.thorough
def test_several_objectives_come_as_a_list_and_the_test_after_a_fit_counts(seeker, equipoise):
    names = ("test_loss", "val_loss", "train_loss")
    directions = "hydra.sweeper.direction=[minimize,minimize,minimize]"
    code, _, err = equipoise(*SEEK, "test=true", f"objective=[{','.join(names)}]", directions)
    assert code == 0, err
    expected = zip(*(last_values(seeker, name) for name in names), strict=True)
    for actual, values in zip(returned(seeker), expected, strict=True):
        assert actual == pytest.approx(list(values), rel=1e-6)
        assert actual[0] == pytest.approx(actual[1])


REFUSED = [
    ((), "Seeker chooses a trial by the values that earlier trials returned", "objective=val_loss"),
    (("callbacks=[model_checkpoint]",), "no checkpoint callback monitors a value", "objective=val_loss"),
    (
        (*MONITOR, "callbacks.model_checkpoint.mode=max"),
        "would minimize 'val_loss'",
        "hydra.sweeper.direction=maximize",
    ),
    (("objective=[val_loss,train_loss]",), "has 1 (minimize) and objective has 2", "same length"),
    (("objective=[]",), "objective must be the name of a logged value", "it is []"),
    (("trainer.max_epoch=3",), "no key 'trainer.max_epoch'", "did you mean 'trainer.max_epochs'?"),
]


@pytest.mark.few_cases(4)
@pytest.mark.parametrize(("overrides", "what", "way_out"), REFUSED, ids=[str(overrides) for overrides, _, _ in REFUSED])
def test_refused_before_the_first_trial(seeker, equipoise, overrides, what, way_out):
    code, _, err = equipoise(*SEEK, *overrides)
    assert code == 2
    assert what in err
    assert way_out in err
    assert err.startswith("equipoise: ")
    assert len(err.strip().splitlines()) == 1
    assert not (seeker / "multirun").exists()


@pytest.mark.thorough
def test_a_sweep_that_the_configuration_asks_for_is_checked_too(seeker, equipoise):
    code, _, err = equipoise("fit", "hydra.mode=MULTIRUN", "hydra/sweeper=seeker")
    assert code == 2
    assert "chooses a trial by the values that earlier trials returned" in err
    assert not list(seeker.glob("multirun/**/config.yaml"))


@pytest.mark.thorough
def test_a_name_that_no_trial_logs(seeker, equipoise):
    code, _, err = equipoise(*SEEK, "objective=val_los")
    assert code == 2
    assert "the run logged no such value; did you mean 'val_loss'?" in err
    assert "Traceback" not in err


@pytest.mark.thorough
def test_a_trial_that_ends_in_nan(seeker, equipoise):
    module = seeker / "tiny" / "module.py"
    module.write_text(module.read_text().replace('self.log("val_loss", (', 'self.log("val_loss", float("nan") * ('))
    code, _, err = equipoise(*SEEK, "objective=val_loss")
    assert code == 2
    assert "This trial failed: its objective 'val_loss' ended as nan" in err
    assert "max_failure_rate" in err


def test_another_primary_configuration_is_the_one_that_is_checked(seeker, equipoise):
    base = (seeker / "conf" / "config.yaml").read_text()
    (seeker / "conf" / "config.yaml").write_text(base + "objective: val_loss\n")
    (seeker / "conf" / "other.yaml").write_text(base)
    for flag in (("--config-name", "other"), ("--config-name=other",)):
        code, _, err = equipoise(*SEEK, *flag)
        assert code == 2
        assert "objective is null" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--multirun", "module.lr=1,2"], True),
        (["-m"], True),
        (["--multirun", "--cfg=job"], False),
    ],
)
def test_flags_that_only_print_begin_no_sweep(arguments, expected):
    assert is_sweep(arguments) is expected
