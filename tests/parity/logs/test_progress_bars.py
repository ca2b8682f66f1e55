"""Lightning's bar, passed by the user, shows and offers under Equipoise what it does under Lightning."""

import subprocess
import sys
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar

from equipoise import Trainer
from tests.support.trainer_runs import Validated, loader, trainer

_NOT_OF_A_LOOP = ("on_save_checkpoint", "on_load_checkpoint", "on_exception")
HOOKS = [name for name in dir(L.Callback) if name.startswith("on_") and name not in _NOT_OF_A_LOOP]
BARS = ("train", "val", "test", "predict")


class Named(TQDMProgressBar):
    """Names the bar of training, as in Lightning's own example."""

    def init_train_tqdm(self) -> Any:
        bar = super().init_train_tqdm()
        bar.set_description("mine")
        return bar


class Shown(Validated):
    """Logs to the bar, in training and in validation, and prints above it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        self.trainer.progress_bar_callback.train_progress_bar.set_postfix(step=batch_idx)
        if batch_idx == 1:
            self.print("hello")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)


def recorder(seen: list[Any]) -> L.Callback:
    """A callback that reads the bars of `trainer.progress_bar_callback` in each hook."""

    def reads(hook: str) -> Any:
        def read(self: Any, run: Any, *_: Any, **__: Any) -> None:
            seen.append((hook, *(state_of(run.progress_bar_callback, bar) for bar in BARS)))

        return read

    kind: type[L.Callback] = type("Recorder", (L.Callback,), {hook: reads(hook) for hook in HOOKS})
    return kind()


def state_of(callback: Any, bar: str) -> Any:
    """The public state of a bar; None before there is one."""
    try:
        value = getattr(callback, f"{bar}_progress_bar")
    except TypeError:
        return None
    return [getattr(value, name, None) for name in ("n", "total", "desc", "postfix", "disable")]


def everything(cls: Any, bar: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run all entry points; return what a callback reads in each hook, and the last line of each bar but its times."""
    seen: list[Any] = []
    torch.manual_seed(0)
    options = {"max_epochs": 2, "num_sanity_val_steps": 1, "val_check_interval": 2, "enable_progress_bar": True}
    run, module = trainer(cls, callbacks=[bar, recorder(seen)], **options), Shown()
    run.fit(module, loader(4), loader(3))
    run.validate(module, loader(3), verbose=False)
    run.test(module, loader(3), verbose=False)
    run.predict(module, [loader(3), loader(2)])
    return seen, capsys.readouterr().out.count("hello")


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("make", [lambda: TQDMProgressBar(2, leave=True), Named])
def test_what_callbacks_read_of_lightnings_bar(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    expected, ours = everything(L.Trainer, make(), capsys), everything(Trainer, make(), capsys)
    assert len(ours[0]) > 100
    assert ours == expected


def fit_in_several_processes() -> None:
    bar = Named()
    run = trainer(strategy="ddp", devices=2, callbacks=[bar], enable_progress_bar=True)
    run.fit(Shown(), loader(4), loader(2))
    with pytest.raises(TypeError, match="has not been set yet"):
        _ = bar.train_progress_bar
    run.validate(Shown(), loader(2), verbose=False)


@pytest.mark.slow
def test_lightnings_bar_in_several_processes() -> None:
    """The main process shows it; what is on the terminal does not come back to the program."""
    # In a program of its own: the output of workers is that of the server which an earlier test may have started.
    script = "from tests.parity.logs.test_progress_bars import fit_in_several_processes as fit; fit()"
    program = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert "mine" in program.stdout
    assert "2/2" in program.stdout
