"""All replicas of a module: refreshed before a step, reduced after it.

A replica has the structure of the module, parameters and buffers of its own, and shares every other attribute. Before a
step `refresh` brings it up to date:

    attributes      as the module has them now; attributes that a replica set itself in the last step are forgotten
    parameters      copied, if the module's have changed
    buffers         copied, if the module's or the replica's have changed

The module is the first replica, so its changes stay: its buffers and its attributes. After a backward
`collect_gradients` adds the replicas' gradients to the module's. Steps computed under `connected` need none of that.
`nn.DataParallel` builds its replicas anew for every batch instead.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from equipoise.errors import StepError
from equipoise.interop.merged_metrics import merge_metric_states
from equipoise.interop.metrics import link_collections, other_state, restore_metric_state, take_metric_state
from equipoise.parallel.device_work import computing_on
from equipoise.parallel.replicas import coalesced
from equipoise.parallel.replicas.autograd_link import connect
from equipoise.parallel.replicas.replica import Replica
from equipoise.parallel.replicas.replicable import check_hooks

__all__ = ["Replicas"]


class Replicas:
    """A module and its copies on several devices.

    Args:
        module: The module, on the first device.
        devices: All devices, repeats allowed.
        always_connected: True if gradients come by `connected` and never by `collect_gradients`, so that hooks on the
            module's parameters see whole gradients. Default: False.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        *,
        always_connected: bool = False,
    ) -> None:
        self.module = module
        self.devices = tuple(devices)
        self._always_connected = always_connected
        self._replicas: dict[int, Replica] = {}

    def __getitem__(self, index: int) -> nn.Module:
        """Return the module of a device; for the first device the module itself."""
        if index == 0:
            return self.module
        return self._replicas[index].module

    def distrust(self) -> None:
        """Note that the module's tensors may have changed without a change of version, as through `.data`."""
        for replica in self._replicas.values():
            replica.distrust()

    def refresh(self, indices: Sequence[int]) -> None:
        """Bring the copies on some devices up to date, and make those that do not exist yet.

        Args:
            indices: The indices of the devices.
        """
        # 1. If the module's structure has changed, all copies are outdated.
        if any(self._replicas[index].structure.has_changed() for index in indices if index in self._replicas):
            self._replicas.clear()
        replicas = [self._replicas.get(index) or self._made(index) for index in indices if index]

        # 2. What has changed since the last step.
        for replica in replicas:
            replica.refresh_attributes()
        with torch.no_grad():
            stale = [replica for replica in replicas if replica.has_stale_parameters()]
            if stale:
                values = self._broadcast(stale[0].sources, stale)
                for replica, tensors in zip(stale, values, strict=True):
                    replica.load_parameters(tensors)
            stale = [replica for replica in replicas if replica.has_stale_buffers()]
            if stale:
                values = self._broadcast(stale[0].buffers(), stale)
                for replica, tensors in zip(stale, values, strict=True):
                    replica.load_buffers(tensors)
        for replica in replicas:
            replica.trust()

    @staticmethod
    def _broadcast(tensors: Sequence[Tensor], replicas: Sequence[Replica]) -> list[Sequence[Tensor]]:
        return coalesced.broadcast(tensors, [replica.device for replica in replicas])

    def _made(self, index: int) -> Replica:
        if not self._always_connected:
            check_hooks(self.module)
        with computing_on(index):
            replica = Replica(self.module, self.devices[index])
        self._replicas[index] = replica
        return replica

    def give_back(self, index: int) -> None:
        """Copy the state of the replica that computed in the module's place to the module."""
        if index:
            self._replicas[index].give_back()

    @contextmanager
    def connected(self, indices: Sequence[int]) -> Iterator[None]:
        """Let copies compute with a graph that leads to the module's parameters, in a `with` block.

        Then no gradients need collecting.

        Args:
            indices: The indices of the copies' devices.
        """
        replicas = []
        if torch.is_grad_enabled():
            replicas = [self._replicas[index] for index in indices if index]
        if not replicas:
            yield
            return

        # 1. The copies of parameters are replaced by tensors of the graph.
        connected = connect(replicas[0].sources, [replica.copies for replica in replicas])
        for replica, tensors in zip(replicas, connected, strict=True):
            replica.use(tensors)

        # 2. The step computes; afterwards the copies are registered again.
        try:
            yield
        finally:
            for replica in replicas:
                replica.use(replica.copies)

    def collect_gradients(self) -> None:
        """Add the gradients of all copies to the module's, and remove them from the copies."""
        by_replica = [replica.parameters for replica in self._replicas.values()]
        sources = []
        rows = []
        for pairs in zip(*by_replica, strict=True):
            source, _ = pairs[0]
            sources.append(source)
            rows.append([source.grad, *(copied.grad for _, copied in pairs)])
        if not rows:
            return
        with torch.no_grad():
            sums = coalesced.add_rows(rows, sources[0].device, in_place=True)
        for source, total in zip(sources, sums, strict=True):
            source.grad = total
        self.discard_gradients()

    def discard_gradients(self) -> None:
        """Remove the gradients of all copies."""
        for replica in self._replicas.values():
            replica.discard_gradients()

    # Metrics.

    def original(self, metric: Metric) -> Metric:
        """Return the module's metric whose copy this is, or the metric itself."""
        for replica in self._replicas.values():
            for source, copied in replica.metrics:
                if copied is metric:
                    return source
        return metric

    def metrics_of(self, index: int, metrics: Sequence[Metric]) -> list[Metric]:
        """Return the copies of the module's metrics on a device; for the first device the metrics themselves.

        Args:
            index: The index of the device.
            metrics: Metrics of the module.
        """
        if index == 0:
            return list(metrics)
        copies = {id(source): copied for source, copied in self._replicas[index].metrics}
        return [copies.get(id(metric), metric) for metric in metrics]

    @contextmanager
    def metrics_in_parts(self, indices: Sequence[int], weights: Sequence[int]) -> Iterator[None]:
        """Merge the states of metrics at the end of a `with` block that computes a batch in parts.

        The module's metrics end as if they had been updated with the whole batch.

        Args:
            indices: The indices of the parts' devices, in order.
            weights: The weights of the parts in a mean.
        """
        # 1. Note the states before, and everything that cannot be merged.
        metrics = []
        has_collections = False
        for module in self.module.modules():
            if isinstance(module, Metric):
                metrics.append(module)
            elif isinstance(module, MetricCollection):
                has_collections = True
        states = [take_metric_state(metric) for metric in metrics]
        by_part = []
        unmergeable = []
        for index in indices:
            part_metrics = self.metrics_of(index, metrics)
            by_part.append(part_metrics)
            for metric in part_metrics:
                before = other_state(metric)
                unmergeable.append((metric, before))

        # 2. Compute the parts, and merge. An error restores the states.
        try:
            yield
            if has_collections:
                for index in indices:
                    link_collections(self[index])
            for metric, before in unmergeable:
                _check_metric(metric, before)
            by_metric = [list(copies) for copies in zip(*by_part, strict=True)]
            merge_metric_states(metrics, states, by_metric, list(weights))
        except BaseException:
            for metric, state in zip(metrics, states, strict=True):
                restore_metric_state(metric, state)
            raise
        finally:
            for replica in self._replicas.values():
                for _, copied in replica.metrics:
                    take_metric_state(copied)


def _check_metric(metric: Metric, before: dict[str, Any]) -> None:
    """Refuse a metric that changed other attributes than its states."""
    after = other_state(metric)
    for name, value in after.items():
        if value != before.get(name):
            kind = type(metric).__name__
            raise StepError(
                f"The metric {kind} cannot be put together from parts of a batch: it keeps {name!r} beside its states."
                " Declare it with `add_state` and a reduction, or take parallelize='forward', where metrics that the"
                " step updates see whole batches."
            )
