"""Checkpoints without frozen weights: small, exact in resumed runs, and of no other base model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging

from equipoise import AdapterCheckpoints, CheckpointError, Quantization
from equipoise.extensions.quantization.adapter_checkpoints import digest_of
from tests.extensions.quantization.qlora import QLoRA, adapters, tokens
from tests.extensions.quantization.runs import fit
from tests.support.equality import assert_equal
from tests.support.trainer_runs import refuses, trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated", "ignore:The checkpoint holds states of callbacks"
)

CALLBACKS: dict[str, Any] = {
    "nf4": lambda: Quantization("nf4"),
    "int8": lambda: Quantization("int8"),
    "none": AdapterCheckpoints,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "one.ckpt"


def save(file: Path, *callbacks: Any, module: Any = None, **options: Any) -> QLoRA:
    """Train, save a checkpoint, and return the module."""
    trained = fit(module or QLoRA(), *callbacks, **options)
    trained.trainer.save_checkpoint(file)
    return trained


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("kind", "precision"),
    [("nf4", "bf16-true"), ("int8", "64-true"), ("none", "32-true")],
)
def test_a_resumed_run_is_equal_to_the_bit_and_its_checkpoint_has_adapters_alone(
    kind: str, precision: Any, path: Path
) -> None:
    whole = fit(QLoRA(), CALLBACKS[kind](), max_epochs=3, precision=precision)
    save(path, CALLBACKS[kind](), max_epochs=2, precision=precision)
    assert torch.load(path, weights_only=True)["state_dict"].keys() == adapters(whole).keys()
    resumed = QLoRA()
    # The same object continues as well.
    for _ in range(2):
        fit(resumed, CALLBACKS[kind](), path=path, max_epochs=3, precision=precision)
        assert_equal(whole, resumed)


def test_a_checkpoint_is_evaluated_with_the_same_base_model(path: Path) -> None:
    module = save(path, Quantization("nf4"), precision="32-true")
    expected = module.trainer.test(module, tokens())
    assert trainer(callbacks=[Quantization("nf4")]).test(QLoRA(), tokens(), ckpt_path=path) == expected
    assert trainer(callbacks=[Quantization("int8")]).test(QLoRA(seed=1), tokens()) != expected


@pytest.mark.parametrize(
    ("callback", "seed"),
    [("int8", 1), ("nf4", 0), ("none", 0)],
    ids=["other values", "another kind", "not quantised"],
)
def test_another_base_model_is_refused(callback: str, seed: int, path: Path) -> None:
    save(path, Quantization("int8"))
    with pytest.raises(CheckpointError, match="trained with another base model: model"):
        fit(QLoRA(seed=seed), CALLBACKS[callback](), path=path, max_epochs=2)


def test_a_run_without_the_callback_is_refused(path: Path) -> None:
    """A warning names the callback that left the weights out."""
    save(path, Quantization("int8"))
    with (
        pytest.warns(UserWarning, match="callbacks that are missing: .*'AdapterCheckpoints'"),
        pytest.raises(CheckpointError, match=r"missing: .*up\.base_layer\.weight"),
    ):
        fit(QLoRA(), path=path, max_epochs=2)


@pytest.mark.parametrize(("kind", "weights_only"), [("nf4", False), ("int8", True)])
def test_whole_weights_are_not_loaded_into_stored_ones(kind: str, weights_only: bool, path: Path) -> None:
    fit(QLoRA(), precision="32-true").trainer.save_checkpoint(path, weights_only=weights_only)
    with pytest.raises(CheckpointError, match=r"as torch\.float32, but here it is stored in few bits"):
        trainer(callbacks=[CALLBACKS[kind]()]).test(QLoRA(), tokens(), ckpt_path=path)


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


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("steps", [range(4, 9), range(3, 6)], ids=["thawed", "frozen again"])
def test_a_weight_that_is_trained_meanwhile_stays_in_checkpoints(steps: range, path: Path) -> None:
    callbacks = (AdapterCheckpoints(), Switch(steps))
    whole = fit(AllStepped(), *callbacks, max_epochs=4)
    saved = path.with_name("first.ckpt")
    save(saved, *callbacks, module=AllStepped(), max_epochs=3)
    assert torch.load(saved, weights_only=True)["state_dict"].keys() == {*adapters(QLoRA()), NAME}
    resumed = save(path, *callbacks, module=AllStepped(), path=saved, max_epochs=4)
    assert_equal(whole.state_dict(), resumed.state_dict())
    assert NAME in torch.load(path, weights_only=True)["state_dict"]


@pytest.mark.parametrize("name", ["whole.ckpt", "whole.safetensors"])
def test_weights_of_a_whole_checkpoint_stay_in_checkpoints(name: str, path: Path) -> None:
    whole = path.with_name(name)
    trained = AllStepped()
    trained.requires_grad_(True)
    save(whole, module=trained)
    first = save(path, AdapterCheckpoints(), module=AllStepped(), path=whole, max_epochs=2)
    # The frozen weights are those that were trained, which a new base model lacks.
    resumed = fit(AllStepped(), AdapterCheckpoints(), path=path, max_epochs=2)
    assert_equal(first.state_dict(), resumed.state_dict())
    assert torch.equal(resumed.get_parameter(NAME), trained.get_parameter(NAME))


def test_digests_tell_weights_apart() -> None:
    weight = torch.arange(12.0).view(4, 3)
    others = [weight.flip(0), weight.flip(1), weight.view(3, 4), weight[0], weight[0, 1]]
    others += [torch.full((4, 4), value) for value in (0.0, 1.0)]
    others += [weight.to(dtype) for dtype in (torch.int32, torch.float8_e4m3fn, torch.complex64, torch.bool)]
    digests = [digest_of(value, "32-true") for value in (weight, *others)]
    assert len(set(digests)) == len(digests)
    assert digest_of(weight.clone(), "32-true") == digests[0]
    assert digest_of(weight, "64-true") == digest_of(weight.double(), "64-true")


def all_trained() -> QLoRA:
    module = QLoRA()
    module.requires_grad_(True)
    return module


def with_packed_head() -> QLoRA:
    module: Any = QLoRA()
    head = Linear4bit(64, 64, bias=False)
    head.weight = Params4bit(torch.randn(64, 64), requires_grad=False)
    module.model.base_model.model[3] = head.to("cpu")
    return module


@pytest.mark.parametrize(
    ("make", "callbacks", "words"),
    [
        (all_trained, [], ["no weight is frozen"]),
        (QLoRA, [EMAWeightAveraging()], ["EMAWeightAveraging computes the mean"]),
        (with_packed_head, [], ["3.weight.absmax', which torch does not load", "Quantization"]),
        (lambda: QLoRA().to("meta"), [], ["on the meta device"]),
    ],
    ids=["all trained", "averaged", "packed by the user", "on meta"],
)
def test_what_cannot_be_left_out_of_checkpoints_is_refused(make: Any, callbacks: Any, words: list[str]) -> None:
    refuses(lambda: fit(make(), AdapterCheckpoints(), *callbacks), *words)
