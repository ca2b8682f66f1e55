"""Each trace of a forward is compared with it: a wrong branch is refused, or the submodule that has it stays whole."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import ConfigurationError
from tests.conftest import ignoring
from tests.support.pipelines import fit, pipelined, quiet
from tests.test_transparency import CLASSES, Base, Batches, Mlp, assert_same

pytestmark = ignoring("\\w+ has a `validation_step`, but")

SIZES = [13, 5]


class Asking(nn.Module):
    """Computes something else where a value is not what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(30, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def answer(self, x: Tensor) -> bool:
        raise NotImplementedError

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features.flatten(1))
        if self.answer(hidden):
            hidden = hidden * 3
        return self.last(torch.relu(self.second(hidden)))


class IsInstance(Asking):
    def answer(self, x: Tensor) -> bool:
        return isinstance(x, Tensor)


class IsTensor(Asking):
    def answer(self, x: Tensor) -> bool:
        return torch.is_tensor(x)


class IsOfType(Asking):
    def answer(self, x: Tensor) -> bool:
        return type(x) is Tensor


class HasAttribute(Asking):
    def answer(self, x: Tensor) -> bool:
        return not hasattr(x, "logits")


class HasDtype(Asking):
    def answer(self, x: Tensor) -> bool:
        return x.dtype is torch.float64


class RequiresGradient(Asking):
    def answer(self, x: Tensor) -> bool:
        return x.requires_grad is True


class Tries(Asking):
    def answer(self, x: Tensor) -> bool:
        try:
            return int(x.shape[0]) > 0
        except TypeError:
            return False


QUESTIONS = [IsInstance, IsTensor, IsOfType, HasAttribute, HasDtype, RequiresGradient, Tries]


class Asked(Base):
    """Its network is a child, called by the step."""

    def __init__(self, network: type[nn.Module]) -> None:
        super().__init__()
        self.net = network()

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch["features"]), batch["label"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_wrong_answer_in_the_network_is_refused(question):
    with pytest.raises(ConfigurationError, match="computes something else than the forward itself") as raised:
        fit(lambda: Asked(question), SIZES, **pipelined(2, micro_batches=2))
    told = str(raised.value)
    assert f"{question.__name__} cannot be cut into stages" in told
    assert "The forward goes on with Asking.forward, line 33: `hidden = hidden * 3`" in told
    assert "what was followed goes on with Asking.forward, line 34: `return self.last(" in told


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_wrong_answer_in_a_submodule_lets_that_stay_whole(question):
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.asking, self.after = nn.Linear(30, 30), question(), nn.Linear(CLASSES, CLASSES)

        def forward(self, features: Tensor) -> Tensor:
            return self.after(self.asking(self.before(features.flatten(1))))

    assert_same(fit(lambda: Asked(Network), SIZES), fit(lambda: Asked(Network), SIZES, **pipelined(2, micro_batches=2)))


def test_a_wrong_answer_is_refused_where_the_cut_is_given():
    with pytest.raises(ConfigurationError, match="goes on with Asking"):
        fit(lambda: Asked(IsInstance), SIZES, **pipelined(2, cut_before=["net.last"]))


def test_a_wrong_answer_is_refused_by_the_engine_of_processes():
    with pytest.raises(ConfigurationError, match=r"Asking\.forward, line 33: `hidden = hidden \* 3`"):
        fit(lambda: Asked(IsTensor), SIZES, **pipelined(2, engine="processes", cut_before=["net.last"]))


class OnlyInEvaluation(IsInstance):
    def answer(self, x: Tensor) -> bool:
        return not self.training and super().answer(x)


def test_a_wrong_answer_in_evaluations_alone_is_refused_there():
    module, trainer = Asked(OnlyInEvaluation).double(), quiet(**pipelined(2, micro_batches=2))
    loader = DataLoader(Batches(SIZES), batch_size=None)
    trainer.fit(module, loader)
    with pytest.raises(ConfigurationError, match="goes on with Asking"):
        trainer.validate(module, loader, verbose=False)


class Detached(Asking):
    """Has the right values, but another gradient."""

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features.flatten(1))
        other = hidden.detach() if isinstance(hidden, Tensor) else hidden
        return self.last(torch.relu(self.second(hidden) + other))


def test_another_gradient_is_refused():
    with pytest.raises(ConfigurationError, match="computes something else"):
        fit(lambda: Asked(Detached), SIZES, **pipelined(2, micro_batches=2))


class Converts(Asking):
    """Makes a tensor of what it takes for something else, as some image models do with their time steps."""

    def forward(self, features: Tensor) -> Tensor:
        if not torch.is_tensor(features):
            features = torch.stack(features.tolist())
        return self.last(torch.relu(self.second(self.first(features.flatten(1)))))


@pytest.mark.parametrize("options", [{}, {"cut_before": ["net.last"]}])
def test_a_failure_of_what_was_followed_is_a_refusal(options):
    with pytest.raises(ConfigurationError, match="fails where the forward itself does not") as raised:
        fit(lambda: Asked(Converts), SIZES, **pipelined(2, **options))
    assert "`features = torch.stack(features.tolist())`" in str(raised.value)


class Noisy(Mlp):
    """Draws from the system, so it never computes the same twice."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(Noise())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator()
        generator.seed()
        return x + 0.1 * torch.randn(x.shape, generator=generator) if bool(x.isfinite().all()) else x


def test_a_forward_that_differs_from_itself_is_not_refused():
    """It may be right, but nobody can tell. One warning says so, though calls are followed in both modes."""
    with pytest.warns(UserWarning, match="Noisy computes something else when it is called again") as caught:
        _, gradients, _ = fit(Noisy, SIZES, val=[4], **pipelined(2, micro_batches=2))
    assert gradients
    assert len(caught) == 1


class Counting(nn.Module):
    """Counts its calls; is one block."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


class Counted(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(30, 8), nn.BatchNorm1d(8), nn.Dropout(), Counting(), nn.Linear(8, CLASSES)
        )


@pytest.mark.parametrize("options", [{}, {"cut_before": ["net.4"]}])
def test_the_comparison_leaves_no_trace(options):
    """Neither in buffers nor in random numbers."""
    module, _, _ = fit(Counted, SIZES, **pipelined(2, micro_batches=2, **options))
    assert module.net[4].calls == 2 * 2 * len(SIZES)
    assert module.net[2].num_batches_tracked == 2 * 2 * len(SIZES)
    again, _, _ = fit(Counted, SIZES, **pipelined(2, micro_batches=2, cut_before=["net.4"]))
    torch.testing.assert_close(dict(again.state_dict()), dict(module.state_dict()), rtol=1e-9, atol=1e-12)


class Forces(nn.Module):
    """Goes backward by itself, as models of energies do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(30, 30)

    def forward(self, x: Tensor) -> Tensor:
        assert bool(x.isfinite().all())
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(torch.tanh(self.layer(given)).sum(), given, create_graph=True)
        return x + force


class Energy(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), Forces(), nn.Linear(30, CLASSES))


def test_a_forward_that_goes_backward_by_itself():
    assert_same(fit(Energy, SIZES), fit(Energy, SIZES, **pipelined(2, micro_batches=2)))
