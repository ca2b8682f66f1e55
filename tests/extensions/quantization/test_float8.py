"""Products in float8, emulated on a CPU: near those in float32, on the layers that were chosen, and what is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from equipoise import ConfigurationError, Float8Training
from tests.extensions.quantization.qlora import QLoRA, difference, tokens
from tests.extensions.quantization.runs import fit
from tests.support.trainer_runs import refuses, trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated",
    "ignore:Ranks from 1 on begin with",
    r"ignore:FSDP2-wrapped module \(FSDPFull\) returned a view",
)

RECIPES: list[Any] = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


class Full(QLoRA):
    """Trains the base model as well; notes the classes of its layers in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.model.requires_grad_(True)
        self.kinds: dict[str, str] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kinds = {name: type(part).__name__ for name, part in self.named_modules()}
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_near_that_without(recipe: Any, precision: Any) -> None:
    plain = fit(Full(), "single_device", [], precision=precision)
    module = fit(Full(), "single_device", [Float8Training(recipe, emulate=True)], precision=precision)
    assert 0.001 < difference(module, plain) < 0.1
    assert list(map(type, module.modules())) == list(map(type, plain.modules()))
    assert all(type(parameter) is torch.nn.Parameter for parameter in module.parameters())


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_evaluations_compute_in_float8_as_well(precision: Any) -> None:
    class Evaluated(Full):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.training_step(batch, batch_idx))

    losses = []
    for inference_mode in (True, False):
        callbacks: Any = [Float8Training(emulate=True)]
        run = trainer(callbacks=callbacks, precision=precision, inference_mode=inference_mode)
        module = Evaluated()
        losses += run.test(module, tokens(), verbose=False)
        assert "Float8Linear" in module.kinds.values()
    (plain,) = trainer(precision=precision).test(Evaluated(), tokens(), verbose=False)
    assert losses[0] == losses[1] != plain


def test_layers_are_those_that_were_chosen() -> None:
    module: Any = fit(Full(), "single_device", [Float8Training(layers=["*.1"], exclude=["*.down"], emulate=True)])
    float8 = [name for name, kind in module.kinds.items() if kind == "Float8Linear"]
    # Adapters of rank 4 are too narrow.
    assert float8 == ["model.base_model.model.1.up.base_layer"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp", "ddp", "fsdp", "pipeline", "pipeline, processes"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_strategies(recipe: Any, strategy: str) -> None:
    callback = Float8Training(recipe, emulate=True)
    alone = fit(Full(), "single_device", [callback], precision="32-true")
    module = fit(Full(), strategy, [callback], precision="32-true")
    # All values of a part of the batch share a scale by "tensorwise".
    assert difference(module, alone) < (0.1 if recipe == "tensorwise" else 1e-3)
    assert list(map(type, module.modules())) == list(map(type, alone.modules()))


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
    fit(module, "single_device", [Float8Training(emulate=True)])
    assert module.first[0] is module.second[0] is layer
    assert module.called == ["Float8Linear"] * 6


def test_a_checkpoint_continues_without_it(tmp_path: Any) -> None:
    run = trainer(callbacks=[Float8Training(emulate=True)])
    run.fit(Full(), tokens())
    run.save_checkpoint(tmp_path / "one.ckpt")
    trainer(max_epochs=2).fit(Full(), tokens(), ckpt_path=tmp_path / "one.ckpt")


def test_layers_come_back_after_an_error() -> None:
    class Fails(Full):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError

    module = Fails()
    with pytest.raises(ZeroDivisionError):
        fit(module, "single_device", [Float8Training(emulate=True)])
    assert not any(type(part).__name__ == "Float8Linear" for part in module.modules())


def test_refused_before_training() -> None:
    def call(*arguments: Any, precision: Any = "32-true", **options: Any) -> Any:
        return lambda: fit(Full(), "single_device", [Float8Training(*arguments, **options)], precision=precision)

    refuses(call(), "compute capability 8.9", "which cpu is not", "emulate=True")
    refuses(call("rowwise"), "computes in bfloat16 beside float8", "precision='32-true'")
    refuses(call("rowwise_with_gw_hp", emulate=True, precision="bf16-mixed"), "on a CPU", "'bf16-true'")
    refuses(call(layers=["*.lora_A.default"], emulate=True), "of 4 linear layers none has sizes that 16 divides")
    with pytest.raises(ConfigurationError, match="recipe is one of"):
        call("columns")()
