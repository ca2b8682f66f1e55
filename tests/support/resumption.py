"""The second promise, as a harness: a run that is killed anywhere and resumed ends as one that nobody disturbed.

- `assert_resumes`: a run saves in every hook, and is resumed from each file.
- `SavesInHooks`: saves a checkpoint in hooks of one's choice, also in processes of their own.
- `Kill`, `KillingCheckpoint`: end a run at once, so that what should follow is not done.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.equality import assert_equal

__all__ = ["HOOKS", "Kill", "Killed", "KillingCheckpoint", "Saved", "SavesInHooks", "assert_resumes", "seeded"]

# Those from which a run continues as if it had not been killed.
HOOKS = (
    "on_train_epoch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
)


class Saved(NamedTuple):
    """A checkpoint that a hook has saved.

    Attributes:
        path: Its file, named by hook and call: `on_train_batch_end-03.ckpt`.
        hook: The name of the hook.
        call: Which call of the hook it was in the run, from 1.
        call_in_epoch: Which call it was in the epoch, from 1.
    """

    path: Path
    hook: str
    call: int
    call_in_epoch: int


class SavesInHooks(L.Callback):
    """Saves a checkpoint in each call of some hooks, as the last of all callbacks.

    Args:
        folder: Where the files go.
        hooks: The names of the hooks. Default: `HOOKS`.
        calls: Which calls of each hook save, from 1. Default: all of them.

    Attributes:
        saved: What was saved in this process, in order.
    """

    def __init__(self, folder: Path, hooks: Sequence[str] = HOOKS, calls: Collection[int] = ()) -> None:
        self.folder, self.calls = folder, calls
        self.counts: dict[str, int] = Counter()
        self.saved: list[Saved] = []
        for hook in hooks:
            setattr(self, hook, self._saver(hook))

    def _saver(self, hook: str) -> Callable[..., None]:
        def save(trainer: Any, *args: Any) -> None:
            if trainer.sanity_checking:
                return
            self.counts[hook] += 1
            in_epoch = f"{hook} in epoch {trainer.current_epoch}"
            self.counts[in_epoch] += 1
            if not self.calls or self.counts[hook] in self.calls:
                path = self.folder / f"{hook}-{self.counts[hook]:02d}.ckpt"
                trainer.save_checkpoint(path)
                self.saved.append(Saved(path, hook, self.counts[hook], self.counts[in_epoch]))

        return save


def seeded(seed: int) -> None:
    """Seed the generators of torch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def assert_resumes(
    run: Callable[[list[L.Callback], Path | None], Any],
    folder: Path,
    hooks: Sequence[str] = HOOKS,
    *,
    calls: Collection[int] = (),
    first_epoch: int | None = None,
) -> None:
    """Assert that a run ends the same, to the bit, from whichever checkpoint of its hooks it is resumed.

    Args:
        run: Makes everything anew, trains with further callbacks, from a checkpoint if there is one, and returns all
            that must be the same. It begins with other random numbers where it resumes, as another process does.
        folder: Where the checkpoints go.
        hooks: The hooks that save. Default: `HOOKS`.
        calls: Which calls of each hook save, from 1. Default: all of them.
        first_epoch: Resume once from each place in an epoch, from the next place in the next epoch, beginning with this
            epoch. Default: resume from every checkpoint.
    """
    seeded(5)
    saves = SavesInHooks(folder, hooks, calls)
    expected = run([saves], None)
    assert saves.saved
    for saved in saves.saved if first_epoch is None else _places_in_turn(saves.saved, first_epoch):
        seeded(99)
        assert_equal(expected, run([], saved.path), title=f"Resumed from {saved.path.name}")


def _places_in_turn(saved: Sequence[Saved], first_epoch: int) -> list[Saved]:
    """Return a checkpoint of each place in an epoch, the next one of the next epoch."""
    by_place: dict[tuple[str, int], list[Saved]] = {}
    for each in saved:
        by_place.setdefault((each.hook, each.call_in_epoch), []).append(each)
    return [each[(first_epoch + number) % len(each)] for number, each in enumerate(by_place.values())]


class Killed(Exception):
    """Ends a run at once, as a signal would: no hook that the loop fires afterwards is fired."""


class Kill(L.Callback):
    """Kills the run in a hook.

    Args:
        hook: The name of the hook.
        at: At which call, from 1. Default: the first one.
    """

    def __init__(self, hook: str, at: int = 1) -> None:
        self.calls = 0

        def kill(trainer: Any, *args: Any) -> None:
            self.calls += 1
            if self.calls == at:
                raise Killed

        setattr(self, hook, kill)


class KillingCheckpoint(ModelCheckpoint):
    """A checkpoint callback whose run is killed when it has written a number of files.

    Args:
        folder: Where the files go.
        at: The number of files. Default: the run is not killed.
        options: Those of ModelCheckpoint, other than `save_last=True`.
    """

    def __init__(self, folder: Path, at: float = float("inf"), **options: Any) -> None:
        super().__init__(folder, save_last=True, **options)
        self.at, self.files = at, 0

    @property
    def state_key(self) -> str:
        """The same, however often it is killed."""
        return "killing"

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self.files += 1
        if self.files == self.at:
            raise Killed
