"""A call of a network: its arguments, split into tensors and the structure around them, and its computation."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from equipoise.errors import ConfigurationError
from equipoise.extensions.pipeline.forward.call_patches import patched_logging
from equipoise.extensions.pipeline.forward.layer_lending import computed_on
from equipoise.extensions.pipeline.forward.saved_tensors import without_saved_tensors
from equipoise.interop.lightning.classes import module_classes
from equipoise.interop.torch.dispatch import OnOperation
from equipoise.interop.torch.modules import hook_registries_of
from equipoise.parallel.snapshot.preserve_state import preserve_state
from equipoise.tree import extract_tensors, insert_tensors, items_of, leaves_of

__all__ = ["CallStructure", "NetworkCall"]

Result = TypeVar("Result")


class CallStructure:
    """The structure of a call's arguments, and their tensors.

    Two calls of the same structure differ only in their tensors.

    Args:
        args, kwargs: The arguments.

    Attributes:
        tensors: The tensors, in the order of the arguments.
        key: Text that is equal for calls of the same structure.

    Raises:
        ConfigurationError: If an argument of an unsupported type contains tensors.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        arguments = (tuple(args), kwargs)
        for leaf in leaves_of(arguments, _items_of):
            _check_leaf(leaf)
        self._tree, self.tensors = extract_tensors(arguments, _items_of)
        self.key = repr(self._tree)

    def copies_on(self, device: torch.device) -> list[Tensor]:
        """Return copies of the tensors, which a forward may change. A tensor that is passed twice has one copy.

        Args:
            device: Device of the copies.
        """
        copies: dict[int, Tensor] = {}
        for tensor in self.tensors:
            if id(tensor) in copies:
                continue
            copy_of_tensor = tensor.detach().clone().to(device)
            copy_of_tensor.requires_grad_(tensor.requires_grad)
            copies[id(tensor)] = copy_of_tensor
        return [copies[id(tensor)] for tensor in self.tensors]

    def fill(self, tensors: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors.

        Args:
            tensors: As many tensors as the call has; also values that stand for them in a trace.
        """
        args, kwargs = insert_tensors(self._tree, tensors, _items_of)
        return args, kwargs


def _items_of(value: Any) -> Iterable[Any] | None:
    """Return the items of a container among the arguments; None: the value is passed on as one."""
    return None if isinstance(value, PackedSequence) else items_of(value)


def _check_leaf(value: Any) -> None:
    """Check that a value which is no container has no tensors that a pipeline cannot see."""
    if isinstance(value, Tensor):
        return
    if isinstance(value, PackedSequence):
        raise ConfigurationError(
            "The network is called with a PackedSequence, which a pipeline cannot pass between its stages. Pass the"
            " padded tensor and the lengths, and pack within a submodule, which stays whole; or choose another"
            " strategy."
        )
    attributes = getattr(value, "__dict__", {})
    if any(isinstance(attribute, Tensor) for attribute in attributes.values()):
        raise ConfigurationError(
            f"The network is called with a {type(value).__name__}, whose tensors a pipeline cannot see. Pass"
            " tensors, or tuples, lists, dictionaries or dataclasses of them."
        )


@dataclass(frozen=True)
class NetworkCall:
    """A call of a network.

    Attributes:
        network: The network, in the mode (training or evaluation) in which it will run.
        forward: Its own forward.
        structure: The arguments, with their tensors.
        module: The user's module to which the network belongs.
        device: Device of the computation. Layers on other devices are lent to it while they are called.
    """

    network: nn.Module
    forward: Callable[..., Any]
    structure: CallStructure
    module: nn.Module
    device: torch.device

    def copied_tensors(self) -> list[Tensor]:
        """Return copies of the tensors on the device, which a forward may change."""
        return self.structure.copies_on(self.device)

    def compute(self, on_operation: OnOperation | None = None) -> Any:
        """Return the output of the forward.

        Args:
            on_operation: See `OperationWatch`. Default: no operation is reported.
        """
        args, kwargs = self.structure.fill(self.copied_tensors())
        with computed_on(self.device, self.network, self.module, on_operation):
            return self.forward(*args, **kwargs)

    def rehearsed(self, compute: Callable[[], Result], *, keeps_hooks: bool = False) -> Result:
        """Return the result of a computation that keeps no tensors for a backward, and restore the module's state.

        Args:
            compute: The computation.
            keeps_hooks: Whether hooks that it registers stay. Default: False.
        """

        def restored() -> Result:
            with self.preserved(keeps_hooks=keeps_hooks):
                return compute()

        return without_saved_tensors(restored)

    @contextmanager
    def preserved(self, *, keeps_hooks: bool = False) -> Iterator[None]:
        """Restore the state of the module at the end of a `with` block, and log nothing in it.

        Args:
            keeps_hooks: Whether hooks that are registered in the block stay. Default: False.
        """
        registries: list[dict[int, Any]] = []
        if not keeps_hooks:
            for submodule in self.module.modules():
                registries += hook_registries_of(submodule)
        hooks = [dict(registry) for registry in registries]
        try:
            with preserve_state(self.module, containers=True), patched_logging(module_classes(), _ignore):
                yield
        finally:
            for registry, content in zip(registries, hooks, strict=True):
                registry.clear()
                registry.update(content)


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Do nothing for a value that is logged."""
