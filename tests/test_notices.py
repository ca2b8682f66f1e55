"""Warnings point at the line of the user that led to them."""

import inspect
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from equipoise import Trainer
from equipoise.notices import rank_zero_warn, warn_of_method
from tests.support.programs import Program
from tests.support.quiet import QUIET

OPTIONS = {"accelerator": "cpu", **QUIET}


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def line_here() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_warning_of_the_trainer_names_the_call_of_fit():
    trainer = Trainer(max_epochs=1, **OPTIONS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Module(), DataLoader(torch.ones(2, 1)))
        line = line_here() - 1
    (found,) = [each for each in caught if "will not be validated" in str(each.message)]
    assert (found.filename, found.lineno) == (__file__, line)


def test_a_warning_from_the_users_own_line_names_that_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rank_zero_warn("Look here.", category=RuntimeWarning)
        line = line_here() - 1
    assert [(each.filename, each.lineno, each.category) for each in caught] == [(__file__, line, RuntimeWarning)]


def test_only_the_first_process_warns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    rank_zero_warn("Nobody reads this.")
    warn_of_method(line_here, "Nor this.")


@pytest.mark.slow
def test_a_script_sees_its_own_line(tmp_path: Path):
    """The warning as it is printed: file, line and source are the script's."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        from torch.utils.data import DataLoader
        from equipoise import Trainer
        from tests.test_notices import OPTIONS, Module
        trainer = Trainer(max_epochs=1, **OPTIONS)
        trainer.fit(Module(), DataLoader(torch.ones(2, 1)))  # here
        """)
    )
    with Program(script.read_text(), path=script, shows_warnings=True) as program:
        complaints = program.finish()[1]
    lines = [line for line in complaints.splitlines() if "script.py" in line or "# here" in line]
    assert lines[0].startswith(f"{script}:7: UserWarning: Module has a `validation_step`")
    assert lines[1].strip().endswith("# here")
