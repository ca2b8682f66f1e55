"""All replicas of a module: refreshed before a step, reduced after it.

A replica has the structure of the module, parameters and buffers of its own, and shares every other attribute. Before a
step `refresh` brings it up to date:

    attributes      as the module has them now; what a replica set itself in the last step is forgotten
    parameters      copied, if the module's have changed
    buffers         copied, if the module's or the replica's have changed

The module is the first replica, so what it changes stays: its buffers and its attributes. After a backward
`collect_gradients` adds the replicas' gradients to the module's; what is computed under `connected` needs none of that.
`nn.DataParallel` builds its replicas anew for every batch instead.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from equipoise.errors import ConfigurationError, StepError
from equipoise.interop.metrics import merge_metric_states, other_state, restore_metric_state, take_metric_state
from equipoise.interop.torch.modules import has_hooks, is_compiled, parameters_of
from equipoise.parallel.replicas import coalesced
from equipoise.parallel.replicas.autograd_link import connect
from equipoise.parallel.replicas.replica import Replica

__all__ = ["Replicas", "check_replicable"]


class Replicas:
    """A module and its copies on several devices.

    Args:
        module: The module, on the first device.
        devices: All devices, repeats allowed.
        always_connected: Whether gradients come by `connected` and never by `collect_gradients`, so that hooks on the
            module's parameters see whole gradients.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device], *, always_connected: bool = False) -> None:
        self.module, self.devices, self._always_connected = module, tuple(devices), always_connected
        self._replicas: dict[int, Replica] = {}

    def __getitem__(self, index: int) -> nn.Module:
        """The module of a device; that of the first is the module itself."""
        return self._replicas[index].module if index else self.module

    def distrust(self) -> None:
        """The module's tensors may have changed in a way that leaves no trace, as through `.data`."""
        for replica in self._replicas.values():
            replica.trusted = False

    def refresh(self, indices: Sequence[int]) -> None:
        """Brings the copies on some devices up to date, and makes those that are not there yet.

        Args:
            indices: Which devices.
        """
        used = [self._made(index) for index in indices if index]
        for replica in used:
            replica.refresh_attributes()
        with torch.no_grad():
            if stale := [replica for replica in used if replica.has_stale_parameters()]:
                sources: list[Tensor] = [source for source, _ in stale[0].parameters]
                for replica, tensors in zip(stale, self._broadcast(sources, stale), strict=True):
                    replica.load_parameters(tensors)
            if stale := [replica for replica in used if replica.has_stale_buffers()]:
                for replica, tensors in zip(stale, self._broadcast(stale[0].buffers(), stale), strict=True):
                    replica.load_buffers(tensors)
        for replica in used:
            replica.trust()

    @staticmethod
    def _broadcast(tensors: list[Tensor], replicas: list[Replica]) -> list[Sequence[Tensor]]:
        return coalesced.broadcast(tensors, [replica.device for replica in replicas])

    def _made(self, index: int) -> Replica:
        replica = self._replicas.get(index)
        if replica is None or replica.is_outdated():
            if replica is not None:
                self._replicas.clear()  # the others are outdated as well
            if not self._always_connected:
                _check_hooks(self.module)
            replica = self._replicas[index] = Replica(self.module, self.devices[index])
        return replica

    def give_back(self, index: int) -> None:
        """Lets the module have the buffers and attributes of the copy that computed in its place."""
        if index:
            self._replicas[index].give_back()

    @contextmanager
    def connected(self, indices: Sequence[int]) -> Iterator[None]:
        """Lets copies compute with a graph that leads to the module's parameters, so that nothing needs collecting.

        Args:
            indices: The devices of the copies.
        """
        used = [self._replicas[index] for index in indices if index] if torch.is_grad_enabled() else []
        if not used:
            yield
            return
        sources = [source for source, _ in used[0].parameters]
        own = [[copied for _, copied in replica.parameters] for replica in used]
        for replica, tensors in zip(used, connect(sources, own), strict=True):
            replica.use(tensors)
        try:
            yield
        finally:
            for replica, copies in zip(used, own, strict=True):
                replica.use(copies)

    def collect_gradients(self) -> None:
        """Adds the gradients of all copies to the module's, and takes them from the copies."""
        replicas = list(self._replicas.values())
        alike: dict[tuple[bool, ...], list[list[nn.Parameter]]] = {}  # parameters by who has a gradient
        for pairs in zip(*(replica.parameters for replica in replicas), strict=True):
            parameters = [pairs[0][0], *(copied for _, copied in pairs)]
            have = tuple([parameter.grad is not None for parameter in parameters])
            if any(have[1:]):
                alike.setdefault(have, []).append([parameters[0], *(p for p in parameters[1:] if p.grad is not None)])
        with torch.no_grad():
            for have, group in alike.items():
                _collect(group, missing=not have[0])

    def discard_gradients(self) -> None:
        """Takes the gradients from all copies."""
        for replica in self._replicas.values():
            for _, copied in replica.parameters:
                copied.grad = None

    # Metrics.

    def original(self, metric: Metric) -> Metric:
        """The module's metric of which this is a copy."""
        for replica in self._replicas.values():
            for source, copied in replica.metrics:
                if copied is metric:
                    return source
        return metric

    def _metrics(self, index: int) -> dict[int, Metric]:
        """The metrics of a copy by the identity of the module's; empty for the module itself."""
        return {id(source): own for source, own in self._replicas[index].metrics} if index else {}

    @contextmanager
    def metrics_in_parts(self, indices: Sequence[int], weights: Sequence[int]) -> Iterator[None]:
        """Lets the module's metrics end as if they had seen the whole batch whose parts are computed inside.

        Args:
            indices: The devices of the parts, in order.
            weights: The weights of the parts in a mean.
        """
        metrics = [module for module in self.module.modules() if isinstance(module, Metric)]
        before = [take_metric_state(metric) for metric in metrics]
        copies = [self._metrics(index) for index in indices]
        parts = [own.get(id(metric), metric) for own in copies for metric in metrics]
        others = [other_state(part) for part in parts]
        try:
            yield
            for part, other in zip(parts, others, strict=True):
                _check_metric(part, other)
            of_each = [[own.get(id(metric), metric) for own in copies] for metric in metrics]
            merge_metric_states(metrics, before, of_each, list(weights))
        except BaseException:
            for metric, state in zip(metrics, before, strict=True):
                restore_metric_state(metric, state)
            raise
        finally:
            for replica in self._replicas.values():
                for _, own in replica.metrics:
                    take_metric_state(own)


def _check_metric(metric: Metric, before: dict[str, Any]) -> None:
    after = other_state(metric)
    if changed := [name for name in after if after[name] != before.get(name)]:
        raise StepError(
            f"The metric {type(metric).__name__} cannot be put together from parts of a batch: it keeps {changed[0]!r}"
            " beside its states. Declare it with `add_state` and a reduction, or take parallelize='forward', where"
            " metrics that the step updates see whole batches."
        )


def _collect(group: list[list[nn.Parameter]], *, missing: bool) -> None:
    """Adds up gradients that the same copies have.

    Args:
        group: For each parameter itself and those of its copies that have a gradient.
        missing: Whether the parameter itself has none.
    """
    if missing:
        for source, first, *_ in group:
            assert first.grad is not None
            source.grad, first.grad = first.grad.to(source.device), None
        group = [[source, *copies] for source, _, *copies in group]
    gradients: list[list[Tensor]] = [
        [p.grad for p in column if p.grad is not None] for column in zip(*group, strict=True)
    ]
    for (source, *copies), summed in zip(group, coalesced.reduce_add(gradients), strict=True):
        if source.grad is not summed:
            source.grad = summed
        for copied in copies:
            copied.grad = None


def check_replicable(module: nn.Module, devices: Sequence[torch.device]) -> None:
    """Checks that a module can be copied to devices.

    Args:
        module: The module.
        devices: The devices.

    Raises:
        ConfigurationError: Naming what is in the way, and the way out.
    """
    for name, part in module.named_modules():
        where = f"{type(module).__name__}{'.' * bool(name)}{name}"
        if isinstance(part, torch.jit.ScriptModule):
            raise ConfigurationError(f"{where} is a TorchScript module, which cannot be copied to several devices.")
        if is_compiled(part):
            raise ConfigurationError(
                f"{where} is compiled, for one device; copies for several would share that code. Leave `torch.compile`"
                " out, or compile functions that the module calls."
            )
        if any(parameter is not None and is_lazy(parameter) for parameter in parameters_of(part).values()):
            raise ConfigurationError(
                f"{where} is lazy: its parameters have no shape yet. Run a batch through it before training, for"
                " instance in `__init__`."
            )
        for key, value in vars(part).items():
            if len(set(devices)) > 1 and isinstance(value, Tensor) and value.ndim and not _is_made_anew(part, key):
                raise ConfigurationError(
                    f"{where}.{key} is a tensor that stays on its device, but copies of the module on others share it."
                    f" Register it: `self.register_buffer({key!r}, ...)`."
                )
    examples: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        examples.setdefault(parameter.device, name)
    if len(examples) > 1:
        raise ConfigurationError(
            f"The parameters of {type(module).__name__} lie on several devices:"
            f" {', '.join(f'{name} on {device}' for device, name in examples.items())}. A module that is spread over"
            " devices by hand cannot be copied; train it with strategy='single_device'."
        )


def _is_made_anew(module: nn.Module, name: str) -> bool:
    """Whether a tensor is a metric's, or made by a hook before every forward, as by pruning and weight norm."""
    made_from = ([f"{name}_orig"], [f"{name}_g", f"{name}_v"])
    parameters = parameters_of(module)
    return isinstance(module, Metric) or any(all(each in parameters for each in names) for names in made_from)


def _check_hooks(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if has_hooks(parameter):
            raise ConfigurationError(
                f"The parameter {name!r} has a hook, which would see the gradient of one part of the batch. Change"
                " gradients in `on_after_backward` or `on_before_optimizer_step`, where they are complete, or choose"
                " parallelize='forward'."
            )
