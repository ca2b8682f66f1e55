"""Units that a module shards by itself over a device mesh, beside layers that it cuts."""

from functools import partial
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from equipoise import ConfigurationError, StepError
from equipoise.extensions.fsdp.mesh.grid import make_mesh
from equipoise.extensions.fsdp.units import table_of, units_of_module
from equipoise.extensions.report.fit_recorder import Fit
from tests.extensions.fsdp import mesh_modules as modules
from tests.extensions.fsdp.mesh_modules import Counting
from tests.extensions.fsdp.programs import (
    assert_close,
    assert_refused_in_processes,
    fit,
    fsdp,
    in_processes,
    loader,
    weights_of,
)
from tests.support.equality import assert_equal
from tests.support.trainer_runs import trainer

pytestmark = pytest.mark.slow


class OnMesh(modules.PlainCut):
    """Has a mesh without a trainer."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._device_mesh = mesh


UNIT = "weight of the unit first is not in shards over self.device_mesh['data_parallel'] alone"
REFUSED: dict[str, tuple[Any, str]] = {
    "over all": (partial(modules.ShardedOver, "all"), UNIT),
    "over the mesh": (partial(modules.ShardedOver, "mesh"), UNIT),
    "over a row": (partial(modules.ShardedOver, "row"), UNIT),
    "nothing cut": (modules.ShardedAlone, "ShardedAlone has no layer that is cut over 2 processes"),
    "a buffer": (modules.CutWithBuffer, "blocks.1.up.factor is a buffer of a layer that is cut"),
}


def test_shards_over_other_processes_than_a_column_are_refused() -> None:
    runs = {name: partial(fit, kind, fsdp(tensor=2), 4, max_epochs=1) for name, (kind, _) in REFUSED.items()}
    assert_refused_in_processes(4, runs, {name: words for name, (_, words) in REFUSED.items()})


class InGroup(Counting):
    """Its metrics are computed over a group of the user's, in which each process has a batch of its own."""

    def configure_model(self) -> None:
        modules.cut_blocks(self)
        for metric in (*self.seen.values(), *self.mean.values()):
            metric.process_group = self.device_mesh["data_parallel"].get_group()


class Speed(Callback):
    """Counts the samples of a fit, as the report does."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.fit = Fit()
        self.fit.attach(trainer, pl_module)
        self.fit.begin_training()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.fit.count_batch(batch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.fit.count_all_processes()
        self.samples = self.fit.factor * self.fit.throughput.samples


def count_samples() -> tuple[dict[str, Any], float]:
    speed = Speed()
    _, trainer = fit(InGroup, fsdp(tensor=2), 4, batch_size=6, max_epochs=1, count=48, callbacks=[speed])
    return dict(trainer.callback_metrics), speed.samples


def test_each_sample_counts_once_in_the_report_and_in_metrics_of_a_column() -> None:
    _, reference = fit(Counting, batch_size=12, max_epochs=1, count=48)
    values, samples = in_processes(4, count_samples)
    assert_close(dict(reference.callback_metrics), values)
    assert samples == 48


class MadeOnce(modules.PlainNet):
    """Returns early from `configure_model` in a second run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = None

    def configure_model(self) -> None:
        if self.inner is None:
            self.inner = nn.Linear(7, 7)
            modules.cut_blocks(self)


def second_run() -> tuple[dict[str, Any], Any]:
    """Return the weights of a fit, and the values of an evaluation after it."""
    module, trainer = fit(MadeOnce, fsdp(tensor=2), 2, batch_size=12, max_epochs=1)
    return weights_of(module), trainer.validate(module, loader(7, 3), verbose=False)


def test_a_network_that_is_cut_once_alone_is_evaluated_whole() -> None:
    weights, values = in_processes(2, second_run)
    alone = MadeOnce()
    alone.inner = nn.Linear(7, 7)
    alone.double().load_state_dict(weights)
    run = trainer(precision="64-true")
    assert_equal(run.validate(alone, loader(7, 3), verbose=False), values, 1e-12)


class Failing(modules.CutHeads):
    """Fails once its layers are cut, of which one is in shards."""

    def configure_model(self) -> None:
        super().configure_model()
        fully_shard(self.last, mesh=self.device_mesh["data_parallel"])
        raise ValueError("past the cut")


def errors_before_the_run() -> None:
    for kind, options, error in (
        (Failing, {}, ValueError),
        (modules.CutHeads, {"units": ["none.*"]}, ConfigurationError),
    ):
        module = kind().double()
        parameters, before = list(module.parameters()), weights_of(module)
        with pytest.raises(error):
            fit(kind, fsdp(tensor=2, **options), 2, batch_size=12, module=module)
        assert module.attention.heads == 4
        assert all(one is other for one, other in zip(module.parameters(), parameters, strict=True))
        assert_equal(before, weights_of(module))


def test_an_error_before_the_run_leaves_whole_layers() -> None:
    in_processes(2, errors_before_the_run)


def later_difference() -> tuple[str, int]:
    module = modules.DifferingLater()
    with pytest.raises(StepError) as caught:
        fit(modules.DifferingLater, fsdp(tensor=2), 2, module=module, count=240, batch_size=2, max_epochs=1)
    return str(caught.value), module.trainer.global_step


def test_batches_that_differ_later_are_noticed() -> None:
    message, steps = in_processes(2, later_difference)
    assert "Ranks 0 and 1 compute a batch together" in message
    assert steps == 100


def lines_of_table() -> list[str]:
    module = OnMesh(make_mesh("cpu", 2, 2))
    module.configure_model()
    return table_of(units_of_module(module), 2).splitlines()


def test_the_table_of_units_divides_what_is_in_shards_once() -> None:
    """Of the 231 elements of a block in float32, the first of 2 x 2 processes has 4 + 4 + 28 + 4 + 28 + 4."""
    assert in_processes(4, lines_of_table)[1].split()[2:] == ["231", "924", "B", "288", "B"]
