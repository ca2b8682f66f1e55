"""The processes as a grid: a row for each batch of a step, whose processes compute it together."""

from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from equipoise.errors import ConfigurationError
from equipoise.extensions.fsdp.interop.tensor_parallel import wait_as_default

__all__ = [
    "CONTEXT",
    "DATA",
    "TENSOR",
    "Size",
    "check_size",
    "copy_marks",
    "grid_rows",
    "is_cut",
    "make_mesh",
    "part_of",
    "row_placement",
    "sizes_of",
]

# The dimensions have the names that modules written for Lightning's ModelParallelStrategy read.
DATA = "data_parallel"
TENSOR = "tensor_parallel"
# Within rows, among processes that have parts of sequences. Modules see these along the first dimension.
CONTEXT = "context_parallel"

Size = int | Literal["auto"]


def check_size(name: str, size: Any, *, or_auto: bool = True) -> None:
    """Check a size of the grid.

    Args:
        name: Its name.
        size: The size.
        or_auto: Whether it may be "auto". Default: True.

    Raises:
        ConfigurationError: If it is none.
    """
    is_number = isinstance(size, int) and not isinstance(size, bool) and size >= 1
    is_auto = or_auto and size == "auto"
    if not is_number and not is_auto:
        kinds = "'auto' or a whole number" if or_auto else "a whole number"
        raise ConfigurationError(f"{name} must be {kinds} from 1, not {size!r}.")


def sizes_of(data: Size, tensor: Size, processes: int, of_machine: int, context: int = 1) -> tuple[int, int]:
    """Return the number of rows, and over how many processes of a row layers are cut.

    Args:
        data: The number of rows; "auto": what remains.
        tensor: The number of those processes; "auto": what remains, where both are "auto" of a machine.
        processes: The number of all processes.
        of_machine: The number of processes of this machine.
        context: The number of processes of a row over which sequences are divided. Default: 1.

    Raises:
        ConfigurationError: If they do not multiply to the number of processes, or a row would lie on two machines.

    Example:
        >>> sizes_of("auto", 2, processes=8, of_machine=4), sizes_of("auto", "auto", processes=8, of_machine=4)
        ((4, 2), (2, 4))
    """
    # 1. The sizes that are "auto".
    if isinstance(tensor, int):
        columns = tensor
    else:
        available = processes // data if isinstance(data, int) else of_machine
        columns = max(1, available // context)
    together = columns * context
    rows = data if isinstance(data, int) else max(1, processes // together)
    names = f"tensor={columns}"
    if context > 1:
        names = f"context={context}" if columns == 1 else f"{names} times context={context}"
    # 2. They fit the processes.
    if rows * together != processes:
        raise ConfigurationError(
            f"data={rows} times {names} is not the number of processes, {processes}. Leave data out, and it follows:"
            f" {together} divides the number of processes then."
        )
    if of_machine % together:
        raise ConfigurationError(
            f"{names} does not divide the {of_machine} processes of this machine, but those that compute a batch"
            " together exchange activations in each layer, and lie on one machine. Give a number that does."
        )
    return rows, columns


def make_mesh(kind: str, data: int, tensor: int, context: int | None = None) -> DeviceMesh:
    """Return the grid, whose rows are successive ranks; all processes call it together.

    Args:
        kind: The type of the devices, such as "cuda".
        data: The number of rows.
        tensor: The number of processes over which layers are cut; successive ones.
        context: The number of such groups in a row, over which sequences are divided. Default: None, the grid does not
            have this dimension.
    """
    if context is None:
        return wait_as_default(init_device_mesh(kind, (data, tensor), mesh_dim_names=(DATA, TENSOR)))
    shape = (data, context, tensor)
    return wait_as_default(init_device_mesh(kind, shape, mesh_dim_names=(DATA, CONTEXT, TENSOR)))


def grid_rows(together: int, context: int, cells: list[str]) -> list[list[str]]:
    """Return the rows of a grid: a head, and one for each batch of a step.

    Args:
        together: The number of processes that compute a batch together.
        context: The number of parts of its sequences.
        cells: The text for each process, by rank.

    Example:
        >>> grid_rows(2, 1, ["a", "b", "c", "d"])
        [['', 'tensor 0', 'tensor 1'], ['data 0', 'a', 'b'], ['data 1', 'c', 'd']]
    """
    tensor = together // context
    heads = []
    for place in range(together):
        # Those that have parts of a layer are successive.
        numbers = []
        if context > 1:
            numbers.append(f"context {place // tensor}")
        if tensor > 1:
            numbers.append(f"tensor {place % tensor}")
        heads.append(", ".join(numbers))
    rows = [["", *heads]]
    for start in range(0, len(cells), together):
        rows.append([f"data {start // together}", *cells[start : start + together]])
    return rows


def part_of(tensor: Tensor) -> Tensor:
    """Return what this process has of a tensor: a part if it is cut over several processes, else the whole."""
    if not isinstance(tensor, DTensor):
        return tensor
    part: Tensor = tensor.to_local()
    return part


def copy_marks(parameter: nn.Parameter, original: nn.Parameter) -> None:
    """Copy the attributes that a user has set on a parameter, such as `no_decay`, to what stands in its place.

    Args:
        parameter: The parameter that stands in its place.
        original: The parameter that has them.
    """
    marks = vars(parameter)
    for name, value in vars(original).items():
        marks.setdefault(name, value)


def row_placement(tensor: Tensor) -> Placement | None:
    """Return how a tensor lies over the processes of a row; None if it does not lie over a row."""
    if not isinstance(tensor, DTensor):
        return None
    names = tensor.device_mesh.mesh_dim_names or ()
    if TENSOR not in names:
        return None
    placement: Placement = tensor.placements[names.index(TENSOR)]
    return placement


def is_cut(tensor: Tensor) -> bool:
    """Return True if each process of a row holds another part of a tensor."""
    placement = row_placement(tensor)
    return placement is not None and not placement.is_replicate()
