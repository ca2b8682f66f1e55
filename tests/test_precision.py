"""Precisions against Lightning's own plugins, to the bit; what Lightning does not offer, against the same by hand."""

import copy
import pickle
import sys
import threading
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision
from lightning.pytorch.plugins.precision import Precision as PlainPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise.errors import ConfigurationError
from equipoise.precision import make_precision, wide_dtype
from tests.support.equality import assert_equal
from tests.support.nested import Pair, Sample
from tests.support.networks.normalised import NAMES, Classifier, fit, make_batches, make_module
from tests.support.trainer_runs import trainer

SHARED = ["32-true", "bf16-mixed", "16-true", "bf16-true", "64-true"]  # what Lightning runs on a CPU
TRUE = {"16-true": torch.float16, "bf16-true": torch.bfloat16, "64-true": torch.float64}


# Names


@pytest.mark.parametrize(
    ("value", "name"),
    [(name, name) for name in NAMES]
    + [(None, "32-true"), (32, "32-true"), ("32", "32-true"), (16, "16-mixed"), ("16", "16-mixed")]
    + [("bf16", "bf16-mixed"), (64, "64-true"), ("64", "64-true")],
)
def test_precisions_by_name_and_short_form(value: Any, name: str) -> None:
    assert make_precision(value, "cpu").name == name


@pytest.mark.parametrize(
    ("value", "nearest"),
    [
        ("fp16", "16-mixed"),
        ("float64", "64-true"),
        ("BF16-Mixed", "bf16-mixed"),
        ("32-ture", "32-true"),
        (16.0, "16-mixed"),
        (torch.bfloat16, "bf16-mixed"),
        ("8", None),
    ],
)
def test_an_unknown_precision_is_refused_with_the_nearest(value: Any, nearest: str | None) -> None:
    with pytest.raises(ConfigurationError) as error:
        make_precision(value, "cpu")
    message = str(error.value)
    assert repr(value) in message
    assert all(repr(name) in message for name in NAMES)
    assert f"Did you mean {nearest!r}?" in message if nearest else "Did you mean" not in message


def test_float64_is_refused_where_the_device_has_none() -> None:
    with pytest.raises(ConfigurationError, match=r"MPS devices have no float64.*64-true.*accelerator='cpu'"):
        make_precision("64-true", "mps")
    assert wide_dtype(torch.device("mps")) is torch.float32
    assert wide_dtype(torch.device("cuda", 1)) is wide_dtype(torch.device("cpu")) is torch.float64


@pytest.mark.parametrize(("name", "dtype"), [("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)])
def test_mixed_precision_uses_autocast_of_mps(name: str, dtype: torch.dtype) -> None:
    precision = make_precision(name, "mps")
    assert (precision.scaler is None) is (name == "bf16-mixed")
    assert precision.autocast == ("mps", dtype)
    with precision.forward_context():
        assert torch.is_autocast_enabled("mps")
        assert not torch.is_autocast_enabled("cpu")


# As in Lightning; `tests/parity` trains in each precision


@pytest.mark.parametrize("name", SHARED)
def test_configure_model_equals_lightning_to_the_bit(name: str) -> None:
    class Late(L.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "layer"):
                self.layer = nn.Linear(3, 1)
                self.register_buffer("table", torch.rand(4))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layer(batch).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    ours, theirs = Late(), Late()
    torch.manual_seed(1)
    with make_precision(name, "cpu").init_context():
        ours.configure_model()
    torch.manual_seed(1)
    trainer(L.Trainer, precision=name).fit(theirs, DataLoader([torch.ones(2, 3)], batch_size=None))
    assert_equal(theirs, ours)
    assert torch.get_default_dtype() == torch.float32


PLUGINS: dict[str, Any] = {
    "32-true": PlainPrecision(),
    "16-mixed": MixedPrecision("16-mixed", "cpu"),
    "bf16-mixed": MixedPrecision("bf16-mixed", "cpu"),
    "16-true": HalfPrecision("16-true"),
    "16-true-norm32": HalfPrecision("16-true"),
    "bf16-true": HalfPrecision("bf16-true"),
    "64-true": DoublePrecision(),
}


@pytest.mark.parametrize("name", NAMES)
def test_entries_of_checkpoints_have_the_names_of_lightnings_plugins(name: str) -> None:
    assert make_precision(name, "cpu").checkpoint_key == type(PLUGINS[name]).__qualname__


def nested_batch() -> list[Any]:
    """Every dtype in every container."""
    dtypes = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64
    tensors = {str(dtype): torch.tensor([0, 1]).to(dtype) for dtype in dtypes}
    single, double = tensors["torch.float32"], tensors["torch.float64"]
    containers = OrderedDict(x=single), UserDict(x=double), defaultdict(int, x=single), Pair(double, 3), Sample(single)
    return [tensors, tuple(tensors.values()), containers, [], {}, None, 3, 0.5, "text"]


@pytest.mark.parametrize("name", TRUE)
def test_input_is_converted_as_lightning_converts_it(name: str) -> None:
    assert_equal(PLUGINS[name].convert_input(nested_batch()), make_precision(name, "cpu").convert_input(nested_batch()))


@pytest.mark.parametrize("name", ["32-true", "16-mixed", "bf16-mixed"])
def test_input_and_module_stay_as_they_are(name: str) -> None:
    precision, module = make_precision(name, "cpu"), make_module()
    precision.convert_module(module)
    assert_equal(make_module(), module)
    assert precision.convert_input is None
    if name == "32-true":  # nothing is asked for in a step
        assert (precision.forward_context, precision.scaler) == (None, None)


# Mixed precision with a scaler; `tests/trainer/test_precision.py` trains with it


def test_the_state_of_the_scaler_goes_to_lightning_and_comes_back() -> None:
    precision = make_precision("16-mixed", "cpu")
    images, labels = make_batches(1)[0]
    fit(make_module(), precision, [(images * 1e30, labels), (images, labels)])  # a scale and a count of their own
    theirs, back = MixedPrecision("16-mixed", "cpu"), make_precision("16-mixed", "cpu")
    theirs.load_state_dict(precision.state_dict())
    assert back.state_dict() != precision.state_dict()
    back.load_state_dict(theirs.state_dict())
    assert back.state_dict() == theirs.state_dict() == precision.state_dict()


@pytest.mark.parametrize("name", NAMES)
def test_only_a_scaler_has_state(name: str) -> None:
    precision = make_precision(name, "cpu")
    state = precision.state_dict()
    assert bool(state) == (precision.scaler is not None) == (name == "16-mixed")
    precision.load_state_dict({})  # of a run in another precision
    assert precision.state_dict() == state


# Contexts


def autocast_state() -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


@pytest.mark.parametrize(("name", "dtype"), [("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)])
def test_autocast_is_entered_and_left(name: str, dtype: torch.dtype) -> None:
    context = make_precision(name, "cpu").forward_context
    outside = autocast_state()
    with context() as first:
        pass
    for _ in range(3):
        with context() as region:
            assert region is first  # used again
            assert autocast_state() == (True, dtype, False)
            with torch.autocast("cpu", enabled=False):
                with context():
                    assert autocast_state() == (True, dtype, False)
                assert not torch.is_autocast_enabled("cpu")
            assert autocast_state() == (True, dtype, False)
        assert autocast_state() == outside
        with pytest.raises(KeyError), context():
            raise KeyError
        assert autocast_state() == outside


def test_autocast_in_threads_that_overlap() -> None:
    context = make_precision("bf16-mixed", "cpu").forward_context
    with context():
        pass  # leaves a region to use again
    barrier = threading.Barrier(4, timeout=300)
    found: list[Any] = []

    def work(index: int) -> None:
        with torch.autocast("cpu", dtype=torch.float16, enabled=index % 2 == 0):
            before = autocast_state()
            barrier.wait()
            with context():
                inside = autocast_state()
                barrier.wait()
            barrier.wait()
            found.append((inside, autocast_state() == before))

    run_in_threads(work)
    assert found == [((True, torch.bfloat16, False), True)] * 4


@pytest.fixture
def default_dtype() -> Iterator[None]:
    """Torch's default dtype, put back afterwards."""
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("name", "dtype"), [*TRUE.items(), ("16-true-norm32", torch.float16)])
@pytest.mark.usefixtures("default_dtype")
def test_the_default_dtype_is_set_and_restored(name: str, dtype: torch.dtype) -> None:
    precision = make_precision(name, "cpu")
    for users in (torch.float32, torch.float64):
        torch.set_default_dtype(users)
        for context in (precision.forward_context, precision.init_context):
            with context():
                assert torch.get_default_dtype() == dtype
                with context():
                    assert torch.zeros(1).dtype == dtype
                assert torch.get_default_dtype() == dtype
            assert torch.get_default_dtype() == users
            with pytest.raises(KeyError), context():
                raise KeyError
            assert torch.get_default_dtype() == users


def run_in_threads(work: Any) -> None:
    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("default_dtype")
def test_the_default_dtype_while_threads_enter_and_leave() -> None:
    context = make_precision("64-true", "cpu").forward_context
    found = set()

    def work(index: int) -> None:
        for _ in range(2000):
            with context():
                found.add(torch.get_default_dtype())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        run_in_threads(work)
    finally:
        sys.setswitchinterval(interval)
    assert found == {torch.float64}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_a_precision_travels_to_another_process(name: str) -> None:
    precision = make_precision(name, "cpu")
    fit(make_module(), precision, make_batches(1))
    there = pickle.loads(pickle.dumps(precision))
    assert there.state_dict() == precision.state_dict()
    assert_equal(fit(make_module(), precision, make_batches()), fit(make_module(), there, make_batches()))


# Normalisation in float32

LAYERS = {
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), (3, 4, 5, 5)),
    "BatchNorm1d without parameters": (lambda: nn.BatchNorm1d(4, affine=False), (3, 4)),
    "LazyBatchNorm1d": (lambda: nn.LazyBatchNorm1d(), (3, 4)),
    "InstanceNorm1d with statistics": (lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (3, 4, 5)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (3, 4, 5)),
    "LayerNorm without parameters": (lambda: nn.LayerNorm(4, elementwise_affine=False), (3, 4)),
    "RMSNorm": (lambda: nn.RMSNorm(4), (3, 4)),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), (3, 4, 5, 5)),
}


def randomised(module: nn.Module) -> nn.Module:
    """Parameters and statistics that float16 does not hold exactly."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_floating_point() and not nn.parameter.is_lazy(tensor):
            tensor.data.uniform_(0.5, 1.5)
    return module


@pytest.mark.parametrize("kind", LAYERS)
def test_torchs_normalisation_layers_compute_in_float32(kind: str) -> None:
    make, shape = LAYERS[kind]
    torch.manual_seed(0)
    reference = randomised(make())
    module = nn.Sequential(nn.Identity(), copy.deepcopy(reference) if "Lazy" not in kind else make())
    make_precision("16-true-norm32", "cpu").convert_module(module)
    for mode in (True, False):
        x = (torch.randn(shape) * 30).half()
        y = module.train(mode)(x)
        assert y.dtype == torch.float16
        assert torch.equal(y, reference.train(mode)(x.float()).half())
    assert_equal(reference, module[1])
    assert all(p.dtype == torch.float32 for p in module.parameters())


class ScaleNorm(nn.Module):
    """A norm of the user's own, with keywords, a nested input and several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1 / 3))

    def forward(self, x: Tensor, *, extra: Any) -> dict[str, Any]:
        seen = [x.dtype, extra["shift"].dtype, extra["index"].dtype]
        return {"out": x / x.norm(dim=-1, keepdim=True) * self.scale + extra["shift"], "seen": seen}


class renormaliser(ScaleNorm):
    """In lower case, and in the middle of the name."""


@pytest.mark.parametrize("cls", [ScaleNorm, renormaliser])
def test_the_users_own_norms_compute_in_float32(cls: type[ScaleNorm]) -> None:
    module = nn.ModuleDict({"norm": cls(), "linear": nn.Linear(4, 4)})
    make_precision("16-true-norm32", "cpu").convert_module(module)
    assert module["norm"].scale.item() == torch.tensor(1 / 3).item()
    assert module["linear"].weight.dtype == torch.float16
    x = torch.randn(3, 4).half()
    extra = {"shift": torch.ones(4).half(), "index": torch.arange(4)}
    result = module["norm"](x=x, extra=extra)
    assert result["seen"] == [torch.float32, torch.float32, torch.int64]
    assert torch.equal(result["out"], cls()(x.float(), extra={**extra, "shift": torch.ones(4)})["out"].half())


class NormBlock(nn.Module):
    """Named a norm, but a container."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x))


class NormAct(nn.LayerNorm):
    """A norm of torch's with more inside."""

    def __init__(self) -> None:
        super().__init__(4)
        self.after = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(super().forward(x))


class Normalise(nn.Module):
    """Named a norm, but without parameters: as like as not a scaling of the input."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float16
        return x / 2


def test_which_modules_are_norms() -> None:
    module = nn.ModuleDict(
        {
            "block": NormBlock(),
            "nested": NormAct(),
            "scaling": Normalise(),
            "spectral": nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
            "weight": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        }
    )
    make_precision("16-true-norm32", "cpu").convert_module(module)
    kept = {name.rpartition(".")[0] for name, p in module.named_parameters() if p.dtype == torch.float32}
    assert kept == {"block.inner", "nested", "nested.after"}
    for name, child in module.items():
        assert child(torch.randn(3, 4).half()).dtype == torch.float16, name


class NormHead(L.LightningModule):
    """The user's whole module, named a norm and without children."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


def test_the_users_whole_module_is_no_norm_by_its_name() -> None:
    module = NormHead()
    make_precision("16-true-norm32", "cpu").convert_module(module)
    assert module.weight.dtype == torch.float16
    assert module.dtype == torch.float16


class CastsByHand(Classifier):
    """Casts around its norms, written out."""

    def forward(self, images: Tensor) -> Tensor:
        conv, batch_norm, relu, flatten = self.features
        layer_norm, linear = self.head
        hidden = flatten(relu(batch_norm(conv(images).float()).half()))
        return linear(layer_norm(hidden.float()).half())


def test_training_with_norms_in_float32_equals_casts_by_hand() -> None:
    ours = fit(make_module("adam"), make_precision("16-true-norm32", "cpu"), make_batches())
    theirs = make_module("adam", CastsByHand).half()
    theirs.features[1].float()  # ones and zeros: nothing was rounded
    theirs.head[0].float()
    stepper = theirs.configure_optimizers()
    for index, (images, labels) in enumerate(make_batches()):
        stepper.zero_grad()
        with make_precision("16-true", "cpu").forward_context():
            loss = theirs.training_step((images.half(), labels), index)
        loss.backward()
        stepper.step()
    assert_equal(theirs.losses, ours.losses)
    assert_equal(theirs, ours)
    assert {p.grad.dtype for p in ours.features[1].parameters()} == {torch.float32}


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    module = randomised(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Linear(4, 2)))
    make_precision("16-true-norm32", "cpu").convert_module(module)
    return module


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_a_copy_of_a_converted_module_is_independent(duplicate: Any) -> None:
    module = normed()
    x = torch.randn(3, 4).half()
    y = module(x)
    twin = duplicate(normed())
    assert torch.equal(twin(x), y)
    make_precision("16-true", "cpu").convert_module(twin)  # takes the copy's hooks, not the original's
    assert twin[2].weight.dtype == torch.float16
    assert twin(x).dtype == torch.float16
    assert module[1](x).dtype == torch.float16
    make_precision("16-true-norm32", "cpu").convert_module(twin)
    assert twin(x).dtype == torch.float16


@pytest.mark.parametrize("name", NAMES)
def test_converting_to_another_precision_removes_the_hooks_of_norms(name: str) -> None:
    """Hooks add no key to the state, and the module converted to float32 computes in it."""
    plain, module = without_hooks(normed().state_dict()), normed().float()
    assert list(plain.state_dict()) == list(module.state_dict())
    x = torch.randn(3, 4)
    assert_equal(plain(x), module(x))
    precision = make_precision(name, "cpu")
    precision.convert_module(plain)
    precision.convert_module(module)
    x = x if precision.convert_input is None else precision.convert_input(x)
    with (precision.forward_context or nullcontext)():
        for depth in range(1, 5):
            assert_equal(copy.deepcopy(plain[:depth])(x), copy.deepcopy(module[:depth])(x))


def without_hooks(state: dict[str, Tensor]) -> nn.Sequential:
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Linear(4, 2))
    plain.load_state_dict(state)
    return plain


def test_the_users_hooks_see_what_the_next_layer_sees() -> None:
    module = nn.Sequential(nn.LayerNorm(4))
    seen: list[torch.dtype] = []
    module[0].register_forward_pre_hook(lambda norm, args: seen.append(args[0].dtype))
    module[0].register_forward_hook(lambda norm, args, output: seen.append(output.dtype))
    make_precision("16-true-norm32", "cpu").convert_module(module)
    module(torch.randn(3, 4).half())
    assert seen == [torch.float16, torch.float16]


def test_norms_of_a_transformer_layer_compute_in_float32_in_evaluation() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    expected = layer(x)
    module = nn.Sequential(layer)
    make_precision("16-true-norm32", "cpu").convert_module(module)
    with torch.inference_mode():
        y = module(x.half())
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.float(), expected, atol=5e-3, rtol=5e-3)


@pytest.mark.slow
def test_norms_in_float32_compile_in_one_graph() -> None:
    module = normed()
    x = torch.randn(3, 4).half()
    compiled = torch.compile(copy.deepcopy(module), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), module(x))
