"""Questions that a forward asks about its tensors while it is recorded, and the conditions that follow.

A forward may decide by what it asks. So a recorded forward serves for other calls only while the answers are the same.
"""

from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from equipoise.extensions.pipeline.forward.packed_sequences import is_asked_by_padding
from equipoise.extensions.pipeline.forward.user_lines import is_assertion
from equipoise.extensions.pipeline.graph.conditions import same_answer, same_shapes, same_trainable
from equipoise.extensions.pipeline.graph.output_structure import items_of_output
from equipoise.extensions.pipeline.graph.traced import FOLLOWS, Condition
from equipoise.extensions.pipeline.recording.arguments import Arguments
from equipoise.extensions.pipeline.recording.targets import check_size, holds
from equipoise.extensions.pipeline.recording.tensor_nodes import (
    Facts,
    Obstacle,
    Sizes,
    TensorNodes,
    inputs_of,
    sizes_of,
)
from equipoise.tree import tensors_in

__all__ = ["Question", "Questions"]

# Functions and attributes by their names. The answers depend on the sizes of a tensor.
_SHAPE = {"__len__", "dim", "is_contiguous", "is_same_size", "nbytes", "ndim", "ndimension", "nelement", "numel"}
_SHAPE |= {"shape", "size", "storage_offset", "stride"}
# The answers depend on the kind of a tensor, which is the same in all calls of one structure.
_KIND = {"_is_view", "dense_dim", "device", "dtype", "element_size", "get_device", "has_names", "is_complex", "is_conj"}
_KIND |= {"is_cpu", "is_cuda", "is_floating_point", "is_inference", "is_meta", "is_mps", "is_neg", "is_nested"}
_KIND |= {"is_quantized", "is_signed", "is_sparse", "is_sparse_csr", "is_xla", "is_xpu", "itemsize", "layout", "names"}
_KIND |= {"promote_types", "result_type", "sparse_dim", "type"}
# The answers depend on the parameters that require gradients.
_TRAINABLE = {"is_leaf", "requires_grad", "retains_grad"}
# The answers are others in every call.
_IDENTITY = {"_version", "data_ptr"}
# The answers decide nothing.
_NOTHING = {"__dir__", "__hash__", "is_storage", "is_tensor"}

# Other answers, such as sums, are other ones in nearly every call.
_COMPARABLE = (bool, int, str, type(None))


class Question(NamedTuple):
    """A call of a function of torch that returns no tensor.

    Attributes:
        function: The function.
        name: Its name.
        args, kwargs: Its arguments.
        result: The answer.
    """

    function: Any
    name: str
    args: Any
    kwargs: Any
    result: Any

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the question is about."""
        arguments = (self.args, self.kwargs)
        return list(tensors_in(arguments, items_of_output))


class Questions:
    """Collect the conditions under which a recorded forward serves for other calls.

    Args:
        graph: The graph of the recorded forward.
        root: Its root.
        tensors: The calls that compute tensors.
        arguments: Turns arguments of a question into those of a call.
        inputs: The network's tensors.
    """

    def __init__(
        self,
        graph: fx.Graph,
        root: nn.Module,
        tensors: TensorNodes,
        arguments: Arguments,
        inputs: Sequence[Tensor],
    ) -> None:
        self._root = root
        self._tensors = tensors
        self._arguments = arguments
        self._shapes = [tensor.shape for tensor in inputs]
        self._graph = graph
        # Indices of tensors whose shapes were asked for, or another condition; in the order of the questions.
        self._noted: list[frozenset[int] | Condition] = []

    @property
    def count(self) -> int:
        """Number of conditions."""
        return len(self._noted)

    def forget_since(self, count: int) -> None:
        """Forget the conditions after the first `count`."""
        del self._noted[count:]

    def conditions(self) -> list[Condition]:
        """Return the conditions."""
        indices: set[int] = set()
        conditions: list[Condition] = []
        for noted in self._noted:
            if isinstance(noted, frozenset):
                indices |= noted
            else:
                conditions.append(noted)
        if indices:
            # One condition serves for all shapes. It comes first, since it computes nothing.
            shapes = {index: self._shapes[index] for index in sorted(indices)}
            conditions.insert(0, same_shapes(shapes))
        return conditions

    def note(self, question: Question, frame: FrameType | None) -> None:
        """Note a question.

        Args:
            question: The question.
            frame: The present frame.

        Raises:
            Obstacle: If the answer may be another one in the next call, and only that call could tell.
        """
        # 1. Some questions decide nothing, or have the same answer in all calls.
        name = question.name
        tensors = question.tensors
        if not tensors or name in _NOTHING or name in _KIND:
            return

        # 2. Others decide something that is compared before the next call.
        if name in _TRAINABLE:
            self._note_trainable()
            return
        if name == "size" and is_asked_by_padding(frame):
            # The recorded call asks again.
            return
        facts = self._facts_of(tensors)
        if name in _SHAPE and sizes_of(facts) is not Sizes.DYNAMIC:
            inputs = inputs_of(facts)
            self._noted.append(inputs)
            self._record_size_checks(tensors)
            return

        # 3. The rest asks for values.
        if name == "__bool__" and _is_asserted(frame):
            self._record_assertion(tensors[0])
            return
        self._note_value(question, facts)

    def _facts_of(self, tensors: Sequence[Tensor]) -> list[Facts]:
        """Return the facts about those tensors that calls compute.

        Raises:
            Obstacle: If a tensor was computed where it cannot be followed.
        """
        facts = []
        for tensor in tensors:
            node = self._tensors.find_node(tensor)
            if node is None:
                self._tensors.check_origin(tensor)
                continue
            facts_of_tensor = self._tensors.facts[node]
            facts.append(facts_of_tensor)
        return facts

    def _note_trainable(self) -> None:
        """Note a question whose answer depends on the parameters that require gradients."""
        self._noted.append(same_trainable(list(self._root.parameters())))

    def note_length(self, arguments: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Note that a function has returned a number of tensors that follows from the sizes of its arguments.

        Args:
            arguments: The tensors that it has received.
            results: The tensors that it has returned.

        Raises:
            Obstacle: If the number depends on values.
        """
        facts = self._facts_of([*arguments, *results])
        if sizes_of(facts) is Sizes.DYNAMIC:
            raise Obstacle("uses a function that returns a number of tensors which depends on values")
        inputs = inputs_of(facts)
        self._noted.append(inputs)
        self._record_size_checks(arguments)

    def _record_size_checks(self, tensors: Sequence[Tensor]) -> None:
        """Record calls that check sizes which are only assumed to follow from those of the network's tensors."""
        for tensor in tensors:
            node = self._tensors.find_node(tensor)
            if node is None or self._tensors.facts[node].sizes is not Sizes.ASSUMED:
                continue
            is_checked = any(user.target is check_size for user in node.users)
            if is_checked:
                continue
            size = tuple(tensor.shape)
            check = self._graph.call_function(check_size, (node, size))
            check.meta[FOLLOWS] = True
            self._tensors.facts[check] = Facts(frozenset(), is_pure=False)

    def _record_assertion(self, tensor: Tensor) -> None:
        """Record a call that checks an assertion, since an assertion decides nothing else."""
        node_of_tensor = self._tensors.node_of(tensor)
        node = self._graph.call_function(holds, (node_of_tensor,))
        facts = Facts(frozenset(), is_pure=False)
        self._tensors.facts[node] = facts

    def _note_value(self, question: Question, facts: Sequence[Facts]) -> None:
        """Note a question about values, which the tensors of the network's call must answer alone.

        Raises:
            Obstacle: If the answer follows from the network, or is another one in nearly every call.
        """
        has_unknown = len(facts) < len(question.tensors)
        is_pure = all(fact.is_pure for fact in facts)
        is_comparable = _is_comparable(question.result) and question.name not in _IDENTITY
        if has_unknown or not is_pure or not is_comparable:
            raise Obstacle(f"asks for values of tensors, by `{question.name}`")
        inputs = inputs_of(facts)
        # Without inputs the answer is always the same.
        if inputs:
            # The condition holds calls alone. The question itself would keep its tensors alive.
            args, kwargs = self._arguments.of_call(question.args, question.kwargs)
            condition = same_answer(self._root, question.function, args, kwargs, question.result, min(inputs))
            self._noted.append(condition)


def _is_asserted(frame: FrameType | None) -> bool:
    """Return True if an assertion of the user's asks, and nothing else."""
    # Skip the frames of torch and of this package.
    while frame is not None:
        module_name = frame.f_globals.get("__name__", "")
        is_of_library = module_name.startswith(("torch.", "equipoise."))
        if not is_of_library:
            return is_assertion(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return False


def _is_comparable(result: Any) -> bool:
    """Return True for an answer that may well be the same in another call, such as a truth value or a size."""
    if isinstance(result, torch.Size):
        return True
    return isinstance(result, _COMPARABLE)
