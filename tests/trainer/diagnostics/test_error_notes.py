"""Errors of a step, a backward, a loader and a hook have notes that say what torch leaves out."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from equipoise.errors import ConfigurationError
from tests.support.trainer_runs import refuses, trainer


class Net(L.LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 5), nn.ReLU())
        self.head = nn.Linear(5, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.encoder(features))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(*items: Any) -> DataLoader[Any]:
    return DataLoader(list(items), batch_size=None)


def good() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])


def notes_of(kind: type[Exception], module: L.LightningModule, data: Any, **options: Any) -> str:
    """Fit, and return the notes of the error."""
    with pytest.raises(kind) as caught:
        trainer(**options).fit(module, data)
    return "\n".join(getattr(caught.value, "__notes__", []))


class Caches(Net):
    """Keeps a tensor of its first batch, of whatever stage."""

    cached: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        if self.cached is None:
            self.cached = features.mean(0)
        return super().forward(features * self.encoder[0].weight.mean() * self.cached)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])


def test_a_tensor_of_an_evaluation_in_training_names_the_remedies() -> None:
    module = Caches()
    trainer().validate(module, batches(good()), verbose=False)
    assert "Trainer(inference_mode=False) there, or use its `clone()`" in notes_of(
        RuntimeError, module, batches(good())
    )
    # The remedies.
    module.cached = module.cached.clone()
    trainer().fit(module, batches(good()))
    module = Caches()
    trainer(inference_mode=False).validate(module, batches(good()), verbose=False)
    trainer().fit(module, batches(good()))


@pytest.mark.parametrize("strategy", ["single_device", "dp"])
def test_a_wrong_shape_names_the_layer_and_its_input(strategy: str) -> None:
    devices = ["cpu"] * (2 if strategy == "dp" else 1)
    notes = notes_of(RuntimeError, Net(width=7), batches(good()), strategy=strategy, devices=devices)
    rows = 3 if strategy == "dp" else 6
    assert "Raised in the submodule 'encoder.0': Linear(in_features=7, out_features=5, bias=True)." in notes
    assert f"input of shape [{rows}, 4], torch.float32" in notes
    assert notes.count("Raised in") == 1


def with_step(step: Any) -> Net:
    """A net whose training step is `step(net, batch)`."""
    return type("Changed", (Net,), {"training_step": lambda self, batch, batch_idx: step(self, batch)})()


def summing(module: Any, batch: Any) -> Tensor:
    """A loss whose graph outlives its batch."""
    module.total = getattr(module, "total", 0.0) + Net.training_step(module, batch, 0)
    return module.total


def changing_in_place(module: Any, batch: Any) -> Tensor:
    hidden = torch.sigmoid(module.encoder(batch[0]))
    loss = module.head(hidden).sum()
    hidden += 1
    return loss


def unpacking(module: Any, batch: Any) -> Tensor:
    features, _ = batch
    return module(features).sum()


NOTES: dict[str, Any] = {
    "strings in a batch": (
        TypeError,
        lambda module, batch: module(batch["text"]).sum(),
        lambda: batches({"text": ("a", "b"), "label": torch.zeros(2)}),
        ("The batch does not hold tensors alone: batch['text'] is a list of 2 str.", "collate_fn"),
    ),
    "a list of samples in place of a loader": (
        TypeError,
        unpacking,
        lambda: [1, 2, 3],
        ("The batch is of type int: each item that a loader gives is a batch.", "DataLoader(samples, batch_size=...)"),
    ),
    "a label out of range": (
        IndexError,
        None,
        lambda: batches((good()[0], torch.tensor([0, 1, 2, 3, 1, 0]))),
        ("Integers in the batch: batch[1] from 0 to 3.",),
    ),
    "a graph that outlives its batch": (
        RuntimeError,
        summing,
        lambda: batches(good(), good()),
        ("still has its graph", "automatic_optimization"),
    ),
    "a result that is changed in place": (
        RuntimeError,
        changing_in_place,
        lambda: batches(good()),
        ("detect_anomaly=True",),
    ),
    "samples that cannot be stacked": (
        RuntimeError,
        None,
        lambda: DataLoader([torch.zeros(1), torch.zeros(2)], batch_size=2),
        ("pad_sequence",),
    ),
}


@pytest.mark.parametrize("name", NOTES)
def test_an_error_of_a_step_names_its_cause(name: str) -> None:
    kind, step, data, words = NOTES[name]
    notes = notes_of(kind, Net() if step is None else with_step(step), data())
    assert not [part for part in words if part not in notes], notes


def test_a_forward_that_gets_the_whole_batch_in_a_prediction() -> None:
    with pytest.raises(TypeError) as caught:
        trainer().predict(Net(), batches(good()))
    assert "The batch is a list of 2 Tensor: layers take its entries" in "\n".join(caught.value.__notes__)


def test_errors_of_the_users_own_get_no_note() -> None:
    def fail(module: Any, batch: Any) -> None:
        raise ValueError("on purpose")

    assert notes_of(ValueError, with_step(fail), batches(good())) == ""


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= 2:
            raise IndexError
        return good()


def test_a_dataset_in_place_of_a_loader_is_named_in_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"dataset was passed in place of a loader \(Samples\).*DataLoader\(dataset"):
        trainer().fit(Net(), Samples())


def test_parameters_on_the_meta_device_are_refused() -> None:
    with torch.device("meta"):
        module = Net()
    with pytest.raises(ConfigurationError, match=r"'encoder.0.weight' of Net is on the meta device.*to_empty"):
        trainer().fit(module, batches(good()))


def test_a_constructor_that_does_not_call_super_is_named() -> None:
    class NoSuper(L.LightningModule):
        def __init__(self) -> None:
            pass

    with pytest.raises(ConfigurationError, match=r"`NoSuper.__init__` does not call `super\(\).__init__\(\)`"):
        trainer().fit(NoSuper(), batches(good()))


# Signatures of hooks


class TakesTooLittle(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any) -> None:  # type: ignore[override]
        pass


class AsksForTooMuch(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        pass


def test_hooks_with_other_arguments_are_refused() -> None:
    called = "`TakesTooLittle.on_train_batch_end` is called with (trainer, pl_module, outputs, batch, batch_idx)"
    run = trainer(callbacks=[TakesTooLittle()])
    refuses(lambda: run.fit(Net(), batches(good())), f"{called}, but is defined as `(trainer")
    called = "`AsksForTooMuch.on_train_batch_start` is called with (batch, batch_idx)"
    refuses(lambda: trainer().fit(AsksForTooMuch(), batches(good())), called)


def without_arguments(hook: Any) -> Any:
    """A decorator that takes what the hook is called with, and hands on nothing."""

    @functools.wraps(hook)
    def called(self: Any, *args: Any) -> Any:
        return hook(self)

    return called


def test_hooks_with_other_names_stars_and_decorators_are_taken() -> None:
    class Stars(L.Callback):
        calls = 0

        @without_arguments
        def on_train_batch_start(self) -> None:
            self.calls += 1

        def on_train_batch_end(self, *everything: Any) -> None:
            self.calls += 1

        def on_train_epoch_end(self, t: Any, m: Any, further: int = 3) -> None:
            self.calls += 1

        def on_validation_batch_end(self, t: Any, m: Any, out: Any, batch: Any, index: int) -> None:
            """Without the loader's index, which has a default."""

    callback = Stars()
    trainer(callbacks=[callback]).fit(Net(), batches(good()))
    assert callback.calls == 3


def test_arguments_of_hooks_that_a_run_does_not_call_are_not_checked() -> None:
    class Old(L.Callback):
        def on_predict_epoch_end(self, trainer: Any, pl_module: Any, outputs: Any) -> None: ...

    run = trainer(callbacks=Old())
    run.fit(Net(), batches(good()))
    with pytest.raises(ConfigurationError, match=r"`Old.on_predict_epoch_end` is called with \(trainer, pl_module\)"):
        run.predict(Net(), batches(good()[0]))


def test_a_module_that_cannot_be_printed_does_not_hide_the_error() -> None:
    class Unprintable(nn.Linear):
        def __repr__(self) -> str:
            raise ValueError("not to be seen")

        def forward(self, features: Tensor) -> Tensor:
            return super().forward(features[:, :1])

    module = Net()
    module.head = Unprintable(5, 3)
    assert notes_of(RuntimeError, module, batches(good())) == ""


class AsksForTheMesh(Net):
    def configure_model(self) -> None:
        self.device_mesh["data_parallel"]


def open_too_much(module: Any, batch: Any) -> None:
    raise OSError(24, "Too many open files")


@pytest.mark.parametrize(
    ("make", "error", "note"),
    [
        (AsksForTheMesh, TypeError, "`self.device_mesh` is None"),
        (lambda: with_step(open_too_much), OSError, "ulimit -n"),
    ],
    ids=["mesh", "open files"],
)
def test_a_missing_mesh_and_missing_open_files_are_named(make: Any, error: Any, note: str) -> None:
    assert note in notes_of(error, make(), batches(good()))


WITHOUT_FILES = """
import os
import resource
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from equipoise import Trainer

class Exhausting(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.open_files = []

    def training_step(self, batch, batch_idx):
        while True:
            self.open_files.append(os.open(os.devnull, os.O_RDONLY))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
trainer = Trainer(max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
try:
    trainer.fit(Exhausting(), DataLoader(torch.rand(4, 2)))
except Exception as error:
    print(repr(error), getattr(error, "__notes__", []))
"""


@pytest.mark.slow
def test_a_process_without_free_files_reports_the_error_of_the_step() -> None:
    """No module can be loaded any more, also none that explains errors."""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FILES],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "OSError(24, 'Too many open files')" in done.stdout
    assert "ulimit -n" in done.stdout


def test_an_error_in_code_of_no_module_is_the_error_of_the_run() -> None:
    names: dict[str, Any] = {}
    exec("def length(value):\n    return len(value)", {}, names)  # noqa: S102
    with pytest.raises(TypeError, match="has no len"):
        trainer().fit(with_step(lambda module, batch: names["length"](3)), batches(good()))
