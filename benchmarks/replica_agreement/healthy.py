"""Programs whose processes agree, or differ by design, in which a comparison must find nothing."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from base import Program, data, fit
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from equipoise import (
    DDPStrategy,
    FSDPStrategy,
    HogwildStrategy,
    ProcessStrategy,
    Quantization,
    VirtualDevicesStrategy,
)

__all__ = ["HEALTHY"]

NATIVE = DDPStrategy(engine="native")
UNUSED = DDPStrategy(find_unused_parameters=True)

HEALTHY: dict[str, Callable[[Path], Any]] = {}


def healthy(words: str, strategy: Any = "ddp", **options: Any) -> Callable[[type[Program]], type[Program]]:
    """Add a module to the healthy programs.

    Args:
        words: What it does.
        strategy: The strategy.
        options: Those of `fit`.
    """

    def add(kind: type[Program]) -> type[Program]:
        def run(folder: Path) -> Any:
            return fit(kind(), strategy, default_root_dir=folder, **options)

        HEALTHY[words] = run
        return kind

    return add


def layers(words: str, make: Callable[[], nn.Module], strategy: Any = NATIVE, **options: Any) -> None:
    """Add the program whose network is (batch, 4) → `make` → (batch, 1)."""

    class Layers(Program):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), make(), nn.Linear(8, 1)).double()

    healthy(words, strategy, **options)(Layers)


# Strategies and their options.

for words, strategy, options in (
    ("torch's wrapper", "ddp", {}),
    ("the native engine", NATIVE, {"devices": 3}),
    ("a step of several buckets", DDPStrategy(bucket_megabytes=0.0001), {}),
    ("a static graph", DDPStrategy(static_graph=True), {}),
    ("shares of 1 and 3", DDPStrategy(shares=[1, 3]), {}),
    ("PowerSGD", DDPStrategy(comm_hook=powerSGD_hook, comm_state=partial(PowerSGDState, None)), {}),
    ("gradients of 16 bits", DDPStrategy(comm_hook=fp16_compress_hook), {}),
    ("fsdp", FSDPStrategy(), {}),
    ("fsdp, units", FSDPStrategy(units=["net.0", "net.2"]), {}),
    ("fsdp, two replicas", FSDPStrategy(replicas=2), {"devices": 4, "loaders": partial(data, 32)}),
    ("fsdp, cut layers", FSDPStrategy(tensor=2, tensor_plan={"net.0": "colwise", "net.2": "rowwise"}), {"devices": 4}),
    ("virtual devices", VirtualDevicesStrategy(count=3), {}),
    ("hogwild", HogwildStrategy(), {}),
    ("a strategy whose processes step by themselves", ProcessStrategy(), {}),
    ("accumulation", NATIVE, {"accumulate_grad_batches": 4}),
    ("accumulation over uneven samples", "ddp", {"accumulate_grad_batches": 4, "loaders": partial(data, 21)}),
    ("clipping by norm", "ddp", {"gradient_clip_val": 0.1}),
    ("clipping by value", NATIVE, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
    ("bfloat16", "ddp", {"precision": "bf16-true"}),
    ("mixed precision", NATIVE, {"precision": "bf16-mixed"}),
    ("uneven samples", "ddp", {"loaders": partial(data, 23)}),
    ("a process without a batch", NATIVE, {"loaders": partial(data, 1)}),
    ("a file after each step", "ddp", {"callbacks": [ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)]}),
    ("an end within the epoch", NATIVE, {"max_steps": 4}),
    ("averages of weights", "ddp", {"callbacks": [EMAWeightAveraging(decay=0.5)]}),
    ("stochastic averages", NATIVE, {"callbacks": [StochasticWeightAveraging(0.01)], "max_epochs": 4}),
    ("pruning", "ddp", {"callbacks": [ModelPruning("l1_unstructured", amount=0.3)]}),
):
    if any(isinstance(callback, ModelCheckpoint) for callback in options.get("callbacks", ())):
        options["enable_checkpointing"] = True
    healthy(words, strategy, **options)(Program)


@healthy(
    "local SGD", DDPStrategy(comm_hook=post_localSGD_hook, comm_state=partial(PostLocalSGDState, None, None, 1, False))
)
class Averaged(Program):
    @torch.no_grad()
    def on_train_batch_end(self, *arguments: Any) -> None:
        if self.global_step % 4 == 0:
            for parameter in self.parameters():
                parameter.copy_(self.trainer.strategy.reduce(parameter))


# Layers with a state.


class OwnMean(nn.Module):
    """Subtracts a running mean that follows the samples of a process."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(features.detach().mean(0), 0.1)
        return features - self.mean


class OwnNoise(nn.Module):
    """Adds noise that stays in a buffer, as each process draws it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.zeros(8))

    def forward(self, features: Tensor) -> Tensor:
        return features + self.noise.normal_()


class Growing(nn.Module):
    """Keeps a table that the process with the largest values enlarges, and numbers that it alone changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1), persistent=False)
        self.register_buffer("enlarged", torch.zeros(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, features: Tensor) -> Tensor:
        if torch.distributed.get_rank() == 1:
            self.count += 1
            self.table += 1
            self.enlarged = torch.zeros(len(self.enlarged) + 1)
        return features


class Recomputed(nn.Sequential):
    """Computes its layers again in the backward."""

    def forward(self, features: Tensor) -> Tensor:
        return checkpoint(super().forward, features, use_reentrant=False)


class Extra(nn.Module):
    """Has parameters of kinds that no gradient has."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.arange(8, dtype=torch.int8), requires_grad=False)
        self.mask = nn.Parameter(torch.ones(8, dtype=torch.bool), requires_grad=False)
        self.none = nn.Parameter(torch.ones(0), requires_grad=False)
        self.phase = nn.Parameter(torch.ones(8, dtype=torch.complex128))
        self.register_buffer("sparse", torch.eye(8).to_sparse())

    def forward(self, features: Tensor) -> Tensor:
        return (features * self.phase).real * self.whole * self.mask


layers("BatchNorm", lambda: nn.BatchNorm1d(8))
layers("BatchNorm, buffers not copied", lambda: nn.BatchNorm1d(8), DDPStrategy(forward_sync_buffers=False))
layers("BatchNorm without a momentum, fsdp", lambda: nn.BatchNorm1d(8, momentum=None), FSDPStrategy())
layers("a running mean of its own", OwnMean)
layers("noise in a buffer", OwnNoise)
layers("tables that grow in one process", Growing)
layers("dropout", lambda: nn.Dropout(0.3), "ddp")
layers("spectral norm", lambda: parametrizations.spectral_norm(nn.Linear(8, 8)))
layers("spectral norm by hooks", lambda: spectral_norm(nn.Linear(8, 8)), "ddp")
layers("weight norm", lambda: parametrizations.weight_norm(nn.Linear(8, 8)))
layers("weight norm by hooks", lambda: weight_norm(nn.Linear(8, 8)), "ddp")
layers("layers computed again in the backward", lambda: Recomputed(nn.Linear(8, 8), nn.Tanh()))
layers("parameters of other kinds", Extra)
layers("a compiled layer", lambda: torch.compile(nn.Linear(8, 8), backend="eager"))


@healthy("BatchNorm that stops to learn", NATIVE, max_epochs=4)
class Stopped(Program):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()

    def on_train_epoch_start(self) -> None:
        self.net[1].train(self.current_epoch < 2)


@healthy("frozen weights of four bits", NATIVE, callbacks=[Quantization("nf4")])
class FewBits(Program):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 1))

    def loss(self, batch: Any) -> Tensor:
        return super().loss([tensor.float() for tensor in batch])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], 0.01)


@healthy("convolutions, channels last", NATIVE)
class Convolutions(Program):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 1))
        self.net = nn.Sequential(*layers).double().to(memory_format=torch.channels_last)


@healthy("an embedding with sparse gradients")
class Sparse(Program):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.EmbeddingBag(10, 1, sparse=True, mode="sum").double()

    def loss(self, batch: Any) -> Tensor:
        rows = (batch[0] * 3).long().remainder(10)
        return (self.net(rows) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(list(self.parameters()), 0.01)


@healthy("tied weights", NATIVE)
class Tied(Program):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)).double()
        self.net[1].weight = self.net[0].weight


@healthy("a branch that only some samples take", UNUSED)
class Branch(Program):
    def __init__(self) -> None:
        super().__init__()
        self.other = copy.deepcopy(self.net)

    def loss(self, batch: Any) -> Tensor:
        net = self.net if float(batch[0].sum()) > 0 else self.other
        return (net(batch[0]) - batch[1]).square().mean()


# Steps.


@healthy("a teacher that follows the weights")
class Teacher(Program):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, *arguments: Any) -> None:
        for mine, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mine.lerp_(other, 0.1)


@healthy("two optimisers by hand", NATIVE)
class Adversaries(Program):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(1, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer, loss in ((first, self.critic(self.net(batch[0])).mean()), (second, self.loss(batch))):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.critic.parameters(), 0.01), torch.optim.SGD(self.net.parameters(), 0.01)]


@healthy("accumulation by hand")
class Accumulated(Program):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        if batch_idx % 3 == 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


@healthy("LBFGS")
class Newton(Program):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)


@healthy("several optimisers, a scheduler that watches a value", NATIVE, max_epochs=4)
class Several(Program):
    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW(self.net[0].parameters(), 0.01)
        second = torch.optim.SGD(self.net[2].parameters(), 0.01, momentum=0.9, nesterov=True)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(first, patience=0)
        return [{"optimizer": first, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}, {"optimizer": second}]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss


@healthy("steps that overflow in half precision", precision="16-mixed")
class Overflowing(Program):
    def __init__(self) -> None:
        super().__init__()
        self.net.float()

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss([tensor.float() for tensor in batch])
        return loss * 1e35 if self.global_rank == 1 and self.global_step in (0, 3) else loss


@healthy("a step without a loss in one process", NATIVE)
class Skipping(Program):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if self.global_rank == 1 and batch_idx == 2 else self.loss(batch)


@healthy("losses that are not a number")
class NotANumber(Program):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * float("nan")


@healthy("noise that all processes draw alike", NATIVE)
class Noisy(Program):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        generator = torch.Generator().manual_seed(self.global_step)
        for parameter in self.parameters():
            parameter.grad += torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


@healthy("a layer that is drawn again by the main process and sent to all")
class Redrawn(Program):
    def on_train_epoch_end(self) -> None:
        state = nn.Linear(8, 1).double().state_dict()
        self.net[2].load_state_dict(self.trainer.strategy.broadcast(state))


@healthy("weights frozen and thawed", NATIVE, max_epochs=4)
class Thawed(Program):
    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch != 1)


class Finetuning(BaseFinetuning):
    """Thaws the first layer after an epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


@healthy("finetuning", callbacks=[Finetuning()], max_epochs=3)
class Finetuned(Program):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], 0.1)


# Data, validation, and runs that continue.


class Stream(IterableDataset[Any]):
    """Samples without a length, of which each process has another number."""

    def shard(self, num_shards: int, index: int) -> "Stream":
        part = Stream()
        part.length = 8 + 3 * index
        return part

    length = 16

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            yield torch.full((4,), float(number), dtype=torch.float64), torch.ones(1, dtype=torch.float64)


healthy("streams of other lengths", NATIVE, loaders=lambda: DataLoader(Stream(), batch_size=2))(Program)


@healthy("validation and files within the epoch", val_check_interval=2, enable_checkpointing=True)
class Validated(Program):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()

    def val_dataloader(self) -> Any:
        return data(6)

    def configure_callbacks(self) -> Any:
        return [ModelCheckpoint(monitor="val_loss"), EarlyStopping("val_loss", patience=1)]


def resumed(folder: Path, strategy: Any, devices: int) -> None:
    """Continue a run in a number of processes, and once more after it."""
    trainer = fit(Program(), strategy, max_epochs=1)
    trainer.save_checkpoint(folder / "x.ckpt")
    module = Program()
    fit(module, strategy, devices=devices, ckpt_path=folder / "x.ckpt", max_epochs=3)
    fit(module, strategy, devices=devices)


HEALTHY["a run that continues"] = partial(resumed, strategy="ddp", devices=2)
HEALTHY["a run that continues in three processes"] = partial(resumed, strategy=NATIVE, devices=3)
HEALTHY["a run in shards that continues in three processes"] = partial(resumed, strategy=FSDPStrategy(), devices=3)
