"""One call of a network for all members at once: `torch.vmap` over their stacked parameters and buffers.

What each member calls is unchanged, so nearly any network can be computed so. What cannot is computed member by member:
forwards with branches on values, operations that have no batched form, and forwards whose side effects would be of all
members at once. The first call of each kind is computed both ways and compared.
"""

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.interop.torch.batching import compute_batched
from equipoise.interop.torch.modules import buffers_of, has_module_hooks, is_compiled, parameters_of, versions
from equipoise.strategies.ensemble.stacked_members import StackedMembers
from equipoise.tree import extract_tensors, insert_tensors, leaves_of

__all__ = ["BatchedCall", "Call", "NotBatchable", "Noted", "reason_against"]

# Positional and keyword arguments.
Call = tuple[tuple[Any, ...], dict[str, Any]]
# A dictionary of a module's parameters or buffers, and the name in it.
Slot = tuple[dict[str, Any], str]

# Tensors, and values in arguments and outputs that are the same for all members if they are equal.
_PLAIN = (Tensor, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class NotBatchable(Exception):
    """A call that cannot be computed for all members at once; its text is the reason."""


class Noted(NamedTuple):
    """What a call may change.

    Attributes:
        buffers: Copies of the stacked buffers.
        attributes: The attributes of each module.
    """

    buffers: list[Tensor]
    attributes: list[dict[str, Any]]


class CallState(NamedTuple):
    """Everything beside the arguments on which the result of a call depends.

    Attributes:
        attributes: The attributes of the network's modules.
        versions: The versions of the first member's parameters and buffers; None if they have none.
        grad: True if gradients are enabled.
        modes: The states of autocast.
    """

    attributes: list[Any]
    versions: list[int] | None
    grad: bool
    modes: tuple[Any, ...]


def _autocast_state() -> tuple[Any, ...]:
    types = ("cpu", "cuda")
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types)


def reason_against(network: nn.Module) -> str:
    """Return why a network is not computed for all members at once; empty if there is no reason before a call.

    Args:
        network: The network.
    """
    if "forward" in vars(network):
        return "its forward was set on the object"
    for name, part in network.named_modules():
        if is_compiled(part) or isinstance(part, torch.jit.ScriptModule):
            return f"{name or 'it'} is compiled"
        # Hooks on the network itself run outside of the batched call.
        if name and has_module_hooks(part):
            return f"{name} has hooks"
    return ""


class BatchedCall:
    """Calls a network of all members.

    Args:
        name: The name of the network in the module.
        members: The members.

    Attributes:
        name: The name.
        networks: The network of each member.
    """

    def __init__(self, name: str, members: StackedMembers) -> None:
        self.name = name
        self.networks = [module.get_submodule(name) for module in members.modules]
        self._network = self.networks[0]
        self._forward: Callable[..., Any] = type(self._network).forward
        self._parts = list(self._network.modules())
        # 1. Parameters and buffers, each with every place in which it is registered.
        self._stacked: list[Tensor] = []
        self._slots: list[list[Slot]] = []
        by_id: dict[int, list[Slot]] = {}
        for part in self._parts:
            for registered in (parameters_of(part), buffers_of(part)):
                for key, tensor in registered.items():
                    if tensor is not None:
                        self._add(tensor, (registered, key), members, by_id)
        self._dims = (0,) * len(self._slots)
        self._own_tensors = [slots[0][0][slots[0][1]] for slots in self._slots]
        self._buffers = [members.buffers[key] for key in by_id if key in members.buffers]
        # 2. Kinds of calls that were compared.
        self._compared: set[tuple[Any, ...]] = set()
        # The structure of the last output.
        self._output_tree: Any = None

    def _add(self, tensor: Tensor, slot: Slot, members: StackedMembers, by_id: dict[int, list[Slot]]) -> None:
        """Note a place in which a parameter or buffer is registered."""
        key = id(tensor)
        if key in by_id:
            by_id[key].append(slot)
            return
        parameter = members.of(tensor)
        stacked: Tensor = members.buffers[key] if parameter is None else parameter.stacked
        by_id[key] = [slot]
        self._stacked.append(stacked)
        self._slots.append(by_id[key])

    def alone(self, member: int, call: Call) -> Any:
        """Compute the call of one member.

        Args:
            member: The index of the member.
            call: The arguments.
        """
        args, kwargs = call
        return self._forward(self.networks[member], *args, **kwargs)

    def __call__(self, calls: Sequence[Call], randomness: str) -> list[Any]:
        """Compute the calls of all members at once.

        Args:
            calls: The arguments of each member.
            randomness: "error" or "different": whether the network may draw random numbers, which differ then between
                members, and from those that a member draws by itself.

        Returns:
            The output of each member.

        Raises:
            NotBatchable: If that is not possible; buffers and attributes are then as before.
        """
        tree, tensors = _taken_apart(calls)
        inputs, dims = _stack(tensors)
        kind = (self._network.training, torch.is_grad_enabled(), repr(tree))
        if kind in self._compared:
            return self._guarded(inputs, dims, tree, len(calls), randomness)
        # A network that draws random numbers has nothing to compare with.
        if randomness == "error":
            outputs = self._compared_outputs(calls, inputs, dims, tree)
        else:
            outputs = self._guarded(inputs, dims, tree, len(calls), randomness)
        self._compared.add(kind)
        return outputs

    def again(self, tree: Any, tensors: Sequence[Sequence[Tensor]], randomness: str) -> list[Any]:
        """Compute calls of a structure that was computed before.

        Args:
            tree: The structure of the arguments, with slots for tensors.
            tensors: The tensors of each member.
            randomness: See `__call__`.

        Raises:
            NotBatchable: See `__call__`.
        """
        inputs, dims = _stack(tensors)
        return self._guarded(inputs, dims, tree, len(tensors), randomness)

    def _guarded(
        self, inputs: list[Tensor], dims: tuple[int | None, ...], tree: Any, members: int, randomness: str
    ) -> list[Any]:
        """Compute a batched call; if that fails, restore what it has changed."""
        noted = self.note()
        try:
            return self._batched(inputs, dims, tree, members, randomness)
        except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, IndexError) as error:
            self.restore(noted)
            raise NotBatchable(_first_line(error)) from None
        except BaseException:
            self.restore(noted)
            raise

    def _batched(
        self, inputs: list[Tensor], dims: tuple[int | None, ...], tree: Any, members: int, randomness: str
    ) -> list[Any]:
        """Compute a batched call."""
        slots = self._slots
        count = len(slots)

        def compute(tensors: Sequence[Tensor]) -> list[Tensor]:
            originals = self._own_tensors
            _register(slots, tensors[:count])
            try:
                args, kwargs = insert_tensors(tree, tensors[count:])
                output = self._forward(self._network, *args, **kwargs)
                _check_registered(slots, tensors[:count])
            finally:
                _register(slots, originals)
            _check_plain(output, "returns")
            self._output_tree, values = extract_tensors(output)
            return values

        in_dims = self._dims + dims
        outputs = compute_batched(compute, [*self._stacked, *inputs], in_dims, members, randomness)
        rows = [output.unbind() for output in outputs]
        tree = self._output_tree
        self._output_tree = None
        return [insert_tensors(tree, values) for values in zip(*rows, strict=True)]

    # The comparison.

    def _compared_outputs(
        self, calls: Sequence[Call], inputs: list[Tensor], dims: tuple[int | None, ...], tree: Any
    ) -> list[Any]:
        """Compute a call member by member and at once, compare, and return the outputs of the latter."""
        # 1. Member by member, without a graph. Random numbers would come twice, so there must be none.
        noted = self.note()
        with torch.no_grad():
            expected = [self.alone(member, call) for member, call in enumerate(calls)]
        expected_buffers = [buffer.clone() for buffer in self._buffers]
        self.restore(noted)

        # 2. At once.
        noted = self.note()
        outputs = self._guarded(inputs, dims, tree, len(calls), "error")
        changed = self._changed_attribute(noted)
        reason = ""
        if changed:
            reason = f"its forward sets {changed}"
        elif not _are_close((expected, expected_buffers), (outputs, self._buffers)):
            reason = "the results differ from those of members computed one by one"
        if reason:
            self.restore(noted)
            raise NotBatchable(reason)
        return outputs

    def note(self) -> Noted:
        """Return what a call may change, for `restore`."""
        buffers = [buffer.clone() for buffer in self._buffers]
        attributes = [dict(vars(part)) for part in self._parts]
        return Noted(buffers, attributes)

    def restore(self, noted: Noted) -> None:
        """Restore what a call has changed.

        Args:
            noted: The state before, which `note` returned.
        """
        with torch.no_grad():
            for buffer, values in zip(self._buffers, noted.buffers, strict=True):
                buffer.copy_(values)
        for part, attributes in zip(self._parts, noted.attributes, strict=True):
            present = vars(part)
            present.clear()
            present.update(attributes)

    def restore_member(self, noted: Noted, member: int) -> None:
        """Restore the buffers of one member.

        Args:
            noted: The state before.
            member: The index of the member.
        """
        with torch.no_grad():
            for buffer, values in zip(self._buffers, noted.buffers, strict=True):
                buffer[member].copy_(values[member])

    def state_of_call(self) -> CallState:
        """Return everything beside the arguments on which the result of a call depends."""
        attributes = []
        for part in self._parts:
            attributes.extend(vars(part).values())
        return CallState(attributes, versions(self._own_tensors), torch.is_grad_enabled(), _autocast_state())

    def is_in_state(self, state: CallState) -> bool:
        """Return True if a call would compute what it would have computed in an earlier state.

        Args:
            state: That state.
        """
        now = self.state_of_call()
        if now.modes != state.modes or now.grad != state.grad or now.versions != state.versions:
            return False
        return len(now.attributes) == len(state.attributes) and all(map(is_, now.attributes, state.attributes))

    def _changed_attribute(self, noted: Noted) -> str:
        """Return an attribute that a call has set; empty if there is none."""
        for part, attributes in zip(self._parts, noted.attributes, strict=True):
            for name, value in vars(part).items():
                if name not in attributes or attributes[name] is not value:
                    return f"{type(part).__name__}.{name}"
        return ""


def _taken_apart(calls: Sequence[Call]) -> tuple[Any, list[list[Tensor]]]:
    """Return the structure that calls have in common, and the tensors of each.

    Raises:
        NotBatchable: If the calls differ in more than tensors.
    """
    trees = []
    columns = []
    for call in calls:
        _check_plain(call, "is called with")
        tree, tensors = extract_tensors(call)
        trees.append(tree)
        columns.append(tensors)
    text = repr(trees[0])
    if any(repr(tree) != text for tree in trees[1:]):
        raise NotBatchable("the members call it with different arguments")
    return trees[0], columns


def _stack(tensors: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], tuple[int | None, ...]]:
    """Return the tensors of calls, stacked where members have different ones; and the dimension of the members.

    Args:
        tensors: The tensors of each member.

    Raises:
        NotBatchable: If they differ in shape or dtype.
    """
    inputs = []
    dims: list[int | None] = []
    for column in zip(*tensors, strict=True):
        first = column[0]
        if all(tensor is first for tensor in column):
            inputs.append(first)
            dims.append(None)
            continue
        if any(tensor.shape != first.shape or tensor.dtype != first.dtype for tensor in column):
            raise NotBatchable("the members call it with tensors of different shapes")
        inputs.append(torch.stack(column))
        dims.append(0)
    return inputs, tuple(dims)


def _check_plain(value: Any, verb: str) -> None:
    """Check that a nested value holds nothing but tensors and values that are the same for all members.

    Raises:
        NotBatchable: If it holds another object.
    """
    for leaf in leaves_of(value):
        if not isinstance(leaf, _PLAIN):
            raise NotBatchable(f"it {verb} a {type(leaf).__name__}")


def _register(slots: list[list[Slot]], tensors: Sequence[Any]) -> None:
    """Register tensors in place of the network's parameters and buffers."""
    for places, tensor in zip(slots, tensors, strict=True):
        for registered, name in places:
            registered[name] = tensor


def _check_registered(slots: list[list[Slot]], tensors: Sequence[Any]) -> None:
    """Check that the forward has replaced no parameter or buffer.

    Raises:
        NotBatchable: If it has.
    """
    for places, tensor in zip(slots, tensors, strict=True):
        for registered, name in places:
            if registered.get(name) is not tensor:
                raise NotBatchable(f"its forward replaces {name}")


def _are_close(expected: Any, computed: Any) -> bool:
    """Return True if two structures of tensors are equal up to rounding."""
    _, left = extract_tensors(expected)
    _, right = extract_tensors(computed)
    if len(left) != len(right):
        return False
    return all(map(_is_close, left, right))


def _is_close(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if not left.is_floating_point():
        return torch.equal(left, right)
    if not left.numel():
        return True
    # Sums of many terms are rounded in another order.
    tolerance = torch.finfo(left.dtype).eps ** (2 / 3)
    largest = left.abs().amax().item()
    return torch.allclose(left, right.detach(), rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def _first_line(error: Exception) -> str:
    """Return the first line of torch's message, which for missing rules has many."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
