"""Arguments of `self.log`: hooks log values of steps and epochs as under Lightning, by default and by choice."""

import itertools

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from equipoise.interop.adapters import find
from equipoise.interop.lightning.self_log import LogOptions
from equipoise.trainer.logging.arguments import complete_options

LIGHTNINGS = find("lightning.pytorch.trainer.connectors.logger_connector.fx_validator._FxValidator")
CHOICES = [*itertools.product([None, False, True], repeat=2)]


@pytest.mark.skipif(LIGHTNINGS is None, reason="this version of Lightning has no table")
def test_values_of_steps_and_epochs_in_each_hook_are_lightnings() -> None:
    for hook, (on_step, on_epoch) in itertools.product(LIGHTNINGS.functions, CHOICES):
        options = LogOptions(on_step=on_step, on_epoch=on_epoch)
        try:
            expected = LIGHTNINGS.check_logging_and_get_default_levels(hook, on_step, on_epoch)
        except MisconfigurationException:
            expected = None
        if not any(expected or ()):
            with pytest.raises(MisconfigurationException, match=hook):
                complete_options(hook, "loss", options)
            continue
        completed = complete_options(hook, "loss", options)
        assert (completed.on_step, completed.on_epoch) == expected, hook


def test_a_hook_that_cannot_log_is_refused() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"self.log\('loss', ...\)` in `setup`. Log in a hook of batches"
    ):
        complete_options("setup", "loss", LogOptions())
    with pytest.raises(MisconfigurationException, match=r"`on_train_epoch_end`, which is called once per epoch"):
        complete_options("on_train_epoch_end", "loss", LogOptions(on_step=True))
    with pytest.raises(MisconfigurationException, match="logs nothing"):
        complete_options("training_step", "loss", LogOptions(on_step=False))
