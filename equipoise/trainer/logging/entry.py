"""One logged name, and the values from which its epoch value is reduced."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric

from equipoise.interop.lightning.self_log import LogOptions

__all__ = ["Collection", "Entry", "default_dtype", "on_cpu", "reduction_name"]

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}
_START = {"min": float("inf"), "max": float("-inf")}
_REDUCTIONS: dict[Any, str] = {
    torch.mean: "mean",
    torch.sum: "sum",
    torch.min: "min",
    torch.max: "max",
    sum: "sum",
    min: "min",
    max: "max",
}


class Entry:
    """One name logged in one hook, and what has been logged under it since the epoch began.

    Args:
        hook: The hook that logs.
        name: The name.
        options: The arguments of `self.log`, with the defaults of the hook.
        dataloader_idx: The loader's index, where there are several.
        metric: The metric, if a metric is logged.

    Attributes:
        key: Under which a collection keeps it.
        given: The arguments as they were given.
        step: The latest value.
        total, weight: What the epoch's value is made of.
        live: Whether anything was logged since the last reset.
        weighs: Whether the epoch's value is a mean, weighted by the sizes of batches.
    """

    def __init__(
        self, hook: str, name: str, options: LogOptions, dataloader_idx: int | None = None, metric: Metric | None = None
    ) -> None:
        self.key = (hook, name, dataloader_idx if options.add_dataloader_idx else None)
        self.given: tuple[Any, ...] = ()
        self.options, self.dataloader_idx, self.metric = options, dataloader_idx, metric
        suffix = (
            f"/dataloader_idx_{dataloader_idx}" if options.add_dataloader_idx and dataloader_idx is not None else ""
        )
        forked = bool(options.on_step and options.on_epoch)
        self.name = name + suffix
        self.step_name, self.epoch_name = f"{name}{'_step' * forked}{suffix}", f"{name}{'_epoch' * forked}{suffix}"
        self.dtype = default_dtype()  # of the hook that logs first, where a precision may set another
        self.accumulates = bool(options.on_epoch) and metric is None
        self.weighs = self.accumulates and options.reduce_fx == "mean"
        self.syncs = bool(options.sync_dist and options.on_step) and metric is None and not options.rank_zero_only
        self.forget()

    def forget(self) -> None:
        """Forgets what was logged."""
        self.step: Any = None
        self.total: Tensor | None = None
        self.weight = 0
        self.computed: Any = None
        self.live = False

    def add(self, value: Any, size: int) -> None:
        """Takes a logged value: a 0-dim tensor, or what a metric gave for its last batch."""
        self.live, self.computed, self.step = True, None, value
        if not self.accumulates:
            return
        total = self.total
        if total is None:
            start = _START.get(self.options.reduce_fx, 0.0)
            total = self.total = torch.full((), start, dtype=self.dtype, device=value.device)
        elif total.device != value.device:
            total = self.total = total.to(value.device)
        if not self.weighs:
            self.total = _COMBINE[self.options.reduce_fx](total, value)
            return
        self.weight += size
        if size & (size - 1) == 0 and total.dtype is value.dtype:
            total.add_(value, alpha=size)  # the product with a power of two is exact: the same bits in one operation
        else:
            self.total = total + value * size

    def epoch(self, reduce: Callable[..., Any] | None) -> Any:
        """The value of the epoch, over all processes if `reduce` is given."""
        if self.computed is None:
            self.computed = self.metric.compute() if self.metric is not None else self._reduced(reduce)
        return self.computed

    def _reduced(self, reduce: Callable[..., Tensor] | None) -> Tensor | None:
        total = self.total
        if total is None:
            return None
        alone = reduce is None or self.options.rank_zero_only
        if not self.weighs:
            return total.clone() if alone or reduce is None else reduce(total.clone(), reduce_op=self.options.reduce_fx)
        if alone or reduce is None:
            return total / self.weight
        weight = torch.tensor(self.weight, dtype=total.dtype, device=total.device)
        summed: Tensor = reduce(total.clone(), reduce_op="sum") / reduce(weight, reduce_op="sum")
        return summed

    def state_dict(self, names: dict[int, str]) -> dict[str, Any]:
        """Everything, in plain containers.

        Args:
            names: The names of the module's metrics, by identity.
        """
        values = on_cpu({"total": self.total, "step": self.step})
        metric = names.get(id(self.metric)) if self.metric is not None else None
        return {
            **values,
            "key": list(self.key),
            "options": list(self.options),
            "dataloader_idx": self.dataloader_idx,
            "metric": metric,
            "weight": self.weight,
            "dtype": self.dtype,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], metrics: dict[str, Any]) -> "Entry":
        """An entry that goes on where another was.

        Args:
            state: What `state_dict` returned.
            metrics: The module's metrics, by name.
        """
        (hook, name, _), metric = state["key"], metrics.get(state["metric"])
        entry = cls(hook, name, LogOptions(*state["options"]), state["dataloader_idx"], metric)
        entry.total, entry.step, entry.weight, entry.dtype = (
            state["total"],
            state["step"],
            state["weight"],
            state["dtype"],
        )
        entry.live = True
        return entry


class Collection:
    """What one loop logged.

    Args:
        training: Whether step values reach callbacks too.

    Attributes:
        any_on_step: Whether anything has values of steps.
    """

    def __init__(self, *, training: bool) -> None:
        self.training = training
        self.any_on_step = False
        self.entries: dict[tuple[str, str, int | None], Entry] = {}

    def reset(self) -> None:
        """Forgets all values, and resets the metrics among them."""
        for entry in self.entries.values():
            entry.forget()
            if entry.metric is not None:
                entry.metric.reset()


def reduction_name(reduce_fx: Any) -> str:
    """The name of a reduction given as a name or a function."""
    if isinstance(reduce_fx, str):
        name = {"avg": "mean"}.get(reduce_fx.lower(), reduce_fx.lower())
    else:
        name = _REDUCTIONS.get(reduce_fx, "")
    if name not in ("mean", "sum", "min", "max"):
        raise MisconfigurationException(
            f"`self.log(..., reduce_fx={reduce_fx!r})`: only mean, sum, min and max are known. For anything else log a"
            " torchmetrics Metric."
        )
    return name


def on_cpu(values: dict[str, Any]) -> dict[str, Any]:
    """The same values, tensors among them copied to the CPU."""
    return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in values.items()}


def default_dtype() -> torch.dtype:
    """The default dtype, but never less than float32."""
    dtype = torch.get_default_dtype()
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
