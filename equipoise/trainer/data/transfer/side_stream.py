"""Copies from the host to a CUDA device, on a stream beside that of the computation.

A copy on the stream of the computation begins when all work before it is done. A copy on a stream of its own begins at
once, while the device still computes the last step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.to_device import to_device

__all__ = ["SideStream"]


class SideStream:
    """A stream of one CUDA device that copies tensors to it.

    Memory of the copies belongs to this stream. The allocator gives it away again when the computation, too, has done
    with it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors to the device. Its current stream waits for them, and the host does not.

        Args:
            tensors: Tensors of the host. Those in memory that is not pinned are pinned: the host would otherwise wait.

        Raises:
            OutOfMemoryError: If the device has no memory for them.
        """
        # 1. Begin the copies. Pinned memory is kept until its copy is done, by torch's allocator.
        with torch.cuda.stream(self._stream):
            copies = [to_device(_pinned(tensor), self._device) for tensor in tensors]
        # 2. What the device computes from now on comes after them.
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        # 3. Their memory belongs to this stream, which may take it back when the computation, too, has done with it.
        for copy in copies:
            copy.record_stream(current)
        return copies


def _pinned(tensor: Tensor) -> Tensor:
    """Return a tensor in pinned memory, with the same strides; the tensor itself where that is not possible."""
    # Pinned memory has the strides of the tensor, so none of its values may lie at several places.
    is_dense = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
    if not is_dense or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()
