"""State of members: logs, predictions, checkpoints and resumption."""

import gc
import random
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import prune
from torchmetrics import SumMetric

from equipoise import (
    CheckpointError,
    ConfigurationError,
    EnsembleStrategy,
    OOMRecovery,
    StepError,
    Trainer,
    split_ensemble,
)
from equipoise.extensions.ensemble.gradients import WeightsOfMembers
from tests.extensions.ensemble.runs import (
    CLOSE,
    Classifier,
    OfAnyLoaders,
    SavesAt,
    alone,
    assert_members,
    ensemble,
    loader,
    states_alone,
    trainer,
)
from tests.support.equality import assert_equal
from tests.support.pairs import pairwise
from tests.support.trainer_runs import refuses

SEED = 21


@pytest.mark.parametrize("mode", ["together", "one_by_one"])
def test_logs_are_means_and_evaluations_log_each_member(mode: Any) -> None:
    _, run, _ = ensemble(SEED, mode=mode)
    of_members = [alone(SEED + member)[1].callback_metrics for member in range(3)]
    for name in ("loss_step", "loss_epoch", "val_loss", "accuracy"):
        mean = sum(float(metrics[name]) for metrics in of_members) / 3
        assert float(run.callback_metrics[name]) == pytest.approx(mean, rel=1e-6)
    for name in ("val_loss", "accuracy"):
        for member, metrics in enumerate(of_members):
            logged = float(run.callback_metrics[f"{name}/member_{member}"])
            assert logged == pytest.approx(float(metrics[name]), rel=1e-6)
    assert "loss_epoch/member_0" not in run.callback_metrics
    assert "val_loss/member_0" not in run.progress_bar_metrics


class Reporting(Classifier):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        p = self(batch[0]).softmax(-1)
        return {"p": p, "label": batch[1], "score": p[0, 0].item(), "names": ["a", ("b", p.mean())]}


def test_predictions_are_averaged() -> None:
    """Numbers and tensors in any containers; labels and texts are the same for all members."""
    strategy, run, module = ensemble(SEED, Reporting)
    outputs = run.predict(module, loader(shuffle=False))
    expected = []
    for batch in loader(shuffle=False):
        p = torch.stack([member(batch[0]).softmax(-1) for member in strategy.member_modules()]).detach().mean(0)
        expected.append({"p": p, "label": batch[1], "score": p[0, 0].item(), "names": ["a", ("b", p.mean())]})
    assert_equal(expected, outputs, CLOSE)


@pytest.mark.parametrize(
    "of_logits",
    [
        lambda logits: logits.argmax(-1),
        lambda logits: f"class {logits.argmax()} of the batch",
        lambda logits: logits[logits > 0.4],
    ],
    ids=["whole numbers", "texts", "shapes"],
)
def test_predictions_without_a_mean_come_as_a_list(of_logits: Any) -> None:
    class Other(Classifier):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return of_logits(self(batch[0]))

    strategy, run, module = ensemble(SEED, Other)
    (first, *_) = run.predict(module, loader(shuffle=False)) or []
    (batch, *_) = loader(shuffle=False)
    expected = [of_logits(member(batch[0]).detach()) for member in strategy.member_modules()]
    assert_equal(expected, first, CLOSE)


@pytest.mark.quick_cases(5)
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("optimizer", "steps", "before", "after"),
    [
        *((*case, "one_by_one", "one_by_one") for case in pairwise(["adam", "sgd", "adafactor"], [3, 8, 11])),
        ("sgd", 3, "together", "together"),
        ("adam", 8, "together", "one_by_one"),
        ("adam", 11, "one_by_one", "together"),
    ],
)
def test_a_resumed_ensemble_ends_as_an_uninterrupted_one(
    optimizer: str, steps: int, before: str, after: str, tmp_path: Path
) -> None:
    """In the middle of a window, at the end of an epoch, and in the second epoch; in the same way or the other."""
    module = partial(Classifier, optimizer=optimizer)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    whole, _, _ = ensemble(SEED, module, mode="one_by_one", **options)
    expected = [member.state_dict() for member in whole.member_modules()]

    ensemble(SEED, module, mode=before, callbacks=[SavesAt(steps, tmp_path / "x.ckpt")], **options)
    seed_everything(99, verbose=False)
    strategy, resumed = EnsembleStrategy(members=3, mode=after), module()
    trainer(strategy, **options).fit(resumed, loader(), loader(shuffle=False), ckpt_path=tmp_path / "x.ckpt")
    assert_members(expected, strategy, 0.0 if before == after == "one_by_one" else CLOSE)


def with_private_generator(seed: int) -> Any:
    return loader(generator=torch.Generator().manual_seed(seed))


@pytest.mark.thorough
def test_files_of_members_hold_the_weights_of_runs_of_their_own(tmp_path: Path) -> None:
    ensemble(SEED, callbacks=[SavesAt(8, tmp_path / "all.ckpt")])
    files = split_ensemble(tmp_path / "all.ckpt", tmp_path / "members")
    assert [file.name for file in files] == [f"all-member_{member}.ckpt" for member in range(3)]
    for member, file in enumerate(files):
        alone(SEED + member, callbacks=[SavesAt(8, tmp_path / "own.ckpt")])
        own, split = (Classifier.load_from_checkpoint(path) for path in (tmp_path / "own.ckpt", file))
        assert_equal(own, split, CLOSE)


def with_two_generators(seed: int) -> Any:
    return {"first": with_private_generator(seed), "second": with_private_generator(seed)}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("data", "batches", "window"),
    [
        (lambda seed: loader(), 4, 3),
        (lambda seed: loader(shuffle=False), 11, 1),
        (with_private_generator, 8, 3),
        (with_two_generators, 11, 1),
    ],
    ids=["shuffled", "in order", "private generator", "two generators"],
)
def test_random_numbers_and_orders_go_on_in_a_resumed_ensemble_and_in_files_of_members(
    data: Any, batches: int, window: int, tmp_path: Path
) -> None:
    """Within a window or an epoch, and at the end of one."""
    options = {"accumulate_grad_batches": window}

    def resume(strategy: Any, file: Path) -> Any:
        seed_everything(99, verbose=False)
        model = OfAnyLoaders()
        trainer(strategy, **options).fit(model, data(99), loader(shuffle=False), ckpt_path=file)
        return model.state_dict()

    file = tmp_path / "x.ckpt"
    saving = [SavesAt(batches, file)]
    ensemble(SEED, OfAnyLoaders, partial(data, SEED), mode="one_by_one", callbacks=saving, **options)
    expected = [
        alone(seed, OfAnyLoaders, partial(data, seed), **options)[0].state_dict() for seed in range(SEED, SEED + 3)
    ]
    strategy = EnsembleStrategy(members=3, mode="one_by_one")
    resume(strategy, file)
    assert_members(expected, strategy)
    assert_equal(expected, [resume("single_device", split) for split in split_ensemble(file)])


@pytest.mark.parametrize("weights_only", [False, True])
def test_an_evaluation_loads_all_members(weights_only: bool, tmp_path: Path) -> None:
    _, run, module = ensemble(SEED)
    run.save_checkpoint(tmp_path / "x.ckpt", weights_only=weights_only)
    expected = run.predict(module, loader(shuffle=False))
    outputs = trainer(EnsembleStrategy(members=3)).predict(
        Classifier(), loader(shuffle=False), ckpt_path=tmp_path / "x.ckpt"
    )
    assert_equal(expected, outputs, CLOSE)


def test_the_checkpoint_is_the_first_members(tmp_path: Path) -> None:
    _, run, _ = ensemble(SEED)
    run.save_checkpoint(tmp_path / "x.ckpt")
    first = Classifier.load_from_checkpoint(tmp_path / "x.ckpt").state_dict()
    assert_equal(alone(SEED)[0].state_dict(), first, CLOSE)
    # Not the memory of all members in each tensor.
    assert first["net.0.weight"].untyped_storage().nbytes() == first["net.0.weight"].nbytes


def test_checkpoints_of_other_runs_are_refused(tmp_path: Path) -> None:
    _, run = alone(SEED)
    run.save_checkpoint(tmp_path / "one.ckpt")
    _, run, _ = ensemble(SEED)
    run.save_checkpoint(tmp_path / "three.ckpt")

    def fit(members: int, name: str) -> None:
        trainer(EnsembleStrategy(members=members), max_epochs=3).fit(
            Classifier(), loader(), loader(shuffle=False), ckpt_path=tmp_path / name
        )

    refuses(lambda: fit(3, "one.ckpt"), "holds one model", "3 members", error=CheckpointError)
    refuses(lambda: fit(2, "three.ckpt"), "EnsembleStrategy(members=3)", error=CheckpointError)
    refuses(lambda: split_ensemble(tmp_path / "one.ckpt"), "holds one model", error=CheckpointError)


# What is refused


class WithoutHyperparameters(Classifier):
    def __init__(self, width: int) -> None:
        super().__init__()
        del self.hparams["optimizer"]
        self._hparams.clear()


class Constant(Classifier):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)


class ByHand(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Lbfgs(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Clipping(Classifier):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        pass


class ForeignParameter(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)


def with_gradient_hook() -> Classifier:
    module = Classifier()
    module.net[0].weight.register_hook(lambda gradient: None)
    return module


def changed_after_its_construction() -> Classifier:
    module = Classifier()
    module.net.append(nn.Linear(3, 3).double())
    return module


class Counting(Classifier):
    """Counts its samples by a metric in a dictionary, which is filled at once or in the first step."""

    def __init__(self, kind: Any = dict, is_filled: bool = True) -> None:
        super().__init__()
        self.counts = kind()
        if is_filled:
            self.fill()

    def fill(self) -> None:
        self.counts["n"] = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.counts:
            self.fill()
        self.counts["n"].update(len(batch[0]))
        self.log("n", self.counts["n"], on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_a_metric_in_a_module_dict_is_of_each_member() -> None:
    _, run, _ = ensemble(SEED, partial(Counting, nn.ModuleDict), partial(loader, 28), max_epochs=1)
    assert run.callback_metrics["n"] == 28


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lambda: WithoutHyperparameters(3), {}, "needs width"),
        (Constant, {}, "the members would be equal"),
        (ByHand, {}, "automatic_optimization=False"),
        (Lbfgs, {}, "cannot step LBFGS"),
        (Clipping, {}, "configure_gradient_clipping"),
        (ForeignParameter, {}, "a parameter of shape [3] that is none of the module's"),
        (with_gradient_hook, {}, "The parameter 'net.0.weight' has a hook"),
        (changed_after_its_construction, {}, "differs from the module that is trained, in net.3.bias, net.3.weight"),
        (Counting, {}, "The metric counts.n (SumMetric) lies in"),
        (
            Classifier,
            {"callbacks": [EMAWeightAveraging()]},
            "EMAWeightAveraging would average",
        ),
        (
            Classifier,
            {"precision": "16-mixed"},
            "(16-mixed): an overflow",
        ),
    ],
)
def test_modules_and_options_that_are_refused(make: Any, options: dict[str, Any], words: str) -> None:
    run = trainer(EnsembleStrategy(members=2), **options)
    refuses(lambda: run.fit(make(), loader(), loader(shuffle=False)), words)


def test_a_metric_that_the_members_come_to_share_is_refused() -> None:
    run = trainer(EnsembleStrategy(members=2, mode="one_by_one"))
    module = Counting(is_filled=False)
    refuses(
        lambda: run.fit(module, loader(), loader(shuffle=False)),
        "logs a SumMetric",
        "nn.ModuleList",
        "nn.ModuleDict",
        error=StepError,
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: EnsembleStrategy(members=1), "members must be an integer of at least 2"),
        (lambda: EnsembleStrategy(members=2, seeds=[1, 1]), "2 different numbers"),
        (lambda: EnsembleStrategy(members=2, seeds=[1]), "2 different numbers"),
        (lambda: EnsembleStrategy(factory=3), "factory must be a function"),  # type: ignore[arg-type]
        (lambda: EnsembleStrategy(mode="fast"), "mode must be"),  # type: ignore[arg-type]
        (lambda: EnsembleStrategy(own_order=1), "own_order must be"),  # type: ignore[arg-type]
        (lambda: EnsembleStrategy(members=2).member_modules(), "There are no members yet"),
        (lambda: Trainer(strategy="ensemble", devices=["cpu", "cpu"], logger=False), "on one device"),
    ],
)
def test_arguments_devices_and_members_before_a_run_are_refused(call: Any, words: str) -> None:
    refuses(call, words)


def test_members_from_a_factory_with_given_seeds() -> None:
    seed_everything(5, verbose=False)
    strategy = EnsembleStrategy(members=3, seeds=[5, 50, 7], factory=partial(Classifier, width=16))
    trainer(strategy).fit(Classifier(width=16), loader(), loader(shuffle=False))
    # Only the strategy holds the members now.
    gc.collect()
    expected = [alone(seed)[0].state_dict() for seed in (5, 50, 7)]
    assert_members(expected, strategy, CLOSE)


def test_members_that_a_factory_does_not_make_anew_are_refused() -> None:
    module = Classifier()

    def sharing() -> Classifier:
        member = Classifier()
        member.net[0] = module.net[0]
        return member

    for factory, words in (
        (lambda: module, "shares net.0.weight"),
        (lambda: None, "factory must return a new Classifier"),
        (sharing, "shares net.0.weight, net.0.bias with the module"),
    ):
        run = trainer(EnsembleStrategy(members=2, factory=factory))
        refuses(lambda run=run: run.fit(module, loader(), loader(shuffle=False)), words)


class Attributed(Classifier):
    """Its constructor makes attributes beside the weights, for the outermost module and for its network."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.name = str(torch.rand(()))
        self.net.options = [draw()]


class Prepared(Classifier):
    """Its tensors beside the weights are of each member, are computed from weights, or are not for training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.rand(3), persistent=False)
        self.example_input_array = torch.randn(1, 8)
        prune.l1_unstructured(self.net[0], "weight", 0.3)


def test_tensors_that_members_do_not_share_may_depend_on_the_seed() -> None:
    """Of two members, one of which has the seed that follows that of the other."""
    strategy = EnsembleStrategy(members=2, seeds=[6, 5], factory=Prepared)
    seed_everything(6, verbose=False)
    trainer(strategy).fit(Prepared(), loader(), loader(shuffle=False))
    assert_members([alone(seed, Prepared)[0].state_dict() for seed in (6, 5)], strategy, CLOSE)


class HookedBy(Classifier):
    """A hook has a value of the constructor."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        factor = draw()
        self.net[0].register_forward_hook(lambda layer, args, output: factor * output)


DRAWS: dict[str, Callable[[], Any]] = {
    "a number": random.random,
    "a tensor": lambda: torch.rand(3),
    "an array": lambda: numpy.random.rand(2000),
    "a generator": lambda: torch.Generator().manual_seed(random.randrange(2**20)),
}


@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.parametrize("kind", DRAWS)
def test_attributes_that_depend_on_the_seed_are_refused(kind: str, members: int) -> None:
    for module, place in (
        (Attributed, r"Attributed\.net\.options(\[0\])?"),
        (HookedBy, r"HookedBy\.net\.0\._forward_hooks\[\d+\]\.factor"),
    ):
        factory = partial(module, DRAWS[kind])
        run = trainer(EnsembleStrategy(members=members, factory=factory))
        with pytest.raises(ConfigurationError, match=f"^{place} depends on the seed"):
            run.fit(factory(), loader(), loader(shuffle=False))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: 3.0,
        lambda: torch.arange(3),
        lambda: numpy.arange(2000),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.tensor(torch.nan),
        lambda: torch.ones(3).to(torch.float8_e4m3fn),
        lambda: random.uniform,
        time.perf_counter_ns,
    ],
    ids=["a number", "a tensor", "an array", "without elements", "not a number", "short", "of the program", "the time"],
)
def test_attributes_that_do_not_depend_on_the_seed(draw: Callable[[], Any]) -> None:
    factory = partial(Attributed, draw)
    strategy = EnsembleStrategy(members=2, factory=factory)
    seed_everything(SEED, verbose=False)
    trainer(strategy).fit(factory(), loader(), loader(shuffle=False))
    assert_members(states_alone(SEED, 2, factory), strategy, CLOSE)


def test_a_step_that_runs_out_of_memory_is_not_repeated_in_parts() -> None:
    class Hungry(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise torch.OutOfMemoryError("too many samples")

    recovery = OOMRecovery()
    with pytest.raises(torch.OutOfMemoryError, match="too many samples"):
        ensemble(SEED, Hungry, callbacks=[recovery])
    assert "an ensemble does not repeat steps" in recovery.events[0].obstacle


def test_the_quicker_way_is_measured_and_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        ensemble(SEED, mode="auto")
    ways = "The ensemble's members are trained (side by side|one by one): .* ms for a step of all members side by side"
    assert re.search(ways, caplog.text)


def test_an_error_in_the_step_of_a_member_ends_the_run() -> None:
    class Failing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.net(batch[0] * 1)
            if batch_idx == 3 and not torch.equal(self.net[0].weight, self.trainer.lightning_module.net[0].weight):
                raise ValueError("a member")
            return logits.square().mean()

    with pytest.raises(ValueError, match="a member"):
        ensemble(SEED, Failing)


def test_weights_on_a_device_without_float64() -> None:
    """On MPS, here with tensors that have no values."""
    weights = WeightsOfMembers()
    with FakeTensorMode():
        weight = torch.ones((), device="mps")
        weights.load_state_dict({"totals": [weight, 2], "common": weight, "equal": False})
        factors = weights.correction()
    assert factors is not None
    assert (factors.device.type, factors.dtype) == ("mps", torch.float32)
