"""A checkpoint that cannot be read, or is not what it should be, is refused before a step runs."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from equipoise import CheckpointError
from equipoise.errors import CheckpointNotFoundError
from equipoise.trainer.checkpointing.file_reading import read_checkpoint
from equipoise.trainer.checkpointing.layout import check_optimizer_shapes
from tests.support.equality import differences
from tests.support.trainer_runs import Small, loader, refuses, trainer, with_optimizers


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint, one with the weights only, and one of the third epoch."""
    folder = tmp_path_factory.mktemp("saved")
    run = trainer()
    run.fit(Small(), loader())
    run.save_checkpoint(folder / "whole.ckpt")
    run.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    run = trainer(max_epochs=3)
    run.fit(Small(), loader())
    run.save_checkpoint(folder / "third.ckpt")
    return folder


def resume(path: Any, module: Small | None = None, **options: Any) -> Callable[[], None]:
    module = Small() if module is None else module

    def call() -> None:
        try:
            trainer(**{"max_epochs": 2, **options}).fit(module, loader(), ckpt_path=path)
        finally:
            assert not module.ran

    return call


def test_a_checkpoint_that_is_not_there(saved: Path) -> None:
    refuses(
        resume(saved / "hole.ckpt"),
        "hole.ckpt' does not exist",
        "third.ckpt, weights.ckpt, whole.ckpt",
        error=CheckpointNotFoundError,
    )
    refuses(resume(saved / "nowhere" / "whole.ckpt"), "does not exist", error=FileNotFoundError)
    refuses(resume("lsat"), "The checkpoint 'lsat' does not exist. Did you mean 'last'?", error=FileNotFoundError)
    refuses(resume(saved), "is a folder", "third.ckpt, weights.ckpt, whole.ckpt", error=CheckpointError)
    refuses(
        resume("memory://nowhere/x.ckpt"),
        "'memory://nowhere/x.ckpt' does not exist",
        error=FileNotFoundError,
    )
    refuses(resume("nonsense://x.ckpt"), "'nonsense://x.ckpt' cannot be read", "nonsense", error=CheckpointError)
    refuses(resume(3), "ckpt_path must be a path, 'best', 'last', 'hpc' or None", "not 3")


def test_no_checkpoint_was_saved_yet() -> None:
    refuses(resume("best"), "ckpt_path='best'", "needs a ModelCheckpoint", "Give a path")
    refuses(resume("best", enable_checkpointing=True), "ckpt_path='best'", "no checkpoint was saved yet", "Give a path")
    refuses(resume(""), "ckpt_path must be a path", "not ''")
    with pytest.warns(UserWarning, match=r"there is no last checkpoint yet.*present weights.*save_last=True"):
        trainer(enable_checkpointing=True, max_steps=0).fit(Small(), loader(), ckpt_path="last")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_checkpoint(saved: Path, tmp_path: Path, share: float) -> None:
    content = (saved / "whole.ckpt").read_bytes()
    path = tmp_path / "cut.ckpt"
    path.write_bytes(content[: int(len(content) * share)])
    parts = ["cut.ckpt", f"({path.stat().st_size} bytes)", "truncated or no checkpoint at all", "Take an earlier one"]
    refuses(resume(path), *parts, error=CheckpointError)


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_or_does_no_harm(saved: Path, place: float, bit: int) -> None:
    content = bytearray((saved / "whole.ckpt").read_bytes())
    content[int(len(content) * place)] ^= 1 << bit
    path = saved / "flipped"
    path.write_bytes(content)
    try:
        read = read_checkpoint(path)
    except CheckpointError:
        return
    finally:
        path.unlink()
    assert not list(differences(torch.load(saved / "whole.ckpt", weights_only=True), read))


def test_a_flipped_bit_is_named(saved: Path, tmp_path: Path) -> None:
    content = bytearray((saved / "whole.ckpt").read_bytes())
    content[len(content) // 2] ^= 4
    (tmp_path / "flipped.ckpt").write_bytes(content)
    parts = ["flipped.ckpt", "Bad CRC-32 for file 'archive/data/", "is damaged", "Take an earlier one"]
    refuses(resume(tmp_path / "flipped.ckpt"), *parts, error=CheckpointError)


def test_not_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "other.ckpt"
    torch.save(Small().state_dict(), path)
    refuses(resume(path), "no checkpoint of a Trainer", "no 'state_dict'", "`load_state_dict`", error=CheckpointError)
    torch.save([1, 2], path)
    refuses(resume(path), "no checkpoint of a Trainer", error=CheckpointError)
    path.write_bytes(pickle.dumps({"state_dict": {}}))
    refuses(resume(path), "it is no zip archive", "no checkpoint at all", error=CheckpointError)
    path.write_text("hello")
    refuses(resume(path), "(5 bytes)", "no checkpoint at all", error=CheckpointError)


class Larger(Small):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.extra = nn.Linear(1, 1)


class Smaller(Small):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)


def test_a_checkpoint_of_another_model(saved: Path) -> None:
    path = saved / "whole.ckpt"
    parts = ["another model than Larger", "missing: extra.weight, extra.bias", "layer.weight [1, 2] for [3, 2]"]
    # Loose loading skips keys, but no shapes.
    refuses(resume(path, Larger()), *parts, "Build the model as it was.", error=CheckpointError)
    other_keys = ["another model than Smaller", "unexpected: layer.bias", "strict_loading = False"]
    refuses(resume(path, Smaller()), *other_keys, error=CheckpointError)
    refuses(lambda: trainer().test(Larger(), loader(), ckpt_path=path), *parts, error=CheckpointError)


def test_many_differing_keys_are_not_all_listed(saved: Path) -> None:
    module = Small()
    module.more = nn.ModuleList(nn.Linear(1, 1) for _ in range(9))
    refuses(resume(saved / "whole.ckpt", module), "more.0.weight", "more.2.bias ...", error=CheckpointError)


def test_weights_alone_do_not_go_on(saved: Path) -> None:
    parts = ["lacks optimizer_states, lr_schedulers", "save_weights_only=True", "`load_from_checkpoint`"]
    refuses(resume(saved / "weights.ckpt"), *parts, error=CheckpointError)
    module = Small()
    trainer().test(module, loader(), ckpt_path=saved / "weights.ckpt", verbose=False)
    assert module.ran == ["test"] * 3


def changed(saved: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    checkpoint = torch.load(saved / "whole.ckpt", weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, folder / "changed.ckpt")
    return folder / "changed.ckpt"


def test_counters_that_are_missing(saved: Path, tmp_path: Path) -> None:
    path = changed(saved, tmp_path, lambda checkpoint: checkpoint.pop("loops"))
    refuses(resume(path), "lacks loops", error=CheckpointError)
    path = changed(saved, tmp_path, lambda checkpoint: checkpoint["loops"]["fit_loop"].pop("epoch_progress"))
    refuses(resume(path), "the counter 'epoch_progress' is missing", error=CheckpointError)


@pytest.mark.parametrize(
    "entry",
    [("steps", "seed"), ("position", "random_state"), ("position", "logs", "entries"), ("run",)],
    ids=str,
)
def test_entries_of_ours_that_are_missing(saved: Path, tmp_path: Path, entry: Any) -> None:
    def remove(checkpoint: dict[str, Any]) -> None:
        inner = checkpoint["equipoise"]
        for key in entry[:-1]:
            inner = inner[key]
        del inner[entry[-1]]

    path = changed(saved, tmp_path, remove)
    if entry == ("run",):
        trainer(max_epochs=2).fit(Small(), loader(), ckpt_path=path)
    else:
        refuses(resume(path), f"lacks {entry[-1]!r}", error=CheckpointError)


def test_optimisers_of_another_kind(saved: Path, tmp_path: Path) -> None:
    path = changed(saved, tmp_path, lambda checkpoint: checkpoint["optimizer_states"].clear())
    refuses(resume(path), "0 optimiser state(s)", "returned 1", error=CheckpointError)
    module = with_optimizers(lambda m: torch.optim.Adam(m.parameters()))
    refuses(resume(saved / "whole.ckpt", module), "another kind than Adam", "betas", error=CheckpointError)
    module = with_optimizers(lambda m: SGD([{"params": [p]} for p in m.parameters()], lr=0.1))
    refuses(resume(saved / "whole.ckpt", module), "optimiser 0 (SGD)", "parameter groups", error=CheckpointError)


OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adamax": torch.optim.Adamax,
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_state_of_another_shape_than_its_parameter(name: str, tmp_path: Path) -> None:
    """Parameters in another order; the optimiser would only miss it in its first step."""
    make = OPTIMISERS[name]
    run = trainer(max_epochs=1)
    run.fit(with_optimizers(lambda m: make(m.parameters())), loader())
    run.save_checkpoint(tmp_path / "order.ckpt")
    module = with_optimizers(lambda m: make(list(m.parameters())[::-1]))
    parts = [f"state of {name} does not fit", "the parameter 'layer.bias' has the shape (1, 2), but the parameter (1,)"]
    refuses(resume(tmp_path / "order.ckpt", module), *parts, "same order", error=CheckpointError)


class Rows(torch.optim.Optimizer):
    """Keeps a value for each row, under a name that torch uses for something else."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            average = state.setdefault("exp_avg", torch.zeros(len(parameter)))
            average += parameter.grad.reshape(len(parameter), -1).sum(1)
        return loss


@pytest.mark.parametrize("make", [Rows, torch.optim.Adafactor, torch.optim.LBFGS], ids=lambda make: make.__name__)
def test_states_that_have_other_shapes_by_right(make: Any, tmp_path: Path) -> None:
    run = trainer(max_epochs=1)
    run.fit(with_optimizers(lambda m: make(m.parameters())), loader())
    run.save_checkpoint(tmp_path / "other.ckpt")
    again = trainer(max_epochs=2)
    again.fit(with_optimizers(lambda m: make(m.parameters())), loader(), ckpt_path=tmp_path / "other.ckpt")
    assert again.global_step == 6


@pytest.mark.parametrize("module", ["torch.optim", "torch.optim.sgd"])
def test_shapes_are_compared_wherever_torch_defines_an_optimizer(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer classes of torch name the package as their module; a package of another name is another's."""
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    state = {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": [{"params": [0]}]}
    monkeypatch.setattr(SGD, "__module__", module)
    with pytest.raises(CheckpointError, match=r"has the shape \(3,\), but the parameter \(2,\)"):
        check_optimizer_shapes(optimizer, state, {})
    monkeypatch.setattr(SGD, "__module__", "torch.optimistic")
    check_optimizer_shapes(optimizer, state, {})


def test_a_schedule_that_ends_before_the_run(tmp_path: Path) -> None:
    def scheduled(module: Any) -> Any:
        optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
        steps = int(module.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    run = trainer(max_epochs=1)
    run.fit(with_optimizers(scheduled), loader())
    run.save_checkpoint(tmp_path / "short.ckpt")
    again = trainer(max_epochs=2)
    call = lambda: again.fit(with_optimizers(scheduled), loader(), ckpt_path=tmp_path / "short.ckpt")  # noqa: E731
    refuses(call, "OneCycleLR was made for 3 steps, but this run makes 6", "load_from_checkpoint")


class Unsafe:
    """An object whose creation could run code."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("was_here",)


class Foreign:
    """A class that a checkpoint of somebody else may hold."""


def test_unsafe_objects_are_named_and_not_created(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = changed(saved, tmp_path, lambda checkpoint: checkpoint.update(extra=[Foreign(), Unsafe()]))
    with pytest.warns(UserWarning, match=r"'extra'\[0\] \(.*\.Foreign\).*'extra'\[1\] \(posix\.mkdir\)"):
        trainer(max_epochs=2).fit(Small(), loader(), ckpt_path=path)
    assert not Path("was_here").exists()


def test_a_checkpoint_beyond_the_end(saved: Path) -> None:
    refuses(resume(saved / "third.ckpt"), "at epoch 3", "beyond max_epochs=2", "Raise max_epochs")


def test_saving_before_any_run(tmp_path: Path) -> None:
    call = lambda: trainer().save_checkpoint(tmp_path / "x.ckpt")  # noqa: E731
    refuses(call, "no run has brought one", "`fit` or `validate`", error=AttributeError)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("positions", [[], "text", [{"random_state": "text"}]])
def test_an_epoch_that_was_left_in_its_midst(tmp_path: Path, positions: Any) -> None:
    """The entry for a run with higher limits is checked too."""
    cut_short = trainer(max_steps=2, default_root_dir=tmp_path, enable_checkpointing=False)
    cut_short.fit(Small(), loader(4))
    cut_short.save_checkpoint(path := tmp_path / "left.ckpt")
    state = torch.load(path, weights_only=True)
    assert state["equipoise"]["left"]["positions"]
    state["equipoise"]["left"]["positions"] = positions
    torch.save(state, path)
    with pytest.raises(CheckpointError, match=r"positions|entry equipoise"):
        trainer(max_steps=3, default_root_dir=tmp_path, enable_checkpointing=False).fit(
            Small(), loader(4), ckpt_path=path
        )


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("hook_state", "values"), (3,), "['values'][0] must be a list that begins with a path, not 3"),
        (("hook_state", "values"), [[["module", 4], 1, False]], "['values'][0] must be a list that begins with a path"),
        (("hook_state", "deleted"), [[]], "['deleted'][0] must be a list that begins with a path"),
        (("logs", "entries", 0, "options", 3), torch.zeros(2), "['options'] must be the arguments of `self.log`"),
        (("logs", "entries", 0, "key"), 3, "cannot be loaded (TypeError"),
    ],
)
def test_what_an_epoch_has_left_is_of_other_types(
    tmp_path: Path, place: tuple[Any, ...], value: Any, message: str
) -> None:
    run = trainer(max_steps=2, default_root_dir=tmp_path, enable_checkpointing=False)
    run.fit(Small(), loader(4))
    run.save_checkpoint(path := tmp_path / "left.ckpt")
    state = torch.load(path, weights_only=True)
    entry = state["equipoise"]["left"]["positions"][0]
    for name in place[:-1]:
        entry = entry[name]
    entry[place[-1]] = value
    torch.save(state, path)
    longer = trainer(max_steps=3, default_root_dir=tmp_path, enable_checkpointing=False)
    refuses(lambda: longer.fit(Small(), loader(4), ckpt_path=path), "equipoise", message, error=CheckpointError)
    assert longer.global_step <= 2
