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
    """Three blocks, each a unit; what is not divided by 16 stays as it is.

    Args:
        width: The width, which three processes do not divide.
    """

    def __init__(self, width: int = 32, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(width, 64, bias=bias), nn.Tanh(), nn.Linear(64, width)) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)
        self.single = nn.ModuleList(nn.Sequential(nn.Linear(width, width, bias=False)) for _ in range(2))
        self.head = nn.Linear(width, 1)
        self.nbytes: dict[str, int] = {}

    def forward(self, features: Tensor) -> Tensor:
        for block in [*self.blocks, *self.single]:
            features = features + block(features)
        return self.head(features)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (features,) = batch
        return (self(features) - 1).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

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


class ByHand(Blocks):
    """Optimises by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward((self(batch[0]) - 1).square().mean())
        optimizer.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])


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
    for (name, value), expected in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, expected), (name, value.sub(expected).abs().max())
    assert list(map(type, module.modules())) == list(map(type, other.modules()))
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    assert not torch.equal(module.head.weight, Blocks().head.weight)


CASES: dict[str, Any] = {
    "32-true": {"precision": "32-true"},
    "true": {"precision": "fp8-true"},
    "uneven shards": {"devices": 3},
    "replicas": {"devices": 4, "strategy": {"replicas": 2}},
    "evaluations first": {"num_sanity_val_steps": 1, "val_check_interval": 2},
    "kept": {"strategy": {"reshard_after_forward": False}},
    "layers of the root": {"strategy": {"units": ["blocks.*"]}},
    "repeated forwards": {"activation_checkpointing": ["blocks.*"], "accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.1},
    "by hand": {"module": ByHand},
    "uneven data": {"samples": 45},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_same_to_the_bit(case: str) -> None:
    whole, gathered = (fit(gathers, **CASES[case]) for gathers in (False, True))
    check_equal(gathered, whole)


@pytest.mark.slow
def test_bytes_are_a_quarter() -> None:
    whole, gathered = (fit(gathers, Counts()) for gathers in (False, True))
    check_equal(gathered, whole)
    # Each process sends half of 14,336 weights and 288 biases in units, and the 33 of the root, which are padded.
    assert whole.nbytes == {"torch.float32": 2 * 4 * (7168 + 144 + 33)}
    # What is rounded has a byte. Torch sends all of a unit in one exchange.
    assert gathered.nbytes == {"torch.uint8": 2 * (7168 + 4 * 144), "torch.float32": 2 * 4 * 33}


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", ["full", "sharded"])
def test_checkpoints_are_those_of_weights_as_they_are(checkpoints: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": {"checkpoints": checkpoints}, "enable_checkpointing": True}
    options["default_root_dir"] = tmp_path
    averaged = [EMAWeightAveraging(decay=0.5) for _ in range(4)]
    whole = fit(False, averaged[0], saving(tmp_path / "whole"), max_epochs=2, **options)
    gathered = fit(True, averaged[1], saving(tmp_path / "gathered"), max_epochs=2, **options)
    check_equal(gathered, whole)
    for way in ("whole", "gathered"):
        # A checkpoint of either way continues the other one.
        path = tmp_path / way / "step=5.ckpt"
        check_equal(fit(True, averaged[2], ckpt_path=path, max_epochs=2, **options), whole)
    # It continues on more processes, and without fsdp.
    path = tmp_path / "gathered" / "step=4.ckpt"
    more = [fit(gathers, averaged[3], devices=3, ckpt_path=path, max_epochs=2, **options) for gathers in (False, True)]
    check_equal(more[1], more[0])
    alone = Blocks()
    run = trainer(callbacks=[Float8Training(emulate=True)], precision="fp8")
    run.validate(alone, batches(12), ckpt_path=path, verbose=False)
    saved = fit(True, EMAWeightAveraging(decay=0.5), max_steps=4, **options)
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in alone.state_dict().items())


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

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.single[0][0].weight.square().sum()


@pytest.mark.slow
def test_a_step_that_reads_a_weight_is_told_what_to_leave_out() -> None:
    # The root keeps its whole weights until the backward, so the step can read one.
    options: dict[str, Any] = {"module": ReadsAWeight, "strategy": {"units": ["blocks.*"]}}
    with pytest.raises(NotImplementedError, match="this is not supported") as error:
        fit(True, **options)
    assert "leave fp8_all_gather out" in " ".join(error.value.__notes__)
    read = fit(False, **options)
    assert not torch.equal(read.single[0][0].weight, fit(False).single[0][0].weight)


def test_refused_where_processes_cannot() -> None:
    refuses(lambda: fit(True, devices=1), "fp8_all_gather=True", "one process gathers nothing")
    refuses(lambda: fit(True, strategy={"reshard_after_forward": 2}, devices=4), "reshard_after_forward as a number")
    offloading = FSDPStrategy(cpu_offload=True)
    offloading.processes = SimpleNamespace(world_size=2)  # type: ignore[assignment]
    assert "cpu_offload=True" in str(offloading.gather_weights_as({}))
    rowwise = Float8Training("rowwise", fp8_all_gather=True, emulate=True)
    refuses(
        lambda: trainer(callbacks=[rowwise]).fit(Blocks(), batches(12), batches(12)), "are not those of whole weights"
    )
    tensorwise = Float8Training(fp8_all_gather=True, emulate=True)
    refuses(
        lambda: trainer(callbacks=[tensorwise]).fit(Blocks(), batches(12), batches(12)),
        "'single_device' gathers no weights",
    )
