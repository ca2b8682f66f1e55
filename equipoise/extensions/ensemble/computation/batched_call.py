"""One call of a network for all members together: `torch.vmap` over their stacked parameters and buffers.

What each member calls is unchanged, so nearly any network can be computed so. What cannot is computed member by member:
forwards with branches on values, operations that have no batched form, and forwards whose side effects would be of all
members together. The first call of each kind is computed both ways and compared.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks

from equipoise.extensions.ensemble.interop.batching import compute_batched
from equipoise.extensions.ensemble.members.stacked_members import StackedMembers
from equipoise.interop.torch.modules import buffers_of, has_module_hooks, is_compiled, parameters_of
from equipoise.parallel.equality import Tolerance, gap_of
from equipoise.parallel.snapshot.attributes import Attributes
from equipoise.tree import extract_tensors, insert_tensors, is_slot, leaves_of

__all__ = ["BatchedCall", "Call", "Computing", "NotBatchable", "TensorsOfMembers", "reason_against", "taken_apart"]

# Positional and keyword arguments.
Call = tuple[tuple[Any, ...], dict[str, Any]]
# The tensors among the arguments of each member.
TensorsOfMembers = Sequence[Sequence[Tensor]]
# A dictionary of a module's parameters or buffers, and the name in it.
Slot = tuple[dict[str, Any], str]

# Tensors, and values in arguments and outputs that are the same for all members if they are equal.
_PLAIN = (Tensor, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


# Such functions compute again, or unpack, in the backward, when no call is computed together any more.
_SAVES_OTHERWISE = "its forward saves tensors in a way of its own, as activation checkpointing does"


class NotBatchable(Exception):
    """A call that cannot be computed for all members together; its text is the reason.

    Args:
        reason: The reason.
        passes: Whether other calls may be computed together. Default: False.

    Attributes:
        passes: The argument.
        draws: True if the network draws random numbers.
    """

    def __init__(self, reason: str, *, passes: bool = False) -> None:
        super().__init__(reason)
        self.passes = passes
        # The words of torch's message.
        self.draws = "randomness error mode" in reason


class _Stacked(NamedTuple):
    """The calls of all members as one.

    Attributes:
        tree: The structure of the arguments, with slots for tensors.
        inputs: The tensors.
        dims: The dimension of the members in each tensor; None: all members have the same.
        members: The number of members.
    """

    tree: Any
    inputs: list[Tensor]
    dims: tuple[int | None, ...]
    members: int


class _Noted(NamedTuple):
    """State that a call may change.

    Attributes:
        buffers: Copies of the stacked buffers.
        attributes: The attributes of each module.
    """

    buffers: list[Tensor]
    attributes: Attributes


def reason_against(network: nn.Module) -> str:
    """Return why a network is not computed for all members together; empty if there is no reason before a call."""
    if "forward" in vars(network):
        return "its forward was set on the object"
    for name, part in network.named_modules():
        if is_compiled(part) or isinstance(part, torch.jit.ScriptModule):
            return f"{name or 'it'} is compiled"
        # Hooks on the network itself run outside of the batched call.
        if name and has_module_hooks(part):
            return f"{name} has hooks"
    return ""


class Computing:
    """The member whose network computes.

    Attributes:
        member: The index of the member; None while no network computes.
    """

    def __init__(self) -> None:
        self.member: int | None = None

    @contextmanager
    def of(self, member: int) -> Iterator[None]:
        """Note the member in a `with` block."""
        outer = self.member
        self.member = member
        try:
            yield
        finally:
            self.member = outer


class BatchedCall:
    """Calls a network of all members.

    Args:
        name: The name of the network in the module.
        members: The members.
        computing: Tells parts of the network that are networks, too, which member computes.

    Attributes:
        name: The name.
        networks: The network of each member.
    """

    def __init__(self, name: str, members: StackedMembers, computing: "Computing") -> None:
        self.name = name
        self._computing = computing
        self.networks = [module.get_submodule(name) for module in members.modules]
        self._network = self.networks[0]
        self._forward: Callable[..., Any] = type(self._network).forward
        self._parts = list(self._network.modules())
        self._members = members
        identities = set(map(id, self._parts))
        self._indices = []
        for index, part in enumerate(members.parts()):
            if id(part) in identities:
                self._indices.append(index)
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
        self._own_tensors: list[Any] = []
        for slots in self._slots:
            registered, key = slots[0]
            self._own_tensors.append(registered[key])
        self._tensors_of_members = []
        for network in self.networks:
            self._tensors_of_members.append([*network.parameters(), *network.buffers()])
        self._buffers = []
        for identity in by_id:
            if identity in members.buffers:
                self._buffers.append(members.buffers[identity])
        # 2. Kinds of calls that were compared.
        self._compared: set[tuple[Any, ...]] = set()

    def _add(self, tensor: Tensor, slot: Slot, members: StackedMembers, by_id: dict[int, list[Slot]]) -> None:
        """Note a place in which a parameter or buffer is registered."""
        key = id(tensor)
        if key in by_id:
            by_id[key].append(slot)
            return
        parameter = members.of(tensor)
        stacked: Tensor
        if parameter is None:
            stacked = members.buffers[key]
        else:
            stacked = parameter.stacked
        by_id[key] = [slot]
        self._stacked.append(stacked)
        self._slots.append(by_id[key])

    def alone(self, member: int, call: Call) -> Any:
        """Compute the call of one member.

        Args:
            member: The index of the member.
            call: The arguments.
        """
        with self._computing.of(member):
            return self.forward_of(member, call)

    def forward_of(self, member: int, call: Call) -> Any:
        """Compute the call of one member, whose parts may be computed together with those of the others.

        Args:
            member: The index of the member.
            call: The arguments.
        """
        args, kwargs = call
        return self._forward(self.networks[member], *args, **kwargs)

    def __call__(self, tree: Any, tensors: TensorsOfMembers, randomness: str) -> list[Any]:
        """Compute the calls of all members together.

        Args:
            tree: The structure of the arguments, with slots for tensors; see `taken_apart`.
            tensors: The tensors of each member.
            randomness: "error" or "different": whether the network may draw random numbers, which differ then between
                members, and from those that a member draws by itself.

        Returns:
            The output of each member.

        Raises:
            NotBatchable: If that is not possible; buffers and attributes are then as before.
        """
        stacked = _stacked(tree, tensors)
        # The steps may have given the networks of members other attributes.
        for member in range(1, len(tensors)):
            if self.has_own_attributes(member):
                raise NotBatchable("the members have set different attributes of it", passes=True)
        kind = (self._network.training, torch.is_grad_enabled(), repr(tree))
        if kind in self._compared:
            return self._guarded(stacked, randomness)
        try:
            outputs = self._compared_outputs(tensors, stacked)
        except NotBatchable as error:
            if not error.draws or randomness == "error":
                raise
            # A network that draws random numbers has nothing to compare with.
            outputs = self._checked_outputs(stacked, randomness)
        self._compared.add(kind)
        return outputs

    def _checked_outputs(self, calls: _Stacked, randomness: str) -> list[Any]:
        """Compute a batched call, and refuse attributes that it has set for all members."""
        noted = self._note()
        outputs = self._guarded(calls, randomness)
        changed = noted.attributes.first_change()
        if changed is not None:
            self._restore(noted)
            part, name = changed
            raise NotBatchable(f"its forward sets {type(part).__name__}.{name}")
        return outputs

    def _guarded(self, calls: _Stacked, randomness: str) -> list[Any]:
        """Compute a batched call; if that fails, restore what it has changed."""
        noted = self._note()
        try:
            outputs = self._batched(calls, randomness)
        except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, IndexError) as error:
            self._restore(noted)
            raise NotBatchable(_first_line(error)) from None
        except BaseException:
            self._restore(noted)
            raise
        return outputs

    def _batched(self, calls: _Stacked, randomness: str) -> list[Any]:
        slots = self._slots
        count = len(slots)
        output_tree: Any = None

        def compute(tensors: Sequence[Tensor]) -> list[Tensor]:
            nonlocal output_tree
            tensors_of_network = tensors[:count]
            inputs = tensors[count:]
            _register(slots, tensors_of_network)
            try:
                args, kwargs = _arguments(calls.tree, inputs)
                with self._computing.of(0), disable_saved_tensors_hooks(_SAVES_OTHERWISE):
                    output = self._forward(self._network, *args, **kwargs)
                _check_registered(slots, tensors_of_network)
            finally:
                _register(slots, self._own_tensors)
            # The usual output is a tensor.
            if type(output) is Tensor:
                return [output]
            _check_plain(output, "returns")
            output_tree, values = extract_tensors(output)
            return values

        arguments = [*self._stacked, *calls.inputs]
        outputs = compute_batched(compute, arguments, self._dims + calls.dims, calls.members, randomness)
        # The output of each member.
        rows = []
        for output in outputs:
            rows.append(output.unbind())
        if output_tree is None:
            return list(rows[0])
        return [insert_tensors(output_tree, values) for values in zip(*rows, strict=True)]

    # The comparison.

    def _compared_outputs(self, tensors: TensorsOfMembers, stacked: _Stacked) -> list[Any]:
        """Compute a call together and member by member, compare, and return the outputs of the former."""
        # 1. Together, and without random numbers, which would come twice.
        noted = self._note()
        outputs = self._checked_outputs(stacked, "error")
        computed = self._note()

        # 2. Member by member, without a graph.
        self._restore_buffers(noted.buffers)
        expected = []
        with torch.no_grad():
            for member, column in enumerate(tensors):
                expected.append(self.alone(member, _arguments(stacked.tree, column)))
        one_by_one = (expected, self._buffers)
        together = (outputs, computed.buffers)
        if not _are_close(one_by_one, together):
            self._restore(noted)
            raise NotBatchable("the results differ from those of members computed one by one")
        self._restore(computed)
        return outputs

    def _note(self) -> _Noted:
        attributes = Attributes(self._parts)
        attributes.mark()
        return _Noted(self.buffers_now(), attributes)

    def _restore(self, noted: _Noted) -> None:
        self._restore_buffers(noted.buffers)
        noted.attributes.restore()

    def _restore_buffers(self, values_of_buffers: Sequence[Tensor]) -> None:
        for buffer, values in zip(self._buffers, values_of_buffers, strict=True):
            # Without a trace in graphs that have saved the buffer.
            buffer.data.copy_(values)

    # For calls that are computed before the members make them.

    def buffers_now(self) -> list[Tensor]:
        """Return copies of the stacked buffers."""
        return [buffer.clone() for buffer in self._buffers]

    def restore_member(self, values_of_buffers: Sequence[Tensor], member: int) -> None:
        """Restore the buffers of one member.

        Args:
            values_of_buffers: The values that `buffers_now` returned.
            member: The index of the member.
        """
        for buffer, values in zip(self._buffers, values_of_buffers, strict=True):
            buffer.data[member].copy_(values[member])

    def shares_buffers(self, other: "BatchedCall") -> bool:
        """Return True if another network has some of the buffers of this one."""
        return not {id(buffer) for buffer in self._buffers}.isdisjoint(id(buffer) for buffer in other._buffers)

    def tensors_of(self, member: int) -> list[Tensor]:
        """Return the parameters and buffers of the network of a member."""
        return self._tensors_of_members[member]

    def has_own_attributes(self, member: int) -> bool:
        """Return True if the step of a member has given its network other attributes than the first member's.

        Args:
            member: The index of the member, from 1.
        """
        return self._members.has_other_attributes(member, self._indices)


def taken_apart(call: Call) -> tuple[Any, list[Tensor]]:
    """Return the structure of a call, and its tensors.

    Raises:
        NotBatchable: If it has an argument that is neither a tensor nor a plain value.
    """
    _check_plain(call, "is called with")
    return extract_tensors(call)


def _arguments(tree: Any, tensors: Sequence[Tensor]) -> Call:
    args, kwargs = tree
    # Mostly there are tensors alone, which the structure has in order.
    if not kwargs and all(map(is_slot, args)):
        return tuple(tensors), {}
    call: Call = insert_tensors(tree, tensors)
    return call


def _stacked(tree: Any, tensors: TensorsOfMembers) -> _Stacked:
    """Return the calls of all members, with their tensors stacked where members have different ones.

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
        shapes = {tensor.shape for tensor in column}
        dtypes = {tensor.dtype for tensor in column}
        if len(shapes) > 1 or len(dtypes) > 1:
            raise NotBatchable("the members call it with tensors of different shapes", passes=True)
        inputs.append(torch.stack(column))
        dims.append(0)
    return _Stacked(tree, inputs, tuple(dims), len(tensors))


def _check_plain(value: Any, verb: str) -> None:
    """Check that a nested value holds nothing but tensors and values that are the same for all members.

    Raises:
        NotBatchable: If it holds another object.
    """
    for leaf in leaves_of(value):
        if not isinstance(leaf, _PLAIN):
            raise NotBatchable(f"it {verb} a {type(leaf).__name__}")


def _register(slots: list[list[Slot]], tensors: Sequence[Any]) -> None:
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
    if left.dtype != right.dtype:
        return False
    share = 0.0
    if left.is_floating_point():
        # Sums of many terms are rounded in another order.
        share = torch.finfo(left.dtype).eps ** (2 / 3)
    return not gap_of(left, right, Tolerance(share, 0.0))


def _first_line(error: Exception) -> str:
    """Return the first line of torch's message, which for missing rules has many."""
    text = str(error).strip()
    if not text:
        return type(error).__name__
    return text.splitlines()[0].rstrip(".")
