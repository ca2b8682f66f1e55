"""Profilers of Lightning time the same actions, under the same names and as often, as far as we have them."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.core.hooks import ModelHooks
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler

from equipoise import Trainer
from tests.support.trainer_runs import Data, Small, Validated, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore:You have overridden `.*` in `LightningModule`")


def overriding(base: type, names: list[str]) -> type:
    """A subclass that overrides these methods, and does what they did."""

    def override(name: str) -> Any:
        return lambda self, *args, **kwargs: getattr(super(cls, self), name)(*args, **kwargs)

    cls = type("All" + base.__name__, (base,), {name: override(name) for name in names})
    return cls


def hooks(*classes: type) -> list[str]:
    return [name for cls in classes for name in vars(cls) if name.startswith("on_") or name in ("setup", "teardown")]


TRANSFERS = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]
METHODS = ["on_save_checkpoint", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "setup"]
AllModule = overriding(Validated, [*hooks(ModelHooks), *TRANSFERS, *METHODS, "teardown"])
AllCallback = overriding(L.Callback, hooks(L.Callback))
AllCallback.state_key = "AllCallback{'x': 1}"
AllData = overriding(Data, ["setup", "teardown", "prepare_data", "state_dict"])

# What Lightning times and we do not: hooks of its own strategies, and what nobody has overridden.
LIGHTNINGS_OWN = {
    "[LightningModule]AllValidated.configure_callbacks",
    "[Strategy]SingleDeviceStrategy.on_train_batch_start",
    *(
        f"[Strategy]SingleDeviceStrategy.on_{stage}_{end}"
        for stage in ("train", "validation", "test", "predict")
        for end in ("start", "end")
    ),
}


def everything(run: Any, module: Any, datamodule: Any, folder: Path) -> None:
    run.fit(module, datamodule=datamodule)
    run.save_checkpoint(folder / "x.ckpt")
    run.test(module, datamodule=datamodule, verbose=False)
    run.predict(module, datamodule=datamodule)


def recorded(cls: Any, folder: Path, module: Any, *callbacks: L.Callback, datamodule: Any = None) -> dict[str, int]:
    """Return how often each action was timed in a fit, a test and a prediction."""
    profiler = SimpleProfiler(dirpath=folder, filename=cls.__module__.partition(".")[0])
    run = trainer(cls, profiler=profiler, callbacks=list(callbacks), max_epochs=2)
    everything(run, module, Data() if datamodule is None else datamodule, folder)
    return {action: len(durations) for action, durations in profiler.recorded_durations.items()}


def test_profiled_actions_are_lightnings(tmp_path: Path) -> None:
    """Every action is timed as often as by Lightning if all hooks are overridden."""
    theirs, ours = (
        recorded(cls, tmp_path, AllModule(), AllCallback(), datamodule=AllData()) for cls in (L.Trainer, Trainer)
    )
    assert {action: theirs.get(action) for action in ours} == ours
    assert set(theirs) - set(ours) <= LIGHTNINGS_OWN
    for name, times in {
        "[Strategy]SingleDeviceStrategy.training_step": 6,
        "run_training_epoch": 2,
        "save_checkpoint": 1,
        "[LightningModule]AllValidated.on_train_batch_end": 6,
        "[Callback]AllCallback{'x': 1}.on_train_batch_end": 6,
        "[LightningDataModule]AllData.train_dataloader": 1,
    }.items():
        assert ours[name] == times, name


def test_hooks_that_nobody_overrides_are_not_timed(tmp_path: Path) -> None:
    theirs, ours = (recorded(cls, tmp_path, Validated(), L.Callback()) for cls in (L.Trainer, Trainer))
    assert {action: theirs.get(action) for action in ours} == ours
    assert "[LightningModule]Validated.configure_optimizers" in ours
    assert not [action for action in ours if "[Callback]" in action or "train_batch" in action]


def test_steps_of_replicas_are_not_timed(tmp_path: Path) -> None:
    """They run in other threads, and a profiler works in one only."""
    profiler = SimpleProfiler(dirpath=tmp_path, filename="report")
    trainer(profiler=profiler, strategy="dp", devices=2).fit(Small(), loader())
    assert len(profiler.recorded_durations["[Strategy]DataParallelStrategy.training_step"]) == 3


def test_a_profiler_reports_each_kind_of_run(tmp_path: Path) -> None:
    profiler = SimpleProfiler(dirpath=tmp_path, filename="report")
    everything(trainer(profiler=profiler), Validated(), Data(), tmp_path)
    reports = {path.name: path.read_text() for path in tmp_path.glob("*.txt")}
    assert set(reports) == {"fit-report.txt", "test-report.txt", "predict-report.txt"}
    for name, report in reports.items():
        assert f"{name.split('-')[0].replace('fit', 'training')}_step" in report


# The names


@pytest.mark.parametrize(("name", "kind"), [("simple", SimpleProfiler), ("Advanced", AdvancedProfiler)])
def test_profilers_by_name_log_their_report(name: str, kind: type, caplog: pytest.LogCaptureFixture) -> None:
    """They log their reports where nobody names a folder."""
    assert type(trainer(profiler="pytorch").profiler) is PyTorchProfiler
    run = trainer(profiler=name)
    assert type(run.profiler) is kind
    with caplog.at_level("INFO"):
        run.fit(Small(), loader())
    (report,) = [record.getMessage() for record in caplog.records if "Profiler Report" in record.getMessage()]
    assert "run_training_epoch" in report
    assert "[Strategy]SingleDeviceStrategy.training_step" in report
    assert run.global_step == 3


@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule")
def test_pytorchs_profiler_names_the_same_actions(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(
        dirpath=tmp_path,
        filename="report",
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=2),
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(tmp_path / "trace.json")),
        emit_nvtx=False,
    )
    trainer(profiler=profiler).fit(Small(), loader())
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert "[pl][profile][Strategy]SingleDeviceStrategy.training_step" in names
    assert "[pl][module]torch.nn.modules.linear.Linear: layer" in names


# One's own


class Own(Profiler):
    """Writes down what it is told; `open` holds the actions that are running."""

    def __init__(self, folder: Path) -> None:
        super().__init__(dirpath=folder, filename="own")
        self.open: list[str] = []
        self.nested: set[tuple[str, ...]] = set()
        self.calls: list[str] = []

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self.calls.append(f"setup {stage!s} {local_rank} {log_dir is not None}")

    def start(self, action_name: str) -> None:
        self.open.append(action_name)
        self.nested.add(tuple(self.open))

    def stop(self, action_name: str) -> None:
        assert self.open.pop() == action_name

    def summary(self) -> str:
        self.calls.append("summary")
        return "a summary"

    def teardown(self, stage: str | None) -> None:
        super().teardown(stage)
        self.calls.append(f"teardown {stage!s}")


def own(cls: Any, folder: Path, module: Any) -> Own:
    profiler = Own(folder / cls.__module__)
    trainer(cls, profiler=profiler).fit(module, loader(), loader())
    return profiler


def test_a_profiler_of_the_users_own_is_called_as_by_lightning(tmp_path: Path) -> None:
    theirs, ours = own(L.Trainer, tmp_path, Validated()), own(Trainer, tmp_path, Validated())
    assert ours.calls == theirs.calls
    assert not ours.open
    assert ("run_training_epoch", "run_training_batch", "[Strategy]SingleDeviceStrategy.training_step") in ours.nested
    assert ("run_training_epoch", "[Strategy]SingleDeviceStrategy.validation_step") in {
        (stack[0], stack[-1]) for stack in theirs.nested & ours.nested if len(stack) > 1
    }
    assert (tmp_path / Trainer.__module__ / "fit-own.txt").read_text() == "a summary"


def test_profiled_actions_end_with_an_error(tmp_path: Path) -> None:
    class Fails(Validated):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ArithmeticError

    profiler = Own(tmp_path)
    with pytest.raises(ArithmeticError):
        trainer(profiler=profiler).fit(Fails(), loader(), loader())
    assert profiler.nested
    assert not profiler.open


def test_a_module_may_time_actions_of_its_own(tmp_path: Path) -> None:
    class Times(Validated):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with self.trainer.profiler.profile("my part"):
                return super().training_step(batch, batch_idx)

    stacks = own(Trainer, tmp_path, Times()).nested
    assert any(stack[-2:] == ("[Strategy]SingleDeviceStrategy.training_step", "my part") for stack in stacks)
