"""Gradients summed over processes, in buckets, while the backward still runs.

Parameters are gathered into buckets in the order in which their gradients become ready, which is about the reverse of
that in which the module holds them. When all gradients of a bucket are there, and all buckets before it are on their
way, it is summed over the processes. So the order of the exchanges is fixed whatever order gradients come in, and each
bucket is exchanged once per window: a process that is late, or does its work twice, is a straggler to the others.

The idea of buckets is that of Li et al., "PyTorch Distributed" (2020).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.parallel import foreach

__all__ = ["GradientReducer"]


class _Bucket:
    """Parameters of one dtype and device whose gradients travel together."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        first = parameters[0]
        self.parameters = parameters
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        parts = torch.split(self.flat, [p.numel() for p in parameters])
        self.views = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
        self.missing = len(parameters)

    def fill(self) -> None:
        """Copies the gradients in; those that are not there count as zeros."""
        absent = [view for view, p in zip(self.views, self.parameters, strict=True) if p.grad is None]
        there = [(view, p.grad) for view, p in zip(self.views, self.parameters, strict=True) if p.grad is not None]
        for view in absent:
            view.zero_()
        foreach.copy_([view for view, _ in there], [grad for _, grad in there])


class GradientReducer:
    """Sums gradients over all processes.

    Args:
        parameters: All that are learned, in the same order in all processes.
        bucket_megabytes: The size of a bucket in MiB. Default: 25. The first ones are smaller, to begin early.

    Example:
        >>> reducer = GradientReducer(module.parameters())  # doctest: +SKIP
        >>> reducer.begin()  # doctest: +SKIP
        >>> loss.backward()  # doctest: +SKIP
        >>> reducer.finish()  # doctest: +SKIP
    """

    def __init__(self, parameters: Iterable[nn.Parameter], bucket_megabytes: float = 25.0) -> None:
        learned = [parameter for parameter in parameters if parameter.requires_grad]
        self._buckets = [_Bucket(group) for group in _grouped(learned, int(bucket_megabytes * 2**20))]
        self._where = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._handles: list[Any] = []
        for parameter in learned:
            register: Any = parameter.register_post_accumulate_grad_hook
            self._handles.append(register(self._ready))
        self._works: list[dist.Work] = []
        self._next = 0
        self._live = False

    def close(self) -> None:
        """Takes its hooks away."""
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        """The next backward is the last of its window: its gradients are exchanged as they become ready."""
        self._live, self._next, self._works = True, 0, []
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def _ready(self, parameter: Tensor) -> None:
        if not self._live:
            return
        self._where[parameter].missing -= 1  # type: ignore[index]
        while self._next < len(self._buckets) and self._buckets[self._next].missing <= 0:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.fill()
        work = dist.all_reduce(bucket.flat, async_op=True)
        assert work is not None
        self._works.append(work)

    @property
    def is_open(self) -> bool:
        """Whether an exchange has begun and is not finished."""
        return self._live

    def finish(self) -> None:
        """Sends what is left and waits; afterwards the gradients are the sums.

        A parameter that no process has a gradient of is left without.
        """
        self._live = False
        while self._next < len(self._buckets):
            self._send()
        parameters = list(self._where)
        have = [parameter.grad is not None for parameter in parameters]
        device = parameters[0].device if parameters else torch.device("cpu")
        anywhere = torch.tensor(have, dtype=torch.uint8, device=device)
        dist.all_reduce(anywhere, dist.ReduceOp.MAX)
        for work in self._works:
            work.wait()
        used = dict(zip(parameters, have if all(have) else anywhere.tolist(), strict=True))
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if used[parameter]:
                    parameter.grad = view

    def scale(self, factor: float) -> None:
        """Multiplies all gradients."""
        foreach.multiply_([p.grad for p in self._where if p.grad is not None], factor)


def _grouped(parameters: Sequence[nn.Parameter], most: int) -> list[list[nn.Parameter]]:
    """Parameters in buckets, from the last to the first; of one dtype and device each."""
    groups: list[list[nn.Parameter]] = []
    size, limit = 0, min(1 << 20, most)
    for parameter in reversed(parameters):
        bytes_ = parameter.numel() * parameter.element_size()
        last = groups[-1][0] if groups else None
        fits = last is not None and (last.dtype, last.device) == (parameter.dtype, parameter.device)
        if not fits or size + bytes_ > limit:
            limit = most if groups else limit
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += bytes_
    return groups
