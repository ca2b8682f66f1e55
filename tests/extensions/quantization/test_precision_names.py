"""`precision="fp8"` and its kin: bfloat16 with Float8Training, to the bit what a loop with torchao computes."""

import dataclasses
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision
from torch import Tensor, nn
from torch.optim import Optimizer
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from equipoise import CLITrainer, Float8Training, Trainer
from equipoise.precision import core_precision, make_precision
from tests.extensions.quantization.qlora import Full, adapters, difference, tokens
from tests.extensions.quantization.runs import fit
from tests.support.equality import assert_equal
from tests.support.trainer_runs import refuses, trainer

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

NAMES: dict[str, Any] = {
    "fp8": ("bf16-mixed", "tensorwise", MixedPrecision),
    "fp8-true": ("bf16-true", "tensorwise", HalfPrecision),
    "fp8-rowwise": ("bf16-mixed", "rowwise", MixedPrecision),
}


def float8_of(run: Trainer) -> Any:
    (callback,) = [callback for callback in run.callbacks if isinstance(callback, Float8Training)]
    return callback


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_precision_of_the_core_with_the_callback(name: str) -> None:
    core, recipe, plugin = NAMES[name]
    run = trainer(precision=name)
    assert run.precision == name
    assert core_precision(name) == core
    assert float8_of(run).recipe == recipe
    assert type(run.precision_plugin) is plugin
    assert make_precision(name, "cpu").checkpoint_key == make_precision(core, "cpu").checkpoint_key
    refuses(lambda: run.fit(Full(), tokens()), "compute capability 8.9", "emulate=True")


def test_a_callback_of_the_users_takes_the_place_of_the_one_of_the_name() -> None:
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        callback = Float8Training(recipe, emulate=True)  # type: ignore[arg-type]
        for options in ({"callbacks": callback}, {"callbacks": [callback]}):
            assert float8_of(trainer(precision="fp8", **options)) is callback
    rowwise = Float8Training("rowwise", exclude=["*.down"])
    assert float8_of(trainer(precision="fp8-rowwise", callbacks=[rowwise])) is rowwise
    refuses(
        lambda: trainer(precision="fp8-rowwise", callbacks=[Float8Training()]),
        "contradicts Float8Training('tensorwise')",
        "precision='fp8'",
    )


def test_an_unknown_name_is_refused_with_those_of_extensions() -> None:
    refuses(lambda: trainer(precision="fp8-tru"), "'bf16-true'", "'fp8-rowwise'", "Did you mean 'fp8-true'?")
    assert not any(isinstance(callback, Float8Training) for callback in trainer(precision="bf16-mixed").callbacks)


@pytest.mark.filterwarnings("ignore")  # of jsonargparse, about how Lightning calls it
def test_lightnings_command_line_takes_the_name() -> None:
    pytest.importorskip("jsonargparse", reason="LightningCLI needs it")
    from lightning.pytorch.cli import LightningCLI

    flags = ["--trainer.precision=fp8-rowwise", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    cli = LightningCLI(Full, trainer_class=CLITrainer, run=False, args=flags)
    assert cli.trainer.precision == "fp8-rowwise"
    assert float8_of(cli.trainer).recipe == "rowwise"


def hand_written(precision: str, recipe: str) -> Full:
    """Train by a loop with torchao."""
    core = core_precision(precision)
    module = Full()

    def is_wide(part: nn.Module, _: str) -> bool:
        return type(part) is nn.Linear and part.in_features % 16 == 0 and part.out_features % 16 == 0

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(module, config=config, module_filter_fn=is_wide)
    if core == "bf16-true":
        module.to(torch.bfloat16)
    optimizer: Optimizer = module.configure_optimizers()
    for batch_idx, batch in enumerate(tokens()):
        with torch.autocast("cpu", torch.bfloat16, enabled=core == "bf16-mixed"):
            loss = module.training_step(batch, batch_idx)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return module


@pytest.mark.parametrize(
    ("precision", "recipe"),
    [
        *((name, recipe) for name, (_, recipe, _) in NAMES.items()),
        *(("bf16-true", "rowwise_with_gw_hp"), ("32-true", "rowwise_with_gw_hp"), ("32-true", "tensorwise")),
    ],
)
def test_a_run_is_a_loop_with_torchao_to_the_bit_and_leaves_plain_layers(precision: str, recipe: Any) -> None:
    expected = hand_written(precision, recipe)
    module = fit(Full(), Float8Training(recipe, emulate=True), precision=precision)
    assert_equal(adapters(expected), adapters(module))
    assert difference(module, Full().to(next(module.parameters()).dtype)) > 0.01
    assert list(map(type, module.modules())) == list(map(type, Full().modules()))
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())


@pytest.mark.filterwarnings("ignore:The search for a learning rate made 3 steps")
def test_a_search_for_a_learning_rate_computes_in_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = []
    step = Full.training_step

    def noting_step(self: Full, batch: Any, batch_idx: int) -> Tensor:
        loss = step(self, batch, batch_idx)
        kinds.append("Float8Linear" in self.kinds.values())
        return loss

    monkeypatch.setattr(Full, "training_step", noting_step)
    module = Full()
    module.lr = 0.01
    callbacks = [Float8Training(emulate=True), LearningRateFinder(num_training_steps=3)]
    fit(module, *callbacks, precision="fp8", max_steps=1)
    assert kinds == [True] * 4
