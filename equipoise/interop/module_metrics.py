"""The metrics of a module, by name."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

__all__ = ["named_metrics"]

# A longer list holds data.
_MOST_ITEMS = 1000


def named_metrics(module: nn.Module) -> dict[str, Metric]:
    """Return the metrics of a module by name, also those in lists, tuples and dictionaries among its attributes.

    Args:
        module: The module; its submodules count, too.

    Example:
        >>> from torchmetrics import MeanMetric
        >>> module = nn.ModuleDict({"mean": MeanMetric()})
        >>> module.others = {"val": [MeanMetric()]}
        >>> list(named_metrics(module))
        ['mean', 'others.val.0']
    """
    parts = dict(module.named_modules())
    metrics = {name: part for name, part in parts.items() if isinstance(part, Metric)}
    # Identities of visited objects, which also end circles.
    seen = set(map(id, parts.values()))
    for name, part in parts.items():
        # The attributes of a metric are its states.
        if isinstance(part, Metric):
            continue
        for attribute, value in list(vars(part).items()):
            path = attribute
            if name:
                path = f"{name}.{attribute}"
            metrics.update(_metrics_in(value, path, seen))
    return metrics


def _metrics_in(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Metric]]:
    """Yield the metrics in nested lists, tuples and dictionaries, with their paths."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, MetricCollection):
        # Its own `items` may copy states.
        items = list(value.named_modules())[1:]
    elif not isinstance(value, Metric):
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Metric):
        yield path, value
    elif len(value) <= _MOST_ITEMS:
        for key, item in items:
            yield from _metrics_in(item, f"{path}.{key}", seen)
