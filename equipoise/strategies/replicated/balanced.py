"""BalancedDataParallelStrategy: data parallelism in one process, with batches cut for unequal devices."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.notices import rank_zero_warn
from equipoise.parallel.batches.calibration import Calibration, SimulatedDevice
from equipoise.parallel.batches.shares import (
    are_shares,
    even_sizes,
    first_device_sizes,
    sizes_by_shares,
)
from equipoise.precision import Precision
from equipoise.strategies.portable_state import PortableState
from equipoise.strategies.replicated.replicated_strategy import Parallelize, ReplicatedStrategy
from equipoise.validation import is_whole

__all__ = ["BalancedDataParallelStrategy"]

# The part of its samples that a device keeps when its memory has run out.
_KEPT_PART = 0.75
# The smallest share after a reduction, relative to the largest one. A smaller one would save no more memory.
_SMALLEST_SHARE = 0.01
# A batch with fewer samples for each device is not measured.
_FEWEST_OF_DEVICE = 4


class BalancedDataParallelStrategy(ReplicatedStrategy):
    """Compute every batch in unequal parts on several devices of one machine, in one process; gradients are exact.

    With `OOMRecovery`, a device that ran out of memory in training gets a quarter less from then on.

    Args:
        shares: A number from 0 for each device, relative to one another: `[2, 3, 3]`. A device with a share of 0 takes
            no part in the computation. "auto": measured in the first steps, so that all devices finish together and
            none exceeds its memory; then logged, to be pinned, and saved in checkpoints. Default: "auto", unless
            `first_device_batch_size` is given.
        first_device_batch_size: Samples for the first device, from 0; the other devices share the remaining samples
            evenly. These are the sizes of BalancedDataParallel (`gpu0_bsz // acc_grad` there). Where the other devices
            would get no more than the first, the batch is divided evenly, with a warning.
        parallelize: "step": the complete `training_step` runs on every device. "forward": only the module's forward
            does. Default: "step".
        output_device: For "forward": where outputs are gathered, an index into the devices or a device. Default: the
            first device.
        dim: The dimension of the samples. Default: 0, the first.
        simulated: Devices, by their index, that are to be slower or smaller than they are; for experiments.

    Raises:
        ConfigurationError: If an argument is out of range or does not fit the devices.

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
        if first_device_batch_size is not None and not is_whole(first_device_batch_size, least=0):
            raise ConfigurationError(
                f"first_device_batch_size is a number of samples, from 0, not {first_device_batch_size!r}."
            )
        self.first_device_batch_size = first_device_batch_size
        self.measures = first_device_batch_size is None and shares in (None, "auto")
        self.simulated = dict(simulated or {})
        self._shares: list[float] | None = None
        # The user's setting, which stays when shares are measured or reduced: shares, or samples of the first device.
        self._user_setting: list[float] | int | None = first_device_batch_size
        self._calibration: Calibration | None = None
        self._has_warned = False
        if not self.measures and shares is not None:
            self.shares = shares

    @property
    def shares(self) -> list[float] | None:
        """The shares in use; None before they were measured, or where `first_device_batch_size` replaces them.

        They may be set at any time, also while training.
        """
        return self._shares

    @shares.setter
    def shares(self, shares: Any) -> None:
        self._apply_shares(shares)
        if not self.measures:
            self._user_setting = self._shares

    def _apply_shares(self, shares: Any) -> None:
        """Check shares and use them from the next batch on, which ends a measurement."""
        if not are_shares(shares):
            raise ConfigurationError(
                f"shares must be 'auto' or a number from 0 for each device, not all of them 0, such as [2, 3, 3]; not"
                f" {shares!r}."
            )
        values = list(shares)
        num_devices = len(self.devices)
        if self.devices and len(values) != num_devices:
            raise ConfigurationError(
                f"shares={values!r} are {len(values)} numbers, but there are {num_devices} devices:"
                f" {self._names_of_devices()}. Give a number for each."
            )
        self._shares = values
        self._calibration = None

    def measure_again(self) -> None:
        """Measure the devices again in the next steps, for instance because other programs use them now.

        Raises:
            ConfigurationError: If the user has set the shares.
        """
        if not self.measures:
            raise ConfigurationError("Only shares='auto' are measured, but these were given; leave them out.")
        self._shares = None
        self._calibration = None
        if self.devices:
            self._calibration = Calibration(self.devices, self.simulated)

    # Where it runs.

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Use the devices; see `Strategy.connect`."""
        if self.first_device_batch_size is not None and len(devices) == 1:
            raise ConfigurationError(
                f"first_device_batch_size={self.first_device_batch_size} shares batches out among several devices, but"
                " there is one. Give more devices, or take strategy='single_device'."
            )
        super().connect(devices, num_nodes)
        # A calibration holds for the devices that it has measured.
        self._calibration = None
        num_devices = len(devices)
        for index in self.simulated:
            if not 0 <= index < num_devices:
                raise ConfigurationError(f"simulated names the device {index}, but there are {num_devices} devices.")
        self._drop_shares_of_other_devices()
        if self._shares is not None:
            # `_apply_shares` checks that there is a number for each device.
            self._apply_shares(self._shares)

    def _drop_shares_of_other_devices(self) -> None:
        """Return to the user's shares if measured or reduced ones are for another number of devices."""
        if self._shares is None or self._shares is self._user_setting:
            return
        if len(self._shares) == len(self.devices):
            return
        self._shares = None
        if isinstance(self._user_setting, list):
            self._shares = self._user_setting

    def setup(self, module: nn.Module, precision: Precision) -> None:
        """Place the module on the first device; see `Strategy.setup`."""
        super().setup(module, precision)
        if not self.measures:
            return
        is_undecided = self._shares is None and self._calibration is None
        if is_undecided and len(self.devices) > 1:
            self.measure_again()

    # How a batch is shared out.

    def sizes(self, batch_size: int) -> list[int]:
        """Return the number of samples for each device."""
        # 1. As the user sets the size of the first.
        first = self.first_device_batch_size
        if first is not None and self._shares is None:
            return self._sizes_by_first(batch_size, first)

        # 2. As the measurement plans them. Small batches and evaluations are not measured.
        calibration = self._calibration
        if calibration is not None and self._is_training and self._is_measurable(batch_size):
            return calibration.sizes(batch_size)

        # 3. By shares, or evenly.
        if self._shares is None:
            return even_sizes(batch_size, len(self.devices))
        return sizes_by_shares(batch_size, self._shares)

    def _sizes_by_first(self, batch_size: int, first: int) -> list[int]:
        """Return the sizes with `first` samples for the first device; warn once where they do not fit."""
        sizes, fits = first_device_sizes(batch_size, len(self.devices), first)
        if not fits and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"first_device_batch_size={first} is too much for a batch of {batch_size}:"
                f" the others would get no more than the first. It is cut evenly, into {sizes}."
            )
        return sizes

    def _compute(self, functions: Sequence[tuple[int, Callable[[], Any]]], sizes: Sequence[int]) -> list[Any]:
        batch_size = sum(sizes)
        # 1. Small batches and evaluations are not measured.
        calibration = self._calibration
        if not self._is_training or not self._is_measurable(batch_size):
            calibration = None

        # 2. The part of each device, as it is simulated and measured.
        work = []
        for (index, function), size in zip(functions, sizes, strict=True):
            compute = function
            if index in self.simulated:
                compute = partial(self.simulated[index].compute, function, size)
            if calibration is not None:
                compute = calibration.measured(index, compute, size)
            work.append((index, compute))
        results = super()._compute(work, sizes)

        # 3. After enough steps the shares follow from the measurements.
        if calibration is not None:
            calibration.end_step(batch_size)
            if calibration.is_done:
                self._apply_shares(calibration.result())
                devices = self._names_of_devices()
                rank_zero_info(f"Measured shares of {devices}: shares={self._shares} pins them.")
        return results

    def _reduce_share(self, index: int, computed: Mapping[int, int]) -> None:
        """Reduce the share of the device that ran out of memory by a quarter; see `ReplicatedRecovery`."""
        name = self._name_of(index)
        # 1. A measurement continues with fewer samples for the device.
        calibration = self._calibration
        batch_size = sum(computed.values())
        if calibration is not None and self._is_measurable(batch_size):
            most = max(1, int(_KEPT_PART * computed[index]))
            calibration.limit(index, most)
            rank_zero_warn(f"Measuring continues with at most {most} samples for {name}, which ran out of memory.")
            return

        # 2. The present shares. Without any, the sizes of the batch that failed stand for them.
        num_devices = len(self.devices)
        if self._shares:
            shares = list(self._shares)
        else:
            shares = [float(computed.get(device, 0)) for device in range(num_devices)]

        # 3. Reduce the share. A device that is alone, or would get hardly any samples, keeps it.
        reduced = _KEPT_PART * shares[index]
        least = _SMALLEST_SHARE * max(shares)
        if num_devices == 1 or reduced < least:
            return
        shares[index] = float(f"{reduced:.3g}")
        self._apply_shares(shares)
        rank_zero_warn(f"{name} ran out of memory and receives fewer samples from now on: shares={shares}.")

    def _names_of_devices(self) -> str:
        return ", ".join(map(str, self.devices))

    def _name_of(self, index: int) -> str:
        device = self.devices[index]
        if self.devices.count(device) > 1:
            return f"{device} (number {index})"
        return str(device)

    def _is_measurable(self, batch_size: int) -> bool:
        return batch_size >= _FEWEST_OF_DEVICE * len(self.devices)

    # State.

    @property
    def portable(self) -> PortableState:
        """Full states, and the shares that the user has not set; see `Strategy.portable`."""
        return PortableState(self._own_state, self._load_own_state)

    def _own_state(self) -> dict[str, Any]:
        """Return shares that were measured, or reduced after an error of memory; then also the user's setting."""
        if self._shares is None or self._shares is self._user_setting:
            return {}
        state: dict[str, Any] = {"shares": self._shares}
        if not self.measures:
            state["instead_of"] = self._user_setting
        return state

    def _load_own_state(self, state: dict[str, Any]) -> None:
        """Restore shares, if they are for as many devices and the user's setting is the same."""
        shares = state.get("shares")
        if shares is None or len(shares) != len(self.devices):
            return
        # Measured shares come without a setting. The empty one is none of this strategy's.
        earlier_setting = state.get("instead_of", ())
        if self.measures or earlier_setting == self._user_setting:
            self._apply_shares(shares)
