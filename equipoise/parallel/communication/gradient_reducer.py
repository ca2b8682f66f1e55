"""Sum gradients over processes, in buckets, while the backward still runs.

Parameters are gathered into buckets in the order in which their gradients become ready, which is about the reverse of
that in which the module holds them. When all gradients of a bucket are there, and all buckets before it are on their
way, it is summed over the processes. So the order of the exchanges is fixed whatever order gradients come in, and each
bucket is exchanged once per window: a process that is late, or does its work twice, is a straggler to the others.

The idea of buckets is that of Li et al., "PyTorch Distributed" (2020).
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.interop.torch import foreach
from equipoise.parallel.batches.weighting import Weight

__all__ = ["GradientReducer"]


class _Bucket:
    """Parameters of one dtype and device whose gradients travel together.

    Behind the gradients travel, for each parameter, how many processes have one, and a weight.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        first, sizes = parameters[0], [p.numel() for p in parameters]
        self.parameters = parameters
        self.flat = torch.zeros(sum(sizes) + len(parameters) + 1, dtype=first.dtype, device=first.device)
        *parts, self.tail = torch.split(self.flat, [*sizes, len(parameters) + 1])
        self.views = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
        self.full = torch.ones_like(self.tail)  # the tail where all gradients are there
        self.weight: Weight = 1
        self.missing = set(range(len(parameters)))
        self.sent = self.whole = False

    def begin(self, weight: Weight) -> None:
        """No gradient is there yet."""
        self.missing.update(range(len(self.parameters)))
        self.sent = False
        if isinstance(weight, Tensor) or isinstance(self.weight, Tensor) or weight != self.weight:
            self.weight = weight
            self.full[-1] = weight

    def fill(self) -> None:
        """Copies the gradients in; those that are not there count as zeros."""
        grads = [p.grad for p in self.parameters]
        if any(grad is not None and grad.layout is not torch.strided for grad in grads):
            raise StepError(
                "The native engine exchanges dense gradients only. Take Embedding(sparse=False), or engine='torch'."
            )
        there = [(view, grad) for view, grad in zip(self.views, grads, strict=True) if grad is not None]
        self.sent, self.whole = True, len(there) == len(grads)
        tail = self.full
        if not self.whole:
            for view in (view for view, grad in zip(self.views, grads, strict=True) if grad is None):
                view.zero_()
            there_or_not = [float(grad is not None) for grad in grads]
            tail = torch.cat([torch.tensor(there_or_not).to(tail), tail[-1:]])
        foreach.copy_([*(view for view, _ in there), self.tail], [*(grad for _, grad in there), tail])

    def hand_out(self) -> None:
        """Makes the sums the gradients; a parameter that no process has a gradient of is left without."""
        if self.whole:  # here at least, so nothing needs to be read
            for parameter, view in zip(self.parameters, self.views, strict=True):
                parameter.grad = view
        else:
            for parameter, view, count in zip(self.parameters, self.views, self.tail[:-1].tolist(), strict=True):
                parameter.grad = view if count else None


class GradientReducer:
    """Sums gradients over all processes.

    Args:
        parameters: All that are learned, in the same order in all processes.
        bucket_megabytes: The size of a bucket in MiB. Default: 25.

    Example:
        >>> reducer = GradientReducer(module.parameters())  # doctest: +SKIP
        >>> reducer.begin()  # doctest: +SKIP
        >>> loss.backward()  # doctest: +SKIP
        >>> reducer.finish()  # doctest: +SKIP
    """

    def __init__(self, parameters: Iterable[nn.Parameter], bucket_megabytes: float = 25.0) -> None:
        learned = [parameter for parameter in parameters if parameter.requires_grad]
        self._buckets = [_Bucket(group) for group in _grouped(learned, int(bucket_megabytes * 2**20))]
        self._handles: list[Any] = []
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                register: Any = parameter.register_post_accumulate_grad_hook
                self._handles.append(register(partial(self._ready, bucket, index)))
        # The weight travels with gradients if they are of float32 or wider: 257 would become 256 in bfloat16.
        wide = [bucket for bucket in self._buckets if bucket.flat.dtype in (torch.float32, torch.float64)]
        self._carrier = wide[0] if wide else None
        self._apart = torch.zeros((), dtype=torch.float64, device=learned[0].device if learned else None)
        self._works: list[dist.Work] = []
        self._next = 0
        self._live = self._eager = self._broken = False

    def close(self) -> None:
        """Takes its hooks away."""
        for handle in self._handles:
            handle.remove()

    def begin(self, weight: Weight = 1, *, eager: bool = True) -> None:
        """The next backward is the last of its window.

        Args:
            weight: A number to be summed along with the gradients. Default: 1.
            eager: Whether its gradients are exchanged as they become ready, not only at the end.
        """
        self._live, self._eager = True, eager
        if not self._broken:
            self._next, self._works = 0, []
        for bucket in self._buckets[self._next :]:
            bucket.begin(weight if bucket is self._carrier else 1)
        if self._carrier is None and not self._broken:
            self._apart.fill_(weight)
            dist.all_reduce(self._apart)

    def total(self) -> Tensor:
        """The weights of all processes, summed; a 0-dim tensor."""
        return self._apart if self._carrier is None else self._carrier.tail[-1]

    def _ready(self, bucket: _Bucket, index: int, parameter: Tensor) -> None:
        if not self._live or not self._eager:
            return
        if bucket.sent:
            if self._broken:
                return
            raise StepError(
                f"A parameter of shape {list(parameter.shape)} got a part of its gradient after the exchange had begun."
                " With activation checkpointing, say use_reentrant=False."
            )
        bucket.missing.discard(index)
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.fill()
        work = dist.all_reduce(bucket.flat, async_op=True)
        assert work is not None
        self._works.append(work)

    def break_off(self) -> bool:
        """Ends an attempt that failed. The next one completes the exchange: what was sent stays as it is.

        Returns:
            Whether anything was sent.
        """
        self._broken = self._broken or (self._live and (self._next > 0 or self._carrier is None))
        self._live = False
        return self._broken

    @property
    def is_open(self) -> bool:
        """Whether an exchange has begun and is not finished."""
        return self._live

    def finish(self) -> None:
        """Sends what is left and waits; afterwards the gradients are the sums.

        A parameter that no process has a gradient of is left without.
        """
        self._live = self._broken = False
        while self._next < len(self._buckets):
            self._send()
        for work, bucket in zip(self._works, self._buckets, strict=True):
            work.wait()
            bucket.hand_out()

    def scale(self, factor: float) -> None:
        """Multiplies all gradients."""
        parameters = (parameter for bucket in self._buckets for parameter in bucket.parameters)
        foreach.multiply_([p.grad for p in parameters if p.grad is not None], factor)


def _grouped(parameters: Sequence[nn.Parameter], most: int) -> list[list[nn.Parameter]]:
    """Parameters in buckets, from the last to the first; of one dtype and device each.

    A bucket is closed by the parameter that fills it, so that a large one need not wait for those behind it. On CUDA
    the first one is small, to begin early; on a CPU the exchange takes its time from the backward, so fewer are better.
    """
    groups: list[list[nn.Parameter]] = []
    size, limit = 0, most if all(p.device.type == "cpu" for p in parameters) else min(1 << 20, most)
    for parameter in reversed(parameters):
        last = groups[-1][0] if groups else None
        fits = last is not None and (last.dtype, last.device) == (parameter.dtype, parameter.device)
        if not fits or size >= limit:
            limit = most if groups else limit
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return groups
