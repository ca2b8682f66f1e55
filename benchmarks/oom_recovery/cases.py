"""A case of the campaign: a random network, random data and options, and errors at random places of random steps."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from equipoise import BalancedDataParallelStrategy, Callback, DDPStrategy, OOMRecovery, Split, Trainer

__all__ = ["Case", "Outcome", "draw", "run"]

FEATURES, TOKENS, CLASSES = 4, 3, 3
PHASES = ("forward", "late", "backward")
Key = tuple[int, int, int]  # rank, epoch, batch


class Attention(nn.Module):
    """A block of a transformer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(tokens)


def _mlp(dropout: float) -> nn.Module:
    layers = (nn.Linear(TOKENS * FEATURES, 6), nn.Tanh(), nn.Dropout(dropout), nn.LayerNorm(6), nn.Linear(6, CLASSES))
    return nn.Sequential(nn.Flatten(), *layers)


def _convolutions(dropout: float) -> nn.Module:
    layers = (nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.Dropout(dropout))
    pool = (nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES))
    return nn.Sequential(nn.Unflatten(1, (1, TOKENS)), *layers, *pool)


def _transformer(dropout: float) -> nn.Module:
    return nn.Sequential(Attention(dropout), nn.Flatten(), nn.Linear(TOKENS * FEATURES, CLASSES))


NETWORKS: dict[str, Callable[[float], nn.Module]] = {
    "MLP": _mlp,
    "convolutions": _convolutions,
    "transformer": _transformer,
}


@dataclass
class Case:
    """Training of one case.

    Attributes:
        mode: "again": failed steps are repeated, "split": cut as planned, "policy": left to OOMRecovery.
        failures: The phases in which successive attempts at a batch fail.
        factors: Into how many times as many parts each of these attempts is cut.
    """

    seed: int
    mode: str
    network: str
    strategy: str
    devices: int
    dropout: float
    samples: int
    batch_size: int
    window: int
    clipping: tuple[float, str] | None
    adam: bool
    schedule: str
    masked: bool
    groups: bool
    grow_after: int
    failures: dict[Key, list[str]] = field(default_factory=dict)
    factors: dict[Key, list[int]] = field(default_factory=dict)

    @property
    def is_bitwise(self) -> bool:
        """Return True if bits are compared, too: other parts of a batch, or gradients sent already, round otherwise."""
        return self.mode != "policy" and self.strategy in ("single_device", "dp")


@dataclass
class Outcome:
    """Outcome of a run."""

    weights: list[Tensor]
    logged: dict[str, float]
    gradients: list[list[Tensor]]
    steps: int
    rates: list[float]
    seen: list[int]
    random_state: Tensor
    events: int
    equal: bool = True  # in all processes


def draw(seed: int, strategies: tuple[str, ...]) -> Case:
    """A case, by its seed."""
    dice = random.Random(seed)
    strategy = dice.choice(strategies)
    mode = dice.choice(("again", "split", "policy"))
    dropout = dice.choice((0.0, 0.3)) if mode != "policy" and strategy in ("single_device", "dp") else 0.0
    case = Case(
        seed=seed,
        mode=mode,
        network=dice.choice(list(NETWORKS)),
        strategy=strategy,
        devices=1 if strategy == "single_device" else dice.choice((2, 3)),
        dropout=dropout,
        samples=dice.randint(20, 45),
        batch_size=dice.randint(6, 12),
        window=dice.randint(1, 3),
        clipping=dice.choice((None, (0.05, "norm"), (0.01, "value"))),
        adam=dice.random() < 0.4,
        schedule=dice.choice(("none", "step", "epoch")),
        masked=dice.random() < 0.3,
        groups=dice.random() < 0.3,
        grow_after=dice.choice((0, 1, 2)),
    )
    ranks = case.devices if strategy == "ddp" else 1
    places = [(rank, epoch, batch) for rank in range(ranks) for epoch in range(2) for batch in range(4)]
    for key in dice.sample(places, dice.randint(1, 4)):
        times = dice.choice((1, 1, 1, 2, 3))
        case.failures[key] = [dice.choice(PHASES) for _ in range(times)]
        case.factors[key] = [1 if mode == "again" else dice.choice((2, 3)) for _ in range(times)]
    return case


class Injector:
    """Raises errors of allocators, as planned.

    Args:
        case: The plan.
        at_once: Fail before anything was computed, once for all failures of a batch: as if it were cut from the start.
    """

    def __init__(self, case: Case, *, at_once: bool) -> None:
        self.left = {key: ["first"] if at_once else list(phases) for key, phases in case.failures.items()}
        self.waits = False  # for a backward that is to fail: other parts of the batch do not

    def next(self, key: Key, size: int) -> str:
        """The phase in which this call fails; single samples fit."""
        if self.waits or size == 1 or not self.left.get(key):
            return ""
        phase = self.left[key].pop(0)
        self.waits = phase == "backward"
        return phase

    def fail(self, gradient: Tensor) -> None:
        """A hook of a gradient."""
        self.waits = False
        raise torch.OutOfMemoryError("injected in the backward")


class Planned(Callback):
    """Cuts batches as planned."""

    def __init__(self, case: Case, *, at_once: bool) -> None:
        self.factors = {key: list(factors) for key, factors in case.factors.items()}
        self.at_once, self.events = at_once, list[Any]()

    def on_out_of_memory(self, trainer: Any, pl_module: Any, event: Any) -> Split:
        self.events.append(event)
        factors = self.factors[event.global_rank, trainer.current_epoch, event.batch_idx]
        factor = 1
        for _ in range(len(factors) if self.at_once else 1):
            factor *= factors.pop(0)
        return Split(event.parts * factor, 0)


class Module(L.LightningModule):
    """The network with logs, metrics and a schedule.

    Attributes:
        gradients: Before each step.
        rates: The learning rate of each step.
    """

    def __init__(self, case: Case, injector: Injector | None) -> None:
        super().__init__()
        torch.manual_seed(case.seed)
        self.case, self.injector = case, injector
        self.net = NETWORKS[case.network](case.dropout)
        self.accuracy, self.count, self.seen = MulticlassAccuracy(CLASSES), SumMetric(), CatMetric()
        self.gradients: list[list[Tensor]] = []
        self.rates: list[float] = []
        self.samples: list[int] = []
        self.equal = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, labels, numbers = batch
        phase = ""
        if self.injector is not None:
            phase = self.injector.next((self.global_rank, self.current_epoch, batch_idx), len(numbers))
        if phase == "first":
            raise torch.OutOfMemoryError("injected before anything")
        logits = self.net(features)
        if phase == "forward":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes.")
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        self.accuracy(logits, labels)
        self.count.update(torch.ones(len(numbers)))
        self.seen.update(numbers)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("largest", losses.detach().max(), reduce_fx="max", on_step=False, on_epoch=True)
        mask = (numbers % 3 != 1).to(losses) if self.case.masked else torch.ones_like(losses)
        loss = (losses * mask).sum() / mask.sum().clamp(min=1)
        self.log("loss", losses.detach().mean(), on_step=False, on_epoch=True)
        if phase == "late":
            raise torch.OutOfMemoryError("injected at the end of forward")
        if phase == "backward":
            assert self.injector is not None
            loss.register_hook(self.injector.fail)
        return {"loss": loss, "loss_weight": mask.sum()} if self.case.masked else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append([torch.zeros(()) if p.grad is None else p.grad.clone() for p in self.net.parameters()])
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_epoch_end(self) -> None:
        self.samples += sorted(map(int, self.seen.compute()))
        self.samples.append(-int(self.count.compute()))
        self.seen.reset(), self.count.reset()
        weights = self.trainer.strategy.gather_objects([p.detach().clone() for p in self.parameters()])
        self.equal = self.equal and all(all(map(torch.equal, weights[0], other)) for other in weights)

    def configure_optimizers(self) -> Any:
        first, *others = self.net.parameters()
        groups: Any = self.net.parameters()
        if self.case.groups:
            groups = [{"params": [first], "weight_decay": 0.1}, {"params": others}]
        kind: Any = torch.optim.AdamW if self.case.adam else torch.optim.SGD
        # Adam makes steps of gradients that are nothing but rounding, as those of an attention's keys' bias: not with
        # a large eps.
        optimizer = kind(groups, lr=0.05, **({"eps": 1e-3} if self.case.adam else {"momentum": 0.9}))
        if self.case.schedule == "none":
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2 if self.case.schedule == "step" else 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": self.case.schedule}]


def run(case: Case, how: str) -> Outcome:
    """Trains for two epochs.

    Args:
        case: What to train.
        how: "undisturbed", on one device; "alike", undisturbed, as the strategy computes; "injected"; or "from the
            start": cut the same way, by an error before anything was computed.
    """
    injected, at_once = how in ("injected", "from the start"), how == "from the start"
    injector = Injector(case, at_once=at_once) if injected else None
    recovery: Any = OOMRecovery(grow_after=case.grow_after) if case.mode == "policy" else Planned(case, at_once=at_once)
    module = Module(case, injector)
    ranks = case.devices if case.strategy == "ddp" else 1
    one = how == "undisturbed"
    trainer = Trainer(
        strategy="single_device" if one else _strategy(case),
        devices=["cpu"] * (1 if one else case.devices),
        precision="64-true",
        max_epochs=2,
        accumulate_grad_batches=case.window,
        gradient_clip_val=case.clipping and case.clipping[0],
        gradient_clip_algorithm=case.clipping and case.clipping[1],
        callbacks=[recovery] if injected else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(case.seed)
    features, labels = torch.randn(case.samples, TOKENS, FEATURES), torch.randint(CLASSES, (case.samples,))
    data = TensorDataset(features, labels, torch.arange(case.samples))
    batch_size = case.batch_size * (ranks if one else 1)
    trainer.fit(module, DataLoader(data, batch_size=batch_size, shuffle=case.strategy != "ddp"))
    return Outcome(
        weights=[p.detach() for p in module.net.parameters()],
        logged={name: float(value) for name, value in trainer.callback_metrics.items()},
        gradients=module.gradients,
        steps=trainer.global_step,
        rates=module.rates,
        seen=module.samples,
        random_state=torch.get_rng_state(),
        events=len(recovery.events) if injected else 0,
        equal=module.equal,
    )


def _strategy(case: Case) -> Any:
    dice = random.Random(case.seed)
    if case.strategy == "balanced":
        return BalancedDataParallelStrategy(shares=[dice.randint(1, 4) for _ in range(case.devices)])
    if case.strategy == "ddp":
        return DDPStrategy(bucket_megabytes=dice.choice((1e-4, 1)), timeout=60)
    return case.strategy
