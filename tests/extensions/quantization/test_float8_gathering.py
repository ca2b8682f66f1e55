"""Weights that fsdp gathers in float8: the numbers are those of weights that are gathered as they are, to the bit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from equipoise import Float8Training, FSDPStrategy
from tests.extensions.quantization.runs import saving
from tests.support.equality import assert_equal
from tests.support.trainer_runs import refuses, trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:Ranks from 1 on begin with",
    "ignore:FSDP2-wrapped module",
    "ignore:The run began with",
    "ignore:The checkpoint holds states of callbacks",
)


class Sent(TorchDispatchMode):
    """Adds the bytes of gathered shards, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_allgather_base" in str(function):
            shard = args[1]
            self.nbytes[str(shard.dtype)] = self.nbytes.get(str(shard.dtype), 0) + shard.nbytes
        return function(*args, **(kwargs or {}))


class Blocks(L.LightningModule):
    """Blocks that are units, of a width that three processes do not divide; what 16 does not divide stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(3))
        self.single = nn.ModuleList(nn.Sequential(nn.Linear(32, 32, bias=False)) for _ in range(2))
        self.head = nn.Linear(32, 1)
        self.nbytes: dict[str, int] = {}

    def forward(self, features: Tensor) -> Tensor:
        for block in [*self.blocks, *self.single]:
            features = features + block(features)
        return self.head(features)

    def loss(self, batch: Any) -> Tensor:
        return (self(batch[0]) - 1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Counts(L.Callback):
    """Counts the bytes that the first process sends in the last step."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.sent = Sent()
        self.sent.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.sent.__exit__(None, None, None)
        module.nbytes = self.sent.nbytes


def batches(size: int, samples: int = 48) -> DataLoader[Any]:
    features = torch.randn(samples, 32, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(features), batch_size=size)


def fit(
    gathers: Any, *callbacks: Any, module: Any = Blocks, devices: int = 2, samples: int = 48, **options: Any
) -> Any:
    trained = module()
    strategy = FSDPStrategy(timeout=120.0, **{"units": ["blocks.*", "single.*"], **options.pop("strategy", {})})
    float8 = Float8Training(emulate=True, fp8_all_gather=gathers)
    path = options.pop("ckpt_path", None)
    run = trainer(
        callbacks=[float8, *callbacks], **{"strategy": strategy, "devices": devices, "precision": "fp8", **options}
    )
    run.fit(trained, batches(12 // devices, samples), batches(12 // devices, 12), ckpt_path=path)
    return trained


def check_equal(module: nn.Module, other: nn.Module) -> None:
    assert_equal(other, module)
    assert list(map(type, module.modules())) == list(map(type, other.modules()))
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    assert not torch.equal(module.head.weight, Blocks().head.weight)


CASES: dict[str, Any] = {
    "32-true, clipped": {"precision": "32-true", "gradient_clip_val": 0.1},
    "true, evaluations first": {"precision": "fp8-true", "num_sanity_val_steps": 1, "val_check_interval": 2},
    "uneven shards and data": {"devices": 3, "samples": 45},
    "replicas, kept": {"devices": 4, "strategy": {"replicas": 2, "reshard_after_forward": False}},
    "layers of the root, repeated forwards": {
        "strategy": {"units": ["blocks.*"]},
        "activation_checkpointing": ["blocks.*"],
        "accumulate_grad_batches": 2,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_with_weights_gathered_in_float8_is_the_same_to_the_bit(case: str) -> None:
    whole, gathered = (fit(gathers, **CASES[case]) for gathers in (False, True))
    check_equal(gathered, whole)


@pytest.mark.slow
def test_a_quarter_of_the_bytes_is_sent() -> None:
    whole, gathered = (fit(gathers, Counts()) for gathers in (False, True))
    check_equal(gathered, whole)
    # Each process sends half of 14,336 weights and 288 biases in units, and the 33 of the root, which are padded.
    assert whole.nbytes == {"torch.float32": 2 * 4 * (7168 + 144 + 33)}
    # What is rounded has a byte. Torch sends all of a unit in one exchange.
    assert gathered.nbytes == {"torch.uint8": 2 * (7168 + 4 * 144), "torch.float32": 2 * 4 * 33}


@pytest.mark.slow
@pytest.mark.parametrize(("checkpoints", "continued"), [("full", "whole"), ("sharded", "gathered")])
def test_checkpoints_are_those_of_weights_that_are_gathered_as_they_are(
    checkpoints: Any, continued: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"strategy": {"checkpoints": checkpoints}, "enable_checkpointing": True}
    options["default_root_dir"] = tmp_path
    averaged = [EMAWeightAveraging(decay=0.5) for _ in range(4)]
    whole = fit(False, averaged[0], saving(tmp_path / "whole"), max_epochs=2, **options)
    gathered = fit(True, averaged[1], saving(tmp_path / "gathered"), max_epochs=2, **options)
    check_equal(gathered, whole)
    # A checkpoint of either way continues the other one.
    path = tmp_path / continued / "step=5.ckpt"
    check_equal(fit(True, averaged[2], ckpt_path=path, max_epochs=2, **options), whole)
    # It continues on more processes, and without fsdp.
    path = tmp_path / "gathered" / "step=4.ckpt"
    more = [fit(gathers, averaged[3], devices=3, ckpt_path=path, max_epochs=2, **options) for gathers in (False, True)]
    check_equal(more[1], more[0])
    alone = Blocks()
    run = trainer(callbacks=[Float8Training(emulate=True)], precision="fp8")
    run.validate(alone, batches(12), ckpt_path=path, verbose=False)
    saved = fit(True, EMAWeightAveraging(decay=0.5), max_steps=4, **options)
    assert_equal(saved, alone)


class Tied(Blocks):
    """Reads the weight of a layer elsewhere, and has one in a block of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.mirror = nn.Linear(32, 64, bias=False)
        self.table = nn.Embedding(64, 32)
        self.mirror.weight = self.table.weight
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, features: Tensor) -> Tensor:
        indices = self.mirror(features).argmax(-1)
        return super().forward(self.block((features + self.table(indices))[None])[0])


@pytest.mark.slow
def test_weights_that_others_read_are_gathered_as_they_are() -> None:
    whole, gathered = (fit(gathers, module=Tied) for gathers in (False, True))
    check_equal(gathered, whole)


class ReadsAWeight(Blocks):
    """Punishes a large weight, which it reads itself."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.single[0][0].weight.square().sum()


@pytest.mark.slow
def test_a_step_that_reads_a_weight_is_told_what_to_leave_out() -> None:
    # The root keeps its whole weights until the backward, so the step can read one.
    options: dict[str, Any] = {"module": ReadsAWeight, "strategy": {"units": ["blocks.*"]}}
    with pytest.raises(NotImplementedError, match="this is not supported") as error:
        fit(True, **options)
    assert "leave fp8_all_gather out" in " ".join(error.value.__notes__)
    read = fit(False, **options)
    assert not torch.equal(read.single[0][0].weight, fit(False).single[0][0].weight)


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        (FSDPStrategy(), {}, "one process gathers nothing"),
        ("single_device", {}, "'single_device' gathers no weights"),
        ("single_device", {"recipe": "rowwise"}, "are not those of whole weights"),
    ],
    ids=["one process", "another strategy", "another recipe"],
)
def test_where_nothing_is_gathered_in_float8_it_is_refused(strategy: Any, options: Any, words: str) -> None:
    float8 = Float8Training(fp8_all_gather=True, emulate=True, **options)
    run = trainer(callbacks=[float8], strategy=strategy)
    refuses(lambda: run.fit(Blocks(), batches(12), batches(12)), "fp8_all_gather=True", words)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"cpu_offload": True}, "cpu_offload=True"), ({"reshard_after_forward": 2}, "reshard_after_forward as a number")],
)
def test_options_of_fsdp_that_move_weights_stay_out(options: Any, words: str) -> None:
    strategy = FSDPStrategy(**options)
    strategy.processes = SimpleNamespace(world_size=4)  # type: ignore[assignment]
    assert words in str(strategy.gather_weights_as({}))
