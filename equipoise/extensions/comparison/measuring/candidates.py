"""The strategies that are compared: how each changes a configuration, and the overrides that do the same."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from equipoise.app.config.suggestions import did_you_mean
from equipoise.errors import ConfigurationError

__all__ = ["CANDIDATES", "MOST_SETTLING_STEPS", "Attempt", "Candidate", "batch_size_of", "chosen_candidates"]

# Steps in which `balanced` measures the devices, before its shares are fixed; one more is a usual step.
MOST_SETTLING_STEPS = 8


@dataclass(frozen=True)
class Candidate:
    """A strategy with its options.

    Attributes:
        label: Its name in tables.
        name: Name of the strategy.
        target: Class of the strategy.
        options: Arguments of the strategy. Default: none.
        has_processes: Whether each device has a process of its own. Default: False.
        last_is_root: Whether the rest of a step runs on the last device, not on the first. Default: False.
        measures_shares: Whether it measures the devices in its first steps, unless their shares are given. Default:
            False.
        is_default: Whether it runs unless the user names strategies. Default: True.
    """

    label: str
    name: str
    target: str
    options: Mapping[str, Any] = field(default_factory=dict)
    has_processes: bool = False
    last_is_root: bool = False
    measures_shares: bool = False
    is_default: bool = True

    def attempt(
        self, values: Mapping[str, Any], devices: Sequence[str], user_overrides: Sequence[str] = ()
    ) -> "Attempt":
        """Return a configuration with this strategy, without a change of the given one."""
        # 1. The devices.
        own_values = deepcopy(dict(values))
        own_devices = list(devices)
        overrides = [f"strategy={self.name}"]
        overrides += [f"strategy.{key}={value}" for key, value in self.options.items()]
        if self.name == "single_device" and len(devices) > 1:
            own_devices = own_devices[:1]
            overrides.append(f"trainer.devices=[{own_devices[0]}]")
        own_values["trainer"] |= {"devices": own_devices, "accelerator": "auto"}

        # 2. The strategy, with the options that the user has chosen for it.
        strategy: dict[str, Any] = {}
        configured = values["strategy"]
        if isinstance(configured, dict) and _class_name(configured["_target_"]) == _class_name(self.target):
            strategy = dict(configured)
            overrides += self._options_of_user(user_overrides)
        own_values["strategy"] = strategy | {"_target_": self.target, **self.options}

        # 3. A batch is that of one device, shared out.
        attempt = Attempt(
            self,
            own_values,
            own_devices,
            overrides,
            settling_steps=self._settling_steps(strategy),
        )
        if self.name != "single_device" and len(devices) == 1:
            attempt.reason = "there is one device; name several, such as trainer.devices=[cpu,cpu]"
        elif self.has_processes:
            attempt.share_batches()
        return attempt

    def _options_of_user(self, user_overrides: Sequence[str]) -> list[str]:
        """Return the user's overrides of options that this candidate leaves to the user."""
        options = []
        for override in user_overrides:
            group, _, key = override.lstrip("+").partition("=")[0].partition(".")
            if group == "strategy" and key and key not in self.options:
                options.append(override)
        return options

    def _settling_steps(self, options: Mapping[str, Any]) -> int:
        """Return the number of steps after which a step is a usual one."""
        if not self.measures_shares:
            return 1
        shares = options.get("shares")
        first_size = options.get("first_device_batch_size")
        if shares in (None, "auto") and first_size is None:
            return MOST_SETTLING_STEPS
        return 1


def _class_name(target: str) -> str:
    return target.rpartition(".")[2]


@dataclass
class Attempt:
    """A configuration with a strategy.

    Attributes:
        candidate: The strategy.
        values: The configuration.
        devices: Names of its devices.
        overrides: The overrides that choose it.
        reason: The reason why it cannot run. Default: None, it can.
        settling_steps: Steps after which a step is a usual one. Default: 1, as optimisers create their state in the
            first.
        has_same_batches: Whether a step has the samples of a step on one device.
    """

    candidate: Candidate
    values: dict[str, Any]
    devices: list[str]
    overrides: list[str]
    reason: str | None = None
    settling_steps: int = 1
    has_same_batches: bool = True

    @property
    def root(self) -> int:
        """Number of the device on which the rest of a step runs."""
        if self.candidate.last_is_root:
            return len(self.devices) - 1
        # Devices of one name differ by their number alone.
        chosen = self.values["strategy"].get("output_device")
        if type(chosen) is int:
            return chosen
        return 0

    @property
    def home(self) -> int:
        """Number of the device with the module's own weights, as far as they are not placed elsewhere."""
        if self.candidate.last_is_root:
            return self.root
        return 0

    def share_batches(self) -> None:
        """Give each process its part of the batch size, so that a step has as many samples as on one device."""
        size = batch_size_of(self.values)
        count = len(self.devices)
        # Batches of a module's own loader, for instance.
        if size is None:
            self.has_same_batches = False
            return
        if size % count:
            self.reason = f"data.batch_size={size} cannot be shared out evenly among {count} processes"
            return
        self.values["data"]["batch_size"] = size // count
        self.overrides.append(f"data.batch_size={size // count}")


def batch_size_of(values: Mapping[str, Any]) -> int | None:
    """Return the value of `data.batch_size`; None if there is no such key with a number."""
    size = (values.get("data") or {}).get("batch_size")
    # By type, because isinstance counts true and false among the integers.
    if type(size) is int:
        return size
    return None


# The first is what the others are compared with. The order is from simple to complex.
CANDIDATES = (
    Candidate("single_device", "single_device", "equipoise.SingleDeviceStrategy"),
    Candidate("dp forward", "dp", "equipoise.DataParallelStrategy", {"parallelize": "forward"}),
    Candidate("dp step", "dp", "equipoise.DataParallelStrategy", {"parallelize": "step"}),
    Candidate("balanced", "balanced", "equipoise.BalancedDataParallelStrategy", measures_shares=True),
    Candidate("ddp", "ddp", "equipoise.DDPStrategy", has_processes=True),
    Candidate("fsdp", "fsdp", "equipoise.FSDPStrategy", has_processes=True),
    Candidate("pipeline", "pipeline", "equipoise.PipelineStrategy", last_is_root=True),
    Candidate("hogwild", "hogwild", "equipoise.HogwildStrategy", has_processes=True, is_default=False),
    # Processes divide the batch themselves.
    Candidate("virtual", "virtual", "equipoise.VirtualDevicesStrategy", is_default=False),
)


def chosen_candidates(names: Sequence[str] | None) -> list[Candidate]:
    """Return the strategies to compare, in the order of the table.

    Args:
        names: Names of strategies or labels; None for those that compute what one device computes.

    Raises:
        ConfigurationError: If there is no such strategy, or nothing to compare.
    """
    if names is None:
        return [candidate for candidate in CANDIDATES if candidate.is_default]
    options = {candidate.name for candidate in CANDIDATES}
    options |= {candidate.label for candidate in CANDIDATES}
    for name in names:
        if name == "ensemble":
            raise ConfigurationError(
                "equipoise compare cannot compare ensemble, which trains several members. Leave it out."
            )
        if name not in options:
            hint = did_you_mean(name, options)
            raise ConfigurationError(f"There is no strategy {name!r} to compare{hint}")
    # A name stands for all variants of a strategy, a label for one.
    return [candidate for candidate in CANDIDATES if candidate.name in names or candidate.label in names]
