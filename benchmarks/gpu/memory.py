"""Items 5 and 6: readings of memory against the allocator's own, and steps that run out of memory."""

import gc
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.gpu.campaign import Row
from benchmarks.gpu.measuring import Setting, seconds_of
from benchmarks.gpu.networks import QUIET, Task, Training, adam, convolution, difference, mlp, sgd, transformer
from benchmarks.gpu.steps import first_line, quiet
from equipoise import Callback, MemoryLogger, OOMRecovery, Trainer
from equipoise.memory.devices import read_memory

__all__ = ["MIB", "collected", "make_workspaces", "readings", "recovery"]

MIB = 2**20
WORKSPACE = 64 * MIB
"""Memory that libraries take for themselves, which no tensor holds."""
STEP = 3
"""The step that is looked at: the optimiser has its state."""


def train(module: Any, batches: list[Any], setting: Setting, *callbacks: Callback, **options: Any) -> Trainer:
    """Train on ready batches."""
    trainer = Trainer(devices=[setting.device], callbacks=list(callbacks), **{**QUIET, "max_epochs": 1, **options})
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return trainer


def collected(setting: Setting) -> int:
    """Return the bytes in live tensors, after what can be freed is."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(setting.device)


def make_workspaces(setting: Setting) -> None:
    """Multiply matrices in a forward and a backward, so that libraries have their workspaces, which stay.

    CuBLAS has one for each thread that multiplies: 65 MiB on an H100, more than a small network takes.
    """
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(256, 256).to(setting.device, dtype)
        features = torch.ones(256, 256, device=setting.device, dtype=dtype)
        layer(features).sum().backward()


# Item 5


class Peak(Callback):
    """Measures the peak of one step by the allocator's own count."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nbytes = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin."""
        if batch_idx == STEP:
            torch.cuda.reset_peak_memory_stats(self.device)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End."""
        if batch_idx == STEP:
            self.nbytes = torch.cuda.max_memory_allocated(self.device)


def readings(setting: Setting) -> Iterator[Row]:
    """Compare MemoryLogger's compositions with the allocator's peaks."""
    quiet()
    make_workspaces(setting)
    for task in (mlp(setting), convolution(setting), transformer(setting)):
        batches = task.batches(STEP + 2, torch.device("cpu"))
        # 1. What the allocator counts, without what was there before.
        before = collected(setting)
        peak = Peak(setting.device)
        train(Training(task), batches, setting, peak)
        counted = peak.nbytes - before
        # 2. What MemoryLogger finds, tensor by tensor.
        collected(setting)
        memory = MemoryLogger(detail="modules", detail_steps=[STEP], leaks=False)
        train(Training(task), batches, setting, memory)
        (composition,) = (found for found in memory.compositions if found.device == str(setting.device))
        missing = counted - composition.nbytes
        yield Row(f"{task.name}: peak by the allocator", counted / MIB, "MiB")
        yield Row(f"{task.name}: peak by MemoryLogger", composition.nbytes / MIB, "MiB")
        what = f"{task.name}: difference beyond workspaces of {WORKSPACE // MIB} MiB, by the peak"
        yield Row.at_most(what, max(0, abs(missing) - WORKSPACE) / counted, 0.05)
    seconds = seconds_of(lambda: read_memory(setting.device), setting, setting.pick(1000, 5))
    yield Row.at_most("a reading", 1e6 * seconds, 100, "µs", is_time=True)


# Item 6


def wide(samples: int, width: int) -> Task:
    """Return a task whose activations need far more memory than its parameters."""
    layers = 4

    def make() -> nn.Module:
        torch.manual_seed(0)
        hidden = [nn.Sequential(nn.Tanh(), nn.Linear(width, width)) for _ in range(layers)]
        return nn.Sequential(nn.Linear(8, width), *hidden, nn.Tanh(), nn.Linear(width, 10)).double()

    return Task("wide", make, partial(random_batch, (samples, 8)))


def images(samples: int, pixels: int) -> Task:
    """Return a task of convolutions, whose algorithms need workspaces."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for index in range(4):
            layers += [nn.Conv2d(3 if index == 0 else 32, 32, 3, padding=1), nn.Tanh()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).double()

    return Task("convolutions", make, partial(random_batch, (samples, 3, pixels, pixels)))


def random_batch(shape: tuple[int, ...], number: int) -> tuple[Tensor, Tensor]:
    """Return features in float64, and labels."""
    draw = torch.Generator().manual_seed(number)
    features = torch.randn(shape, generator=draw, dtype=torch.float64)
    return features, torch.randint(10, shape[:1], generator=draw)


class HeavyBackward(torch.autograd.Function):
    """The identity, whose backward needs many times its own memory."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        """Return a copy."""
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient, by way of a large tensor."""
        large = gradient.repeat(1, 2000)
        return large[:, : gradient.size(1)].clone()


class Heavy(nn.Module):
    """A network with a heavy backward."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, features: Tensor) -> Tensor:
        return HeavyBackward.apply(self.network(features))


def heavy(task: Task) -> Task:
    """Return the same with a heavy backward."""
    return Task("heavy backward", lambda: Heavy(task.make()), task.batch)


class Limited(Callback):
    """Measures what a step needs, or limits the device to a part of it.

    Args:
        setting: Where.
        limit: Bytes that may be taken; None: no limit.
    """

    def __init__(self, setting: Setting, limit: int | None = None) -> None:
        self.setting = setting
        self.limit = limit
        self.held = 0
        self.needed = 0
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a step, in the second one with the limit."""
        if batch_idx == 1:
            self.held = collected(self.setting)
            torch.cuda.reset_peak_memory_stats(self.setting.device)
            if self.limit is not None:
                set_limit(self.setting, self.limit)
        self.setting.wait()
        self._begun = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a step."""
        self.setting.wait()
        self.seconds.append(time.perf_counter() - self._begun)
        if batch_idx == 1:
            self.needed = torch.cuda.max_memory_allocated(self.setting.device)


def set_limit(setting: Setting, limit: int) -> None:
    """Limit the memory that may be taken; 0: no limit."""
    if setting.is_simulated:
        from tests.simulated.devices.installation import extension

        extension().set_limit(0, limit)
        return
    total = torch.cuda.get_device_properties(setting.device).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total if limit else 1.0, setting.device)


def recovery(setting: Setting) -> Iterator[Row]:
    """Compare steps that were done again with steps that had enough memory."""
    quiet()
    samples, width = setting.pick((8192, 512), (2048, 16))
    in_forward = wide(samples, width)
    # Many samples and little work, for many steps.
    narrow = wide(*setting.pick((65536, 64), (2048, 16)))
    convolutions = images(*setting.pick((256, 64), (16, 16)))
    many = setting.pick(200, 10)
    # Parameters need far more memory than activations, or the other way round.
    many_parameters = wide(16, setting.pick(2048, 64))
    many_samples = wide(*setting.pick((65536, 512), (2048, 16)))
    cases = {
        "wide, 2 times the memory": partial(recovered, in_forward, 2.0, setting),
        f"narrow, 8 times the memory, {many} steps": partial(recovered, narrow, 8.0, setting, steps=many),
        "heavy backward, 2 times the memory": partial(recovered, heavy(in_forward), 2.0, setting),
        "convolutions, 2 times the memory": partial(recovered, convolutions, 2.0, setting),
        "convolutions, cudnn.benchmark, 2 times the memory": partial(
            recovered, convolutions, 2.0, setting, benchmark=True
        ),
        "optimiser's step": partial(in_optimizer, many_parameters, setting),
        "evaluation, 2 times the memory": partial(in_evaluation, many_samples, setting),
    }
    for name, rows in cases.items():
        try:
            yield from rows(name)
        except Exception as error:
            yield Row.holds(name, False, first_line(error))
        finally:
            set_limit(setting, 0)


def recovered(
    task: Task, times: float, setting: Setting, name: str, *, steps: int | None = None, benchmark: bool = False
) -> Iterator[Row]:
    """Train with enough memory and without."""
    different = 5
    batches = task.batches(different, torch.device("cpu"))
    batches = batches * ((steps or setting.pick(20, different)) // different)
    options = {"benchmark": benchmark}
    # 1. With enough: what a step needs.
    collected(setting)
    enough = Limited(setting)
    expected = Training(task, sgd)
    train(expected, batches, setting, enough, **options)
    expected.cpu()
    limit = enough.held + int((enough.needed - enough.held) / times) + allowance(setting)
    # 2. Without.
    collected(setting)
    limited = Limited(setting, limit)
    armed = OOMRecovery()
    actual = Training(task, sgd)
    train(actual, batches, setting, limited, armed, **options)
    waste = torch.cuda.memory_reserved(setting.device) - torch.cuda.memory_allocated(setting.device)
    set_limit(setting, 0)
    actual.cpu()
    phases = sorted({event.phase for event in armed.events})
    yield Row.holds(f"{name}: ran out of memory ({', '.join(phases)})", bool(armed.events))
    yield Row.at_most(f"{name}: largest difference of weights", difference(expected, actual), 1e-12)
    yield Row(f"{name}: micro-batches", max((event.parts for event in armed.events), default=0) * 2)
    yield Row.time(f"{name}: step in which it ran out, by a usual one", limited.seconds[1] / enough.seconds[-1], "")
    yield Row.time(f"{name}: later steps, by usual ones", limited.seconds[-1] / enough.seconds[-1], "")
    yield Row(f"{name}: reserved and not used at the end", waste / MIB, "MiB")


class Holding(OOMRecovery):
    """Holds memory that an optimiser needs for its state, and gives it back when that runs out of memory.

    Args:
        setting: Where.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting = setting
        self.held: Tensor | None = None

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Leave memory for half of the state of Adam in the first step."""
        if trainer.global_step:
            return
        collected(self.setting)
        nbytes = sum(parameter.nbytes for parameter in pl_module.parameters())
        self.held = torch.empty(4 * nbytes, dtype=torch.uint8, device=self.setting.device)
        set_limit(self.setting, torch.cuda.memory_reserved(self.setting.device) + nbytes)

    def on_out_of_memory(self, trainer: Any, pl_module: Any, event: Any) -> Any:
        """Give it back."""
        self.held = None
        return super().on_out_of_memory(trainer, pl_module, event)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Limit nothing else."""
        set_limit(self.setting, 0)


def in_optimizer(task: Task, setting: Setting, name: str) -> Iterator[Row]:
    """Let the step of an optimiser run out of memory."""
    batches = task.batches(3, torch.device("cpu"))

    def run(*callbacks: Callback) -> Training:
        module = Training(task, adam)
        train(module, batches, setting, *callbacks)
        return module.cpu()

    expected = run()
    armed = Holding(setting)
    actual = run(armed)
    yield from verdicts(name, armed, "optimizer step", difference(expected, actual))


def in_evaluation(task: Task, setting: Setting, name: str) -> Iterator[Row]:
    """Validate with half of the memory that it needs."""
    batches: Any = DataLoader(task.batches(3, torch.device("cpu")), batch_size=None)  # type: ignore[arg-type]
    module = Training(task, sgd)

    def validate(*callbacks: Callback) -> float:
        trainer = Trainer(devices=[setting.device], callbacks=list(callbacks), **QUIET)
        (metrics,) = trainer.validate(module, batches, verbose=False)
        return metrics["val_loss"]

    validate()
    held = collected(setting)
    torch.cuda.reset_peak_memory_stats(setting.device)
    expected = validate()
    needed = torch.cuda.max_memory_allocated(setting.device) - held
    held = collected(setting)
    set_limit(setting, held + needed // 2 + allowance(setting))
    armed = OOMRecovery()
    actual = validate(armed)
    set_limit(setting, 0)
    yield from verdicts(name, armed, "evaluation", abs(actual - expected) / abs(expected))


def verdicts(name: str, armed: OOMRecovery, phase: str, largest: float) -> Iterator[Row]:
    """Tell where memory ran out, and what that has changed."""
    phases = sorted({event.phase for event in armed.events})
    yield Row.holds(f"{name}: ran out of memory ({', '.join(phases)})", phases == [phase])
    yield Row.at_most(f"{name}: largest difference", largest, 1e-12)


def allowance(setting: Setting) -> int:
    """Return the memory that the allocator and libraries need beside tensors."""
    return 0 if setting.is_simulated else WORKSPACE
