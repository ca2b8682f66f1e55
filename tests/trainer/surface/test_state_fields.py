"""StateField: the Trainer's names stand for fields of its RunState, in both directions."""

from typing import get_args, get_type_hints

import pytest

from equipoise import Trainer
from equipoise.errors import ConfigurationError
from equipoise.trainer.state.run_state import RunState
from equipoise.trainer.surface.state_fields import StateFields
from tests.support.trainer_runs import trainer


def test_attributes_of_the_trainer_have_the_types_of_the_state() -> None:
    hints = get_type_hints(RunState)
    for name in hints.keys() & vars(StateFields).keys() - {"loggers"}:
        assert get_args(vars(StateFields)[name].__orig_class__) == (hints[name],), name


def test_computed_values_cannot_be_written() -> None:
    run = trainer(Trainer)
    with pytest.raises(AttributeError):
        run.default_root_dir = "elsewhere"
    with pytest.raises(AttributeError):
        run.current_epoch = 3
    with pytest.raises(AttributeError, match="world_size"):
        run.world_size = 2


def test_a_subclass_may_write_and_override_computed_values() -> None:
    class Mine(Trainer):
        current_epoch = 7

        def __init__(self) -> None:
            super().__init__(accelerator="cpu", logger=False)
            self.limit_train_batches = 2

    run = Mine()
    assert run.current_epoch == 7
    assert run.run_state.limit_train_batches == 2


def test_a_subclass_may_not_hide_a_setting() -> None:
    with pytest.raises(ConfigurationError, match=r"`Mine.accumulate_grad_batches` hides a setting.*`super\(\)"):

        class Mine(Trainer):
            accumulate_grad_batches = 4

    with pytest.raises(ConfigurationError, match=r"`Limited.limit_val_batches` hides a setting"):

        class Limited(Trainer):
            @property
            def limit_val_batches(self) -> int:
                return 1


def test_a_subclass_may_write_before_it_calls_the_constructor() -> None:
    class Mine(Trainer):
        def __init__(self, epochs: int) -> None:
            self.max_epochs = epochs
            super().__init__(accelerator="cpu", logger=False, max_epochs=self.max_epochs)

    assert Mine(5).run_state.max_epochs == 5
