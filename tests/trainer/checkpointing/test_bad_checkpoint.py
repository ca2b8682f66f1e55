"""A checkpoint that cannot be read, or is not what it should be, is refused before a step runs."""

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from equipoise import CheckpointError, ConfigurationError
from equipoise.errors import CheckpointNotFoundError
from equipoise.trainer.checkpointing.file_reading import read_checkpoint
from tests.support.equality import assert_equal
from tests.support.trainer_runs import Small, loader, refuses, trainer, with_optimizers
from tests.support.trainer_runs import saved as saved_by_fit


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint, one with the weights only, and one of the third epoch."""
    folder = tmp_path_factory.mktemp("saved")
    for epochs, name in ((1, "whole.ckpt"), (3, "third.ckpt")):
        run = trainer(max_epochs=epochs)
        run.fit(Small(), loader())
        run.save_checkpoint(folder / name)
    run.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    return folder


def resume(path: Any, module: Small | None = None, **options: Any) -> Callable[[], None]:
    module = Small() if module is None else module

    def call() -> None:
        try:
            trainer(**{"max_epochs": 2, **options}).fit(module, loader(), ckpt_path=path)
        finally:
            assert not module.ran

    return call


# Paths

CHECKPOINTS = "third.ckpt, weights.ckpt, whole.ckpt"


@pytest.mark.parametrize(
    ("path", "words", "error"),
    [
        ("SAVED/hole.ckpt", ["hole.ckpt' does not exist", CHECKPOINTS], CheckpointNotFoundError),
        ("SAVED/nowhere/whole.ckpt", ["does not exist"], FileNotFoundError),
        ("lsat", ["The checkpoint 'lsat' does not exist. Did you mean 'last'?"], FileNotFoundError),
        ("SAVED", ["is a folder", CHECKPOINTS], CheckpointError),
        ("memory://nowhere/x.ckpt", ["'memory://nowhere/x.ckpt' does not exist"], FileNotFoundError),
        ("nonsense://x.ckpt", ["'nonsense://x.ckpt' cannot be read", "nonsense"], CheckpointError),
        (3, ["ckpt_path must be a path, 'best', 'last', 'hpc' or None", "not 3"], ConfigurationError),
        ("", ["ckpt_path must be a path", "not ''"], ConfigurationError),
        ("best", ["ckpt_path='best'", "needs a ModelCheckpoint", "Give a path"], ConfigurationError),
        ("SAVED/third.ckpt", ["at epoch 3", "beyond max_epochs=2", "Raise max_epochs"], ConfigurationError),
        (
            "SAVED/weights.ckpt",
            ["lacks optimizer_states, lr_schedulers", "save_weights_only=True", "`load_from_checkpoint`"],
            CheckpointError,
        ),
    ],
)
def test_a_path_without_a_checkpoint_to_go_on_from_is_refused(
    path: Any, words: list[str], error: type[Exception], saved: Path
) -> None:
    path = path.replace("SAVED", str(saved)) if isinstance(path, str) else path
    refuses(resume(path), *words, error=error)


def test_no_checkpoint_was_saved_yet() -> None:
    refuses(resume("best", enable_checkpointing=True), "ckpt_path='best'", "no checkpoint was saved yet", "Give a path")
    with pytest.warns(UserWarning, match=r"there is no last checkpoint yet.*present weights.*save_last=True"):
        trainer(enable_checkpointing=True, max_steps=0).fit(Small(), loader(), ckpt_path="last")


def test_weights_alone_can_be_evaluated(saved: Path) -> None:
    module = Small()
    trainer().test(module, loader(), ckpt_path=saved / "weights.ckpt", verbose=False)
    assert module.ran == ["test"] * 3


def test_saving_before_any_run_is_refused(tmp_path: Path) -> None:
    call = lambda: trainer().save_checkpoint(tmp_path / "x.ckpt")  # noqa: E731
    refuses(call, "no run has brought one", "`fit` or `validate`", error=AttributeError)
    assert not list(tmp_path.iterdir())


# Damaged files


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_truncated_file_is_refused(saved: Path, tmp_path: Path, share: float) -> None:
    content = (saved / "whole.ckpt").read_bytes()
    path = tmp_path / "cut.ckpt"
    path.write_bytes(content[: int(len(content) * share)])
    parts = ["cut.ckpt", f"({path.stat().st_size} bytes)", "truncated or no checkpoint at all", "Take an earlier one"]
    refuses(resume(path), *parts, error=CheckpointError)


def flipped(saved: Path, folder: Path, place: float) -> Path:
    """A copy of a checkpoint with another bit at a share of its length."""
    path, content = folder / "flipped.ckpt", bytearray((saved / "whole.ckpt").read_bytes())
    content[int(len(content) * place)] ^= 4
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("place", [0.0, 0.02, 0.1, 0.95, 0.96, 0.97, 0.98, 0.99, 0.999])
def test_a_flipped_bit_is_found_or_does_no_harm(saved: Path, tmp_path: Path, place: float) -> None:
    """In the header, the pickle, the data and the directory of the archive."""
    try:
        read = read_checkpoint(flipped(saved, tmp_path, place))
    except CheckpointError:
        return
    assert_equal(torch.load(saved / "whole.ckpt", weights_only=True), read)


def test_a_flipped_bit_is_named(saved: Path, tmp_path: Path) -> None:
    path = flipped(saved, tmp_path, 0.5)
    parts = ["flipped.ckpt", "Bad CRC-32 for file 'archive/data/", "is damaged", "Take an earlier one"]
    refuses(resume(path), *parts, error=CheckpointError)


def bytes_of(content: Any) -> bytes:
    torch.save(content, buffer := io.BytesIO())
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (bytes_of(Small().state_dict()), ["no checkpoint of a Trainer", "no 'state_dict'", "`load_state_dict`"]),
        (bytes_of([1, 2]), ["no checkpoint of a Trainer"]),
        (pickle.dumps({"state_dict": {}}), ["it is no zip archive", "no checkpoint at all"]),
        (b"hello", ["(5 bytes)", "no checkpoint at all"]),
    ],
    ids=["weights", "list", "pickle", "text"],
)
def test_a_file_that_is_no_checkpoint_is_refused(content: bytes, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "other.ckpt"
    path.write_bytes(content)
    refuses(resume(path), *words, error=CheckpointError)


# Entries


def changed(path: Path, folder: Path, *entry: Any, value: Any = None) -> Path:
    """A copy of a checkpoint with another value of an entry, or without it."""
    checkpoint = inner = torch.load(path, weights_only=True)
    for key in entry[:-1]:
        inner = inner[key]
    if value is None:
        del inner[entry[-1]]
    else:
        inner[entry[-1]] = value
    torch.save(checkpoint, folder / "changed.ckpt")
    return folder / "changed.ckpt"


BATCHES = ("loops", "fit_loop", "epoch_loop.batch_progress")
POSITION = ("equipoise", "position")


@pytest.mark.parametrize(
    ("entry", "value", "words"),
    [
        (["loops"], None, "lacks loops"),
        (["loops", "fit_loop", "epoch_progress"], None, "the counter 'epoch_progress' is missing"),
        (["equipoise", "steps", "seed"], None, "lacks 'seed'"),
        ([*POSITION, "random_state"], None, "lacks 'random_state'"),
        ([*POSITION, "logs", "entries"], None, "lacks 'entries'"),
        (["epoch"], -1, "damaged: epoch must be a non-negative integer, not -1"),
        (["global_step"], 2**63, "global_step must be a non-negative integer"),
        ([*BATCHES, "is_last_batch"], 1, "must be True or False, not 1"),
        ([*BATCHES, "total", "ready"], True, "must be a non-negative integer, not True"),
        (["state_dict"], {1: 2}, "a key of state_dict must be a text, not 1"),
        (["optimizer_states"], {}, "optimizer_states must be a list, not a dict"),
        (["callbacks"], [1], "callbacks must be a dictionary, not a list"),
        (["equipoise", "steps", "processes"], 0, "must be a positive integer or None, not 0"),
        ([*POSITION, "random_state", "global"], {"torch": 1}, "must be the states of random generators, not a dict"),
        ([*POSITION, "gradients"], [0.5], "['gradients'][0] must be a tensor, not 0.5"),
        ([*POSITION, "metrics_of_validation"], [2], "['metrics_of_validation'][0] must be a text, not 2"),
    ],
)
def test_a_damaged_entry_is_named(entry: list[str], value: Any, words: str, saved: Path, tmp_path: Path) -> None:
    path = changed(saved / "whole.ckpt", tmp_path, *entry, value=value)
    refuses(resume(path), words, error=CheckpointError)


def test_the_name_of_the_run_may_be_missing(saved: Path, tmp_path: Path) -> None:
    trainer(max_epochs=2).fit(Small(), loader(), ckpt_path=changed(saved / "whole.ckpt", tmp_path, "equipoise", "run"))


A_PATH = "must be a list that begins with a path"


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ([], [], "positions"),
        ([0], {"random_state": "text"}, "equipoise"),
        ([0, "hook_state", "values"], (3,), f"['values'][0] {A_PATH}, not 3"),
        ([0, "hook_state", "deleted"], [[]], f"['deleted'][0] {A_PATH}"),
        ([0, "logs", "entries", 0, "options", 3], torch.zeros(2), "['options'] must be the arguments of `self.log`"),
        ([0, "logs", "entries", 0, "key"], 3, "cannot be loaded (TypeError"),
    ],
)
def test_an_entry_of_an_epoch_that_was_left_in_its_midst_is_of_another_type(
    place: list[Any], value: Any, words: str, tmp_path: Path
) -> None:
    """It is for a run with higher limits, and is checked too."""
    options = {"default_root_dir": tmp_path, "enable_checkpointing": False}
    run = trainer(max_steps=2, **options)
    run.fit(Small(), loader(4))
    run.save_checkpoint(path := tmp_path / "left.ckpt")
    path = changed(path, tmp_path, "equipoise", "left", "positions", *place, value=value)
    longer = trainer(max_steps=3, **options)
    refuses(lambda: longer.fit(Small(), loader(4), ckpt_path=path), words, error=CheckpointError)
    assert longer.global_step <= 2


class Unsafe:
    """An object whose creation could run code."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("was_here",)


class Foreign:
    """A class that a checkpoint of somebody else may hold."""


def test_unsafe_objects_are_named_and_not_created(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = changed(saved / "whole.ckpt", tmp_path, "extra", value=[Foreign(), Unsafe()])
    with pytest.warns(UserWarning, match=r"'extra'\[0\] \(.*\.Foreign\).*'extra'\[1\] \(posix\.mkdir\)"):
        trainer(max_epochs=2).fit(Small(), loader(), ckpt_path=path)
    assert not Path("was_here").exists()


# Another model, other optimisers


def with_layer(layer: nn.Module, **others: nn.Module) -> Small:
    module = Small()
    for name, part in {"layer": layer, **others}.items():
        setattr(module, name, part)
    return module


LARGER = ["another model than Small", "missing: extra.weight, extra.bias", "layer.weight [1, 2] for [3, 2]"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        # Loose loading skips keys, but no shapes.
        (lambda: with_layer(nn.Linear(2, 3), extra=nn.Linear(1, 1)), [*LARGER, "Build the model as it was."]),
        (
            lambda: with_layer(nn.Linear(2, 1, bias=False)),
            ["another model than Small", "unexpected: layer.bias", "strict_loading = False"],
        ),
        (
            lambda: with_layer(nn.Linear(2, 1), more=nn.ModuleList(nn.Linear(1, 1) for _ in range(9))),
            ["more.0.weight", "more.2.bias ..."],
        ),
        (
            lambda: with_optimizers(lambda m: torch.optim.Adam(m.parameters())),
            ["another kind than Adam", "betas"],
        ),
        (
            lambda: with_optimizers(lambda m: SGD([{"params": [p]} for p in m.parameters()], lr=0.1)),
            ["optimiser 0 (SGD)", "parameter groups"],
        ),
    ],
)
def test_another_model_or_optimiser_is_refused(make: Callable[[], Small], words: list[str], saved: Path) -> None:
    refuses(resume(saved / "whole.ckpt", make()), *words, error=CheckpointError)


def test_another_model_is_refused_by_an_evaluation(saved: Path) -> None:
    other = with_layer(nn.Linear(2, 3), extra=nn.Linear(1, 1))
    refuses(lambda: trainer().test(other, loader(), ckpt_path=saved / "whole.ckpt"), *LARGER, error=CheckpointError)


def test_another_number_of_optimisers_is_refused(saved: Path, tmp_path: Path) -> None:
    path = changed(saved / "whole.ckpt", tmp_path, "optimizer_states", value=[])
    refuses(resume(path), "0 optimiser state(s)", "returned 1", "`load_from_checkpoint`", error=CheckpointError)


def saved_with(configure: Callable[[Any], Any], folder: Path) -> Path:
    """The checkpoint of a fit with these optimisers."""
    return saved_by_fit(with_optimizers(configure), folder)


OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_an_optimizer_state_of_another_shape_than_its_parameter_is_refused(name: str, tmp_path: Path) -> None:
    """Parameters in another order; the optimiser would only miss it in its first step."""
    make = OPTIMISERS[name]
    path = saved_with(lambda m: make(m.parameters()), tmp_path)
    module = with_optimizers(lambda m: make(list(m.parameters())[::-1]))
    parts = [f"state of {name} does not fit", "the parameter 'layer.bias' has the shape (1, 2), but the parameter (1,)"]
    refuses(resume(path, module), *parts, "same order", error=CheckpointError)


@pytest.mark.parametrize("steps", [torch.ones(2), -1.0], ids=["two", "negative"])
def test_a_damaged_number_of_steps_of_an_optimizer_is_named(steps: Any, tmp_path: Path) -> None:
    def configure(module: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(module.parameters())

    path = changed(saved_with(configure, tmp_path), tmp_path, "optimizer_states", 0, "state", 0, "step", value=steps)
    refuses(resume(path, with_optimizers(configure)), "must be a number of steps, not ", error=CheckpointError)


class Rows(SGD):
    """Keeps a value for each row, under a name that torch uses for something else."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["exp_avg"] = torch.zeros(len(parameter))
        return super().step(closure)


@pytest.mark.parametrize("make", [Rows, torch.optim.Adafactor, torch.optim.LBFGS], ids=lambda make: make.__name__)
def test_optimizer_states_may_have_other_shapes_by_right(make: Any, tmp_path: Path) -> None:
    path = saved_with(lambda m: make(m.parameters()), tmp_path)
    again = trainer(max_epochs=2)
    again.fit(with_optimizers(lambda m: make(m.parameters())), loader(), ckpt_path=path)
    assert again.global_step == 6


def test_a_learning_rate_schedule_that_ends_before_the_run_is_refused(tmp_path: Path) -> None:
    def scheduled(module: Any) -> Any:
        optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
        steps = int(module.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    path = saved_with(scheduled, tmp_path)
    call = resume(path, with_optimizers(scheduled))
    refuses(call, "OneCycleLR was made for 3 steps, but this run makes 6", "load_from_checkpoint")
