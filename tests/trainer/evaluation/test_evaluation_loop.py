"""Evaluations that do not come to their end, and those that show their results."""

from typing import Any

import pytest

from tests.support.trainer_runs import Small, Validated, loader, trainer


@pytest.mark.parametrize(("error", "is_training"), [(KeyboardInterrupt, True), (ArithmeticError, False)])
def test_an_interrupt_restores_the_modes_and_an_error_does_not(error: type[BaseException], is_training: bool) -> None:
    class Raises(Validated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise error

    module = Raises()
    with pytest.raises(error):
        trainer().validate(module, loader(1), verbose=False)
    assert module.training is is_training


def test_results_are_shown_by_loader(capsys: pytest.CaptureFixture[str]) -> None:
    module = Small()
    results = trainer().test(module, [loader(1), loader(2)])
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "test_loss" in line)
    assert [f"{value:.6g}" for result in results for value in result.values()] == row.replace("│", " ").split()[1:]
