"""`equipoise tune`: limits are planted in a project whose time passes by a clock, so that gains are exact."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml

from equipoise.extensions.common import bench
from equipoise.extensions.timing import clock as clock_module
from equipoise.extensions.timing.tune import probe, rounds
from tests.extensions.timing.tune.passing import CLOCK, FILES
from tests.support.bounded_calls import call_here
from tests.support.commands import equipoise, no_trace, quick
from tests.support.projects import project_in

__all__ = ["equipoise", "no_trace", "quick"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]

# Enough for rounds of steps that take some seconds.
LONG = "--seconds=400"
VALIDATED = (
    *("data._target_=tuned.module.Validated", "module._target_=tuned.module.Validating"),
    *("+module.validation=4.0", "trainer.val_check_interval=4"),
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trials run in the process of the test, on two processors."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1}, raising=False)
    monkeypatch.setattr(bench, "call_bounded", call_here)
    for module in (clock_module, probe, rounds):
        monkeypatch.setattr(module, "perf_counter", CLOCK)
    with project_in(tmp_path, FILES, "tuned") as folder:
        yield folder


@pytest.fixture
def tuned(project: Path, equipoise: Any) -> Any:
    """Runs `equipoise tune --json` and returns what it tells."""

    def tune(*arguments: str) -> dict[str, Any]:
        code, out, complaint = equipoise("tune", "--json", *arguments)
        assert code == 0, complaint
        result: dict[str, Any] = json.loads(out)
        return result

    return tune


def speeds(result: dict[str, Any]) -> dict[str, float]:
    return {row["label"]: median(row["speeds"]) for row in result["rows"] if row["speeds"]}


@pytest.mark.thorough
def test_workers_are_found_for_slow_data(tuned: Any, project: Path) -> None:
    """Time of workers is not that of the process: what remains is the forward."""
    result = tuned("data.seconds=3.0", LONG)
    assert result["limit"] == "waiting for data"
    measured = speeds(result)
    assert measured["data.num_workers=2"] == pytest.approx(4.0, rel=1e-9)
    assert result["overrides"] == ["data.num_workers=2"]
    assert result["sentence"] == (
        "75% of the time is spent waiting for data: data.num_workers=2 makes it 0%"
        f" (measured over {result['steps']} steps)"
    )
    assert {path.name for path in project.iterdir()} == {"conf", "tuned"}


@pytest.mark.thorough
def test_a_change_that_the_configuration_cannot_express_is_left_to_the_user(project: Path, equipoise: Any) -> None:
    """Changes that the configuration cannot express are measured, and left to the user."""
    code, out, _ = equipoise("tune", "data._target_=tuned.module.Fixed", "~data.num_workers", "data.seconds=3.0", LONG)
    assert code == 0
    assert "DataLoader(num_workers=2) makes it 0%" in out
    assert "change the code that makes the DataLoader" in out
    assert "data.num_workers" not in out


@pytest.mark.thorough
def test_frequent_validation_is_made_rarer(tuned: Any) -> None:
    """Trials are whole periods: 4 steps of a second and a validation of 4; every 36 steps the latter takes a tenth."""
    result = tuned(*VALIDATED, "--seconds=700")
    assert result["limit"] == "validation"
    remedy = result["rows"][1]
    assert remedy["candidate"]["overrides"] == ["trainer.val_check_interval=1.0", "trainer.check_val_every_n_epoch=2"]
    assert median(remedy["speeds"]) == pytest.approx(2 / (1 + 4 / 48), rel=1e-9)
    assert result["steps"] % 48 == 0


@pytest.mark.thorough
def test_a_remedy_that_takes_too_long_is_not_measured(tuned: Any) -> None:
    """It needs eleven epochs, which do not fit; the others are measured. The first trial waits for a validation."""
    result = tuned(*VALIDATED[:2], "+module.validation=24.0", "--seconds=100")
    # Twice what would do: 3.15 steps of each trial take 100 seconds.
    assert result["rows"][1]["reason"] == "it needs 264 steps: --seconds=16762"
    assert result["steps"] == 20
    assert speeds(result)["data.num_workers=2"] == 1.0
    assert (
        result["sentence"]
        == "validation every 24 steps takes 53% of the time, and nothing that was tried makes it faster."
    )


@pytest.mark.thorough
def test_a_limit_without_a_candidate_is_told(project: Path, equipoise: Any) -> None:
    code, out, _ = equipoise("tune", "+module.hook=3.0", LONG)
    assert code == 0
    assert "hooks of the module take 75% of the time: let them do less, or act in fewer steps. Not measured." in out


@pytest.mark.thorough
def test_a_healthy_run_has_no_limit(project: Path, equipoise: Any) -> None:
    code, out, _ = equipoise("tune")
    assert code == 0
    assert "A step takes 1 s: forward" in out
    assert "Nothing limits this run that a setting could change" in out
    assert not (project / "outputs").exists()


@pytest.mark.thorough
def test_an_error_of_the_program_is_shown(project: Path, equipoise: Any) -> None:
    code, out, complaint = equipoise("tune", "+module.fails=true")
    assert (code, out) == (2, "")
    assert complaint.rstrip().endswith("ValueError: a mistake of mine")
    assert "in training_step" in complaint
    assert not (project / "outputs").exists()


@pytest.mark.thorough
def test_too_little_time_is_refused(project: Path, equipoise: Any) -> None:
    code, _, complaint = equipoise("tune", "--seconds=20")
    assert code == 2
    assert "Only 10 steps were made in 10 s, and 20 are needed: give more time, such as --seconds=80." in complaint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps=3"], "equipoise tune takes overrides"),
        (["--seconds"], "--seconds takes seconds above 0"),
        (["trainer.num_nodes=2"], "leave trainer.num_nodes out"),
    ],
)
def test_arguments_that_are_refused(project: Path, equipoise: Any, arguments: list[str], message: str) -> None:
    code, _, complaint = equipoise("tune", *arguments)
    assert code == 2
    assert message in complaint
    assert not (project / "outputs").exists()


@pytest.mark.thorough
def test_apply_runs_what_was_found(project: Path, equipoise: Any) -> None:
    code, out, _ = equipoise("tune", "data.seconds=3.0", "trainer.max_epochs=1", "--apply", LONG)
    assert code == 0
    assert "data.num_workers=2" in out
    (file,) = (project / "outputs").rglob("config.yaml")
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert (values["data"]["num_workers"], values["trainer"]["max_epochs"]) == (2, 1)


@pytest.mark.slow
def test_trials_in_processes(tmp_path: Path, equipoise: Any) -> None:
    """Nothing is replaced: trials have processes, and time passes."""
    with project_in(tmp_path, FILES, "tuned"):
        code, out, complaint = equipoise("tune", "--json", "--seconds=5", "strategy=ddp", "trainer.devices=[cpu,cpu]")
    assert code == 0, complaint
    assert sum(json.loads(out)["shares"].values()) == pytest.approx(1.0)
