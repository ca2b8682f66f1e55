"""Memory of a step is released before the next batch, that of a run at its end."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from equipoise import Trainer
from tests.support.trainer_runs import Small, Validated, loader, trainer, with_step

pytestmark = [
    pytest.mark.filterwarnings("ignore:`training_step` returned None"),
    pytest.mark.usefixtures("quick_collections"),
]


@contextmanager
def without_collection() -> Iterator[None]:
    """Turn collections off: objects are released because nothing refers to them, not because cycles are collected."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# A step


class Token:
    """Lies in a graph and lives as long."""


class Marked(torch.autograd.Function):
    """The identity, whose graph holds a token."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Watching(Validated):
    """Remembers, weakly, what belongs to the present batch."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, weakref.ref[Any]] = {}

    def loss(self, batch: Any) -> Tensor:
        token, output = Token(), self.layer(batch[0])
        loss = Marked.apply(output, token).square().mean()
        things = {"features": batch[0], "graph": token, "output": output, "loss": loss}
        self.held = {name: weakref.ref(thing) for name, thing in things.items()}
        return loss

    def alive(self) -> list[str]:
        return [name for name, thing in self.held.items() if thing() is not None]


class Checked(Dataset[Tensor]):
    """Asks, each time a sample is read, what of the last batch is still there."""

    def __init__(self, module: Watching, samples: int) -> None:
        self.module, self.samples, self.found = module, samples, []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor]:
        self.found.append(self.module.alive())
        return (torch.full((2,), float(index)),)


class Logs(Watching):
    """Logs what it can with its graph, and returns more than the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"largest": loss}, reduce_fx="max", on_epoch=True)
        return {"loss": loss, "output": loss.detach() * 2}


class Manual(Watching):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Skips(Watching):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.loss(batch)


class Lbfgs(Watching):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


CASES: dict[str, tuple[type[Watching], dict[str, Any]]] = {
    "logs": (Logs, {}),
    "manual optimisation": (Manual, {}),
    "steps without a loss": (Skips, {}),
    "a closure that is called twice": (Lbfgs, {}),
    "accumulation": (Logs, {"accumulate_grad_batches": 2}),
    "autocast": (Logs, {"precision": "bf16-mixed"}),
    "anomalies": (Logs, {"detect_anomaly": True}),
    "a profiler": (Logs, {"profiler": "simple"}),
    "a callback": (Logs, {"callbacks": [L.Callback()]}),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", CASES)
def test_a_step_leaves_nothing_to_the_next(name: str) -> None:
    """Nothing of a batch is there when the first sample of the next is read."""
    kind, options = CASES[name]
    module = kind()
    data = Checked(module, 6)
    with without_collection():
        trainer(max_epochs=2, **options).fit(module, DataLoader(data, batch_size=2), loader())
        assert data.found == [[]] * 12
        assert module.held
        assert module.alive() == []


class Evaluating(Watching):
    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch)}

    validation_step = predict_step = test_step


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_an_evaluation_step_leaves_nothing_to_the_next(entry: str) -> None:
    run, module = trainer(), Evaluating()
    data = Checked(module, 6)
    options = {"return_predictions": False} if entry == "predict" else {"verbose": False}
    with without_collection():
        getattr(run, entry)(module, DataLoader(data, batch_size=2), **options)
        assert data.found == [[]] * 6
        assert module.held
        assert module.alive() == []


class Read(IterableDataset[Any]):
    """Batches without a length, of which the trainer must read one ahead; counts those that are alive."""

    def __init__(self) -> None:
        self.batches: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most = 0

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(6):
            batch = torch.full((2, 2), float(number))
            self.batches.add(batch)
            self.most = max(self.most, len(self.batches))
            yield batch
            del batch


def test_one_batch_at_most_is_read_ahead() -> None:
    data = Read()
    with without_collection():
        trainer().fit(Small(), DataLoader(data, batch_size=None))
        assert data.most == 2
        assert len(data.batches) == 0


# A run


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_with_the_run(persistent: bool) -> None:
    before, during = children(), []

    def step(module: Any, batch: Any) -> Any:
        during.append(len(children() - before))
        return module.loss(batch)

    options = {"num_workers": 1, "persistent_workers": persistent}
    loaders = loader(1, **options), loader(1, **options)
    with without_collection():
        trainer(max_epochs=2, num_sanity_val_steps=0).fit(with_step(step, Validated), *loaders)
        assert max(during) >= 1
        assert children() == before


def state_after(cls: Any, module: Validated, **options: Any) -> dict[str, Any]:
    """Return the state that a fit leaves in a module."""
    run = trainer(cls, **options)
    run.fit(module, loader(), loader())
    return {
        "gradients": {name: p.grad is not None for name, p in module.named_parameters()},
        "devices": {p.device.type for p in module.parameters()} | {module.device.type},
        "training": {name: child.training for name, child in module.named_modules()},
        "hooks of layers": [len(child._forward_hooks) + len(child._forward_pre_hooks) for child in module.modules()],
        "requires gradients": [p.requires_grad for p in module.parameters()],
        "attached": module.trainer is run,
    }


@pytest.mark.parametrize(
    "options",
    [{"limit_val_batches": 0}, {"accumulate_grad_batches": 2, "val_check_interval": 2}, {"precision": "64-true"}],
    ids=str,
)
def test_a_module_is_left_as_lightning_leaves_it(options: dict[str, Any]) -> None:
    theirs, ours = (state_after(cls, Validated(), **options) for cls in (L.Trainer, Trainer))
    assert ours == theirs
    assert ours["devices"] == {"cpu"}
    assert ours["attached"]  # `module.trainer` still answers


def test_a_module_has_the_attributes_that_it_had() -> None:
    module = Validated()
    before = set(vars(module)), set(vars(module.layer)), dir(type(module))
    trainer().fit(module, loader(), loader())
    assert (set(vars(module)), set(vars(module.layer)), dir(type(module))) == before


@pytest.mark.parametrize("entry", ["fit", "validate", "test", "predict"])
def test_trainer_and_module_go_when_nobody_holds_them(entry: str) -> None:
    run, module = trainer(callbacks=[L.Callback()]), Validated()
    given = {"fit": (loader(), loader())}.get(entry, (loader(),))
    getattr(run, entry)(module, *given)
    held = {name: weakref.ref(thing) for name, thing in _things(run, module, given).items()}
    del run, module, given
    gc.collect()
    assert [name for name, thing in held.items() if thing() is not None] == []


def _things(run: Any, module: Any, given: Any) -> dict[str, Any]:
    optimizers = {f"optimizer {number}": optimizer for number, optimizer in enumerate(run.optimizers)}
    loaders = {f"loader {number}": loader for number, loader in enumerate(given)}
    return {"trainer": run, "module": module, "weight": module.layer.weight, **optimizers, **loaders}


def test_trainer_and_module_go_after_an_error() -> None:
    class Fails(Watching):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1:
                raise ArithmeticError
            return loss

    run, module = trainer(), Fails()
    with pytest.raises(ArithmeticError) as caught:
        run.fit(module, loader(num_workers=1), loader())
    del caught
    gc.collect()
    assert module.alive() == []
    held = weakref.ref(run), weakref.ref(module)
    del run, module
    gc.collect()
    assert [thing() for thing in held] == [None, None]


def test_a_second_run_releases_the_module_of_the_first() -> None:
    """One trainer for many modules, in a search for hyperparameters, say."""
    run, held = trainer(max_epochs=0), []
    for _ in range(3):
        run.fit_loop.max_epochs += 1
        module, given = Validated(), (loader(), loader())
        run.fit(module, *given)
        assert module.ran.count("training") == 3
        things = _things(run, module, given)
        held.append([weakref.ref(thing) for name, thing in things.items() if name != "trainer"])
        del module, given, things
    gc.collect()
    assert [sum(thing() is not None for thing in things) for things in held] == [0, 0, len(held[2])]


def test_predictions_are_kept_only_where_they_are_asked_for() -> None:
    outputs: weakref.WeakSet[Tensor] = weakref.WeakSet()

    class Module(Validated):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            output = self.layer(batch[0])
            outputs.add(output)
            return output

    run = trainer()
    with without_collection():
        run.predict(Module(), loader(), return_predictions=False)
        assert len(outputs) == 0
        kept = run.predict(Module(), loader())
        assert len(outputs) == len(kept) == 3
