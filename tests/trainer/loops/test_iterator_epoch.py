"""`training_step(dataloader_iter)`: what it refuses, how it resumes, and where it is on purpose not as in Lightning.

That all else is as in Lightning is shown in `tests/parity/test_dataloader_iter.py`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from equipoise import Callback, ConfigurationError, OOMRecovery, StepError, Trainer
from equipoise.extensions.report.fit_recorder import size_function
from equipoise.interop.lightning.self_log import CURRENT_HOOK
from tests.support.trainer_runs import Small, Stream, Validated, loader, refuses, refuses_fit, trainer
from tests.trainer.loops import test_resumption as resuming

# Refusals


class Pulls(Small):
    """Pulls so many batches in each step, fewer where the epoch has no more; remembers the first sample of each."""

    def __init__(self, batches: int = 1) -> None:
        super().__init__()
        self.batches = batches
        self.pulled: list[tuple[int, int]] = []

    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
        self.ran.append("training")
        losses: list[Tensor] = []
        while len(losses) < self.batches and (pulled := next(dataloader_iter, None)) is not None:
            batch, batch_idx, _ = pulled
            self.pulled.append((batch_idx, int(batch[0][0, 0])))
            losses.append(1e-3 * self.loss(batch))
        return torch.stack(losses).mean()


class Overdraws(Pulls):
    """Asks for the same number of batches in each step, whether there are as many or not."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
        self.ran.append("training")
        losses = []
        for _ in range(self.batches):
            batch, batch_idx, _ = next(dataloader_iter)
            self.pulled.append((batch_idx, int(batch[0][0, 0])))
            losses.append(1e-3 * self.loss(batch))
        return torch.stack(losses).mean()


def stepping(step: Callable[[Any, Any], Any], base: type[Small] = Small) -> Small:
    """A module whose training step is `step(module, dataloader_iter)`."""

    class Module(base):
        def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
            return step(self, dataloader_iter)

    return Module()


class Survives(Callback):
    def on_out_of_memory(self, trainer: Any, pl_module: Any, event: Any) -> Any:
        return None


class Accumulates(L.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.accumulate_grad_batches = 2


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"strategy": "dp", "devices": 2}, ["`Pulls.training_step(dataloader_iter)`", "strategy='dp'"]),
    ({"strategy": "balanced", "devices": 2}, ["strategy='balanced'", "strategy='single_device'"]),
    ({"strategy": "pipeline"}, ["strategy='pipeline'", "strategy='single_device'"]),
    ({"strategy": "ddp"}, ["strategy='ddp'", "strategy='single_device'"]),
    ({"callbacks": [OOMRecovery()]}, ["cannot be done again", "Leave OOMRecovery"]),
    ({"callbacks": [Survives()]}, ["cannot be done again", "Leave OOMRecovery"]),
    ({"accumulate_grad_batches": 2}, ["accumulate_grad_batches", "pull all batches"]),
    ({"callbacks": [GradientAccumulationScheduler({0: 1, 4: 2})]}, ["AccumulationScheduler", "pull all batches"]),
    ({"callbacks": [Accumulates()]}, ["accumulate_grad_batches"]),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_needs_the_batches_of_a_step(options: dict[str, Any], words: list[str]) -> None:
    refuses_fit(Pulls(), *words, **{"devices": 1, **options})


def test_lbfgs() -> None:
    class Module(Pulls):
        def configure_optimizers(self) -> Any:
            return LBFGS(self.parameters())

    refuses_fit(Module(), "LBFGS", "other batches each time", "automatic_optimization = False")


def test_another_argument() -> None:
    class Module(Small):
        def training_step(self, dataloader_iter: Any, batch_idx: int) -> Any: ...

    refuses_fit(Module(), "takes the iterator alone", "next(dataloader_iter)")


def test_evaluating_such_a_module() -> None:
    """Nothing of the training is asked for, so nothing of it is refused."""
    module = Pulls()
    trainer(accumulate_grad_batches=2, callbacks=[OOMRecovery()]).test(module, loader(), verbose=False)
    assert module.ran == ["test"] * 3


# Values


def log(**options: Any) -> Callable[[Any, Any], Any]:
    def step(module: Any, dataloader_iter: Any) -> Any:
        loss = module.loss(next(dataloader_iter)[0])
        module.log("loss", loss, **options)
        module.ran.append("logged")
        return loss

    return step


@pytest.mark.parametrize("hook", ["training_step", "on_train_batch_end"])
def test_a_mean_over_the_epoch_needs_the_batch_size(hook: str) -> None:
    class LogsAtEnd(Pulls):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("loss", 1.0, on_epoch=True)

    module = stepping(log(on_epoch=True)) if hook == "training_step" else LogsAtEnd()
    refuses(
        lambda: trainer().fit(module, loader()),
        "`self.log(..., batch_size=n)`",
        "on_epoch=False",
        error=MisconfigurationException,
    )
    assert "logged" not in module.ran  # it is raised where the call is


def test_a_mean_over_the_epoch_needs_the_batch_size_in_each_call() -> None:
    """The size may not be asked of the iterator, either."""

    class Module(Pulls):
        def batch_size(self, batch: Any) -> int:
            return len(batch[0])

        def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
            batch, batch_idx, _ = next(dataloader_iter)
            self.log("loss", 1.0, on_epoch=True, batch_size=2 if batch_idx == 0 else None)
            return self.loss(batch)

    refuses(lambda: trainer().fit(Module(), loader()), "batch_size=n", error=MisconfigurationException)


@pytest.mark.parametrize("options", [{}, {"on_epoch": True, "reduce_fx": "max"}], ids=["step", "maximum"])
def test_values_without_a_weight_need_no_batch_size(options: dict[str, Any]) -> None:
    run = trainer()
    run.fit(stepping(log(**options)), loader())
    assert run.callback_metrics["loss"] > 0


def test_metrics_and_values_of_the_epochs_end_need_no_batch_size() -> None:
    class Module(Validated):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
            batch, batch_idx, _ = next(dataloader_iter)
            self.mean.update(float(batch_idx))
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            return self.loss(batch)

        def on_train_epoch_end(self) -> None:
            self.log("end", 3.0)

    run = trainer()
    run.fit(Module(), loader(), loader())
    assert (run.callback_metrics["mean"], run.callback_metrics["end"]) == (1.0, 3.0)
    assert "val_loss" in run.callback_metrics  # whose batches tell their sizes


def test_samples_of_a_step_are_not_guessed() -> None:
    """The hook knows the last batch only."""
    batch = next(iter(loader(batch_size=4)))
    assert size_function(trainer(), Small())(batch) == 4
    assert size_function(trainer(), Pulls(2))(batch) is None


# The iterator


@pytest.mark.parametrize("sized", [True, False])
def test_what_the_iterator_tells(sized: bool) -> None:
    told: list[Any] = []

    def step(module: Any, dataloader_iter: Any) -> Any:
        assert iter(dataloader_iter) is dataloader_iter
        before = (dataloader_iter.fetched, dataloader_iter.length, dataloader_iter.done)
        batch, _, dataloader_idx = next(dataloader_iter)
        told.append((before, (dataloader_iter.fetched, dataloader_iter.length, dataloader_iter.done), dataloader_idx))
        return module.loss(batch)

    data = loader(2) if sized else DataLoader(Stream(4), batch_size=2)
    trainer(max_epochs=2).fit(stepping(step), data)
    unknown = 2 if sized else None
    assert (
        told == [((0, unknown, False), (1, 2 if sized else None, False), 0), ((1, unknown, False), (2, 2, True), 0)] * 2
    )


def test_a_loader_that_gives_fewer_batches_than_it_says() -> None:
    class Short:
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Iterator[Any]:
            return iter(loader(3))

    module = Overdraws(1)
    with pytest.warns(UserWarning, match="promised 5 batches by its length, and gave 3"):
        trainer(max_epochs=2).fit(module, Short())
    assert [index for index, _ in module.pulled] == [0, 1, 2] * 2


def test_a_profile_times_the_reading_of_batches() -> None:
    profiler = SimpleProfiler()
    trainer(profiler=profiler).fit(Pulls(2), loader(5))
    assert len(profiler.recorded_durations["[_TrainingEpochLoop].train_dataloader_next"]) == 5
    assert len(profiler.recorded_durations["run_training_batch"]) == 3


def test_a_batch_that_was_not_moved_is_named() -> None:
    def step(module: Any, dataloader_iter: Any) -> Any:
        return module.loss(next(dataloader_iter)[0])

    data: Any = DataLoader([[torch.ones(2, 2, device="meta")]], batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(StepError, match=r"batch\[0\] is on meta, while the rest is on cpu"):
        trainer().fit(stepping(step), data)


def test_an_error_of_another_iterator_does_not_end_the_epoch() -> None:
    def step(module: Any, dataloader_iter: Any) -> Any:
        next(dataloader_iter)
        return next(iter(()))

    with pytest.raises(StepError, match="raised StopIteration, though `dataloader_iter`"):
        trainer().fit(stepping(step), loader())


# A step that asks for more batches than there are


class Recorded(Overdraws):
    """Writes down what follows its batches; its scheduler goes by epochs."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ran.append("batch end")

    def on_train_epoch_end(self) -> None:
        self.ran.append("epoch end")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.ran.append("validation")

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [StepLR(optimizer, 1, 0.5)]


@pytest.mark.parametrize("sized", [True, False])
def test_a_step_that_was_not_completed(sized: bool) -> None:
    """The epoch ends as any other: it is validated, and schedulers continue. The step does not count."""
    module, run = Recorded(2), trainer(max_epochs=2, num_sanity_val_steps=0)
    data = loader(3) if sized else DataLoader(Stream(6), batch_size=2)
    with pytest.warns(UserWarning, match=r"last step was not completed; 1 of 3 batches were pulled in it"):
        run.fit(module, data, loader(1))
    assert module.ran == ["training", "batch end", "training", "validation", "epoch end"] * 2
    assert (run.global_step, run.progress.batches_that_stepped) == (2, 2)
    assert run.progress.batch.total.state_dict() == {"ready": 2, "started": 2, "processed": 2, "completed": 2}
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)


@pytest.mark.filterwarnings("ignore:.*last step was not completed")
def test_nothing_can_be_logged_outside_of_hooks_after_such_a_step() -> None:
    """The training step has not returned, yet it does not run any more."""
    running: list[str | None] = []

    class Noted:
        def __iter__(self) -> Iterator[Any]:
            running.append(vars(module)[CURRENT_HOOK])
            return iter(loader(3))

    module = Overdraws(2)
    trainer(max_epochs=2).fit(module, Noted())
    assert running[-2:] == [None, None]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_an_epoch_without_a_step_that_was_completed() -> None:
    module, run = Recorded(4), trainer(num_sanity_val_steps=0)
    before = module.layer.weight.clone()
    with pytest.warns(UserWarning, match="3 of 3 batches were pulled in it"):
        run.fit(module, loader(3), loader(1))
    assert module.ran == ["training", "validation", "epoch end"]
    assert run.global_step == 0
    assert torch.equal(module.layer.weight, before)


def test_a_scheduler_by_epoch_goes_on_where_a_step_pulls_several_batches() -> None:
    """Lightning leaves it where it is, since it looks for the last batch before the step."""

    class Module(Pulls):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.1)
            return [optimizer], [StepLR(optimizer, 1, 0.5)]

    run = trainer(max_epochs=3)
    run.fit(Module(2), loader(4))
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)


# Resumption


class Resumed(resuming.Module):
    """Pulls two batches in each step, and what is left in the last one."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:  # type: ignore[override]
        losses: list[Tensor] = []
        while len(losses) < 2 and (pulled := next(dataloader_iter, None)) is not None:
            losses.append(self.loss_of(pulled[0]))
        return self.optimize(torch.stack(losses).mean())

    def loss_of(self, batch: Any) -> Tensor:
        features, labels, indices = batch
        self.seen.append(indices.tolist())
        logits = self.net(features)
        self.accuracy(logits, labels)
        loss = nn.functional.cross_entropy(logits, labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(labels))
        self.log("train_accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def optimize(self, loss: Tensor) -> Tensor:
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


class ResumedOverdrawn(Resumed):
    """Asks for two batches in each step, and so leaves the last one of seven out."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
        losses = [self.loss_of(next(dataloader_iter)[0]) for _ in range(2)]
        return self.optimize(torch.stack(losses).mean())


CASES: dict[str, tuple[type[Resumed], str, dict[str, Any], dict[str, Any]]] = {
    "shuffled": (Resumed, "shuffled", {}, {}),
    "unsized": (Resumed, "unsized", {}, {}),
    "by hand": (Resumed, "shuffled", {"automatic": False}, {}),
    "limited": (Resumed, "own generator", {}, {"limit_train_batches": 5}),
    "validating inside": (Resumed, "shuffled", {"interval": "step"}, {"val_check_interval": 2}),
    "overdrawn": (ResumedOverdrawn, "shuffled", {}, {}),
    "overdrawn and unsized": (ResumedOverdrawn, "unsized", {}, {}),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:The lr scheduler keys", "ignore:.*last step was not completed")
def test_killed_anywhere(name: str, tmp_path: Path) -> None:
    """No batch is repeated and none is lost; weights, counters, values and generators are those of one run."""
    kind_of_module, kind, of_module, options = CASES[name]
    resuming.seeded()
    module, saver = kind_of_module(**of_module), resuming.SaveEverywhere(tmp_path)
    reference = resuming.outcome(resuming.train(kind, module, [saver], **options), module)
    assert len(saver.saved) > 20
    for path, _ in saver.saved_in_turn(list(CASES).index(name)):
        resuming.seeded()
        resumed = kind_of_module(**of_module)
        resuming.seeded(99)  # nothing may depend on the generators of the new process
        run = resuming.train(kind, resumed, [], path, **options)
        resuming.assert_equal(reference, resuming.outcome(run, resumed), path.name)
        assert resumed.seen == module.seen, path.name


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_after_backward"])
def test_killed_in_a_step(hook: str, tmp_path: Path) -> None:
    """All batches of the step are pulled again."""
    module, saver = Resumed(), resuming.SaveEverywhere(tmp_path, (hook,))
    resuming.train("shuffled", module, [saver])
    assert len(saver.saved) == 12
    for path, seen_before in saver.saved:
        resumed = Resumed()
        resuming.train("shuffled", resumed, [], path)
        pulled_in_step = 0 if hook == "on_train_batch_start" else (1 if len(seen_before) % 7 == 0 else 2)
        done = seen_before[: len(seen_before) - pulled_in_step]
        seen, ended = done + resumed.seen[len(seen_before) :], 7 * (len(done) // 7 + 1)
        assert seen[:ended] == module.seen[:ended], path.name


def test_a_run_that_max_steps_ended_goes_on_with_the_next_batches(tmp_path: Path) -> None:
    first = Pulls(2)
    run = trainer(max_steps=2)
    run.fit(first, loader(7))
    run.save_checkpoint(tmp_path / "x.ckpt")
    second = Pulls(2)
    trainer(max_steps=6, max_epochs=-1).fit(second, loader(7), ckpt_path=tmp_path / "x.ckpt")
    assert [index for index, _ in first.pulled] == [0, 1, 2, 3]
    assert [index for index, _ in second.pulled[4:]] == [4, 5, 6, 0, 1, 2, 3]
    assert [sample for _, sample in second.pulled[4:7]] == [8, 10, 12]


class TakesBatches(Small):
    """Has the parameters of `Pulls`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ran.append(f"batch {batch_idx}")
        return 1e-3 * self.loss(batch)


def halfway(module: Small, folder: Path) -> Path:
    run = trainer(max_steps=2)
    run.fit(module, loader(6))
    run.save_checkpoint(folder / "x.ckpt")
    return folder / "x.ckpt"


def test_going_on_with_a_step_that_takes_batches(tmp_path: Path) -> None:
    """Which counts batches where the other counted steps."""
    module, path = TakesBatches(), halfway(Pulls(2), tmp_path)
    refuses(
        lambda: trainer(max_steps=4).fit(module, loader(6), ckpt_path=path),
        "after 2 steps",
        "4 batches",
        "an epoch's end",
        error=ConfigurationError,
    )
    assert module.ran == []


def test_going_on_with_a_step_that_takes_batches_where_each_pulled_one(tmp_path: Path) -> None:
    module = TakesBatches()
    trainer(max_steps=4).fit(module, loader(6), ckpt_path=halfway(Pulls(1), tmp_path))
    assert module.ran == ["batch 2", "batch 3"]


def test_going_on_from_a_step_that_took_batches(tmp_path: Path) -> None:
    module = Pulls(2)
    trainer(max_steps=4).fit(module, loader(6), ckpt_path=halfway(TakesBatches(), tmp_path))
    assert [index for index, _ in module.pulled] == [2, 3, 4, 5]


@pytest.mark.filterwarnings("ignore")
def test_going_on_from_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    """Exact where each step had pulled one batch, since Lightning counts steps."""
    saving = ModelCheckpoint(tmp_path, "x", every_n_train_steps=2)
    trainer(L.Trainer, max_steps=2, enable_checkpointing=True, callbacks=[saving]).fit(Pulls(1), loader(6))
    module = Pulls(1)
    trainer(Trainer, max_steps=4).fit(module, loader(6), ckpt_path=tmp_path / "x.ckpt")
    assert [index for index, _ in module.pulled] == [2, 3]
