"""Programs with a fault in one process, and what the error is to name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from base import Program, data, fit
from lightning.pytorch import Callback
from torch import nn
from torch.distributed import GradBucket, get_rank
from torch.futures import Future

from equipoise import DDPStrategy, FSDPStrategy, VirtualDevicesStrategy

__all__ = ["FAULTS", "Fault"]

NATIVE = DDPStrategy(engine="native")


@dataclass(frozen=True)
class Fault:
    """A program with a fault.

    Attributes:
        run: Fits it, given an empty folder.
        name: The first tensor that differs.
        ranks: How the message names the ranks.
        since: The optimiser step of the last agreement, as the message names it; None: any.
    """

    run: Callable[[Path], Any]
    name: str = "net.0.weight"
    ranks: str = "rank 1 as in rank 0"
    since: str | None = None


FAULTS: dict[str, Fault] = {}


def planted(words: str, strategy: Any = "ddp", **options: Any) -> Callable[[type[Program]], type[Program]]:
    """Add a module to the faults.

    Args:
        words: What is wrong.
        strategy: The strategy.
        options: Those of the trainer, and fields of `Fault`.
    """
    fields = {name: options.pop(name) for name in ("name", "ranks", "since") if name in options}

    def add(kind: type[Program]) -> type[Program]:
        def run(folder: Path) -> Any:
            module = kind()
            module.folder = str(folder)  # type: ignore[assignment]
            return fit(module, strategy, **options)

        FAULTS[words] = Fault(run, **fields)
        return kind

    return add


START = "before the first optimiser step"


@planted("a bias changed in a hook of the batch", devices=3, name="net.2.bias", ranks="rank 2 as in ranks 0 and 1")
class Bias(Program):
    @torch.no_grad()
    def on_train_batch_end(self, *arguments: Any) -> None:
        if self.global_rank == 2 and self.global_step == 3:
            self.net[2].bias.add_(1e-6)


@planted("one bit of one element", NATIVE, name="net.2.weight", since="after optimiser step 6")
class Bit(Program):
    def on_train_epoch_start(self) -> None:
        if self.global_rank == 1 and self.current_epoch == 1:
            self.net[2].weight.data.view(torch.int64)[0, 5] ^= 1


@planted("another initialisation after the setup", NATIVE, name="net.0.weight", since=START)
class Initialised(Program):
    def on_train_start(self) -> None:
        torch.manual_seed(self.global_rank)
        nn.init.normal_(self.net[0].weight)


@planted("another file loaded in one process", NATIVE, since=START)
class File(Program):
    def on_fit_start(self) -> None:
        other = Path(self.folder) / f"{self.global_rank}.pt"
        torch.save({name: value * (1 + self.global_rank) for name, value in self.net.state_dict().items()}, other)
        self.net.load_state_dict(torch.load(other))


@planted("noise on weights in training_step", since=START)
class Noise(Program):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(1e-3 * torch.randn_like(parameter))
        return self.loss(batch)


@planted("a branch by rank: weights clamped in the main process alone", NATIVE, ranks="rank 1 as in rank 0")
class Clamped(Program):
    @torch.no_grad()
    def on_train_batch_end(self, *arguments: Any) -> None:
        if self.trainer.is_global_zero:
            for parameter in self.parameters():
                parameter.clamp_(-0.1, 0.1)


class Scaled(Program):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64))

    def loss(self, batch: Any) -> Any:
        return super().loss(batch) * self.scale.sum()

    def on_train_batch_end(self, *arguments: Any) -> None:
        if self.global_rank == 1:
            self.scale.mul_(0.9)


for strategy in (NATIVE, FSDPStrategy()):
    planted(f"a buffer changed in one process, {strategy.name}", strategy, name="the buffer scale")(Scaled)


@planted("gradients changed after the exchange", since=START)
class Changed(Program):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_rank == 1:
            self.net[0].weight.grad.mul_(2)  # type: ignore[union-attr]


@planted("gradients clipped in the main process alone", NATIVE, since=START)
class Clipped(Program):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_rank == 0:
            nn.utils.clip_grad_norm_(self.parameters(), 1e-9)


@planted("noise of its own on each process's gradients", since=START)
class Private(Program):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad += 0.1 * torch.randn_like(parameter)


def no_exchange(state: None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Return the gradients as they are."""
    future: Future[torch.Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


planted("a communication hook that exchanges nothing", DDPStrategy(comm_hook=no_exchange), since=START)(Program)


@planted("another learning rate in one process", since=START)
class Rate(Program):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01 * (1 + self.global_rank))


@planted("weight decay in one process", NATIVE, devices=3, ranks="rank 0 as in ranks 1 and 2", since=START)
class Decay(Program):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01, weight_decay=0.0 if self.global_rank else 0.1)


@planted("another beta of Adam in one process", since="after optimiser step 1")
class Beta(Program):
    def configure_optimizers(self) -> Any:
        # The first step of Adam does not depend on its betas but for the rounding.
        return torch.optim.Adam(self.parameters(), 0.01, betas=(0.5 if self.global_rank else 0.75, 0.75), eps=0.0)


@planted("a scheduler stepped in one process", since="after optimiser step 1")
class Scheduled(Program):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return optimizer

    def on_train_batch_end(self, *arguments: Any) -> None:
        if self.global_rank == 1:
            self.scheduler.step()


@planted("the state of the optimiser loaded in one process", NATIVE, since=START)
class State(Program):
    def on_train_start(self) -> None:
        optimizer = self.optimizers().optimizer
        if self.global_rank == 1:
            state = {parameter: torch.ones_like(parameter) for parameter in self.parameters()}
            for parameter, ones in state.items():
                optimizer.state[parameter] = {"step": torch.tensor(9.0), "exp_avg": ones, "exp_avg_sq": ones.clone()}


@planted("one more optimiser step in one process", name="net.0.weight", since=START)
class More(Program):
    def on_train_batch_end(self, *arguments: Any) -> None:
        if self.global_rank == 1:
            self.optimizers().optimizer.step()


@planted("a prototype that follows each process's samples", name="prototype", since=START)
class Prototype(Program):
    def __init__(self) -> None:
        super().__init__()
        self.prototype = nn.Parameter(torch.zeros(4, dtype=torch.float64), requires_grad=False)

    @torch.no_grad()
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.prototype.lerp_(batch[0].mean(0), 0.1)
        with torch.enable_grad():
            return self.loss(batch)


@planted("a teacher with another momentum in one process", NATIVE, name="teacher.0.weight", since=START)
class Teacher(Program):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double().requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, *arguments: Any) -> None:
        for mine, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mine.lerp_(other, 0.2 if self.global_rank else 0.1)


@planted("manual optimisation: a gradient left out in one process", name="net.2.bias", since=START)
class ByHand(Program):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if self.global_rank == 1:
            self.net[2].bias.grad = None
        optimizer.step()


@planted("a layer drawn again at the end of an epoch", name="net.2.weight", since="after optimiser step 1")
class Drawn(Program):
    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        self.net[2].weight.normal_()


class Pruned(Callback):
    """Prunes small weights, in the main process alone."""

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            weight = module.net[0].weight
            weight[weight.abs() < 0.2] = 0


planted("a callback that prunes in the main process alone", callbacks=[Pruned()], since="after optimiser step 1")(
    Program
)


@planted("weights rounded before a file is written", NATIVE, since="after optimiser step 1")
class Rounded(Program):
    def on_train_epoch_end(self) -> None:
        if get_rank() == 0:
            self.net.float()
            torch.save(self.net.state_dict(), Path(self.folder) / "small.pt")
            self.net.double()


@planted("parameters frozen in one process after the first step", NATIVE, name="net.0.bias")
class Frozen(Program):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and batch_idx == 1:
            # The optimiser of this process loses it.
            group = self.optimizers().optimizer.param_groups[0]
            group["params"] = [parameter for parameter in group["params"] if parameter is not self.net[0].bias]


@planted("a weight that is not a number", devices=3, name="net.2.bias", ranks="rank 1 as in ranks 0 and 2")
class NotANumber(Program):
    @torch.no_grad()
    def on_train_end(self) -> None: ...

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 1:
            self.net[2].bias.data.fill_(float("nan"))


class Shard(Program):
    @torch.no_grad()
    def on_train_batch_end(self, *arguments: Any) -> None:
        if self.global_rank == 3:
            self.net[0].bias.to_local().add_(1)


planted(
    "a shard of one of two replicas",
    FSDPStrategy(replicas=2),
    devices=4,
    loaders=partial(data, 32),
    name="net.0.bias",
    ranks="rank 3 as in rank 1",
    since=START,
)(Shard)


@planted("gradients changed under virtual devices", VirtualDevicesStrategy(count=4), since=START)
class Virtual(Changed): ...
