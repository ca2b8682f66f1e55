"""Counters count what Lightning's count; `tests/parity/resuming` goes on from the other's checkpoints."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from equipoise import Trainer
from equipoise.trainer.state.progress import FitProgress
from tests.support.resumption import SavesInHooks
from tests.support.trainer_runs import Validated, loader, trainer


class Scheduled(Validated):
    """A scheduler that steps with every batch that steps."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


class Manual(Validated):
    """Two optimisers, one of which steps twice."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, times in zip(self.optimizers(), (1, 2), strict=True):
            for _ in range(times):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


HOOKS = (
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_after_backward",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
)


def loops_of(cls: Any, module: Any, folder: Path, **options: Any) -> list[tuple[str, Any]]:
    """The counters in the checkpoints of every hook of a fit, of its end, and of what follows."""
    folder = folder / cls.__module__
    run = trainer(cls, callbacks=[saves := SavesInHooks(folder, HOOKS)], max_epochs=2, **options)
    run.fit(module, loader(5), loader(2))
    run.save_checkpoint(folder / "fitted.ckpt")
    run.validate(module, loader(3), verbose=False)
    run.test(module, loader(4), verbose=False)
    run.predict(module, loader(2))
    run.save_checkpoint(folder / "evaluated.ckpt")
    paths = [*(saved.path for saved in saves.saved), folder / "fitted.ckpt", folder / "evaluated.ckpt"]
    return [(path.stem, torch.load(path, weights_only=False)["loops"]) for path in paths]


CASES: dict[str, tuple[type[Validated], dict[str, Any]]] = {
    "validation in mid-epoch": (Scheduled, {"val_check_interval": 2}),
    "accumulation": (Scheduled, {"accumulate_grad_batches": 2, "val_check_interval": 3}),
    "manual": (Manual, {"val_check_interval": 2}),
    "max_steps": (Scheduled, {"max_steps": 7}),
    "a limit": (Validated, {"limit_train_batches": 3, "limit_val_batches": 1, "num_sanity_val_steps": 0}),
}


@pytest.mark.quick_cases(2)
@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_counters_in_every_hook_are_lightnings(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    theirs, ours = (loops_of(cls, kind(), tmp_path, **options) for cls in (L.Trainer, Trainer))
    assert [hook for hook, _ in ours] == [hook for hook, _ in theirs]
    assert [hook for (hook, a), (_, b) in zip(theirs, ours, strict=True) if a != b] == []
    assert len({str(loops) for _, loops in ours}) > 30  # they do change
    for hook, loops in theirs:
        progress = FitProgress()
        progress.load_state_dict(loops["fit_loop"])
        assert progress.state_dict() == loops["fit_loop"], hook
