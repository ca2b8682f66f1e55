"""One `training_step` for all members: `torch.vmap` over their stacked parameters, buffers and batches.

    arguments   stacked parameters and buffers, registered in the module for the time of the step; the stacked batches
    results     the loss, its weight, the logged values and the outputs, one row for each member

The step is the user's own, which runs once. Whatever would make its numbers others than those of members one by one
ends it with an error, after which everything is as before.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks

from equipoise.errors import StepError
from equipoise.extensions.ensemble.members.stacked_members import StackedMembers
from equipoise.interop.module_metrics import named_metrics
from equipoise.interop.torch.modules import buffers_of, has_module_hooks, is_compiled, parameters_of, versions
from equipoise.parallel.snapshot.attributes import Attributes, Containers
from equipoise.parallel.step_protocols import StepResult, TrainingStep
from equipoise.tree import extract_tensors, insert_tensors, is_slot, leaves_of

__all__ = ["BatchedStep", "NotBatchable", "StackedBatches"]

# Tensors, and values that are the same for all members if they are equal.
_PLAIN = (Tensor, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
# Such functions compute again, or unpack, in the backward, after the batched step.
_SAVES_OTHERWISE = "it saves tensors in a way of its own, as activation checkpointing does"


class NotBatchable(Exception):
    """A step that cannot be computed for all members together; its text is the reason."""


class StackedBatches(NamedTuple):
    """The batches of all members as one.

    Attributes:
        tree: The structure, with slots for tensors.
        tensors: The tensors, (members, *shape), or as they are if all members share the batch.
        are_shared: Whether they do.
    """

    tree: Any
    tensors: list[Tensor]
    are_shared: bool

    @classmethod
    def of(cls, batches: Sequence[Any]) -> "StackedBatches":
        """Stack batches.

        Raises:
            NotBatchable: If they differ in more than the values of tensors.
        """
        first = batches[0]
        tree, tensors = extract_tensors(first)
        _check_plain(tree, "its batch holds")
        if all(batch is first for batch in batches):
            # The step may change them.
            return cls(tree, [tensor.clone() for tensor in tensors], are_shared=True)
        rows: Sequence[Sequence[Tensor]] = batches
        # The usual batch is a list of tensors, which needs no search.
        if not all(type(batch) is list and set(map(type, batch)) == {Tensor} for batch in batches):
            parts = list(map(extract_tensors, batches))
            if len({repr(structure) for structure, _ in parts}) > 1:
                raise NotBatchable("the members' batches differ in structure")
            rows = [tensors_of_member for _, tensors_of_member in parts]
        if len(set(map(len, rows))) > 1:
            raise NotBatchable("the members' batches differ in structure")
        stacked = []
        for column in zip(*rows, strict=True):
            if len({(tensor.shape, tensor.dtype) for tensor in column}) > 1:
                raise NotBatchable("the members' batches differ in shape")
            stacked.append(torch.stack(column))
        return cls(tree, stacked, are_shared=False)


class BatchedStep:
    """Runs the step of the module with the tensors of all members.

    Args:
        members: The members.

    Attributes:
        parameters: The stacked parameters.
        buffers: The stacked buffers.
    """

    def __init__(self, members: StackedMembers) -> None:
        self.parameters: list[Tensor] = [parameter.stacked for parameter in members.parameters]
        self.buffers = list(members.buffers.values())
        self._module = members.modules[0]
        self._parts = members.parts()
        self._metrics = list(named_metrics(self._module).values())
        self._attributes = Attributes(self._parts)
        # Each tensor with every place in which it is registered: the dictionary of a module, and the name in it.
        places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for part in self._parts:
            for registered in (parameters_of(part), buffers_of(part)):
                for name, tensor in registered.items():
                    if tensor is not None:
                        places.setdefault(id(tensor), []).append((registered, name))
        firsts = [parameter.members[0] for parameter in members.parameters]
        self._places = [*map(places.__getitem__, map(id, firsts)), *map(places.__getitem__, members.buffers)]

    def reason_against(self) -> str:
        """Return why the step of the module is not computed for all members together; empty if a trial tells."""
        for part in self._parts:
            kind = type(part).__name__
            if is_compiled(part) or isinstance(part, torch.jit.ScriptModule):
                return f"{kind} is compiled"
            if has_module_hooks(part):
                return f"{kind} has hooks"
        return ""

    def __call__(self, step: TrainingStep, batches: StackedBatches, size: int, randomness: str) -> list[StepResult]:
        """Compute the step of all members.

        Args:
            step: The step.
            batches: The batches.
            size: The number of samples of each batch.
            randomness: "error" or "different": whether the step may draw random numbers, which differ then between
                members, and from those that a member draws by itself.

        Returns:
            The result of each member; its outputs are those of the first one.

        Raises:
            NotBatchable: If that is not possible; buffers and attributes are then as before.
            StepError: If parameters were changed before that was known.
        """
        # 1. What is there before. Hooks may have set other lists since the last step.
        containers = Containers(self._module)
        containers.mark()
        self._attributes.mark()
        noted_buffers = [buffer.clone() for buffer in self.buffers]
        noted_versions = versions(self.parameters)
        # 2. The step.
        try:
            results = self._results(step, batches, size, randomness)
            self._check_changes(containers, batches.tensors)
        except BaseException as error:
            # 3. After a failure everything is as before. Parameters have no copies.
            self._attributes.restore()
            containers.restore()
            self.restore_buffers(noted_buffers)
            if not isinstance(error, Exception):
                raise
            reason = _first_line(error)
            if versions(self.parameters) != noted_versions:
                raise StepError(
                    "`training_step` changed parameters in place, and then could not be computed for all members of the"
                    f" ensemble together: {reason}. Take EnsembleStrategy(mode='one_by_one')."
                ) from error
            raise NotBatchable(reason) from None
        return results

    def _results(self, step: TrainingStep, batches: StackedBatches, size: int, randomness: str) -> list[StepResult]:
        count = len(self._places)
        first: Any = None
        tree: Any = None
        outputs_tree: Any = None
        number = 0

        def compute(*tensors: Tensor) -> tuple[Tensor, ...]:
            nonlocal first, tree, outputs_tree, number
            with self._registered(tensors[:count]), self._without_metrics():
                batch = insert_tensors(batches.tree, batches.tensors if batches.are_shared else tensors[count:])
                with disable_saved_tensors_hooks(_SAVES_OTHERWISE):
                    first = step.run_on(self._module, batch, size)
            if first.loss is None:
                raise NotBatchable("it returned no loss")
            _check_plain(first.outputs, "it returns")
            tree, of_members = extract_tensors((first.weight, [logged.value for logged in first.logged]))
            outputs_tree, of_first = extract_tensors(first.outputs)
            number = len(of_members)
            return first.loss, *of_members, *of_first

        # 1. The step. A batch that all members share is no argument.
        arguments = [*self.parameters, *self.buffers]
        if not batches.are_shared:
            arguments += batches.tensors
        losses, *results = torch.vmap(compute, randomness=randomness)(*arguments)

        # 2. The rows of each member. Of the outputs those of the first one are shown.
        outputs = insert_tensors(outputs_tree, [result[0] for result in results[number:]])
        rows = [result.unbind() for result in results[:number]]
        results_of_members = []
        for member, loss in enumerate(losses.unbind()):
            weight, values = insert_tensors(tree, [result[member] for result in rows])
            pairs = zip(first.logged, values, strict=True)
            logged = [one._replace(value=value) for one, value in pairs]
            results_of_members.append(StepResult(loss, weight, outputs, logged))
        return results_of_members

    @contextmanager
    def _registered(self, tensors: Sequence[Any]) -> Iterator[None]:
        """Let the module have other tensors in place of its own in a `with` block.

        Raises:
            NotBatchable: If they are others at its end.
        """
        own = [registered[name] for (registered, name), *_ in self._places]
        self._register(tensors)
        try:
            yield
            for places, tensor in zip(self._places, tensors, strict=True):
                for registered, name in places:
                    if registered.get(name) is not tensor:
                        raise NotBatchable(f"it replaces {name}")
        finally:
            self._register(own)

    def _register(self, tensors: Sequence[Any]) -> None:
        for places, tensor in zip(self._places, tensors, strict=True):
            for registered, name in places:
                registered[name] = tensor

    @contextmanager
    def _without_metrics(self) -> Iterator[None]:
        """Refuse calls of metrics in a `with` block: their states would be of all members together."""
        attributes = Attributes(self._metrics)
        attributes.mark()
        for metric in self._metrics:
            vars(metric).update(forward=_refuse_metric, update=_refuse_metric)
        try:
            yield
        finally:
            attributes.restore()

    def _check_changes(self, containers: Containers, tensors: Sequence[Tensor]) -> None:
        """Refuse what the step has changed beside buffers and parameters, for all members at once."""
        change = self._attributes.first_change()
        if change is not None:
            part, name = change
            raise NotBatchable(f"it sets {type(part).__name__}.{name}")
        if containers.have_changed():
            raise NotBatchable("it changes a list or dictionary of the module")
        # These are new tensors, whose version is 0.
        if any(versions(tensors) or ()):
            raise NotBatchable("it changes its batch")

    def restore_buffers(self, values_of_buffers: Sequence[Tensor]) -> None:
        """Set the stacked buffers, without a trace in graphs that have saved them."""
        for buffer, values in zip(self.buffers, values_of_buffers, strict=True):
            buffer.data.copy_(values)


def _refuse_metric(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotBatchable("it calls a metric")


def _check_plain(value: Any, words: str) -> None:
    """Check that a nested value holds nothing but tensors and values that are the same for all members.

    Raises:
        NotBatchable: If it holds another object.
    """
    for leaf in leaves_of(value):
        if not isinstance(leaf, _PLAIN) and not is_slot(leaf):
            raise NotBatchable(f"{words} a {type(leaf).__name__}")


def _first_line(error: Exception) -> str:
    """Return the first line of a message; torch's have many."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
