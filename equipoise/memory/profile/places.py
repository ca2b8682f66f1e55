"""Devices of one name, such as those of `["cpu", "cpu"]`, told apart by who computes.

Torch knows one CPU. Which of the user's devices a tensor would lie on follows from the moment of its creation:

    while a device computes its part of a forward or backward    that device
    in a backward                                                the device that computed the same part of the forward
    after the backward, as in the optimiser's step               the device of the tensors that are read
    at any other time                                            the device on which the rest of the step runs

This holds for devices that compute one after another, as those of one name do.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from equipoise.interop.torch.autograd import next_node_number, number_of_node, running_node

__all__ = ["DevicePlaces", "names_of_devices"]

# From here on, numbers are those of nodes at which a leaf receives its gradient. It lies where it was computed.
_NODES_OF_LEAVES = 2**63


def names_of_devices(devices: Sequence[object]) -> list[str]:
    """Return a name for each device; devices of one name are numbered.

    Example:
        >>> names_of_devices(["cpu", "cpu"]), names_of_devices(["cuda:0", "cuda:1"])
        (['cpu (0)', 'cpu (1)'], ['cuda:0', 'cuda:1'])
    """
    texts = [str(device) for device in devices]
    names = []
    for index, text in enumerate(texts):
        if texts.count(text) > 1:
            text = f"{text} ({index})"
        names.append(text)
    return names


class DevicePlaces:
    """Tells on which device of one name a tensor lies. It is a `DeviceObserver`.

    Args:
        names: Names of the devices.
        root: Number of the device on which the rest of a step runs.
        in_helper: Returns a context for threads in which steps compute. Default: none.
        on_placed: Receives tensors that are placed, with the names of their devices. Default: nothing does.

    Example:
        >>> places = DevicePlaces(["cpu (0)", "cpu (1)"], root=0)
        >>> with places.computing_on(1):
        ...     places.place_of(None)
        'cpu (1)'
        >>> places.place_of(None)
        'cpu (0)'
    """

    def __init__(
        self,
        names: Sequence[str],
        root: int,
        *,
        in_helper: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_placed: Callable[[Tensor, str], None] | None = None,
    ) -> None:
        self._names = list(names)
        self._root = root
        self._in_helper = in_helper
        self._on_placed = on_placed
        # True if a tensor that no device computes alone lies with those that it is computed from.
        self._follows_arguments = False
        # Devices that compute, the present one last.
        self._computing: list[int] = []
        # The parts of the forward: the numbers of their first nodes, in ascending order; for each the number after its
        # last node, and its device.
        self._first_nodes: list[int] = []
        self._ends_and_devices: list[tuple[int, int]] = []

    # Announcements.

    @contextmanager
    def computing_on(self, index: int) -> Iterator[None]:
        """Note which device computes in a `with` block; see `DeviceObserver`."""
        begin = next_node_number()
        self._computing.append(index)
        try:
            yield
        finally:
            self._computing.pop()
            end = next_node_number()
            if end > begin:
                self._first_nodes.append(begin)
                self._ends_and_devices.append((end, index))

    def in_helper_thread(self) -> AbstractContextManager[None]:
        """Return the context of a thread in which a step computes; see `DeviceObserver`."""
        return self._in_helper()

    def note_placed(self, tensor: Tensor, index: int) -> None:
        """Note the device of a parameter or buffer; see `DeviceObserver`."""
        if self._on_placed is not None:
            self._on_placed(tensor, self._names[index])

    # Phases of a step.

    def begin_forward(self) -> None:
        """Forget the last forward. Tensors that no device computes belong to the device of the rest of the step."""
        self._follows_arguments = False
        self._first_nodes.clear()
        self._ends_and_devices.clear()

    def begin_backward(self) -> None:
        """Assign tensors that no device computes alone to the device of their inputs."""
        self._follows_arguments = True

    # Places.

    def place_of(self, source: str | None) -> str:
        """Return the device of a tensor that is created now.

        Args:
            source: Device of the tensors from which it is computed; None if unknown.
        """
        # 1. A device computes its part.
        if self._computing:
            return self._names[self._computing[-1]]
        # 2. A node of a backward computes.
        node = running_node()
        if node is not None:
            number = number_of_node(node)
            if number >= _NODES_OF_LEAVES and source is not None:
                return source
            index = self.computing_device(number)
            return self._names[self._root if index is None else index]
        # 3. After the backward, and at any other time.
        if self._follows_arguments and source is not None:
            return source
        return self._names[self._root]

    def computing_device(self, number: int) -> int | None:
        """Return the device that computed the part of the forward which made a node; None if no device did alone.

        Args:
            number: Number of the node, as `number_of_node` returns it.
        """
        position = bisect_right(self._first_nodes, number) - 1
        if position >= 0:
            end, index = self._ends_and_devices[position]
            if number < end:
                return index
        return None
