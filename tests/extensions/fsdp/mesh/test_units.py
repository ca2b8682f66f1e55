"""Units that a module shards by itself over a device mesh, beside layers that it cuts."""

from functools import partial
from typing import Any

import pytest
from torch.distributed.fsdp import fully_shard

from equipoise import RunSummary
from tests.extensions.fsdp import mesh_modules as modules
from tests.extensions.fsdp.mesh_modules import Counting
from tests.extensions.fsdp.programs import (
    assert_close,
    assert_refused_in_processes,
    fit,
    fsdp,
    in_processes,
    weights_of,
)
from tests.support.equality import assert_equal

pytestmark = pytest.mark.slow


REFUSED: dict[str, tuple[Any, str]] = {
    "over all": (
        modules.ShardedOverAll,
        "weight of the unit first is not in shards over self.device_mesh['data_parallel'] alone",
    ),
    "nothing cut": (modules.ShardedAlone, "ShardedAlone has no layer that is cut over 2 processes"),
    "a buffer": (modules.CutWithBuffer, "blocks.1.up.factor is a buffer of a layer that is cut"),
}


def test_shards_over_other_processes_than_a_column_are_refused() -> None:
    runs = {name: partial(fit, kind, fsdp(tensor=2), 4, max_epochs=1) for name, (kind, _) in REFUSED.items()}
    assert_refused_in_processes(4, runs, REFUSED)


class InGroup(Counting):
    """Its metrics are computed over a group of the user's, in which each process has a batch of its own."""

    def configure_model(self) -> None:
        modules.cut_blocks(self)
        for metric in (*self.seen.values(), *self.mean.values()):
            metric.process_group = self.device_mesh["data_parallel"].get_group()


class Counted(RunSummary):
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.samples = self._fit.factor * self._fit.throughput.samples
        super().on_fit_end(trainer, pl_module)


def count_samples() -> tuple[dict[str, Any], float]:
    summary = Counted(table=False)
    _, trainer = fit(InGroup, fsdp(tensor=2), 4, batch_size=6, max_epochs=1, count=48, callbacks=[summary])
    return dict(trainer.callback_metrics), summary.samples


def test_each_sample_counts_once_in_the_report_and_in_metrics_of_a_column() -> None:
    _, reference = fit(Counting, batch_size=12, max_epochs=1, count=48)
    values, samples = in_processes(4, count_samples)
    assert_close(dict(reference.callback_metrics), values)
    assert samples == 48


class Failing(modules.CutHeads):
    """Fails once its layers are cut, of which one is in shards."""

    def configure_model(self) -> None:
        super().configure_model()
        fully_shard(self.last, mesh=self.device_mesh["data_parallel"])
        raise ValueError("past the cut")


def error_before_the_run() -> None:
    module = Failing().double()
    parameters, before = list(module.parameters()), weights_of(module)
    with pytest.raises(ValueError, match="past the cut"):
        fit(Failing, fsdp(tensor=2), 2, batch_size=12, module=module)
    assert module.attention.heads == 4
    assert all(one is other for one, other in zip(module.parameters(), parameters, strict=True))
    assert_equal(before, weights_of(module))


def test_an_error_before_the_run_leaves_whole_layers() -> None:
    in_processes(2, error_before_the_run)
