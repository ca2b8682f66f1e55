"""BalancedDataParallelStrategy: data parallelism in one process, with batches cut for unequal devices."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.notices import rank_zero_warn
from equipoise.parallel.batches.calibration import Calibration, SimulatedDevice
from equipoise.parallel.batches.shares import are_shares, even_sizes, first_device_sizes, sizes_by_shares
from equipoise.precision import Precision
from equipoise.strategies.replicated.base import Parallelize, ReplicatedStrategy

__all__ = ["BalancedDataParallelStrategy"]

_LESS = 0.75  # of what a device had when its memory ran out
_LEAST = 0.01  # of the largest share; less helps nobody


class BalancedDataParallelStrategy(ReplicatedStrategy):
    """Computes every batch in unequal parts on several devices of one machine, in one process; gradients are exact.

    With `OOMRecovery`, a device that ran out of memory in training gets a quarter less from then on.

    Args:
        shares: A number from 0 for each device, relative to one another: `[2, 3, 3]`. A device with a share of 0 takes
            no part in the computation. "auto": measured in the first steps, so that all devices finish together and
            none exceeds its memory; then told, to be pinned, and saved in checkpoints. Default: "auto", unless
            `first_device_batch_size` is given.
        first_device_batch_size: Samples for the first device, from 0, the rest going to the others evenly; the sizes of
            BalancedDataParallel (`gpu0_bsz // acc_grad` there). Where the others would get no more than the first, the
            batch is cut evenly, and a warning says so.
        parallelize: "step": the whole `training_step` runs on every device. "forward": only the module's forward does.
            Default: "step".
        output_device: For "forward": where outputs are gathered, an index into the devices or a device. Default: the
            first device.
        dim: The dimension of the samples. Default: 0, the first.
        simulated: Devices, by their index, that are to be slower or smaller than they are; for trying things out.

    Raises:
        ConfigurationError: If an argument cannot be right, or does not fit the devices.

    Example:
        >>> from equipoise import BalancedDataParallelStrategy, Trainer
        >>> strategy = BalancedDataParallelStrategy(shares=[1, 3])
        >>> trainer = Trainer(strategy=strategy, devices=["cpu", "cpu"], logger=False, enable_checkpointing=False)
        >>> strategy.sizes(8)
        [2, 6]
    """

    name: ClassVar[str] = "balanced"

    def __init__(
        self,
        *,
        shares: Sequence[float] | Literal["auto"] | None = None,
        first_device_batch_size: int | None = None,
        parallelize: Parallelize = "step",
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        simulated: Mapping[int, SimulatedDevice] | None = None,
    ) -> None:
        super().__init__(parallelize=parallelize, output_device=output_device, dim=dim)
        if shares is not None and first_device_batch_size is not None:
            raise ConfigurationError(
                f"shares={shares!r} and first_device_batch_size={first_device_batch_size!r} both say how batches are"
                " cut. Give one of them."
            )
        if first_device_batch_size is not None and (
            isinstance(first_device_batch_size, bool)
            or not isinstance(first_device_batch_size, int)
            or first_device_batch_size < 0
        ):
            raise ConfigurationError(
                f"first_device_batch_size is a number of samples, from 0, not {first_device_batch_size!r}."
            )
        self.first_device_batch_size = first_device_batch_size
        self.measures = first_device_batch_size is None and shares in (None, "auto")
        self.simulated = dict(simulated or {})
        self._shares: list[float] | None = None
        self._given: list[float] | int | None = first_device_batch_size  # by the user, whatever was learned since
        self._calibration: Calibration | None = None
        self._warned = False
        if not self.measures and shares is not None:
            self.shares = shares

    @property
    def shares(self) -> list[float] | None:
        """The shares in use; None before they were measured, or where `first_device_batch_size` says it instead.

        They may be set at any time, also while training.
        """
        return self._shares

    @shares.setter
    def shares(self, shares: Any) -> None:
        self._take(shares)
        if not self.measures:
            self._given = self._shares

    def _take(self, shares: Any) -> None:
        if not are_shares(shares):
            raise ConfigurationError(
                f"shares must be 'auto' or a number from 0 for each device, not all of them 0, such as [2, 3, 3]; not"
                f" {shares!r}."
            )
        if self.devices and len(shares) != len(self.devices):
            raise ConfigurationError(
                f"shares={list(shares)!r} are {len(shares)} numbers, but there are {len(self.devices)} devices:"
                f" {', '.join(map(str, self.devices))}. Give a number for each."
            )
        self._shares, self._calibration = list(shares), None

    def measure_again(self) -> None:
        """The next steps measure the devices anew, for instance because others use them now.

        Raises:
            ConfigurationError: If the shares were given.
        """
        if not self.measures:
            raise ConfigurationError("Only shares='auto' are measured, but these were given; leave them out.")
        self._shares = None
        self._calibration = Calibration(self.devices, self.simulated) if self.devices else None

    # Where it runs.

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Takes the devices; see `Strategy.connect`."""
        if self.first_device_batch_size is not None and len(devices) == 1:
            raise ConfigurationError(
                f"first_device_batch_size={self.first_device_batch_size} shares batches out among several devices, but"
                " there is one. Give more devices, or take strategy='single_device'."
            )
        super().connect(devices, num_nodes)
        self._calibration = None  # of other devices
        if wrong := [index for index in self.simulated if not 0 <= index < len(devices)]:
            raise ConfigurationError(f"simulated names the device {wrong[0]}, but there are {len(devices)} devices.")
        learned = None if self._shares is self._given else self._shares
        if learned is not None and len(learned) != len(devices):
            self._shares = self._given if isinstance(self._given, list) else None
        if self._shares is not None:
            self._take(self._shares)  # which checks their number

    def setup(self, module: nn.Module, precision: Precision) -> None:
        """Places the module on the first device; see `Strategy.setup`."""
        super().setup(module, precision)
        if self.measures and self._shares is None and self._calibration is None and len(self.devices) > 1:
            self.measure_again()

    # How a batch is shared out.

    def sizes(self, batch_size: int) -> list[int]:
        """The number of samples for each device."""
        devices = len(self.devices)
        if self.first_device_batch_size is not None and self._shares is None:
            sizes, as_asked = first_device_sizes(batch_size, devices, self.first_device_batch_size)
            if not as_asked and not self._warned:
                self._warned = True
                rank_zero_warn(
                    f"first_device_batch_size={self.first_device_batch_size} is too much for a batch of {batch_size}:"
                    f" the others would get no more than the first. It is cut evenly, into {sizes}."
                )
            return sizes
        if self._calibration is not None and self._training and self._is_measurable(batch_size):
            return self._calibration.sizes(batch_size)
        return even_sizes(batch_size, devices) if self._shares is None else sizes_by_shares(batch_size, self._shares)

    def _compute(self, functions: Sequence[tuple[int, Callable[[], Any]]], sizes: Sequence[int]) -> list[Any]:
        work = [(index, self._simulate(index, run, size)) for (index, run), size in zip(functions, sizes, strict=True)]
        calibration = self._calibration
        if calibration is None or not self._training or not self._is_measurable(sum(sizes)):
            return super()._compute(work, sizes)
        work = [(index, calibration.measured(index, run, n)) for (index, run), n in zip(work, sizes, strict=True)]
        answers = super()._compute(work, sizes)
        calibration.end_step(sum(sizes))
        if calibration.is_done:
            self._take(calibration.result())
            rank_zero_info(f"Measured shares of {', '.join(map(str, self.devices))}: shares={self._shares} pins them.")
        return answers

    def relieve(self) -> None:
        """Takes a quarter of its share from the device that ran out of memory; see `Strategy.relieve`."""
        index, devices = self._failed, range(len(self.devices))
        if index is None or index not in self._computed:
            return
        name = f"{self.devices[index]}{f' (number {index})' if self.devices.count(self.devices[index]) > 1 else ''}"
        if self._calibration is not None and self._is_measurable(sum(self._computed.values())):
            most = max(1, int(_LESS * self._computed[index]))
            self._calibration.limit(index, most)
            rank_zero_warn(f"Measuring goes on with at most {most} samples for {name}, which ran out of memory.")
            return
        shares = list(self._shares or [float(self._computed.get(each, 0)) for each in devices])
        if len(self.devices) > 1 and _LESS * shares[index] >= _LEAST * max(shares):
            shares[index] = float(f"{_LESS * shares[index]:.3g}")
            self._take(shares)
            rank_zero_warn(f"{name} ran out of memory and gets less from now on: shares={shares}.")

    def _is_measurable(self, batch_size: int) -> bool:
        """Whether a batch is large enough for every device to get a part, and a larger and a smaller one."""
        return batch_size >= 4 * len(self.devices)

    def _simulate(self, index: int, function: Callable[[], Any], size: int) -> Callable[[], Any]:
        device = self.simulated.get(index)
        return function if device is None else lambda: device.compute(function, size)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The shares that were measured, or reduced where memory ran out; then also those that they replace."""
        if self._shares is None or self._shares is self._given:
            return {}
        return {"shares": self._shares, **({} if self.measures else {"instead_of": self._given})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes shares back, if they are for as many devices and what was given is as it was."""
        shares = state.get("shares")
        same = self.measures or state.get("instead_of", ()) == self._given
        if same and shares is not None and len(shares) == len(self.devices):
            self._take(shares)
