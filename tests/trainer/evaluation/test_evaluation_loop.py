"""Evaluations that do not come to their end."""

from typing import Any

import pytest

from tests.support.trainer_runs import Validated, loader, trainer


@pytest.mark.parametrize(("error", "is_training"), [(KeyboardInterrupt, True), (ArithmeticError, False)])
def test_an_interrupt_restores_the_modes_and_an_error_does_not(error: type[BaseException], is_training: bool) -> None:
    class Raises(Validated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise error

    module = Raises()
    with pytest.raises(error):
        trainer().validate(module, loader(1), verbose=False)
    assert module.training is is_training
