"""Several optimisers of different parameters that are stepped as one."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from equipoise.errors import ConfigurationError
from equipoise.interop.torch.optimizers import plain_step
from equipoise.parallel.optimizers.combined_state import CombinedState

__all__ = ["CombinedOptimizer"]


class CombinedOptimizer(Optimizer):
    """Steps several optimisers of different parameters, each once in a step.

    Strategies, scalers of the loss and hooks see one optimiser. It has neither groups nor a state of its own: what is
    read or changed through it is in the optimisers, which keep everything that checkpoints save.

    Args:
        optimizers: The optimisers, in the order in which they are stepped. No parameter belongs to two of them.

    Attributes:
        optimizers: The optimisers.

    Example:
        >>> import torch
        >>> first, second = (torch.nn.Parameter(torch.tensor([1.0])) for _ in range(2))
        >>> combined = CombinedOptimizer([torch.optim.SGD([first], 0.5), torch.optim.SGD([second], 0.25)])
        >>> loss = combined.step(lambda: (first + second).backward())
        >>> first.item(), second.item()
        (0.5, 0.75)
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # The constructor of torch's class is not called. It would make groups, and let functions that run with every
        # step of any optimiser run once more for this one.
        self.optimizers = list(optimizers)
        self.defaults = {}
        # Without the record for a profiler, if none is at work.
        self._plain_steps = [plain_step(optimizer) for optimizer in optimizers]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimisers, in order: a new list of the same dictionaries."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> CombinedState:  # type: ignore[override]
        """The state of each parameter, which is kept by its optimiser."""
        return CombinedState(self.optimizers)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step each optimiser.

        Args:
            closure: Function that computes the loss and all gradients. It is called once, before the first step, and
                the optimisers do not receive it. Default: None, the gradients exist already.
            kwargs: Other arguments of each optimiser's `step`.

        Returns:
            The result of the closure; None without one.
        """
        # An optimiser that asked for the loss again would change its parameters without the others.
        result = None
        if closure is not None:
            result = closure()
        if kwargs:
            for optimizer in self.optimizers:
                optimizer.step(**kwargs)
            return result
        for step in self._plain_steps:
            step()
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero the gradients of each optimiser."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Register a hook that runs before the step of the first optimiser."""
        return self.optimizers[0].register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Register a hook that runs after the step of the last optimiser."""
        return self.optimizers[-1].register_step_post_hook(hook)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group, which must be added to one of the optimisers."""
        raise self._refusal("Add the group to")

    def state_dict(self) -> dict[str, Any]:
        """Refuse, since each optimiser has a state of its own."""
        raise self._refusal("Ask for the state of")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse, since each optimiser has a state of its own."""
        raise self._refusal("Load the state of")

    def _refusal(self, remedy: str) -> ConfigurationError:
        return ConfigurationError(
            f"This stands for {len(self.optimizers)} optimisers. {remedy} one of them: `trainer.optimizers`."
        )

    def __repr__(self) -> str:
        return f"CombinedOptimizer({self.optimizers!r})"
