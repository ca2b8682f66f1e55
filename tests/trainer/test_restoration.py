"""Steps of restoring a checkpoint that need no run: does a state belong to a module?"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn

from equipoise.errors import CheckpointError
from equipoise.trainer.checkpointing.module.names import with_present_names
from equipoise.trainer.restoration import check_fits
from tests.support.equality import assert_equal
from tests.support.trainer_runs import Small, loader, saved, trainer

pytestmark = pytest.mark.filterwarnings("ignore:The checkpoint holds states of callbacks")


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def refuse(state: dict[str, object], text: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(text)):
        check_fits(layers(), state)


def test_entries_that_are_no_tensors_are_named() -> None:
    state = {**layers().state_dict(), "0.bias": [0.0, 0.0, 0.0]}
    refuse(state, "not tensors: 0.bias is a list.")


def test_a_missing_part_is_named_and_looseness_is_advised_where_each_part_has_some_weights() -> None:
    state = {name: value for name, value in layers().state_dict().items() if name.startswith("0.")}
    refuse(state, "missing: 1.weight, 1.bias. Build the model as it was. The file holds no weight of 1.")
    state = {name: value for name, value in layers().state_dict().items() if name != "1.bias"}
    refuse(state, "missing: 1.bias. Build the model as it was, or set `strict_loading = False` in it.")


# Compiled parts


class Parts(Small):
    """Two layers, each compiled with `torch.compile` or not."""

    def __init__(self, *compiled: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        if "layer" in compiled:
            self.layer = torch.compile(self.layer, backend="eager")
        if "block" in compiled:
            self.blocks[1] = torch.compile(self.blocks[1], backend="eager")

    def loss(self, batch: Any) -> Tensor:
        features = batch[0]
        for block in self.blocks:
            features = block(features)
        return self.layer(features).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


@torch.compiler.set_stance("force_eager")
@pytest.mark.parametrize(("then", "now"), [(("layer",), ()), ((), ("block", "layer")), (("layer",), ("block",))])
def test_weights_of_compiled_parts_are_read_by_either_name(
    tmp_path: Path, then: tuple[str, ...], now: tuple[str, ...]
) -> None:
    path = saved(Parts(*then), tmp_path)
    weights = torch.load(path, weights_only=True)["state_dict"].values()
    module = Parts(*now)
    trainer().test(module, loader(), ckpt_path=path, verbose=False)
    assert_equal(list(weights), list(module.state_dict().values()))
    resumed = Parts(*now)
    trainer(max_epochs=2).fit(resumed, loader(), ckpt_path=path)
    same = Parts(*then)
    trainer(max_epochs=2).fit(same, loader(), ckpt_path=path)
    assert_equal(list(same.state_dict().values()), list(resumed.state_dict().values()))


def test_names_that_differ_by_more_than_compilation_are_kept() -> None:
    state = {"a._orig_mod.w": 1, "b": 2, "a.w": 3}
    assert with_present_names(state, ["a.w", "c"]) is state
    assert with_present_names({"a._orig_mod.w": 1, "b": 2}, ["a.w"]) == {"a.w": 1, "b": 2}


# Averaged weights


class Mended(Small):
    """Negates the weights of a checkpoint, as one that reads an older format would."""

    def __init__(self) -> None:
        super().__init__()
        self.at_start: list[Tensor] = []
        self.mended = 0

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.mended += 1
        checkpoint["state_dict"] = {name: -value for name, value in checkpoint["state_dict"].items()}

    def on_train_start(self) -> None:
        self.at_start = [parameter.detach().clone() for parameter in self.parameters()]


def averaging() -> Any:
    return EMAWeightAveraging(decay=0.5, device="cpu")


def test_weights_that_on_load_checkpoint_changes_are_trained_beside_averaged_ones(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, "a")
    trainer(callbacks=[averaging(), keeper], enable_checkpointing=True).fit(Small(), loader())
    path = tmp_path / "a.ckpt"
    content = torch.load(path, weights_only=True)
    trained = list(content["current_model_state"].values())
    averaged = list(content["state_dict"].values())
    assert not any(map(torch.equal, trained, averaged))

    resumed = Mended()
    trainer(max_epochs=2, callbacks=[averaging()]).fit(resumed, loader(), ckpt_path=path)
    assert resumed.mended == 2
    assert [torch.equal(now, -then) for now, then in zip(resumed.at_start, trained, strict=True)] == [True, True]

    # Without a training, the averaged weights are the only ones.
    tested = Mended()
    with pytest.warns(UserWarning, match="outside the 'fit' stage"):
        trainer(callbacks=[averaging()]).test(tested, loader(), ckpt_path=path, verbose=False)
    assert tested.mended == 1
    assert all(map(torch.equal, tested.parameters(), [-value for value in averaged]))
