"""Short names and Lightning's names mean the same on the command line as in the constructor."""

import pytest

from equipoise import Trainer
from equipoise.app.config.lightning_names import translate


@pytest.mark.parametrize("short", ["bf16", "16", "32", "64"])
def test_short_names_of_precisions(short):
    (argument,) = translate([f"precision={short}"])
    for value in [short] if short == "bf16" else [short, int(short)]:
        assert argument == f"precision={Trainer(accelerator='cpu', precision=value, logger=False).precision}"


def test_other_arguments_stay_as_they_are():
    arguments = ["precision=bf16-true", "precision=x", "strategy=dp,balanced", "strategy=ddp", "trainer.precision=16"]
    arguments += ["module.precision=16", "--cfg", "job", "~precision", "strategy", "+precision=16"]
    assert translate(arguments) == arguments


def test_a_project_may_have_options_of_such_names(tmp_path):
    for group, name in (("precision", "bf16"), ("strategy", "fsdp"), ("strategy", "ddp_spawn")):
        (tmp_path / group).mkdir(exist_ok=True)
        (tmp_path / group / f"{name}.yaml").touch()
    arguments = ["precision=bf16", "strategy=fsdp", "strategy=ddp_spawn"]
    assert translate(arguments, [tmp_path]) == arguments
    sweep = translate(["strategy=ddp_fork", "precision=16,bf16-true,64"], [tmp_path])
    assert sweep == ["strategy=ddp", "precision=16-mixed,bf16-true,64-true"]
