"""The user's steps of a module in shards, in which parameters are read and changed as on one device."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial, wraps
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from equipoise.errors import StepError
from equipoise.extensions.fsdp.within_steps.root_switches import RootSwitches
from equipoise.extensions.fsdp.within_steps.seen_parameters import (
    PartlyFreed,
    Seen,
    hook_whole,
)
from equipoise.extensions.fsdp.within_steps.whole_results import is_alike, sum_gradient
from equipoise.interop.distributed.backward_calls import destination, is_run_here
from equipoise.interop.distributed.fully_sharded import (
    follow_backwards,
    follow_gathering,
    keep_gathered,
    reduce_at_the_end,
    shards_and_wholes,
)
from equipoise.interop.torch.autograd import number_of_backward
from equipoise.interop.torch.dispatch import change_class, own_functions

__all__ = ["BACKWARD", "RETURNED", "ROOT", "SUMMED", "UserSteps"]

# What processes do together within a step, as numbers beside those of the units: a backward, by what it does with
# gradients of parameters, and the gathering of the root's weights after they were freed.
BACKWARD = -3
SUMMED = -4
RETURNED = -5
ROOT = -6


def _equal() -> float:
    return 1.0


def _destination(parameter: Seen) -> Literal["grad", "caller", ""]:
    """Return where the backward that runs puts the gradient of a parameter, which may be freed."""
    with own_functions():
        return destination(torch.autograd.graph.get_gradient_edge(parameter.whole).node)


class UserSteps:
    """Follows torch's gathering and freeing of weights, and what the user's steps do between them.

    Args:
        units: The modules to which `fully_shard` was applied, the root last. Each has been gathered once.
        by_hand: Whether the module optimises by hand.
        processes: The number of processes over which gradients are averaged; 1: they are added up.

    Attributes:
        note: Called before what all processes do together; see `UnitCalls`. Default: None.
        switches: Follows the switches of the module that the user's step turns.
        is_in_step: True within a step of the user.
        hooks: Those of the modules, to be removed in the end.
    """

    def __init__(self, units: Sequence[nn.Module], *, by_hand: bool, processes: float) -> None:
        self._units = units
        self._root: Any = units[-1]
        self._by_hand = by_hand
        self._processes = processes
        self.is_in_step = False
        self.note: Callable[[int], None] | None = None
        # The number of the last backward that was noted.
        self._noted_backward = -1
        # Returns the weight of this process's samples, relative to the mean over the processes.
        self._relative_weight: Callable[[], float] = _equal
        # Ends the time in which units keep their weights, since the graph of a backward needs them.
        self._end_keeping: Callable[[], None] | None = None
        self.switches = RootSwitches(self._root)
        self.hooks: list[RemovableHandle] = []
        self._seen = [self._follow(unit) for unit in units]
        if by_hand:
            # Modules with hooks are not compiled, and other steps rarely free the root before their end.
            self._follow_calls()

    def _follow(self, unit: nn.Module) -> list[Seen]:
        """Let both forms of each parameter of a unit stand for it, and return them."""
        parameters = []
        for shard, gathered in shards_and_wholes(unit):
            # Parts of cut layers, and weights that are gathered in another form, are torch's alone.
            if type(gathered) is nn.Parameter and gathered.dtype == shard.dtype:
                parameters.append(Seen(shard, gathered, self))
                # Weights in few bits have no gradients.
                if gathered.is_floating_point() or gathered.is_complex():
                    self._follow_gradients(parameters[-1])

        def all_of_them(action: Callable[[Seen], None]) -> Callable[[], None]:
            def act() -> None:
                for parameter in parameters:
                    action(parameter)

            return act

        forms = {id(form) for parameter in parameters for form in (parameter.shard, parameter.whole)}
        places = [
            (part, name)
            for part in unit.modules()
            for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
            if id(parameter) in forms
        ]

        def begin_gathering() -> None:
            for part, name in places if self.is_in_step else ():
                present = getattr(part, name)
                if id(present) not in forms and not isinstance(present, PartlyFreed):
                    raise StepError(_REPLACED.format(name))
            for parameter in parameters:
                parameter.note_gathering()

        def free_partly() -> None:
            shards: Iterable[Any] = unit.parameters()
            for parameter in shards:
                if type(parameter) is DTensor:
                    change_class(parameter, PartlyFreed)

        follow_gathering(
            unit,
            gathering=begin_gathering,
            gathered=all_of_them(Seen.note_gathered),
            freeing=all_of_them(Seen.keep_changes),
            freed=all_of_them(Seen.note_freed),
            partly_freed=free_partly,
        )
        follow_backwards(unit, begun=self._begin_backward, end=self._end_backward)
        return parameters

    def _follow_calls(self) -> None:
        """Gather the root's weights at once where a module is called that has some of them."""

        # A function is not copied with a module, as a method would be with this object.
        def gather_root(module: nn.Module, arguments: Any) -> None:
            if self.is_in_step:
                if self.note is not None and not self._seen[-1][0].is_gathered:
                    self.note(ROOT)
                self._root.unshard()

        shards_of_root = {id(parameter.shard) for parameter in self._seen[-1]}
        for part in self._root.modules():
            parameters = part.parameters(recurse=part is self._root)
            if any(id(parameter) in shards_of_root for parameter in parameters):
                # Before torch gathers the root in its own forward.
                self.hooks.append(part.register_forward_pre_hook(gather_root, prepend=True))

    # The steps.

    def weigh(self, relative_weight: Callable[[], float]) -> None:
        """Weigh the gradients of a step by hand, and those of the hooks after it.

        Args:
            relative_weight: Returns the weight of this process's samples, relative to the mean over the processes.
        """
        self._relative_weight = cache(relative_weight)

    def watched(self, step: Callable[..., Any], *, is_training: bool) -> Callable[..., Any]:
        """Return a step within which shards are gathered where they are computed with.

        Args:
            step: The user's step, within which the root is gathered at first.
            is_training: Whether it is `training_step`.
        """

        @wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if is_training:
                self.switches.begin()
            self._enter(is_in_step=True)
            try:
                result = step(*args, **kwargs)
                if is_training:
                    self.follow_switches()
            finally:
                self._enter(is_in_step=False)
            if is_training and self._by_hand:
                # Hooks see shards, as everywhere outside of the steps.
                self._root.reshard()
            return result

        return watched

    def _enter(self, *, is_in_step: bool) -> None:
        self.is_in_step = is_in_step
        for of_unit in self._seen:
            for parameter in of_unit:
                parameter.enter(is_in_step)

    def follow_switches(self) -> None:
        """Let the shards of the root follow what was switched in its whole weights, or the reverse."""
        self.switches.follow(are_gathered=any(parameter.is_gathered for parameter in self._seen[-1]))

    # Backwards.

    def _note_backward(self) -> None:
        """Note a backward that has come to a unit or a parameter, once, unless this process alone runs it."""
        number = number_of_backward()
        if self.note is None or number == self._noted_backward or is_run_here():
            return
        self._noted_backward = number
        parameters = chain.from_iterable(self._seen)
        destinations = (_destination(parameter) for parameter in parameters if parameter.whole.requires_grad)
        self.note(_KINDS[next(filter(None, destinations), "")])

    def _begin_backward(self) -> None:
        self._note_backward()
        if torch.is_grad_enabled() and self._end_keeping is None:
            # The graph of this backward refers to whole weights, of which torch knows nothing.
            self._end_keeping = keep_gathered(self._units)

    def _end_backward(self, end: Callable[[], None]) -> None:
        # 1. The last look at whole weights of the root, which the end frees.
        if self.is_in_step:
            self.follow_switches()
        # 2. After the backward of a backward nobody needs the weights that were kept.
        has_kept = self._end_keeping is not None and not torch.is_grad_enabled()
        if has_kept and self._end_keeping is not None:
            self._end_keeping()
            self._end_keeping = None
        end()
        if has_kept:
            for unit in self._units:
                unit.reshard()  # type: ignore[operator]

    def _follow_gradients(self, parameter: Seen) -> None:
        """Let all roads to the gradient of a parameter lead to its exchange."""
        gathered = parameter.whole
        parameter.note_gathering()
        # Torch takes hooks of tensors that require gradients.
        requires_grad = gathered.requires_grad
        gathered.requires_grad_(True)
        hook_whole(gathered, partial(self._exchange_returned, parameter))
        if self._by_hand:
            nn.Parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                gathered,
                lambda _: reduce_at_the_end(self._root),
            )
        gathered.requires_grad_(requires_grad)
        parameter.note_freed()

    def _exchange_returned(self, parameter: Seen, gradient: Tensor) -> Tensor | None:
        """Return the mean gradient of all processes where `torch.autograd.grad` returns it; elsewhere it is weighed."""
        self._note_backward()
        if _destination(parameter) == "grad":
            weight = self._relative_weight()
            return None if weight == 1 else gradient * weight
        if torch.is_grad_enabled():
            raise StepError(
                f"{_RETURNED} with create_graph=True, but the exchange of gradients has no graph. Take the penalty of"
                " gradients of the inputs, or differences of two forwards."
            )
        return self.mean_gradient(gradient, parameter.shard)

    def mean_gradient(self, gradient: Tensor, shard: Any) -> Tensor:
        """Return the mean over all processes of a gradient.

        Args:
            gradient: The gradient of the samples of this process.
            shard: The parameter.

        Raises:
            StepError: If the optimisation is automatic: the weights of the processes are known after the step only.
        """
        self._check_by_hand()
        return self.mean(gradient, shard)

    def check_assigned(self, gradient: Tensor, shard: Any) -> None:
        """Check that a whole gradient that is assigned is the same in all processes, as what `grad` returns is.

        Args:
            gradient: The gradient.
            shard: The parameter.

        Raises:
            StepError: In all processes, if it is another one in some of them, or the optimisation is automatic.
        """
        self._check_by_hand()
        if not is_alike(gradient, shard):
            raise StepError(
                "The processes have assigned different gradients to a parameter. What a backward and"
                " `torch.autograd.grad` compute is exchanged; what follows from the samples of a process in another way"
                " is not. Average it over the processes by `self.all_gather` first."
            )

    def _check_by_hand(self) -> None:
        if not self._by_hand:
            raise StepError(
                f"{_RETURNED}, or a gradient was assigned, in automatic optimisation, where the gradient of a step is"
                " known after it. Return the loss, change gradients in `on_after_backward` or"
                " `on_before_optimizer_step`, or optimise by hand."
            )

    def mean(self, gradient: Tensor, shard: Any) -> Tensor:
        """Return the mean over all processes of a gradient; in automatic optimisation the sum."""
        return sum_gradient(gradient * self._relative_weight(), shard) / self._processes


_KINDS = {"grad": SUMMED, "caller": RETURNED, "": BACKWARD}
_RETURNED = "Under strategy='fsdp' `torch.autograd.grad` was asked for gradients of parameters"
_REPLACED = (
    "{!r} of a module was replaced within a step, as `torch.func.functional_call` does. Under strategy='fsdp' the"
    " forward would compute with the module's own weights. Call the function with a copy of the module that the step"
    " makes, by `copy.deepcopy`, or change the weights themselves."
)
