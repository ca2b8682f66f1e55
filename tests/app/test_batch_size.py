"""`data.batch_size=auto`: the largest batch that fits, or one clear line."""

import logging

import pytest

from tests.support.projects import write

FILES = {
    "conf/data/sized.yaml": """
        _target_: tiny.sized.Sized
        batch_size: 4
        """,
    "tiny/sized.py": """
        from torch.utils.data import DataLoader
        from tiny.data import Points

        class Sized(Points):
            def __init__(self, *, batch_size: int) -> None:
                super().__init__(count=240)
                self.batch_size = batch_size

            def loader(self):
                print("batches of", self.batch_size)
                return DataLoader(self.points, batch_size=self.batch_size)

            train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader
        """,
}


@pytest.fixture
def sized(project):
    write(project, FILES)
    return project


@pytest.mark.slow
def test_a_fit_takes_the_largest_size_that_leaves_steps(sized, equipoise, caplog):
    caplog.set_level(logging.INFO)
    code, out, err = equipoise("fit", "data=sized", "data.batch_size=auto", "seed=3", "test=true")
    assert code == 0, err
    # The small step, the real ones, and then the fit with ten steps an epoch; the test searches no other size.
    sizes = [line for line in out.splitlines() if line.startswith("batches of")]
    assert sizes[0] == "batches of 2"
    assert set(sizes[1:]) == {"batches of 24"}
    assert "An epoch of 240 samples has 10 steps with batches of 24." in caplog.text


@pytest.mark.thorough
def test_only_a_new_fit_searches(sized, equipoise):
    code, _, err = equipoise("test", "data=sized", "data.batch_size=auto")
    assert code == 2
    assert "data.batch_size=auto searches for a fit, not for test" in err
    code, _, err = equipoise("fit", "data=sized", "data.batch_size=auto", "ckpt_path=last")
    assert code == 2
    assert "ckpt_path resumes from a checkpoint" in err
