"""Traces of the network's calls, each compared with the forward before it is used."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.extensions.pipeline.forward_patch import ForwardPatch
from equipoise.extensions.pipeline.graph.call_structure import CallStructure, NetworkCall
from equipoise.extensions.pipeline.graph.traced import Traced
from equipoise.extensions.pipeline.graph.training_modes import modes_of
from equipoise.extensions.pipeline.recording.targets import present_modes
from equipoise.extensions.pipeline.recording.tracing import NotTraceable, trace
from equipoise.extensions.pipeline.verification.trace_comparison import Comparison, Parting
from equipoise.notices import rank_zero_warn

__all__ = ["CheckedTraces", "NotFollowed"]

# Number of traces for one kind of call from which the user is warned.
_MANY_TRACES = 20


class NotFollowed(ConfigurationError):
    """Raised if the forward of a network cannot be recorded.

    Attributes:
        reason: The reason, as a part of a sentence.
    """

    # An error that another process sends is built from the message alone.
    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


def _key_of_call(name: str, network: nn.Module, structure: CallStructure) -> tuple[Any, ...]:
    """Return a key that is equal for calls with the same trace, if the trace also fits their tensors."""
    # A tensor may be passed twice.
    indices: dict[int, int] = {}
    kinds = []
    for index, tensor in enumerate(structure.tensors):
        first_index = indices.setdefault(id(tensor), index)
        kinds.append((tensor.dtype, tensor.layout, tensor.requires_grad, first_index))
    return name, structure.key, tuple(kinds), tuple(modes_of(network)), present_modes()


class CheckedTraces:
    """Trace calls of the network, and compare each kind of call once with the forward.

    Args:
        module: The user's module.
        modules: Its submodules by their names.
        patch: Replaces the forwards of networks; a trace needs the original ones.
        device: Device of the comparison.
        all_parameters_here: Makes a context in which this process has the values of all parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        modules: Mapping[str, nn.Module],
        patch: ForwardPatch,
        device: torch.device,
        all_parameters_here: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._module = module
        self._modules = modules
        self._patch = patch
        self._device = device
        self._all_parameters_here = all_parameters_here
        # Traces that agree with the forward, for each kind of call.
        self._compared: dict[tuple[Any, ...], list[Traced]] = {}
        # Networks that differ from themselves when they are repeated, of which the user has been warned.
        self._warned: set[nn.Module] = set()
        # Classes of submodules whose trace differs from their forward, with the reason. They stay whole.
        self._opaque_types: dict[type[nn.Module], str] = {}

    def forget(self) -> None:
        """Forget the traces that have been compared."""
        self._compared.clear()

    def find(self, name: str, structure: CallStructure) -> Traced | None:
        """Return the trace of an earlier call that serves for this one, too; None if there is none.

        Args:
            name: The network's name in the user's module.
            structure: The call.
        """
        key = _key_of_call(name, self._modules[name], structure)
        for traced in self._compared.get(key, ()):
            if traced.fits(structure.tensors):
                return traced
        return None

    def _trace(self, call: NetworkCall) -> Traced:
        try:
            with self._patch.removed(), self._all_parameters_here():
                return trace(call, self._opaque_types)
        except NotTraceable as error:
            kind = type(call.network).__name__
            raise NotFollowed(
                f"{kind} cannot be cut into stages: {error.obstacle}. Move that out of the network's forward, or into a"
                " submodule, which stays whole; or write the network as a sequence of blocks (nn.Sequential); or place"
                " its parts by hand and train with strategy='single_device'.",
                error.obstacle,
            ) from error

    def checked(self, name: str, structure: CallStructure) -> Traced:
        """Trace a call, and check that the trace computes what the forward does.

        Where they differ in a submodule of the user's, that submodule stays whole, and the call is traced again.

        Args:
            name: The network's name in the user's module.
            structure: The call.

        Raises:
            ConfigurationError: If they differ in the network's own forward.
        """
        earlier = self.find(name, structure)
        if earlier is not None:
            return earlier
        network = self._modules[name]
        compared = self._compared.setdefault(_key_of_call(name, network, structure), [])
        call = NetworkCall(network, self._patch.original(name), structure, self._module, self._device)
        while True:
            # 1. Trace the call, and compare the trace with the forward.
            traced = self._trace(call)
            parting = self._compare(call, traced)
            if parting is None:
                compared.append(traced)
                self._warn_of_many(network, len(compared))
                return traced

            # 2. Keep the likeliest submodule whole.
            kinds = [type(module) for module in parting.owners if type(module) not in self._opaque_types]
            if not kinds:
                raise NotFollowed(
                    _cannot_be_followed(network, parting), f"what was followed of it {parting}"
                ) from parting.error
            self._opaque_types[kinds[0]] = f"what was followed of it {parting}"

    def _warn_of_many(self, network: nn.Module, count: int) -> None:
        """Warn once of a network that is recorded again and again."""
        if count == _MANY_TRACES:
            rank_zero_warn(
                f"{type(network).__name__} was recorded {count} times, since its calls differ in shapes for which its"
                " forward asks, in answers about values of its arguments, or in attributes that it reads. Each"
                " recording takes as long as three or four forwards on one device. Batches that are padded to a few"
                " lengths need few recordings."
            )

    def _compare(self, call: NetworkCall, traced: Traced) -> Parting | None:
        """Return the first difference between a trace and the forward; None if there is none, or none can be found."""
        comparison = Comparison(call)
        with self._patch.removed(), self._all_parameters_here():
            parting = comparison.parting(traced)
        if not comparison.is_possible and call.network not in self._warned:
            self._warned.add(call.network)
            rank_zero_warn(_cannot_be_compared(call.network))
        return parting


def _cannot_be_followed(network: nn.Module, parting: Parting) -> str:
    return (
        f"{type(network).__name__} cannot be cut into stages: what was followed of its forward {parting}. So the"
        " forward depends on something that is not its own and differs from call to call, such as a global variable or"
        " an object that another module changes. Pass that as an argument; or move what depends on it into a submodule,"
        " which then stays whole; or choose another strategy."
    )


def _cannot_be_compared(network: nn.Module) -> str:
    return (
        f"{type(network).__name__} computes something else when it is called again with the same input, random numbers"
        " and buffers, so what was followed of its forward could not be compared with it, and is used as it is. A"
        " forward may use the clock, a generator of its own, or a counter outside of the module. Whatever it asks there"
        " must not decide what is computed, unless it is asked in a submodule that stays whole."
    )
