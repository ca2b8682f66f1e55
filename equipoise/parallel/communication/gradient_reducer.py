"""Sum gradients over processes, in buckets, while the backward still runs.

Parameters are gathered into buckets in the order in which their gradients become ready, which is about the reverse of
that in which the module holds them. A bucket is summed over the processes as soon as all its gradients are ready and
all buckets before it were sent. So the order of the exchanges is fixed whatever order gradients become ready in, and
each bucket is exchanged once per window: a process that is late, or repeats its work, is a straggler to the rest.

The idea of buckets is that of Li et al., "PyTorch Distributed" (2020).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.interop.torch import foreach
from equipoise.parallel.batches.weighting import Weight

__all__ = ["GradientReducer"]

_WIDE_DTYPES = (torch.float32, torch.float64)
_FIRST_CUDA_BUCKET = 1 << 20  # bytes


class _Bucket:
    """Parameters of one dtype and device whose gradients are exchanged together.

    The flat tensor holds the gradients and then a tail: for each parameter the number of processes that have a
    gradient of it, and the weight.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        first = parameters[0]
        self.parameters = parameters
        # 1. Allocate the flat tensor.
        sizes = [parameter.numel() for parameter in parameters]
        tail_size = len(parameters) + 1
        self.flat = torch.zeros(sum(sizes) + tail_size, dtype=first.dtype, device=first.device)

        # 2. Divide it into a view of each gradient's shape, and the tail.
        *segments, self.tail = torch.split(self.flat, [*sizes, tail_size])
        self.views = [segment.view(parameter.shape) for segment, parameter in zip(segments, parameters, strict=True)]
        # The tail of a process that has all gradients.
        self.full_tail = torch.ones_like(self.tail)
        self.weight: Weight = 1

        # 3. Expect all gradients, by the indices of their parameters.
        self._indices = range(len(parameters))
        self.missing = set(self._indices)
        self.is_sent = False
        # Whether this process had a gradient of each parameter when the bucket was sent.
        self.has_all_gradients = False

    def begin(self) -> None:
        """Expect all gradients again."""
        self.missing.update(self._indices)
        self.is_sent = False

    def set_weight(self, weight: Weight) -> None:
        """Sum this weight along with the gradients. Default: 1."""
        # Tensors are not compared, since that would wait for their device.
        is_tensor = isinstance(weight, Tensor) or isinstance(self.weight, Tensor)
        if is_tensor or weight != self.weight:
            self.weight = weight
            self.full_tail[-1] = weight

    def fill(self, factor: float) -> None:
        """Copy the gradients into the flat tensor, times a factor; missing gradients count as zeros."""
        # 1. Separate the parameters that have a gradient from those that have none.
        filled_views = []
        empty_views = []
        gradients = []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                empty_views.append(view)
                continue
            if gradient.layout is not torch.strided:
                raise StepError(
                    "The native engine exchanges dense gradients only. Take Embedding(sparse=False), or engine='torch'."
                )
            filled_views.append(view)
            gradients.append(gradient)
        self.is_sent = True
        self.has_all_gradients = not empty_views

        # 2. Write zeros for the missing gradients, and count them in the tail.
        tail = self.full_tail
        if not self.has_all_gradients:
            for view in empty_views:
                view.zero_()
            counts = [float(parameter.grad is not None) for parameter in self.parameters]
            counts_on_device = torch.tensor(counts).to(tail)
            weight = tail[-1:]
            tail = torch.cat([counts_on_device, weight])

        # 3. Copy the gradients and the tail in one call.
        filled_views.append(self.tail)
        gradients.append(tail)
        foreach.copy_(filled_views, gradients)
        if factor != 1:
            self.flat[: -len(tail)].mul_(factor)

    def assign_gradients(self) -> None:
        """Make the sums the gradients; a parameter without a gradient in any process gets none."""
        for parameter, gradient in zip(self.parameters, self._sums(), strict=True):
            parameter.grad = gradient

    def copy_gradients(self, factor: float) -> None:
        """Copy the sums, times a factor, into the gradients, which others may hold; see `assign_gradients`."""
        sums = self._sums()
        self.flat[: -len(self.tail)].mul_(factor)
        own = []
        summed = []
        for parameter, gradient in zip(self.parameters, sums, strict=True):
            if parameter.grad is not None and gradient is not None:
                own.append(parameter.grad)
                summed.append(gradient)
            elif gradient is not None:
                parameter.grad = gradient.clone()
        with torch.no_grad():
            foreach.copy_(own, summed)

    def _sums(self) -> Sequence[Tensor | None]:
        """Return the sum for each parameter; None if no process has a gradient of it."""
        # If this process has all gradients, the counts are positive and need not be read from the device.
        return self.views if self.has_all_gradients else self._views_with_gradients()

    def _views_with_gradients(self) -> list[Tensor | None]:
        counts = self.tail[:-1].tolist()
        gradients: list[Tensor | None] = []
        for view, count in zip(self.views, counts, strict=True):
            if count:
                gradients.append(view)
            else:
                gradients.append(None)
        return gradients


class GradientReducer:
    """Sums gradients over all processes.

    Args:
        parameters: Parameters in the same order in all processes. Those that require no gradient are left out.
        bucket_megabytes: Size of a bucket in MiB. Default: 25.
        at_end: True exchanges gradients at the end of a window alone, and watches no parameter. Default: False.
        on_gradient: Called when a gradient is ready while no exchange is open, which it may begin. Default: None.

    Example:
        >>> reducer = GradientReducer(module.parameters())  # doctest: +SKIP
        >>> reducer.begin()  # doctest: +SKIP
        >>> loss.backward()  # doctest: +SKIP
        >>> reducer.finish()  # doctest: +SKIP
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        bucket_megabytes: float = 25.0,
        *,
        at_end: bool = False,
        on_gradient: Callable[[], None] | None = None,
    ) -> None:
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        groups = _group_into_buckets(trainable, int(bucket_megabytes * 2**20))
        self._buckets = [_Bucket(group) for group in groups]
        self._handles: list[Any] = []
        self._on_gradient = on_gradient
        if not at_end:
            self._register_hooks()
        # The weight travels with gradients if they are of float32 or wider: 257 would become 256 in bfloat16.
        # Without such a bucket it is a tensor of its own.
        self._weight_bucket = self._first_wide_bucket()
        device = None
        if trainable:
            device = trainable[0].device
        self._separate_weight = torch.zeros((), dtype=torch.float64, device=device)
        # The exchanges of the buckets that were sent in this window.
        self._works: list[dist.Work] = []
        self._num_sent = 0
        # The arguments of `begin`, and whether the exchange is not finished.
        self._is_open = False
        self._is_eager = False
        self._factor = 1.0
        # Whether an attempt has failed after some buckets were sent, which stay as they are.
        self._is_broken_off = False

    def _register_hooks(self) -> None:
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                register: Any = parameter.register_post_accumulate_grad_hook
                self._handles.append(register(partial(self._ready, bucket, index)))

    def _first_wide_bucket(self) -> _Bucket | None:
        for bucket in self._buckets:
            if bucket.flat.dtype in _WIDE_DTYPES:
                return bucket
        return None

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def begin(self, weight: Weight = 1, *, eager: bool = True, factor: float = 1.0) -> None:
        """Prepare for the last backward of a window.

        Args:
            weight: Number that is summed along with the gradients. Default: 1.
            eager: True exchanges gradients as they become ready, False only at the end. Default: True.
            factor: Number by which the gradients of this process are multiplied before the sum. Default: 1.
        """
        self._is_open = True
        self._is_eager = eager
        self._factor = factor
        # After a failed attempt, buckets that were sent stay as they are.
        if not self._is_broken_off:
            self._num_sent = 0
            self._works = []
        for bucket in self._buckets[self._num_sent :]:
            bucket.begin()
            if bucket is self._weight_bucket:
                bucket.set_weight(weight)
        if self._weight_bucket is None and not self._is_broken_off:
            self._separate_weight.fill_(weight)
            dist.all_reduce(self._separate_weight)

    def total(self) -> Tensor:
        """Return the sum of the weights of all processes, a 0-dim tensor."""
        if self._weight_bucket is None:
            return self._separate_weight
        return self._weight_bucket.tail[-1]

    def _ready(self, bucket: _Bucket, index: int, parameter: Tensor) -> None:
        """Note that a gradient is ready, and send the buckets that are full."""
        if not self._is_open and self._on_gradient is not None:
            self._on_gradient()
        if not self._is_open or not self._is_eager:
            return
        if bucket.is_sent:
            if self._is_broken_off:
                return
            raise StepError(
                f"A parameter of shape {list(parameter.shape)} got a part of its gradient after the exchange had begun."
                " With activation checkpointing, say use_reentrant=False."
            )
        bucket.missing.discard(index)
        # A full bucket waits for those before it, so the order of the exchanges is fixed.
        while self._num_sent < len(self._buckets):
            next_bucket = self._buckets[self._num_sent]
            if next_bucket.missing:
                return
            self._send()

    def _send(self) -> None:
        """Send the next bucket."""
        bucket = self._buckets[self._num_sent]
        self._num_sent += 1
        bucket.fill(self._factor)
        work = dist.all_reduce(bucket.flat, async_op=True)
        assert work is not None
        self._works.append(work)

    def break_off(self) -> bool:
        """End an attempt that failed. The next attempt completes the exchange and keeps the buckets already sent.

        Returns:
            True if a bucket or the weight was sent.
        """
        has_sent = self._num_sent > 0 or self._weight_bucket is None
        if self._is_open and has_sent:
            self._is_broken_off = True
        self._is_open = False
        return self._is_broken_off

    @property
    def is_open(self) -> bool:
        """True if an exchange has begun and is not finished."""
        return self._is_open

    def finish(self, factor: float | None = None) -> None:
        """Send the remaining buckets and wait; afterwards the gradients are the sums.

        A parameter without a gradient in any process gets none.

        Args:
            factor: The sums, times this factor, are copied into the gradients of this process. Default: None, the
                gradients become views of the buckets, which the next exchange overwrites.
        """
        self._is_open = False
        self._is_broken_off = False
        while self._num_sent < len(self._buckets):
            self._send()
        for work, bucket in zip(self._works, self._buckets, strict=True):
            work.wait()
            if factor is None:
                bucket.assign_gradients()
            else:
                bucket.copy_gradients(factor)


def _group_into_buckets(parameters: Sequence[nn.Parameter], bucket_size: int) -> list[list[nn.Parameter]]:
    """Group parameters of one dtype and device into buckets of about `bucket_size` bytes, from the last to the first.

    The parameter that fills a bucket closes it, so that a large parameter need not wait for those before it in the
    module. On CUDA the first bucket is small, so that the exchange begins early. On a CPU the exchange competes with
    the backward, so fewer buckets are better.
    """
    limit = bucket_size
    is_on_gpu = any(parameter.device.type != "cpu" for parameter in parameters)
    if is_on_gpu:
        limit = min(_FIRST_CUDA_BUCKET, bucket_size)
    groups: list[list[nn.Parameter]] = []
    group: list[nn.Parameter] = []
    size = 0
    for parameter in reversed(parameters):
        is_full = size >= limit
        if group and (is_full or not _can_share_bucket(group[0], parameter)):
            # Only the first bucket has a limit of its own.
            limit = bucket_size
            groups.append(group)
            group = []
            size = 0
        group.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if group:
        groups.append(group)
    return groups


def _can_share_bucket(first: nn.Parameter, second: nn.Parameter) -> bool:
    return first.dtype == second.dtype and first.device == second.device
