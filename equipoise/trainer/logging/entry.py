"""One logged name, and the values from which its epoch value is reduced."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric

from equipoise.interop.lightning.self_log import LogOptions
from equipoise.notices import rank_zero_warn

__all__ = ["Entry", "combined", "default_dtype", "neutral_value", "on_cpu", "reduction_name"]

# Functions that add a value to those of the epoch.
_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}
# Neutral elements of reductions other than sums.
_START = {"min": float("inf"), "max": float("-inf")}
# Functions that users pass as `reduce_fx`.
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
    """Values logged under one name in one hook since the epoch began.

    Args:
        hook: The hook that logs.
        name: The name.
        options: The arguments of `self.log`, with the defaults of the hook.
        dataloader_idx: The loader's index, if there are several loaders.
        metric: The metric, if a metric is logged.
        arguments: The values of `LogOptions` as the user passed them.

    Attributes:
        key: Key of this entry in a collection.
        name, step_name, epoch_name: Names of its value, of a step's and of an epoch's.
        step: The latest value.
        total, weight: Sum (or minimum, maximum) of the epoch so far, and the number of samples in it.
        computed: The epoch's value once it is computed.
        live: True if anything was logged since the last reset.
        is_mean: True if the epoch's value is a mean, weighted by the sizes of batches.
        syncs_steps: True if values of a step are reduced over all processes.
    """

    def __init__(
        self,
        hook: str,
        name: str,
        options: LogOptions,
        dataloader_idx: int | None = None,
        metric: Metric | None = None,
        arguments: tuple[Any, ...] = (),
    ) -> None:
        self.options = options
        self.arguments = arguments
        self.dataloader_idx = dataloader_idx
        self.metric = metric
        # 1. Names. Values of steps and of epochs have different ones if both are logged.
        index = None
        suffix = ""
        if options.add_dataloader_idx and dataloader_idx is not None:
            index = dataloader_idx
            suffix = f"/dataloader_idx_{dataloader_idx}"
        self.key = (hook, name, index)
        self.name = name + suffix
        self.step_name = self.name
        self.epoch_name = self.name
        if options.on_step and options.on_epoch:
            self.step_name = f"{name}_step{suffix}"
            self.epoch_name = f"{name}_epoch{suffix}"
        # 2. Reduction. The dtype is that of the hook that logs first; the precision may set another one for a hook.
        self.dtype = default_dtype()
        is_tensor = metric is None
        self.accumulates = is_tensor and bool(options.on_epoch)
        self.is_mean = self.accumulates and options.reduce_fx == "mean"
        self.syncs_steps = is_tensor and bool(options.sync_dist and options.on_step) and not options.rank_zero_only
        # 3. Values.
        self.forget()

    def forget(self) -> None:
        """Forget all values."""
        self.step: Any = None
        self.total: Tensor | None = None
        self.weight = 0
        self.computed: Any = None
        self.live = False

    def add(self, value: Any, size: int) -> None:
        """Add a value of a step: a 0-dim tensor, or the value of a metric for its last batch.

        Args:
            value: The value.
            size: Its weight in a mean, in samples.
        """
        self.live = True
        self.computed = None
        self.step = value
        if not self.accumulates:
            return
        # 1. Begin with the neutral element of the reduction, on the device of the value.
        total = self.total
        if total is None:
            start = neutral_value(self.options.reduce_fx)
            total = self.total = torch.full((), start, dtype=self.dtype, device=value.device)
        elif total.device != value.device:
            total = self.total = total.to(value.device)
        # 2. Sums, minima and maxima have no weights.
        if not self.is_mean:
            self.total = _COMBINE[self.options.reduce_fx](total, value)
            return
        # 3. A product with a power of two is exact, so one operation gives the same bits as two.
        self.weight += size
        is_power_of_two = size & (size - 1) == 0
        if is_power_of_two and total.dtype is value.dtype:
            total.add_(value, alpha=size)
        else:
            self.total = total + value * size

    def convert(self, value: Tensor) -> Tensor:
        """Return a value of another dtype than float32 and float64 in the dtype of the epoch's value."""
        if not self.live and not value.is_floating_point():
            rank_zero_warn(f"The value logged as {self.name!r} is of {value.dtype}; it is made floating to be reduced.")
        return value.to(self.dtype)

    def set_epoch_value(self, value: Any) -> None:
        """Set the epoch's value, which was computed over all processes.

        This process may have logged nothing; the entry is live nevertheless.
        """
        self.computed = value
        self.live = True

    def epoch(self) -> Any:
        """Return the value of the epoch: that of all processes once it is computed, before that of this process.

        No other process is waited for, since a hook may read it in one process alone.
        """
        if self.computed is None and self.metric is not None:
            self.computed = self.metric.compute()
        if self.computed is not None or self.total is None:
            return self.computed
        if self.is_mean:
            return self.total / self.weight
        return self.total.clone()

    def state_dict(self, names: dict[int, str]) -> dict[str, Any]:
        """Return all values, in plain containers."""
        values = on_cpu({"total": self.total, "step": self.step})
        metric = None
        if self.metric is not None:
            metric = names.get(id(self.metric))
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
    def like(cls, state: dict[str, Any], metrics: dict[str, Any]) -> "Entry":
        """Return an entry without values, of the name and the arguments of a saved one."""
        hook, name, _ = state["key"]
        options = LogOptions(*state["options"])
        metric = metrics.get(state["metric"])
        return cls(hook, name, options, state["dataloader_idx"], metric, arguments=tuple(options))

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], metrics: dict[str, Any]) -> "Entry":
        """Return an entry that continues a saved one."""
        entry = cls.like(state, metrics)
        entry.load_values(state)
        return entry

    def load_values(self, state: dict[str, Any]) -> None:
        """Take the values of a saved entry."""
        self.total = state["total"]
        self.step = state["step"]
        self.weight = state["weight"]
        self.dtype = state["dtype"]
        self.live = True


def reduction_name(reduce_fx: Any) -> str:
    """Return the name of a reduction: mean, sum, min or max.

    Raises:
        MisconfigurationException: For any other reduction.
    """
    if isinstance(reduce_fx, str):
        name = reduce_fx.lower()
        if name == "avg":
            name = "mean"
    else:
        name = _REDUCTIONS.get(reduce_fx, "")
    if name not in ("mean", "sum", "min", "max"):
        raise MisconfigurationException(
            f"`self.log(..., reduce_fx={reduce_fx!r})`: only mean, sum, min and max are known. For anything else log a"
            " torchmetrics Metric."
        )
    return name


def neutral_value(reduction: Any) -> float:
    """Return the value that changes nothing in a reduction."""
    return _START.get(reduction, 0.0)


def combined(values: Sequence[Tensor], reduction: str) -> Tensor:
    """Return one value for those of several processes or parts of a batch: their mean, sum, minimum or maximum."""
    stacked = torch.stack(tuple(values))
    if reduction == "mean":
        return stacked.mean(0)
    if reduction == "sum":
        return stacked.sum(0)
    if reduction == "min":
        return stacked.amin(0)
    return stacked.amax(0)


def on_cpu(values: dict[str, Any]) -> dict[str, Any]:
    """Return the same values, with copies on the CPU in place of tensors."""
    copies = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            value = value.detach().cpu()
        copies[name] = value
    return copies


def default_dtype() -> torch.dtype:
    """Return the default dtype if it is float64, else float32."""
    dtype = torch.get_default_dtype()
    if dtype in (torch.float32, torch.float64):
        return dtype
    return torch.float32
