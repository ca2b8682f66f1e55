"""A logged value that hides that of another hook is named in a warning."""

import warnings

import pytest

from equipoise.interop.lightning.self_log import LogOptions
from equipoise.trainer.logging.collection import Collection
from equipoise.trainer.logging.entry import Entry

STEP = {"on_step": True, "on_epoch": False}
EPOCH = {"on_step": False, "on_epoch": True}
BOTH = {"on_step": True, "on_epoch": True}

# Hook, name, and what it is a value of.
Call = tuple[str, str, dict[str, bool]]


def told(*logged: Call) -> list[str]:
    """Return the warnings for values that are logged one after the other."""
    collection = Collection(training=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for hook, name, when in logged:
            collection.register(Entry(hook, name, LogOptions(**when)))
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("when", [STEP, EPOCH, BOTH])
def test_a_value_that_hides_that_of_another_hook_is_named(when: dict[str, bool]) -> None:
    (message,) = told(
        ("training_step", "a", when), ("on_train_batch_end", "a", when), ("on_train_batch_end", "a", when)
    )
    assert message.startswith("'a' is logged in `training_step` and in `on_train_batch_end`")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("training_step", "a", BOTH), ("on_train_epoch_end", "a", EPOCH)),
        (("training_step", "a", EPOCH), ("on_train_batch_end", "b", EPOCH)),
        (("training_step", "step", STEP), ("on_train_batch_end", "step", STEP)),
    ],
)
def test_values_that_hide_no_other_give_no_warning(first: Call, second: Call) -> None:
    assert told(first, second) == []
