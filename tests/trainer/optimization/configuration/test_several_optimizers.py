"""Several optimisers in automatic optimisation: every form, and what is refused or told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, LearningRateFinder
from torch import nn
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from equipoise import EnsembleStrategy
from tests.support.trainer_runs import Small, loader, refuses, refuses_fit, trainer, with_optimizers

pytestmark = pytest.mark.filterwarnings("ignore:Found unsupported keys in the optimizer configuration")


def pair(module: Any) -> tuple[SGD, Adam]:
    """An optimiser for each parameter."""
    return SGD([module.layer.weight], lr=0.1), Adam([module.layer.bias], lr=0.2)


def schedule(optimizer: Any) -> dict[str, Any]:
    return {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"}


# In those with a scheduler, it is one of the second optimiser.
FORMS: dict[str, Callable[[Any], Any]] = {
    "a list": lambda m: list(pair(m)),
    "a tuple": pair,
    "two lists": lambda m: (lambda o: (list(o), [schedule(o[1])]))(pair(m)),
    "dictionaries": lambda m: (lambda o: [{"optimizer": o[0]}, {"optimizer": o[1], "lr_scheduler": schedule(o[1])}])(
        pair(m)
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_two_optimisers_with_schedulers(form: str) -> None:
    module = with_optimizers(FORMS[form])
    before = [parameter.detach().clone() for parameter in module.parameters()]
    run = trainer()
    run.fit(module, loader(3))
    assert run.global_step == 3
    assert [type(optimizer) for optimizer in run.optimizers] == [SGD, Adam]
    assert [type(optimizer.optimizer) for optimizer in module.optimizers()] == [SGD, Adam]
    second = 0.2 / 8 if form in ("two lists", "dictionaries") else 0.2
    assert [optimizer.param_groups[0]["lr"] for optimizer in run.optimizers] == pytest.approx([0.1, second])
    assert not any(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize("as_entry", [True, False])
def test_one_of_two_optimisers_may_have_a_plateau(as_entry: bool) -> None:
    """The monitor stands beside the scheduler, or in its dictionary."""

    def configure(module: Any) -> Any:
        first, second = pair(module)
        plateau: Any = ReduceLROnPlateau(first, factor=0.5, patience=0, threshold=10.0)
        if as_entry:
            plateau = {"scheduler": plateau}
        return {"optimizer": first, "lr_scheduler": plateau, "monitor": "loss"}, {"optimizer": second}

    run = trainer(max_epochs=3)
    run.fit(with_optimizers(configure), loader(2))
    assert [optimizer.param_groups[0]["lr"] for optimizer in run.optimizers] == [0.1 / 8, 0.2]


class TwiceAStep(SGD):
    """An optimiser of another library that computes the loss again."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure()
        return super().step(closure)


REFUSED: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "a parameter of two": (
        lambda m: [SGD(m.parameters(), 0.1), Adam([m.layer.bias])],
        ["layer.bias would be stepped by two", "SGD (optimiser 0)", "Adam (optimiser 1)", "GAN"],
    ),
    "a parameter that the module lacks": (
        lambda m: (lambda p: [SGD([p], 0.1), Adam([p])])(nn.Parameter(torch.ones(3))),
        ["shape (3,) outside the module"],
    ),
    "LBFGS": (lambda m: [LBFGS([m.layer.weight]), Adam([m.layer.bias])], ["LBFGS", "several times"]),
    "one that needs a closure": (
        lambda m: [TwiceAStep([m.layer.weight], 0.1), Adam([m.layer.bias])],
        ["TwiceAStep computes a batch several times"],
    ),
    "a frequency": (
        lambda m: [{"optimizer": o, "frequency": 2} for o in pair(m)],
        ["'frequency'", "self.automatic_optimization = False", "self.optimizers()"],
    ),
    "a scheduler of a third": (lambda m: (list(pair(m)), [StepLR(SGD(m.parameters(), 0.1), 1)]), ["StepLR", "another"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_two_optimisers_that_cannot_be_stepped_together_are_refused(name: str) -> None:
    configure, words = REFUSED[name]
    refuses_fit(with_optimizers(configure), *words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": EnsembleStrategy(members=2)}, ["strategy='ensemble'", "returned 2"]),
        ({"step_in_backward": True}, ["step_in_backward=True", "returned 2 optimisers"]),
        ({"callbacks": [LearningRateFinder()]}, ["learning rate", "2 optimisers"]),
    ],
    ids=["ensemble", "step_in_backward", "learning rates"],
)
def test_two_optimisers_are_refused_where_one_is_needed(options: dict[str, Any], words: list[str]) -> None:
    module = with_optimizers(pair)
    module.lr = 0.1
    refuses_fit(module, *words, **options)


def test_a_callback_that_adds_a_parameter_to_two_optimisers_is_refused() -> None:
    """Lightning's callback adds the parameters of the backbone to each optimiser."""

    module = with_optimizers(pair)
    module.backbone = nn.Linear(2, 2)
    run = trainer(max_epochs=2, callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1)])
    refuses(lambda: run.fit(module, loader(1)), "backbone.weight, backbone.bias", "two of them")


def test_parameters_that_no_optimiser_steps_are_named() -> None:
    module = with_optimizers(pair)
    module.further = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
    module.further[0].weight.requires_grad_(False)
    names = r"further\.0\.bias, further\.1\.weight, further\.1\.bias, further\.2\.weight and 1 more"
    with pytest.warns(UserWarning, match=f"No optimiser .* steps {names}.*requires_grad"):
        trainer().fit(module, loader(1))


ASKED: dict[str, Callable[[Any], Any]] = {
    "Add the group": lambda optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "Ask for the state": lambda optimizer: optimizer.state_dict(),
    "Load the state": lambda optimizer: optimizer.load_state_dict({}),
}


@pytest.mark.parametrize("remedy", ASKED)
def test_what_only_one_optimiser_can_do_is_refused_with_the_remedy(remedy: str) -> None:
    class Asks(Small):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            ASKED[remedy](optimizer)

    refuses(
        lambda: trainer().fit(with_optimizers(pair, Asks), loader(1)), "2 optimisers", remedy, "`trainer.optimizers`"
    )
