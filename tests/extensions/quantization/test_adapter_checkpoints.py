"""Checkpoints without frozen weights: small, exact in resumed runs, and of no other base model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor

from equipoise import AdapterCheckpoints, CheckpointError, ConfigurationError, Quantization, Trainer
from equipoise.extensions.quantization.adapter_checkpoints import digest_of
from tests.extensions.quantization.qlora import QLoRA, adapters, difference, stored, tokens
from tests.support.trainer_runs import refuses, trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated", "ignore:The checkpoint holds states of callbacks"
)

CALLBACKS: dict[str, Any] = {
    "nf4": lambda: Quantization("nf4"),
    "int8": lambda: Quantization("int8"),
    "none": AdapterCheckpoints,
}


def fit(module: QLoRA, *callbacks: Any, path: Path | None = None, **options: Any) -> Trainer:
    run: Trainer = trainer(callbacks=list(callbacks), **options)
    run.fit(module, tokens(), ckpt_path=path)
    return run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "one.ckpt"


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("kind", CALLBACKS)
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true"])
def test_a_resumed_run(kind: str, precision: Any, path: Path) -> None:
    whole, resumed = QLoRA(), QLoRA()
    fit(whole, CALLBACKS[kind](), max_epochs=3, precision=precision)
    fit(QLoRA(), CALLBACKS[kind](), max_epochs=2, precision=precision).save_checkpoint(path)
    state = torch.load(path, weights_only=True)["state_dict"]
    assert state.keys() == adapters(whole).keys()
    fit(resumed, CALLBACKS[kind](), path=path, max_epochs=3, precision=precision)
    assert difference(resumed, whole) == 0
    base = stored(whole)
    assert all(torch.equal(value, base[name]) for name, value in stored(resumed).items())
    # The same object continues as well.
    fit(resumed, CALLBACKS[kind](), path=path, max_epochs=3, precision=precision)
    assert difference(resumed, whole) == 0


def test_files_are_small(path: Path) -> None:
    module = QLoRA()
    run = fit(module, AdapterCheckpoints())
    run.save_checkpoint(path, weights_only=True)
    small = path.stat().st_size
    assert module.state_dict().keys() > adapters(module).keys()
    fit(module).save_checkpoint(path, weights_only=True)
    assert path.stat().st_size - small > sum(value.nbytes for value in stored(module).values())


class Evaluated(QLoRA):
    """Evaluates the loss of training."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))


def test_evaluation_of_a_checkpoint(path: Path) -> None:
    module = Evaluated()
    run = fit(module, Quantization("nf4"))
    run.save_checkpoint(path)
    expected = run.test(module, tokens())
    assert trainer(callbacks=[Quantization("nf4")]).test(Evaluated(), tokens(), ckpt_path=path) == expected
    assert trainer(callbacks=[Quantization("int8")]).test(Evaluated(seed=1), tokens()) != expected


@pytest.mark.parametrize(
    ("callback", "seed"),
    [("int8", 1), ("nf4", 0), ("none", 0)],
    ids=["other values", "another kind", "not quantised"],
)
def test_another_base_model_is_refused(callback: str, seed: int, path: Path) -> None:
    fit(QLoRA(), Quantization("int8")).save_checkpoint(path)
    with pytest.raises(CheckpointError, match="trained with another base model: model"):
        fit(QLoRA(seed=seed), CALLBACKS[callback](), path=path, max_epochs=2)
    # A warning names the callback that left the weights out.
    with (
        pytest.warns(UserWarning, match="callbacks that are missing: .*'AdapterCheckpoints'"),
        pytest.raises(CheckpointError, match=r"missing: .*up\.base_layer\.weight"),
    ):
        fit(QLoRA(), path=path, max_epochs=2)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("weights_only", [False, True])
def test_whole_weights_are_not_loaded_into_stored_ones(kind: str, weights_only: bool, path: Path) -> None:
    fit(QLoRA()).save_checkpoint(path, weights_only=weights_only)
    with pytest.raises(CheckpointError, match=r"as torch\.float32, but here it is stored in few bits"):
        trainer(callbacks=[CALLBACKS[kind]()]).test(Evaluated(), tokens(), ckpt_path=path)


NAME = "model.base_model.model.1.norm.weight"


class Switch(Callback):
    """Trains a weight of the base model in some steps."""

    def __init__(self, steps: range) -> None:
        self.steps = steps

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.get_parameter(NAME).requires_grad_(trainer.global_step in self.steps)


class AllStepped(QLoRA):
    """Gives all weights to the optimiser."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


@pytest.mark.parametrize("steps", [range(4, 9), range(3, 6)], ids=["thawed", "frozen again"])
def test_a_weight_that_is_trained_meanwhile(steps: range, path: Path) -> None:
    def run(module: QLoRA, epochs: int, path: Path | None = None) -> Trainer:
        return fit(module, AdapterCheckpoints(), Switch(steps), path=path, max_epochs=epochs)

    whole, first, resumed = AllStepped(), AllStepped(), AllStepped()
    run(whole, 4)
    saved = path.with_name("first.ckpt")
    run(first, 3).save_checkpoint(saved)
    state: dict[str, Tensor] = torch.load(saved, weights_only=True)["state_dict"]
    assert state.keys() == {*adapters(QLoRA()), NAME}
    run(resumed, 4, saved).save_checkpoint(path)
    assert difference(resumed, whole) == 0
    assert torch.equal(resumed.get_parameter(NAME), whole.get_parameter(NAME))
    assert NAME in torch.load(path, weights_only=True)["state_dict"]


@pytest.mark.parametrize("name", ["whole.ckpt", "whole.safetensors"])
def test_weights_of_a_whole_checkpoint_stay_in_checkpoints(name: str, path: Path) -> None:
    whole = path.with_name(name)
    trained = AllStepped()
    trained.requires_grad_(True)
    fit(trained).save_checkpoint(whole)
    first, resumed = AllStepped(), AllStepped()
    fit(first, AdapterCheckpoints(), path=whole, max_epochs=2).save_checkpoint(path)
    # The frozen weights are those that were trained, which a new base model lacks.
    fit(resumed, AdapterCheckpoints(), path=path, max_epochs=2)
    assert all(torch.equal(value, first.state_dict()[name]) for name, value in resumed.state_dict().items())
    assert torch.equal(resumed.get_parameter(NAME), trained.get_parameter(NAME))


def test_digests_tell_weights_apart() -> None:
    weight = torch.arange(12.0).view(4, 3)
    others = [weight.flip(0), weight.flip(1), weight.view(3, 4), weight.to(torch.int32), weight[0], weight[0, 1]]
    others += [torch.full((4, 4), value) for value in (0.0, 1.0)]
    others += [weight.to(dtype) for dtype in (torch.float8_e4m3fn, torch.complex64, torch.complex128, torch.bool)]
    digests = [digest_of(value, "32-true") for value in (weight, *others)]
    assert len(set(digests)) == len(digests)
    assert digest_of(weight.clone(), "32-true") == digests[0]
    assert digest_of(weight, "64-true") == digest_of(weight.double(), "64-true")


def test_refused_before_training() -> None:
    trained = QLoRA()
    trained.requires_grad_(True)
    refuses(lambda: fit(trained, AdapterCheckpoints()), "no weight is frozen")
    refuses(lambda: fit(QLoRA(), AdapterCheckpoints(), EMAWeightAveraging()), "EMAWeightAveraging computes the mean")
    quantised: Any = QLoRA()
    head = Linear4bit(64, 64, bias=False)
    head.weight = Params4bit(torch.randn(64, 64), requires_grad=False)
    quantised.model.base_model.model[3] = head.to("cpu")
    refuses(lambda: fit(quantised, AdapterCheckpoints()), "3.weight.absmax', which torch does not load", "Quantization")
    with pytest.raises(ConfigurationError, match="on the meta device"):
        fit(QLoRA().to("meta"), AdapterCheckpoints())
