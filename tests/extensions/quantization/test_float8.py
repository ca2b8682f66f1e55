"""Products in float8, emulated on a CPU: near those in float32, on the layers that were chosen, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from equipoise import Float8Training
from tests.extensions.quantization.qlora import Full, tokens
from tests.extensions.quantization.runs import fit
from tests.support.trainer_runs import refuses, trainer

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_evaluations_compute_in_float8_as_well(precision: Any) -> None:
    losses = []
    for inference_mode in (True, False):
        callbacks = [Float8Training(emulate=True)]
        run = trainer(callbacks=callbacks, precision=precision, inference_mode=inference_mode)
        module = Full()
        losses += run.test(module, tokens(), verbose=False)
        assert "Float8Linear" in module.kinds.values()
    (plain,) = trainer(precision=precision).test(Full(), tokens(), verbose=False)
    assert losses[0] == losses[1] != plain


def test_layers_are_those_that_were_chosen() -> None:
    module = fit(Full(), Float8Training(layers=["*.1"], exclude=["*.down"], emulate=True))
    float8 = [name for name, kind in module.kinds.items() if kind == "Float8Linear"]
    # Adapters of rank 4 are too narrow.
    assert float8 == ["model.base_model.model.1.up.base_layer"]


class Shared(Full):
    """Has a layer of two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 64))
        self.second = nn.Sequential(self.first[0])
        self.called: list[str] = []
        self.first[0].register_forward_hook(lambda layer, *_: self.called.append(type(layer).__name__))

    def forward(self, tokens: Any) -> Any:
        return super().forward(tokens) + self.second(self.first(self.model.get_submodule("base_model.model.0")(tokens)))


def test_a_shared_layer_is_one_layer_and_keeps_hooks() -> None:
    module = Shared()
    layer = module.first[0]
    fit(module, Float8Training(emulate=True))
    assert module.first[0] is module.second[0] is layer
    assert module.called == ["Float8Linear"] * 6


def test_a_checkpoint_continues_without_float8(tmp_path: Path) -> None:
    fit(Full(), Float8Training(emulate=True)).trainer.save_checkpoint(tmp_path / "one.ckpt")
    fit(Full(), path=tmp_path / "one.ckpt", max_epochs=2)


class Fails(Full):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ZeroDivisionError


def test_layers_come_back_after_an_error() -> None:
    module = Fails()
    with pytest.raises(ZeroDivisionError):
        fit(module, Float8Training(emulate=True))
    assert not any(type(part).__name__ == "Float8Linear" for part in module.modules())


@pytest.mark.parametrize(
    ("options", "precision", "words"),
    [
        ({}, "32-true", ["compute capability 8.9", "which cpu is not", "emulate=True"]),
        ({"recipe": "rowwise"}, "32-true", ["computes in bfloat16 beside float8", "precision='32-true'"]),
        ({"recipe": "rowwise_with_gw_hp", "emulate": True}, "bf16-mixed", ["on a CPU", "'bf16-true'"]),
        ({"layers": ["*.lora_A.default"], "emulate": True}, "32-true", ["of 4 linear layers none has sizes that 16 d"]),
        ({"recipe": "columns"}, "32-true", ["recipe is one of"]),
    ],
)
def test_what_cannot_be_computed_in_float8_is_refused(options: Any, precision: str, words: list[str]) -> None:
    refuses(lambda: fit(Full(), Float8Training(**options), precision=precision), *words)
